"""Random folders and settings of data, read by fxplug and by a plain loop over the files: the same samples, pixel for pixel."""

from __future__ import annotations

import io
import json
import math
import random
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from fxplug.config.run_config import check_settings
from fxplug.core.errors import FxplugError
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import match_test_items, open_items
from fxplug.training.train_section import Data

MODES = [
    "1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;8", "I;16", "I;16B", "F", "F;8", "F;1"
]  # fmt: skip
FORMATS = {"png": {}, "tif": {}, "tiff": {"compression": "tiff_lzw"}, "webp": {"lossless": True}, "jpg": {}, "bmp": {}}
FOLDERS = ["", "a", "3_dog", "0_reg", "1_b/deep", "2_c/d"]


def picture(rng: random.Random, mode: str, size: tuple[int, int]) -> Image.Image:
    """A picture of a mode. `;8` has values to 255 in 32 bits, `F;1` some that are no whole numbers."""
    grey = np.random.RandomState(rng.randrange(2**31)).randint(0, 256, (*size, 3)).astype(np.uint8)
    one, colour = grey[..., 0], Image.fromarray(grey)
    if mode.startswith("I;16"):
        values = (one.astype(np.uint16) << 8) + grey[..., 1]
        return Image.frombytes(mode, size[::-1], values.astype("<u2" if mode == "I;16" else ">u2").tobytes())
    if mode[0] in "IF":
        values = one.astype(np.int32) * (257 if mode == "I" else 1) if mode[0] == "I" else one.astype(np.float32)
        values = values / np.float32(255) if mode == "F" else values * np.float32(0.75) if mode == "F;1" else values
        return Image.fromarray(values)
    if mode in ("LA", "RGBA"):
        colour.putalpha(Image.fromarray(grey[..., 1]))
    return colour.convert("P").convert("PA") if mode == "PA" else colour.convert(mode)


def save(rng: random.Random, file: Path, size: tuple[int, int]) -> Path:
    """Write a picture of a mode and format that go together, turned in one of eight ways."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        suffix, exif, written = rng.choice(list(FORMATS)), Image.Exif(), io.BytesIO()
        mode, exif[0x0112] = rng.choice(MODES), rng.randint(1, 8)
        if suffix in ("webp", "jpg") and mode[0] in "IF":
            continue  # PIL cuts what is beyond 255 when it writes them
        Image.init()
        try:
            options = {} if suffix == "bmp" else {"exif": exif}
            picture(rng, mode, size).save(written, Image.EXTENSION[f".{suffix}"], **FORMATS[suffix], **options)
        except (OSError, KeyError, ValueError):
            continue
        file = file.with_suffix(f".{suffix}")
        file.write_bytes(written.getvalue())
        return file


# the plain reading


def pixels(file: Path, channels: int, background: tuple[int, int, int]) -> np.ndarray:
    with Image.open(io.BytesIO(file.read_bytes())) as image:  # of a path, PIL maps some, and turns them wrongly
        image.load()
        kind, image = image.format, ImageOps.exif_transpose(image)
    values = np.asarray(image)
    if image.mode[0] in "IF":
        wide = image.mode.startswith("I;16") or kind == "PNG"
        white = 65535 if wide or values.max() > 255 else 1 if image.mode == "F" and values.max() <= 1 else 255
        values = np.floor(values / 256) if white == 65535 else np.rint(values * (255 / white))
        image = Image.fromarray(values.astype(np.uint8))
    elif image.mode in ("LA", "PA", "RGBA"):
        rgba = np.asarray(image.convert("RGBA")).astype(np.float64)
        share = rgba[..., 3:] / 255
        image = Image.fromarray(np.rint(rgba[..., :3] * share + np.array(background) * (1 - share)).astype(np.uint8))
    image = image.convert("RGB") if image.mode == "LAB" else image
    read = np.asarray(image.convert("RGB" if channels == 3 else "L")).astype(np.int64)
    return read if channels == 3 else read[..., None]


def plain(top: Path, folder: Path, skip: list[Path], repeats: bool) -> dict[str, float]:
    """How often an epoch has each file below a folder."""
    counts = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix[1:] not in FORMATS or any(other in file.parents for other in skip):
            continue
        times = 1.0
        for above in file.parents[: len(file.relative_to(folder).parts) - 1]:
            head = above.name.partition("_")[0]
            if repeats and head.isdigit() and "_" in above.name:
                times = float(head)
                break
        if (own := file.parent / "multiply.txt").exists():
            times = float(own.read_text())
        if times:
            counts[file.relative_to(top).as_posix()] = times
    return counts


def make(rng: random.Random, top: Path) -> tuple[dict, list[Path]]:
    """A folder of images, and the section `data` about it with the folders in it that are other data."""
    size, others = rng.choice([None, 8, [6, 10]]), []
    kind = rng.choice(["images", "images", "classes"])
    spec = {
        kind: "top", "size": size, "channels": rng.choice([1, 3]), "background": rng.choice(["white", [9, 90, 200]]),
        "crop": rng.choice(["center", "random"]) if size else "center", "flip": rng.random() < 0.5,
        "shuffle": rng.random() < 0.7, "repeats": rng.choice(["folders", "none"]), "captions": "none",
    }  # fmt: skip
    folders = rng.sample(FOLDERS, rng.randint(1, 4)) if kind == "images" else ["x", "x/1_y", "0_z", "w"][: rng.randint(1, 4)]
    for folder in folders:
        for n in range(rng.randint(1, 3)):
            save(rng, top / folder / f"{n}", rng.choice([(8, 12), (12, 8), (9, 9)]))
        if rng.random() < 0.3:
            (top / folder / "multiply.txt").write_text(rng.choice(["0", "2", "0.5", "1.5"]))
    if rng.random() < 0.5:
        test = top / rng.choice(["val", "a/val"]) if kind == "images" else top / "val"
        for n in range(rng.randint(1, 3)):
            save(rng, test / rng.choice([f for f in folders if f] or ["x"]) / f"{n}", (8, 8))
        spec["test"] = {kind: str(test)}
        others.append(test)
    if kind == "images" and rng.random() < 0.3:
        for file in [f for f in top.rglob("*") if f.suffix[1:] in FORMATS and not any(o in f.parents for o in others)]:
            kept = (top / "edges" / file.relative_to(top)).with_suffix(".png")
            kept.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(file, 3, (0, 0, 0)).astype(np.uint8)).save(kept)
        spec["conditions"] = str(top / "edges")
        others.append(top / "edges")
    return spec, others


def view(array: np.ndarray, size, flip: bool) -> torch.Tensor:
    """An image as it is trained on: cut to a shape in its centre, resized, mirrored, from -1 to 1."""
    image = Image.fromarray(array.astype(np.uint8).squeeze())
    if size is not None:
        image = ImageOps.fit(image, (size, size) if isinstance(size, int) else size[::-1], Image.Resampling.LANCZOS)
    values = np.asarray(ImageOps.mirror(image) if flip else image)
    return torch.tensor(values.reshape(*values.shape[:2], -1)).permute(2, 0, 1).float() / 127.5 - 1


def compare(rng: random.Random, base: Path) -> str | None:
    """What fxplug reads otherwise than the plain loop; None for nothing."""
    spec, others = make(rng, base / "top")
    repeats = spec["repeats"] == "folders" and "images" in spec
    wanted = plain(base / "top", base / "top", others, repeats)
    for key in ("captions", "repeats") if "classes" in spec else ():
        spec.pop(key, None)  # they are of other kinds of data
    section = check_settings(Data, spec, "data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            items = open_items(section, base)
        except FxplugError as error:
            return None if not wanted and "have 0 repeats" in str(error) else f"refused: {error}"
        found = dict(zip(items.names, items.repeats or [1.0] * len(items), strict=True))
        if found != wanted:
            return f"samples {found}, and there are {wanted}"
        for other in others:
            if not any(f"'{other.resolve()}'" in note for note in items.notes):
                return f"nothing is said of {other}"
        arrays = {}
        for i, name in enumerate(items.names):
            arrays[name] = pixels(base / "top" / name, section.channels, section.background)
            read = np.asarray(items[i]["image"]).astype(np.int64)
            if read.shape[:2] != arrays[name].shape[:2] or items.sizes[i] != read.shape[:2]:
                return f"{name} is {read.shape}, measured {items.sizes[i]}, and seen {arrays[name].shape}"
            if abs(read.reshape(arrays[name].shape) - arrays[name]).max() > 1:  # PIL rounds where it composes
                return f"{name} has other pixels"
        if "classes" in spec:
            classes = sorted(p.name for p in (base / "top").iterdir() if p.is_dir() and p not in others)
            labels = [classes.index(name.partition("/")[0]) for name in items.names]
            if labels != [items[i]["label"] for i in range(len(items))] or items.classes != classes:
                return f"labels of {items.classes}, and there are {classes}"
        return _compare_epochs(rng, items, section, spec, arrays, wanted) or _compare_test(base, items, section, spec, others)


def _compare_epochs(rng, items, section, spec, arrays, wanted) -> str | None:
    epoch, seed = rng.randrange(3), rng.randrange(99)
    if sum(map(int, wanted.values())) + round(sum(n % 1 for n in wanted.values())) < 2:
        return None  # no batch
    batches = list(Loader(items, section, 1, seed=seed).epoch(epoch))
    counts = Counter(batch["name"][0] for batch in batches)
    if wrong := {n: counts[n] for n in wanted if not math.floor(wanted[n]) <= counts[n] <= math.ceil(wanted[n])}:
        return f"an epoch has {wrong}, and must have {wanted}"
    seen = {}
    for batch in batches:
        name, image = batch["name"][0], batch["image"][0]
        seen.setdefault(name, []).append(image)
        sides = [view(arrays[name], section.size, flip) for flip in ((False, True) if section.flip else (False,))]
        if section.crop == "center" and not any((image - side).abs().max() < 2.5 / 127.5 for side in sides):
            return f"{name} is trained on as another picture"
        if "condition" in batch and batch["condition"].shape[2:] != image.shape[1:]:
            return f"the condition of {name} has another size"
    if section.crop == "random" and section.size == 8:
        for name, views in seen.items():
            if len(views) > 5 and len({view.numpy().tobytes() for view in views}) == 1 and len(set(items.sizes)) > 1:
                return f"{name} has one view in {len(views)}"
    halves = [list(Loader(items, section, 1, seed=seed, rank=rank, world=2).epoch(epoch)) for rank in (0, 1)]
    joined = [batch for pair in zip(*halves, strict=True) for batch in pair]
    for one, two in zip(joined, batches, strict=False):
        if not section.shuffle and epoch:
            break  # it begins where the epoch before ended, which depends on the batch
        if one["name"] != two["name"] or not one["image"].equal(two["image"]):
            return f"two processes have {one['name']} where one has {two['name']}, or another view of it"
    resumed = list(Loader(items, section, 1, seed=seed).epoch(epoch, 1))
    if not all(one["image"].equal(two["image"]) for one, two in zip(resumed, batches[1:], strict=True)):
        return "a resumed epoch has other views"
    return None


def _compare_test(base, items, section, spec, others) -> str | None:
    if section.test is None:
        return None
    wanted = plain(others[0], others[0], [], spec.get("repeats") == "folders" and "images" in spec)
    try:
        tests = match_test_items(open_items(section.test, base, test=True), items)
    except FxplugError as error:
        known = not wanted or "is not among the" in str(error)
        return None if known else f"the test data are refused: {error}"
    if {*tests.names} != {*wanted}:
        return f"test samples {tests.names}, and there are {[*wanted]}"
    if "classes" in spec:
        for i, name in enumerate(tests.names):
            if items.classes[tests[i]["label"]] != name.partition("/")[0]:
                return f"the test image {name} has the label {tests[i]['label']} of {items.classes}"
    return None


def one(seed: int) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder).resolve()
        try:
            return compare(random.Random(seed), base)
        except Exception:  # whatever it is, the case is told
            return traceback.format_exc()


def fuzz_data(cases: int, seed: int) -> list[str]:
    """Run so many cases, from this seed on; a line for each miss."""
    misses = []
    for number in range(seed, seed + cases):
        if what := one(number):
            print(f"\n{what}\n  again: python tests/fuzz.py data --cases 1 --seed {number}", flush=True)
            misses.append(f"seed {number}: {json.dumps(what[-300:])}")
    return misses

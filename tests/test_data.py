"""Samples from folders, data sets and import paths; buckets; the order of batches; what bad data does."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sweeps import sweep
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fxplug.core.errors import SpecError, TrainError
from fxplug.training.data.batch_order import Order, assign, list_bucket_sizes
from fxplug.training.data.image_files import Crop, crop_and_resize
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import OwnItems, match_test_items, open_items
from fxplug.training.data.wrapped_loader import make_loader
from fxplug.training.train_section import Buckets, Data


def picture(seed=0, size=(20, 24), mode="RGB"):
    h, w = size
    shape = (h, w) if mode == "L" else (h, w, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def folder(top, count=6, *, captions=True, size=(20, 24), suffix=".png"):
    top.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        picture(i, size).save(top / f"{i}{suffix}")
        if captions:
            (top / f"{i}.txt").write_text(f"picture {i}\n")
    return top


def opened(base, **spec):
    spec = Data(**spec)
    return open_items(spec, base), spec


def loaded(base, batch=2, *, epoch=0, start=0, loader=None, **spec):
    items, spec = opened(base, **spec)
    return list(Loader(items, spec, batch, **(loader or {})).epoch(epoch, start))


def same(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key], key


class Toy(Dataset):
    """Ten samples that draw from every global generator."""

    classes = ["even", "odd"]

    def __init__(self, count=10, kind="dict"):
        self.count, self.kind = count, kind

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        noise = torch.rand(2) + random.random() + np.random.rand()
        image = torch.full((3, 4, 4), i, dtype=torch.uint8)
        if self.kind == "dict":
            return {"image": image, "label": i % 2, "text": f"number {i}", "noise": noise, "weight": float(i)}
        return {"tuple": (image, i % 2), "caption": (image, "a"), "three": (1, 2, 3), "image": image}[self.kind]


class Floats(Toy):
    def __getitem__(self, i):
        return {"image": np.full((4, 4, 1), i / 10), "label": self.classes[i % 2]}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Short(IterableDataset):
    """Fewer samples than it says."""

    def __iter__(self):
        return iter([Toy()[0]] * 4)

    def __len__(self):
        return 6


class Faulty(Toy):
    def __getitem__(self, i):
        if i == 3:
            raise KeyError("lost")
        if i == 5:
            raise OSError("gone")
        return super().__getitem__(i)


def dark(image, level=128):
    return image.convert("L").point(lambda v: 255 * (v >= level))


def inverted(image):
    return 255 - np.asarray(image)


def crash(image):
    raise ZeroDivisionError("oops")


TOY = f"{__name__}:Toy"


# folders


def test_a_folder_of_images_with_captions_beside_them(tmp_path):
    folder(tmp_path / "set", 11)
    folder(tmp_path / "set" / "more", 2, suffix=".JPG")
    (tmp_path / "set" / "notes.md").write_text("no image")
    (tmp_path / "set" / "._0.png").write_text("hidden")
    items, _ = opened(tmp_path, images="set")
    assert [item["name"] for item in items] == [*(f"{i}.png" for i in range(11)), "more/0.JPG", "more/1.JPG"]
    assert items[10]["caption"] == "picture 10" and items.classes is None
    assert items.sizes == [(20, 24)] * 13


def test_metadata_gives_captions_labels_and_more(tmp_path):
    folder(tmp_path, 3, captions=False)
    folder(tmp_path / "in", 1, captions=False)
    lines = [{"file_name": f"{i}.png", "text": f"t{i}", "label": "cat" if i else "ant", "score": i / 2} for i in range(3)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "in" / "metadata.jsonl").write_text('{"file_name": "0.png", "caption": "inner", "label": "cat", "score": 9}')
    (batch,) = loaded(tmp_path, 4, images=".", shuffle=False)
    assert batch["caption"] == ["t0", "t1", "t2", "inner"] and batch["label"].tolist() == [0, 1, 1, 1]
    assert batch["score"].tolist() == [0, 0.5, 1, 9] and batch["index"].tolist() == [0, 1, 2, 3]
    assert batch["name"] == ["0.png", "1.png", "2.png", "in/0.png"]
    assert opened(tmp_path, images=".")[0].classes == ["ant", "cat"]


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"file_name": "5.png", "text": "x"}', r"metadata.jsonl:2: no image '5.png' \(did you mean"),
        ('{"file_nam": "0.png"}', "metadata.jsonl:2: missing key 'file_name'"),
        ("{file_name: 0.png}", r"metadata.jsonl:2: is not JSON: .* column 2"),
        ("[1]", "metadata.jsonl:2: must be a mapping of file_name, text, caption, not a list"),
        ('{"file_name": "0.png", "text": "a"}', "metadata.jsonl:2: '0.png' is listed in an earlier line already"),
        ('{"file_name": "1.png", "text": "a", "caption": "b"}', "metadata.jsonl:2: give either 'text' or 'caption', not both"),
        ('{"file_name": "1.png", "text": 5}', "metadata.jsonl:2: text: must be text, not 5"),
        ('{"file_name": "1.png", "index": 5}', "metadata.jsonl:2: the key 'index' is reserved by the loader"),
        (
            '{"file_name": "1.png", "text": "a", "score": 1}',
            "data.images: metadata.jsonl has 'score' for 1 of 2 images, and none for",
        ),
    ],
)
def test_metadata_that_does_not_fit(tmp_path, line, said):
    folder(tmp_path, 2, captions=False)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "x"}\n' + line)
    with pytest.raises(SpecError, match=said):
        opened(tmp_path, images=".")


def test_labels_of_two_kinds(tmp_path):
    folder(tmp_path, 2)
    lines = ['{"file_name": "0.png", "label": 1}', '{"file_name": "1.png", "label": "a"}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(SpecError, match=r"must all be whole numbers or all text, not int \('0.png'\), str \('1.png'\)"):
        opened(tmp_path, images=".")


def test_missing_captions(tmp_path):
    folder(tmp_path, 9, captions=False)
    (tmp_path / "2.txt").write_text("two")
    (tmp_path / "3.txt").write_text(" \n")
    said = "data.images: 8 of 9 images have no caption: '0.png', '1.png', '3.png', '4.png', '5.png', ...; put a .txt beside"
    with pytest.raises(SpecError, match=said):
        opened(tmp_path, images=".")
    optional, _ = opened(tmp_path, images=".", captions="optional")
    assert [item["caption"] for item in optional][:4] == ["", "", "two", ""]
    assert "caption" not in opened(tmp_path, images=".", captions="none")[0][2]


def test_labels_need_no_captions(tmp_path):
    folder(tmp_path, 2, captions=False)
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps({"file_name": f"{i}.png", "label": i}) for i in range(2)))
    items, _ = opened(tmp_path, images=".")
    assert items[1]["label"] == 1 and "caption" not in items[1] and items.classes is None


def test_folders_that_are_not_there_or_empty(tmp_path):
    (tmp_path / "images").mkdir()
    for spec, said in (
        ({"images": "imagse"}, r"data.images: no such folder '.*imagse' \(did you mean 'images'\?\)"),
        ({"images": "a/b"}, "no such folder '.*/a/b', nor '.*/a'"),
        ({"images": "images"}, "data.images: no images in '.*images'; it is empty"),
        ({"classes": "images"}, "data.classes: no images in '.*images'; it is empty"),
        ({"dataset": "imagse"}, "data.dataset: no such folder"),
        ({"images": "images", "conditions": "imags"}, "data.conditions: no such folder .*did you mean 'images'"),
    ):
        with pytest.raises(SpecError, match=said):
            opened(tmp_path, **spec)
    (tmp_path / "images" / "a.csv").touch()
    with pytest.raises(SpecError, match="data.test.images: no images in '.*images'; it has files with .csv"):
        open_items(Data(images="images"), tmp_path, test=True)
    with pytest.raises(SpecError, match="must be a folder, and '.*a.csv' is a file"):
        opened(tmp_path, images="images/a.csv")


def test_a_folder_for_each_class(tmp_path):
    for name, count in (("b10", 2), ("b9", 1), ("a", 3)):
        folder(tmp_path / name / "deep", count, captions=False)
    items, _ = opened(tmp_path, classes=".")
    assert items.classes == ["a", "b10", "b9"]
    assert [(item["name"], item["label"]) for item in items][2:] == [
        ("a/deep/2.png", 0), ("b9/deep/0.png", 2), ("b10/deep/0.png", 1), ("b10/deep/1.png", 1),
    ]  # fmt: skip
    picture().save(tmp_path / "stray.png")
    with pytest.raises(SpecError, match="data.classes: 'stray.png' not inside a class folder"):
        opened(tmp_path, classes=".")
    (tmp_path / "c").mkdir()
    with pytest.raises(SpecError, match="data.classes: no images in the class folder 'c' of"):
        opened(tmp_path, classes=".")


def test_images_are_upright_and_of_one_mode(tmp_path):
    image = Image.new("RGB", (8, 4), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    image.save(tmp_path / "b.webp", exif=exif)
    image.save(tmp_path / "c.png", exif=exif)
    palette = image.quantize(4)
    palette.save(tmp_path / "d.png", transparency=b"\x00\x10")
    Image.fromarray(np.full((8, 4), 0x8040, dtype=np.uint16)).save(tmp_path / "e.png")
    image.rotate(90, expand=True).convert("RGBA").save(tmp_path / "f.png")
    image.rotate(90, expand=True).convert("CMYK").save(tmp_path / "g.tiff")
    items, _ = opened(tmp_path, images=".", captions="none")
    assert items.sizes == [(8, 4), (8, 4), (8, 4), (4, 8), (8, 4), (8, 4), (8, 4)]
    assert [(item["image"].height, item["image"].width) for item in items] == items.sizes
    assert {item["image"].mode for item in items} == {"RGB"}
    assert items[4]["image"].getpixel((0, 0)) == (0x80, 0x80, 0x80)
    grey, _ = opened(tmp_path, images=".", captions="none", channels=1)
    assert {item["image"].mode for item in grey} == {"L"}
    with pytest.warns(UserWarning, match="'d.png' has transparent pixels"):
        (batch,) = loaded(tmp_path, 7, images=".", captions="none", channels=1, size=[8, 4])
    assert batch["image"].shape == (7, 1, 8, 4)


def transparent(mode):
    """A red image, its lower half transparent: with alpha, as a palette or with a colour that is the transparent one."""
    red = Image.new("RGBA", (8, 8), (255, 0, 0, 255))
    red.paste((0, 255, 0, 0), (0, 4, 8, 8))
    if mode == "P":
        return red.convert("RGBA").quantize(4, method=Image.Quantize.FASTOCTREE)
    if mode == "RGB":
        opaque = red.convert("RGB")
        opaque.info["transparency"] = (0, 255, 0)
        return opaque
    return red.convert(mode)


@pytest.mark.parametrize(("mode", "suffix"), [("RGBA", "png"), ("P", "png"), ("RGB", "png"), ("LA", "png"), ("RGBA", "webp")])
@pytest.mark.parametrize(("background", "colour"), [(None, (255, 255, 255)), ("black", (0, 0, 0)), ([0, 0, 255], (0, 0, 255))])
def test_transparent_pixels_have_the_background(tmp_path, mode, suffix, background, colour):
    image = transparent(mode)
    for name in ("a", "b"):
        image.save(tmp_path / f"{name}.{suffix}", **({"lossless": True, "exact": True} if suffix == "webp" else image.info))
    spec = {} if background is None else {"background": background}
    with pytest.warns(UserWarning, match="has transparent pixels.*'background' in the section 'data'") as said:
        batches = loaded(tmp_path, 1, images=".", captions="none", shuffle=False, **spec)
    assert len([one for one in said if "transparent" in str(one.message)]) == 1
    for batch in batches:
        upper, lower = batch["image"][0, :, 1, 1], batch["image"][0, :, -2, 1]
        assert ((lower + 1) * 127.5).round().tolist() == list(colour)
        if mode != "LA":
            assert ((upper + 1) * 127.5).round().tolist() == [255, 0, 0]


def test_an_opaque_alpha_is_no_transparency(tmp_path):
    picture(3, (8, 8)).convert("RGBA").save(tmp_path / "a.png")
    (batch,) = loaded(tmp_path, 1, images=".", captions="none")
    plain = torch.tensor(np.asarray(picture(3, (8, 8)))).permute(2, 0, 1)
    assert ((batch["image"][0] + 1) * 127.5).round().to(torch.uint8).equal(plain)


def test_arrays_with_alpha_and_conditions_are_composed(tmp_path):
    rgba = torch.zeros(4, 6, 6, dtype=torch.uint8)
    spec = Data(call="toy:Toy", background="#0000ff")
    items = OwnItems([{"image": rgba, "condition": rgba.permute(1, 2, 0).numpy()}], spec)
    item = items[0]
    assert item["image"].getpixel((0, 0)) == item["condition"].getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(("count", "batch", "world"), [(6, 4, 1), (7, 4, 1), (5, 2, 2), (11, 3, 3), (4, 4, 1), (9, 1, 2)])
def test_without_shuffle_every_sample_is_seen(count, batch, world):
    how = {"seed": 0, "world": world, "train": True, "shuffle": False}
    seen, orders = [], [Order([range(count)], batch, rank=rank, **how) for rank in range(world)]
    for epoch in range(count):
        steps = [order.requests(epoch) for order in orders]
        seen += [i for step in zip(*steps, strict=True) for request in step for i in request.indices]
    whole = count // (batch * world) * batch * world
    assert seen == [i % count for i in range(whole * count)]


def test_without_shuffle_every_sample_of_each_bucket_is_seen():
    order = Order([range(5), range(5, 12)], 2, seed=0, rank=0, world=1, train=True, shuffle=False)
    seen = {i for epoch in range(2) for request in order.requests(epoch) for i in request.indices}
    assert seen == {*range(12)}


def test_a_folder_of_no_repeats_is_left_out(tmp_path):
    folder(tmp_path / "0_reg", 2)
    folder(tmp_path / "2_dog", 3)
    items, spec = opened(tmp_path, images=".", repeats="folders", captions="optional")
    loader = Loader(items, spec, 2)
    names = [name for batch in loader.epoch(0) for name in batch["name"]]
    assert len(names) == 6
    assert {name.partition("/")[0] for name in names} == {"2_dog"}
    assert "2 of 5 images have 0 repeats and are left out" in items.notes


# data sets


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import datasets

    top = tmp_path_factory.mktemp("hub")
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["x", "y"]), "words": datasets.Value("string")}
    )
    rows = {"img": [picture(i) for i in range(6)], "fine_label": [0, 1] * 3, "words": [f"w{i}" for i in range(6)]}
    one = datasets.Dataset.from_dict(rows, features=features)
    one.save_to_disk(str(top / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([0, 1])}).save_to_disk(str(top / "splits"))
    datasets.Dataset.from_dict({"a": [1], "b": ["x"]}).save_to_disk(str(top / "plain"))
    two = {"img": rows["img"], "condition": rows["img"], "words": rows["words"], "more": rows["words"], "kind": ["q", "p"] * 3}
    features = datasets.Features({key: features["img" if key in ("img", "condition") else "words"] for key in two})
    datasets.Dataset.from_dict(two, features=features).save_to_disk(str(top / "two"))
    return top


@pytest.mark.slow
def test_a_hugging_face_data_set(saved):
    items, spec = opened(saved, dataset="one")
    assert items.classes == ["x", "y"] and items.sizes == [(20, 24)] * 6
    assert items[3]["caption"] == "w3" and items[3]["label"] == 1 and items[3]["name"] == "dataset[3]"
    assert np.array_equal(items[3]["image"], picture(3))
    assert len(opened(saved, dataset="splits")[0]) == 6
    assert len(opened(saved, dataset="splits", split="test")[0]) == 2
    assert len(open_items(Data(dataset="splits"), saved, test=True)) == 2
    same(loaded(saved, dataset="one", workers=2), loaded(saved, dataset="one"))


def test_columns_are_named_where_features_do_not_tell(saved):
    columns = {"caption": "more", "label": "kind", "tag": "words", "image": "img"}
    (batch,) = loaded(saved, 6, dataset="two", columns=columns, shuffle=False)
    assert batch["caption"] == batch["tag"] == [f"w{i}" for i in range(6)] and batch["label"].tolist() == [1, 0] * 3
    assert torch.allclose(batch["condition"] * 2 - 1, batch["image"], atol=1e-6)
    for spec, said in (
        (
            {"dataset": "plain"},
            r"data.dataset: no image column in '.*plain', it has a \(int\), b \(text\); name it with columns",
        ),
        ({"dataset": "two"}, "data.dataset: no caption and no label column"),
        (
            {"dataset": "two", "columns": {"caption": "mroe"}},
            r"data.columns.caption: no column 'mroe' \(did you mean 'more'\?\)",
        ),
        ({"dataset": "splits", "split": "tset"}, r"data.split: no split 'tset' \(did you mean 'test'\?\); .* has train, test"),
        ({"dataset": "one", "split": "train"}, "data.split: '.*one' has no splits"),
        ({"dataset": "one", "columns": {"label": "img"}}, "data.columns.label: column 'img' is not a label: it has image"),
        ({"dataset": "."}, "data.dataset: '.*' is not a data set written by save_to_disk"),
    ):
        with pytest.raises(SpecError, match=said):
            opened(saved, **spec)


def test_rows_without_a_caption(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [picture(0), picture(1), None], "text": ["a", None, "c"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path))
    with pytest.raises(TrainError, match=r"dataset\[1\] has no caption: write one, or set 'captions: optional'"):
        loaded(tmp_path, 3, dataset=".")
    items, spec = opened(tmp_path, dataset=".", captions="optional", size=16, buckets={"step": 8})
    assert items.sizes == [(20, 24), (20, 24), (0, 0)]
    loader = Loader(items, spec, 2)
    assert sorted(next(loader.epoch(0))["caption"]) == ["", "a"] and loader.skipped == {"dataset[2]": "no image"}
    (batch,) = loaded(tmp_path, 3, dataset=".", captions="none")
    assert "caption" not in batch and sorted(batch["index"].tolist()) == [0, 0, 1]


def test_a_data_set_by_import_path(tmp_path):
    items, spec = opened(tmp_path, call={TOY: {"count": 4}})
    assert len(items) == 4 and items.classes == ["even", "odd"]
    (batch,) = loaded(tmp_path, 4, call={TOY: {"count": 4}}, shuffle=False)
    assert batch["image"].shape == (4, 3, 4, 4) and torch.allclose(batch["image"][2], torch.tensor(2 / 127.5 - 1))
    assert batch["label"].tolist() == [0, 1, 0, 1] and batch["caption"][3] == "number 3"
    assert batch["weight"].dtype == torch.float64 and batch["name"][1] == "dataset[1]"
    (batch,) = loaded(tmp_path, 4, call={TOY: {"count": 4, "kind": "tuple"}})
    assert batch.keys() == {"image", "label", "name", "index"}
    assert opened(tmp_path, call={TOY: {"kind": "caption"}})[0][0]["caption"] == "a"


def test_float_images_are_used_as_they_are(tmp_path):
    (batch,) = loaded(tmp_path, 10, call=f"{__name__}:Floats", shuffle=False, flip=True, crop="random")
    assert batch["image"].dtype == torch.float32 and batch["image"].shape == (10, 1, 4, 4)
    assert torch.allclose(batch["image"][:, 0, 0, 0], torch.arange(10) / 10) and batch["label"].tolist() == [0, 1] * 5
    with pytest.raises(
        TrainError, match=r"dataset\[\d\] is a float image of 4x4, which is used as it is, but the size must be 8x8"
    ):
        loaded(tmp_path, call=f"{__name__}:Floats", size=8)


@pytest.mark.parametrize(
    "call, said",
    [
        (f"{__name__}:Tyo", r"data.call: .*no attribute 'Tyo' \(did you mean 'Toy'\?\)"),
        ("nowhere.at_all:X", "data.call: no module named 'nowhere'"),
        ({TOY: {"coutn": 4}}, r"data.call.*Toy has no option 'coutn' \(did you mean 'count'\?\)"),
        ({TOY: {"count": 0}}, "data.call: what '.*Toy' gives has no samples"),
        (f"{__name__}:Stream", "what '.*:Stream' gives is a Stream, not a map-style data set: it needs a length"),
        (f"{__name__}:picture", "what '.*:picture' gives is a Image, not a map-style data set"),
    ],
)
def test_import_paths_that_are_no_data_set(tmp_path, call, said):
    with pytest.raises(SpecError, match=said):
        opened(tmp_path, call=call)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("three", r"dataset\[\d\] must be a mapping or a tuple \(image, label\), not a tuple of 3"),
        ("image", r"dataset\[\d\] must be a mapping or a tuple \(image, label\), not a Tensor"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_none(tmp_path, kind, said, workers):
    with pytest.raises(TrainError, match=said):
        loaded(tmp_path, call={TOY: {"kind": kind}}, workers=workers)


def test_a_data_set_that_raises(tmp_path):
    with pytest.raises(TrainError, match=r"dataset\[3\] raised KeyError: 'lost' \(.*test_data.py:\d+\)"):
        loaded(tmp_path, call=f"{__name__}:Faulty", shuffle=False)
    items, spec = opened(tmp_path, call=f"{__name__}:Faulty", shuffle=False)
    loader = Loader(items, spec, 2)
    assert [b["index"].tolist() for b in loader.epoch(0, 2)] == [[4, 6], [6, 7], [8, 9]]
    assert loader.skipped == {"dataset[5]": "gone"}


# conditions


@pytest.mark.parametrize("suffix", [".png", ".bmp"])
def test_condition_images_are_cropped_and_mirrored_alike(tmp_path, suffix):
    folder(tmp_path / "set", 4)
    for i in range(4):
        (tmp_path / "set" / "cond").mkdir(exist_ok=True)
        picture(i).save(tmp_path / "set" / "cond" / f"{i}{suffix}")
    how = {"size": 16, "crop": "random", "flip": True, "images": "set"}
    batches = loaded(tmp_path, 4, conditions="set/cond", **how) + loaded(tmp_path, 4, epoch=1, conditions="set/cond", **how)
    for batch in batches:
        assert batch["condition"].shape == (4, 3, 16, 16)
        assert torch.allclose(batch["condition"] * 2 - 1, batch["image"], atol=1e-6)
    assert not torch.equal(*(b["image"][b["index"].argsort()] for b in batches))
    plain = loaded(tmp_path, 4, images="set", captions="none", size=16)
    assert {n.partition("/")[0] for n in plain[0]["name"]} <= {"0.png", "1.png", "2.png", "3.png", "cond"}


def test_condition_functions_see_the_image_as_the_model_does(tmp_path):
    folder(tmp_path / "set", 4)
    how = {"size": 16, "crop": "random", "flip": True, "images": "set"}
    for call, level in ((f"{__name__}:dark", 128), ({f"{__name__}:dark": {"level": 200}}, 200)):
        (batch,) = loaded(tmp_path, 4, conditions=call, **how)
        back = Image.fromarray(((batch["image"][0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
        assert torch.equal(batch["condition"][0, 0], torch.from_numpy(np.array(dark(back, level))) / 255)
    array = loaded(tmp_path, 4, conditions=f"{__name__}:inverted", **how)[0]
    assert torch.allclose(array["condition"] * 2 - 1, -array["image"], atol=1e-6)
    with pytest.raises(ZeroDivisionError, match="oops"):
        loaded(tmp_path, 4, conditions=f"{__name__}:crash", **how)
    with pytest.raises(SpecError, match=r"data.conditions: .*no attribute 'drak' \(did you mean 'dark'\?\)"):
        opened(tmp_path, conditions=f"{__name__}:drak", **how)
    with pytest.raises(TrainError, match="is a float image: a condition function needs PIL or uint8"):
        loaded(tmp_path, call=f"{__name__}:Floats", conditions=f"{__name__}:dark")


def test_what_float_tensors_cannot_have():
    with pytest.raises(TrainError, match=r"dataset\[0\]: a label must be a whole number, not 0.5; for text"):
        next(make_loader([(picture(), 0.5)], 1).epoch(0))
    with pytest.raises(TrainError, match=r"dataset\[0\]: a label must be a whole number, not Tensor \[2\] torch.float32"):
        next(make_loader([(picture(), torch.full((2,), 0.5))], 1).epoch(0))
    with pytest.raises(TrainError, match="is a float image: a plugin's transform_pil_image needs PIL or uint8"):
        next(make_loader(Floats(), 1, hooks=Louder()).epoch(0))
    sample = {"image": picture(0, (8, 8)), "condition": torch.zeros(3, 8, 8)}
    assert next(make_loader([sample], 1).epoch(0))["condition"].shape == (1, 3, 8, 8)
    with pytest.raises(TrainError, match="its condition is a float tensor, which cannot be cropped and flipped with it"):
        next(Loader(OwnItems([sample], spec := Data(call="x", size=4)), spec, 1).epoch(0))


def test_condition_images_that_do_not_fit(tmp_path):
    folder(tmp_path / "set", 3)
    folder(tmp_path / "cond", 2, captions=False)
    with pytest.raises(SpecError, match="data.conditions: no condition image for '2.png' in '.*cond'"):
        opened(tmp_path, images="set", conditions="cond")
    picture(0).save(tmp_path / "cond" / "0.jpg")
    with pytest.raises(SpecError, match="data.conditions: '0.jpg' and '0.png' in '.*cond' have the same name without suffix"):
        opened(tmp_path, images="set", conditions="cond")
    (tmp_path / "cond" / "0.jpg").unlink()
    picture(0, (24, 24)).save(tmp_path / "cond" / "2.png")
    with pytest.raises(TrainError, match="2.png is 20x24, its condition 24x24: they must have one shape"):
        loaded(tmp_path, 3, images="set", conditions="cond")
    with pytest.raises(
        SpecError, match="data.conditions: a folder of conditions is only for image files; with 'call' each sample has its own"
    ):
        opened(tmp_path, call=TOY, conditions="cond")


# sizes


def test_crops_keep_the_shape_of_things():
    image = picture(0, (40, 100))
    half = crop_and_resize(image, (20, 20), Crop())
    assert half.size == (20, 20)
    assert np.array_equal(half, image.resize((50, 20), Image.Resampling.LANCZOS).crop((15, 0, 35, 20)))
    left = crop_and_resize(image, (40, 40), Crop(x=0, y=0, flip=True))
    assert np.array_equal(left, image.crop((0, 0, 40, 40)).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert crop_and_resize(image, (40, 100), Crop()) is image


def test_bucket_sizes_are_those_of_kohya():
    assert list_bucket_sizes((512, 512), Buckets(step=64, min=256, max=1024)) == [
        (1024, 256), (960, 256), (896, 256), (832, 256), (768, 320), (704, 320), (640, 384), (576, 448), (512, 512),
        (448, 576), (384, 640), (320, 704), (320, 768), (256, 832), (256, 896), (256, 960), (256, 1024),
    ]  # fmt: skip


@given(
    st.integers(8, 200),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_buckets(side, step, images, fill):
    try:
        sizes = list_bucket_sizes((side, side), Buckets(step=step))
    except SpecError as error:
        assert "too small for buckets" in str(error) and step > side // 2
        return
    assert all(h % step == w % step == 0 and h * w <= side * side for h, w in sizes) and len({*sizes}) == len(sizes)
    chosen = assign(images, sizes, fill)
    counts = {size: chosen.count(size) for size in chosen}
    assert {*chosen} <= {*sizes} and (min(counts.values()) >= fill or len(counts) == 1)
    if fill == 1:
        off = [abs(np.log(w / h) - np.log(bw / bh)) for (h, w), (bh, bw) in zip(images, chosen, strict=True)]
        best = [min(abs(np.log(w / h) - np.log(bw / bh)) for bh, bw in sizes) for h, w in images]
        assert np.allclose(off, best)


def test_a_batch_comes_from_one_bucket(tmp_path):
    for i, size in enumerate([(40, 20)] * 5 + [(20, 40)] * 6 + [(30, 30)] * 3 + [(31, 29)]):
        picture(i, size).save(tmp_path / f"{i}.png")
    how = {"images": ".", "captions": "none", "size": 32, "buckets": {"step": 8}}
    items, spec = opened(tmp_path, **how)
    loader = Loader(items, spec, 2)
    assert loader.buckets == {(32, 32): 4, (24, 40): 6, (40, 24): 5} and loader.left_out == 1 and loader.steps == 7
    batches = list(loader.epoch(0))
    assert {tuple(b["image"].shape[2:]) for b in batches} == {(40, 24), (24, 40), (32, 32)} and len(batches) == 7
    same(batches, list(loader.epoch(0)))
    first = [tuple(b["image"].shape[2:]) for b in batches]
    assert first != sorted(first)
    with pytest.raises(SpecError, match="data.buckets: size 8x8 is too small for buckets with sides of 64 to 0 in steps of 64"):
        loaded(tmp_path, **{**how, "size": 8, "buckets": {"step": 64}})
    with pytest.raises(SpecError, match="data.buckets: buckets need a 'size'"):
        loaded(tmp_path, **{**how, "size": None})
    with pytest.raises(SpecError, match="data.buckets: buckets need the size of each image"):
        loaded(tmp_path, call=TOY, size=32, buckets={"step": 8})
    assert len(Loader(items, spec, 4, world=2).buckets) == 1, "a bucket without a whole batch gives its images to the next"


def test_images_of_several_sizes_need_a_size(tmp_path):
    folder(tmp_path, 1)
    picture(1, (9, 9)).save(tmp_path / "1.png")
    with pytest.raises(
        TrainError, match=r"images of a batch must have one size and dtype: 0.png \(3x20x24 uint8\), 1.png \(3x9x9"
    ):
        loaded(tmp_path, images=".", captions="none", shuffle=False)


# order

laws = given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
    train=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)


@laws
@settings(max_examples=150, deadline=None)
def test_processes_share_what_one_would_have(sizes, batch, world, train, shuffle, epoch):
    ends = np.cumsum([0, *sizes]).tolist()
    groups = [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    how = {"seed": 3, "train": train, "shuffle": shuffle}
    whole = Order(groups, batch * world, rank=0, world=1, **how)
    parts = [Order(groups, batch, rank=rank, world=world, **how) for rank in range(world)]
    each = [part.requests(epoch) for part in parts]
    assert [len(part) for part in parts] == [len(requests) for requests in each]
    if train:
        joined = [sum((request.indices for request in requests), []) for requests in zip(*each, strict=True)]
        assert joined == [request.indices for request in whole.requests(epoch)]
        assert {len(r.indices) for requests in each for r in requests} <= {batch}
    seen = [index for requests in each for request in requests for index in request.indices]
    assert len(seen) == len({*seen}) and sorted(seen) == sorted(i for r in whole.requests(epoch) for i in r.indices)
    assert len(seen) == sum(size - size % (batch * world) if train else size for size in sizes)
    assert all(index in groups[request.group] for requests in each for request in requests for index in request.indices)


@given(count=st.integers(2, 10), batch=st.integers(1, 2), start=st.integers(0, 10), epoch=st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_a_resumed_epoch_has_the_remaining_batches(count, batch, start, epoch):
    items, spec = opened(Path(), call={TOY: {"count": count}}, flip=True)
    random.seed(start)
    same(list(Loader(items, spec, batch).epoch(epoch, start)), list(Loader(items, spec, batch).epoch(epoch))[start:])


def test_epochs_differ_and_seeds_differ(tmp_path):
    orders = {
        tuple(torch.cat([b["index"] for b in loaded(tmp_path, call=TOY, epoch=epoch, loader={"seed": seed})]).tolist())
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9 and all(sorted(order) == list(range(10)) for order in orders)
    assert [b["index"].tolist() for b in loaded(tmp_path, 4, call=TOY, loader={"train": False})] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


@sweep("method, workers", [("fork", 2), ("spawn", 1)], 0)
def test_workers_change_nothing(tmp_path, method, workers):
    items, spec = opened(tmp_path, call=TOY)
    alone = Loader(items, spec, 2, seed=5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    expected = [list(alone.epoch(0)), list(alone.epoch(1, 3))]
    torch.multiprocessing.set_start_method(method, force=True)
    try:
        pooled = Loader(items, spec.model_copy(update={"workers": workers}), 2, seed=5)
        next(pooled.epoch(2))  # an epoch that is not finished
        for got, wanted in zip([list(pooled.epoch(0)), list(pooled.epoch(1, 3))], expected, strict=True):
            same(got, wanted)
    finally:
        torch.multiprocessing.set_start_method(None, force=True)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    parts = [list(Loader(items, spec, 1, seed=5, rank=rank, world=2).epoch(0)) for rank in range(2)]
    assert all(
        torch.equal(torch.cat([a["noise"], b["noise"]]), w["noise"]) for a, b, w in zip(*parts, expected[0], strict=True)
    )


def test_a_batch_larger_than_the_data(tmp_path):
    with pytest.raises(TrainError, match="a batch of 11 is larger than the data: 10 samples"):
        loaded(tmp_path, 11, call=TOY)
    with pytest.raises(TrainError, match="a batch of 6 in each of 2 processes is larger than the data: 10 samples"):
        loaded(tmp_path, 6, call=TOY, loader={"world": 2})


class Louder:
    """Plugins of two hooks; stateless, so that workers may have it."""

    def __init__(self, hooks=("transform_caption", "transform_pil_image")):
        self.hooks = hooks

    def has(self, hook):
        return hook in self.hooks

    def transform_caption(self, caption):
        return caption.upper()

    def transform_pil_image(self, img):
        return img.convert("L")


def test_hooks_come_before_the_transform(tmp_path):
    folder(tmp_path, 2)
    seen = []

    def transform(image, size):
        seen.append((image.mode, size, random.random()))
        return torch.zeros(1)

    (batch,) = loaded(tmp_path, images=".", shuffle=False, size=8, loader={"hooks": Louder(), "transform": transform})
    assert batch["caption"] == ["PICTURE 0", "PICTURE 1"] and batch["image"].shape == (2, 1)
    assert [s[:2] for s in seen] == [("RGB", (8, 8))] * 2 and seen[0][2] != seen[1][2]
    (batch,) = loaded(tmp_path, images=".", loader={"hooks": Louder()})
    assert torch.equal(batch["image"][:, 0], batch["image"][:, 1])


def test_the_first_samples_and_a_transform_that_comes_later(tmp_path):
    folder(tmp_path, 4)
    items, spec = opened(tmp_path, images=".", size=8, crop="random", workers=1)
    loader = Loader(items, spec, 2, hooks=Louder())
    assert loader.size == (8, 8) and loader.classes is None and loader.root == str(tmp_path)
    first = loader.first(3)
    assert first["name"] == ["0.png", "1.png", "2.png"] and first["caption"][0] == "picture 0"
    assert first["image"].shape == (3, 3, 8, 8)
    next(loader.epoch(0))
    loader.transform = halves
    assert loader.transform is halves and {float(b["image"].mean()) for b in loader.epoch(0)} == {0.5}
    same([loader.first(3)], [first])


def halves(image, size):
    return torch.full((3, *size), 0.5)


# what Python has


def test_loaders_of_what_python_has(tmp_path):
    items, spec = opened(tmp_path, call=TOY)
    ours = Loader(items, spec, 3, seed=4)
    assert make_loader(ours, 7) is ours
    same(list(make_loader(Toy(), 3, seed=4).epoch(1)), list(ours.epoch(1)))
    same(list(make_loader(items, 3, seed=4).epoch(1)), list(ours.epoch(1)))
    listed = make_loader([(picture(i), i) for i in range(4)], 2, train=False)
    assert [b["label"].tolist() for b in listed.epoch(0)] == [[0, 1], [2, 3]] and listed.classes is None
    with pytest.raises(SpecError, match="the data is a Stream, not a map-style data set"):
        make_loader(Stream(), 2)
    with pytest.raises(SpecError, match="the data is a int, not a map-style"):
        make_loader(5, 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers, own", [(0, False), (0, True), (2, False)])
def test_a_data_loader_is_taken_as_it_is(workers, own):
    generator = torch.Generator().manual_seed(3) if own else None
    given = make_loader(DataLoader(Toy(), 4, shuffle=True, num_workers=workers, generator=generator), 99, seed=1)
    assert given.steps == 3 and given.classes == ["even", "odd"] and given.size is None and given.skipped == {}
    before = torch.get_rng_state(), random.getstate()
    epochs = [list(given.epoch(number)) for number in range(2)]
    torch.rand(3)
    random.random()
    same(list(given.epoch(1, 1)), epochs[1][1:])
    same(list(given.epoch(0)), epochs[0])
    assert not torch.equal(*(e[0]["image"] for e in epochs))
    image = epochs[0][0]["image"]
    assert image.shape == (4, 3, 4, 4) and image.min() >= -1 and image.max() <= 1 and image.dtype == torch.float32
    assert epochs[0][2]["name"] == ["batch 2[0]", "batch 2[1]"] and epochs[0][0]["label"].dtype == torch.int64
    assert given.first(3)["caption"] == ["number 0", "number 1", "number 2"]
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    next(given.epoch(0))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    pairs = make_loader(DataLoader(Toy(kind="tuple"), 5), 1)
    assert [b["label"].tolist() for b in pairs.epoch(0)] == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert next(make_loader(DataLoader(Toy(kind="caption"), 5), 1).epoch(0))["caption"] == ["a"] * 5


def test_data_loaders_that_cannot_be_taken():
    with pytest.raises(TrainError, match="the DataLoader has no length"):
        make_loader(DataLoader(Stream()), 1)
    with pytest.raises(TrainError, match="the DataLoader has no batches"):
        make_loader(DataLoader(Toy(2), 4, drop_last=True), 1)
    with pytest.raises(
        TrainError, match="2 processes would train on the same batches: give the DataLoader a DistributedSampler"
    ):
        make_loader(DataLoader(Toy(), 4), 1, world=2)
    with pytest.raises(TrainError, match="a plugin's transform_caption has no effect inside a DataLoader"):
        make_loader(DataLoader(Toy(), 4), 1, hooks=Louder())
    with pytest.raises(TrainError, match=r"batch 0 must be a mapping or a tuple \(image, label\), not a Tensor"):
        next(make_loader(DataLoader(Toy(kind="image"), 4), 1).epoch(0))
    sampler = DistributedSampler(Toy(), num_replicas=2, rank=1, shuffle=True)
    given = make_loader(DataLoader(Toy(), 5, sampler=sampler), 1, world=2)
    assert not torch.equal(*(next(given.epoch(number))["image"] for number in range(2)))


def test_a_data_loader_that_ends_early_is_said():
    with pytest.raises(TrainError, match="the length of the DataLoader is 3 batches, and it ended after 2: the length of"):
        list(make_loader(DataLoader(Short(), 2), 1).epoch(0))
    assert len(list(make_loader(DataLoader(Short(), 2), 1, train=False).epoch(0))) == 2


def test_samples_that_do_not_go_together():
    from fxplug.training.data.collation import collate

    with pytest.raises(TrainError, match="b has 'x' and a does not"):
        collate([{"name": "a"}, {"name": "b", "x": 1}])
    with pytest.raises(TrainError, match="the values of 'x' cannot be collated into a batch: .*; samples from a"):
        collate([{"name": "a", "x": None}, {"name": "b", "x": None}])


# broken images


@pytest.fixture
def broken(tmp_path):
    folder(tmp_path, 8, suffix=".jpg", size=(64, 64))
    (tmp_path / "1.jpg").write_text("<html>not found</html>")
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:900])
    (tmp_path / "4.jpg").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buckets", [None, {"step": 16}])
def test_unreadable_images_are_named_and_replaced(broken, workers, buckets):
    items, spec = opened(broken, images=".", size=32, shuffle=False, workers=workers, buckets=buckets)
    loader = Loader(items, spec, 2)
    first = [b["index"].tolist() for b in loader.epoch(0)]
    assert first == ([[0, 2], [2, 5], [5, 5], [6, 7]] if not buckets else [[0, 2], [5, 5], [6, 7]])
    assert [b["index"].tolist() for b in loader.epoch(1)] == first
    assert loader.skipped["1.jpg"] == "not an image" and loader.skipped["4.jpg"] == "an empty file"
    assert "truncated" in loader.skipped["3.jpg"] and len(loader.skipped) == 3
    kept = [b["index"].tolist() for b in Loader(items, spec, 2, train=False).epoch(0)]
    assert sum(kept, []) == [0, 2, 5, 6, 7]


def test_the_first_samples_are_the_first_that_can_be_read(broken):
    items, spec = opened(broken, images=".", max_corrupt=3)
    loader = Loader(items, spec, 2)
    assert loader.first(0) == {} and loader.first(1)["index"].tolist() == [0] and not loader.skipped
    assert loader.first(3)["index"].tolist() == [0, 2, 5] and list(loader.skipped) == ["1.jpg", "3.jpg", "4.jpg"]
    assert loader.first(9)["index"].tolist() == [0, 2, 5, 6, 7]
    (broken / "0.jpg").write_text("text")
    with pytest.raises(TrainError, match=r"4 images cannot be read, and 'max_corrupt' is 3: 0.jpg \(not an image\)"):
        Loader(items, spec, 2).first(2)
    for name in (2, 5, 6, 7):
        (broken / f"{name}.jpg").write_text("text")
    with pytest.raises(TrainError, match=r"no image of 8 can be read: 0.jpg \(not an image\)"):
        Loader(items, Data(images=".", max_corrupt=9), 2).first(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_images(broken, workers):
    with pytest.raises(TrainError, match=r"3 images cannot be read, and 'max_corrupt' is 2: 1.jpg \(not an image\); 3.jpg"):
        loaded(broken, images=".", max_corrupt=2, shuffle=False, workers=workers)
    for name in (0, 2, 5, 6, 7):
        (broken / f"{name}.jpg").write_text("text")
    with pytest.raises(TrainError, match="no image of a group of 8 can be read: "):
        loaded(broken, 8, images=".", workers=workers)
    with pytest.raises(TrainError, match="3 images cannot be read, and 'max_corrupt' is 2"):
        loaded(broken, 8, images=".", max_corrupt=2, size=32, buckets={"step": 16}, workers=workers)


def test_a_decompression_bomb_is_an_unreadable_image(tmp_path, monkeypatch):
    folder(tmp_path, 4)
    picture(9, (200, 200)).save(tmp_path / "2.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    items, spec = opened(tmp_path, images=".", size=8, shuffle=False)
    loader = Loader(items, spec, 4)
    assert [b["index"].tolist() for b in loader.epoch(0)] == [[0, 1, 3, 3]]
    assert loader.skipped["2.png"].startswith("too many pixels (a possible decompression bomb)")


def test_a_file_that_vanished(tmp_path):
    folder(tmp_path, 3)
    items, spec = opened(tmp_path, images=".")
    (tmp_path / "1.png").unlink()
    loader = Loader(items, spec, 3)
    list(loader.epoch(0))
    assert loader.skipped == {"1.png": "no such file"}


def test_test_labels_have_the_numbers_of_the_training_classes(tmp_path):
    for name in ("ape", "bee", "cat"):
        folder(tmp_path / "train" / name, 1, captions=False)
    for name in ("bee", "cat"):
        folder(tmp_path / "test" / name, 1, captions=False)
    train, _ = opened(tmp_path, classes="train")
    test, spec = opened(tmp_path, classes="test")
    assert [test[i]["label"] for i in range(2)] == [0, 1]
    same = pickle.loads(pickle.dumps(match_test_items(test, train)))  # as worker processes get it
    assert [same[i]["label"] for i in range(2)] == [1, 2]
    (batch,) = Loader(same, spec, 2, train=False).epoch(0)
    assert batch["label"].tolist() == [1, 2]
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "cta")
    with pytest.raises(SpecError, match=r"data\.test: the class 'cta' is not among the 3 of .* \(did you mean 'cat'\?\)"):
        match_test_items(opened(tmp_path, classes="test")[0], train)

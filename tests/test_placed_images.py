"""Images that are not decoded: where they are cropped, by hand, and the same pixels as when the loader decodes them."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import resize

from fxplug.config.run_config import check_settings
from fxplug.core.errors import TrainError
from fxplug.training.data import image_sources
from fxplug.training.data.image_files import Crop, Unreadable
from fxplug.training.data.image_sources import ImageFile, PlacedImage, find_crop_origin
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.plugins import Plugins
from fxplug.training.train_section import Data


def picture(seed=0, size=(20, 24)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def folder(top: Path, sizes, suffix=".png"):
    top.mkdir(parents=True, exist_ok=True)
    for i, size in enumerate(sizes):
        picture(i, size).save(top / f"{i}{suffix}")
    return top


def loader(base, batch=2, *, train=True, hooks=None, seed=0, **given):
    spec = check_settings(Data, {"images": ".", "captions": "none", "size": 16, **given}, "data")
    return Loader(open_items(spec, base), spec, batch, train=train, hooks=hooks, seed=seed)


def never(item):
    return False


def always(item):
    return True


# height and width of the file, of the crop, the place of the crop from 0 to 1 and whether it is mirrored -> top and left
BY_HAND = [
    ((100, 200), (50, 50), (0.5, 0.5, False), (0, 25)),  # resized to 50x100
    ((200, 100), (50, 50), (0.5, 0.5, False), (25, 0)),
    ((100, 200), (50, 50), (0.0, 0.0, False), (0, 0)),
    ((100, 200), (50, 50), (1.0, 1.0, False), (0, 50)),
    ((100, 200), (50, 50), (0.2, 0.9, False), (0, 10)),
    ((100, 200), (50, 50), (0.2, 0.9, True), (0, 40)),  # of the mirrored picture: what was right of it is left of it
    ((60, 60), (60, 60), (0.3, 0.3, False), (0, 0)),
    ((30, 40), (60, 60), (0.5, 0.5, False), (0, 10)),  # enlarged to 60x80
    ((1024, 1536), (512, 640), (0.5, 0.0, False), (0, 64)),  # resized to 512x768
    ((101, 151), (64, 64), (0.5, 0.5, False), (0, 16)),  # resized to 64x95.7
]


@pytest.mark.slow
@pytest.mark.parametrize(("image", "size", "place", "expected"), BY_HAND)
def test_where_a_crop_lies_by_hand(image, size, place, expected):
    assert find_crop_origin(image, size, Crop(*place)) == expected


def test_the_crop_is_where_it_says_it_is(tmp_path):
    rng = np.random.default_rng(0)
    for turn in range(8):
        h, w, side = (int(n) for n in rng.integers(16, 90, 3))
        column = np.linspace(0, 255, w, dtype=np.uint8)[None].repeat(h, 0)
        row = np.linspace(0, 255, h, dtype=np.uint8)[:, None].repeat(w, 1)
        Image.fromarray(np.stack([column, row, row], -1)).save(tmp_path / "a.png")
        place = Crop(*rng.random(2), flip=bool(turn % 2))
        found = PlacedImage(ImageFile(tmp_path / "a.png", "a"), (side, side), place).read()
        top, left = find_crop_origin((h, w), (side, side), place)
        scale = max(side / h, side / w)
        whole = torch.from_numpy(np.stack([column, row, row])).float() / 127.5 - 1
        whole = resize(whole.flip(-1) if place.flip else whole, [round(h * scale), round(w * scale)])
        crop = whole[:, top : top + side, left : left + side]
        shape = crop.shape[1:]
        slope = 2 / min(whole.shape[1:])
        assert (found[:, : shape[0], : shape[1]] - crop).abs().mean() < 1.5 * slope, (h, w, side, place)


def test_batches_say_the_size_of_the_picture_and_where_it_is_cropped(tmp_path):
    folder(tmp_path, [(20, 40), (40, 20)])
    (batch,) = loader(tmp_path, shuffle=False).epoch(0)
    assert batch["original_size"].tolist() == [[20, 40], [40, 20]] and batch["original_size"].dtype == torch.int64
    assert batch["crop"].tolist() == [[0, 8], [8, 0]] and batch["crop"].dtype == torch.int64
    assert not {"flipped", "content"} & batch.keys()
    (batch,) = loader(tmp_path, 1, size=None, train=False).epoch(0, start=1)
    assert batch["original_size"].tolist() == [[40, 20]] and batch["crop"].tolist() == [[0, 0]]


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_a_turned_picture_has_the_size_that_it_is_shown_with(tmp_path, turned, suffix):
    exif = Image.Exif()
    exif[0x0112] = turned
    picture(0, (20, 40)).save(tmp_path / f"a{suffix}", exif=exif)
    expected = ([40, 20], [8, 0]) if turned > 4 else ([20, 40], [0, 8])
    for skip in (None, never, always):
        one = loader(tmp_path, 1)
        one.skip_decoding = skip
        (batch,) = one.epoch(0)
        assert (batch["original_size"].tolist()[0], batch["crop"].tolist()[0]) == expected, skip


def test_what_a_sample_says_of_itself_stays(tmp_path):
    folder(tmp_path, [(20, 40)])
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "original_size": 7, "crop": "left"}\n')
    (batch,) = loader(tmp_path, 1).epoch(0)
    assert batch["original_size"].tolist() == [7] and batch["crop"] == ["left"]


def read(batch):
    """A batch with the pixels of what was not decoded."""
    found = {key: value for key, value in batch.items() if key != "content"}
    for key in ("image", "condition"):
        if key in batch:
            found[key] = torch.stack([image.read() for image in batch[key]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("skip", [never, always])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_decoded_later_is_equal(tmp_path, skip, workers):
    folder(tmp_path / "images", [(20, 40), (40, 20), (16, 16), (33, 17), (18, 50)])
    folder(tmp_path / "edges", [(10, 20), (40, 20), (16, 16), (33, 17), (18, 50)], ".jpg")
    (tmp_path / "images" / "1.png").write_bytes(b"broken")
    given = {"images": "images", "conditions": "edges", "flip": True, "buckets": {"step": 8}, "workers": workers}
    eager, lazy = loader(tmp_path, 1, **given), loader(tmp_path, 1, **given)
    lazy.skip_decoding = skip
    flipped, count = set(), 0
    for epoch in range(3):
        one, two = list(eager.epoch(epoch)), list(lazy.epoch(epoch))
        assert len(one) == len(two) == 4
        for a, b in zip(one, two, strict=True):
            assert all(isinstance(image, PlacedImage) for key in ("image", "condition") for image in b[key])
            assert [image.pixels is None for image in b["image"]] == [skip is always]
            file = tmp_path / "images" / b["name"][0]
            assert b["content"] == [hashlib.sha256(file.read_bytes()).hexdigest()] == [b["image"][0].content]
            b = read(b)
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key], key
            flipped.add(a["flipped"].item())
            count += 1
    assert flipped == {False, True} and count == 12
    assert eager.skipped == lazy.skipped == {"1.png": "not an image"}


def test_unreadable_pictures_are_replaced_as_without_skipping(tmp_path):
    folder(tmp_path, [(20, 40)] * 4)
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[: len(whole) // 2])
    names = []
    for skip in (None, never, lambda item: item["name"] != "2.png"):
        one = loader(tmp_path)
        one.skip_decoding = skip
        names.append([batch["name"] for batch in one.epoch(1)])
        assert list(one.skipped) == ["2.png"]
    assert names[0] == names[1] == names[2]
    one = loader(tmp_path, max_corrupt=0)
    one.skip_decoding = never
    with pytest.raises(TrainError, match=r"1 images cannot be read, and 'max_corrupt' is 0: 2\.png"):
        list(one.epoch(0))


def test_a_condition_of_another_shape_is_refused_without_decoding(tmp_path):
    folder(tmp_path / "images", [(20, 40)])
    folder(tmp_path / "edges", [(20, 20)])
    one = loader(tmp_path, 1, images="images", conditions="edges")
    one.skip_decoding = always
    with pytest.raises(TrainError, match="20x40, its condition 20x20: they must have one shape"):
        list(one.epoch(0))


def test_nothing_is_decoded_that_is_skipped(tmp_path, monkeypatch):
    folder(tmp_path, [(20, 40)] * 4)
    one = loader(tmp_path)
    one.skip_decoding = always
    for module in ("image_sources", "image_files"):
        monkeypatch.setattr(f"fxplug.training.data.{module}.read_image", None)
    monkeypatch.setattr(Image.Image, "load", None)
    assert sum(len(batch["image"]) for batch in one.epoch(0)) == 4


def test_a_digest_is_that_of_the_bytes_that_are_there(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    picture(0).save(file)
    first, times = file.read_bytes(), (10**18, 10**18)
    os.utime(file, ns=times)
    image = ImageFile(file, "a")
    assert image.content() == hashlib.sha256(first).hexdigest()
    changed = first[:-20] + bytes(20)
    file.write_bytes(changed)  # the same name, size, inode and time of modification
    os.utime(file, ns=times)
    assert image.content() == hashlib.sha256(changed).hexdigest()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)  # long enough after the file was written
    assert image.content() == hashlib.sha256(changed).hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert image.content() == hashlib.sha256(changed).hexdigest()  # and not read again
    monkeypatch.undo()
    file.write_bytes(first)
    os.utime(file, ns=times)
    assert image.content() == hashlib.sha256(first).hexdigest()
    file.unlink()
    with pytest.raises(Unreadable, match="no such file"):
        image.content()


def test_a_decoded_picture_has_the_digest_of_what_was_decoded(tmp_path):
    file = tmp_path / "a.png"
    picture(0).save(file)
    placed = PlacedImage(ImageFile(file, "a"), (16, 16), Crop())
    before = placed.content
    picture(1).save(file)
    decoded = placed.decoded()
    assert before != decoded.content == hashlib.sha256(file.read_bytes()).hexdigest()
    again = PlacedImage(ImageFile(file, "a"), (16, 16), Crop())
    assert torch.equal(decoded.read(), again.read()) and decoded.key == again.key
    assert pickle.loads(pickle.dumps(decoded)).key == again.key
    assert torch.equal(decoded.mirrored().read(), again.mirrored().read())
    assert decoded.mirrored().key != decoded.key


def test_what_changes_pixels_changes_the_key(tmp_path):
    file = tmp_path / "a.png"
    picture(0).save(file)
    base = {"source": ImageFile(file, "a"), "size": (16, 16), "place": Crop()}
    others = [
        {"source": ImageFile(file, "a", 1)}, {"source": ImageFile(file, "a", 3, (0, 0, 0))}, {"size": (16, 8)}, {"size": None},
        {"place": Crop(0.25)}, {"place": Crop(0.5, 0.25)}, {"place": Crop(flip=True)},
    ]  # fmt: skip
    keys = [PlacedImage(**base).key, *(PlacedImage(**{**base, **other}).key for other in others)]
    assert all(one != two for i, one in enumerate(keys) for two in keys[:i])
    assert PlacedImage(**{**base, "source": ImageFile(file, "another name")}).key == keys[0]
    assert PlacedImage(**{**base, "source": ImageFile(file.read_bytes(), "in memory")}).key == keys[0]


class Darker(Plugins):
    transforms = True

    def has(self, hook):
        return hook == "transform_pil_image"


def test_pixels_that_depend_on_more_than_files_are_not_left_for_later(tmp_path):
    folder(tmp_path, [(20, 40)] * 2)
    assert loader(tmp_path).has_files
    assert not loader(tmp_path, crop="random").has_files
    assert loader(tmp_path, crop="random", train=False).has_files
    assert not loader(tmp_path, hooks=Darker()).has_files
    assert not loader(tmp_path, conditions="os:fspath").has_files
    one = loader(tmp_path)
    one.transform = always
    assert not one.has_files


def test_a_data_set_on_disk_is_read_later_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [picture(0), picture(1, (40, 20))], "text": ["a", "b"]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path)
    given = {"images": None, "dataset": ".", "captions": "required", "shuffle": False}
    eager, lazy = loader(tmp_path, **given), loader(tmp_path, **given)
    assert lazy.has_files
    lazy.skip_decoding = always
    (one,), (two,) = eager.epoch(0), lazy.epoch(0)
    assert torch.equal(one["image"], read(two)["image"]) and one["caption"] == two["caption"] == ["a", "b"]
    assert one["original_size"].tolist() == two["original_size"].tolist() == [[20, 24], [40, 20]]
    assert len(set(two["content"])) == 2


def test_the_sizes_of_all_batches_are_known_before_any_is_read(tmp_path):
    folder(tmp_path, [(16, 32), (32, 16), (16, 16)])
    assert loader(tmp_path, 1, buckets={"step": 8}).sizes == [(8, 24), (16, 16), (24, 8)]
    assert loader(tmp_path, 1).sizes == [(16, 16)] and loader(tmp_path, 1, size=None).sizes == [None]


def test_what_is_remembered_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(image_sources, "MOST", 2)
    monkeypatch.setattr(image_sources, "SETTLED", -(10**12))
    folder(tmp_path, [(16, 16)] * 5)
    for i in range(5):
        ImageFile(tmp_path / f"{i}.png", "a").content()
    assert len(image_sources._REMEMBERED) <= 2

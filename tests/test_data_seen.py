"""Data as a person sees them: upright, of any mode, each view drawn anew, no sample of other data, labels by their names."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zlib
from pathlib import Path

import fuzz_data
import numpy as np
import processes
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fxplug
from fxplug.config.run_config import check_settings
from fxplug.core.errors import SpecError, TrainError
from fxplug.training.data.batch_order import Order
from fxplug.training.data.image_files import Unreadable, convert_image, read_image, read_size
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import get_labels, match_test_items, open_items
from fxplug.training.data.wrapped_loader import make_loader
from fxplug.training.tasks.classify import Transform
from fxplug.training.train_section import Data


@pytest.mark.slow
def test_random_folders_are_read_as_a_plain_loop_reads_them(capsys):
    assert fuzz_data.fuzz_data(40, 7) == [], capsys.readouterr().out


def picture(seed=0, size=(8, 12)):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (*size, 3)).astype(np.uint8))


def folder(top: Path, names, **texts):
    for n, name in enumerate(names):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        picture(n).save(top / name)
    for name, text in texts.items():
        (top / name.replace("__", "/").replace("_txt", ".txt").replace("_jsonl", ".jsonl")).write_text(text)
    return top


def section(**given):
    return check_settings(Data, given, "data")


def opened(base, **given):
    return open_items(section(**{"captions": "none", **given} if "images" in given else given), base)


def both(base, **given):
    spec = section(**given)
    train = open_items(spec, base)
    return train, match_test_items(open_items(spec.test, base, test=True), train)


# modes and turns


@pytest.mark.parametrize("suffix", fuzz_data.FORMATS)
@pytest.mark.parametrize("mode", fuzz_data.MODES)
def test_each_mode_and_turn_is_measured_and_read_as_seen(tmp_path, mode, suffix):
    if suffix in ("webp", "jpg") and mode[0] in "IF":
        return  # PIL cuts what is beyond 255 when it writes them
    rng = __import__("random").Random(0)
    for turn in range(1, 9):
        exif, file = Image.Exif(), tmp_path / f"{turn}.{suffix}"
        exif[0x0112] = turn
        options = {**fuzz_data.FORMATS[suffix], **({} if suffix == "bmp" else {"exif": exif})}
        try:
            fuzz_data.picture(rng, mode, (6, 10)).save(file, **options)
        except (OSError, ValueError, KeyError):
            return  # PIL writes no such files
        for channels in (1, 3):
            seen = fuzz_data.pixels(file, channels, (255, 255, 255))
            for source in (file, file.read_bytes()):
                read = np.asarray(read_image(source, "x", channels)).astype(int).reshape(seen.shape)
                assert abs(read - seen).max() <= 1  # what is composed is rounded by PIL
                assert read_size(source) == seen.shape[:2]
        with Image.open(io.BytesIO(file.read_bytes())) as image:  # as a data set of one's own gives it
            given = np.asarray(convert_image(image, "x", 3)).astype(int)
        assert abs(given - seen).max() <= 1


def test_a_turned_tiff_goes_into_the_bucket_of_its_shape(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, options in (("a.tif", {}), ("b.tif", {"compression": "tiff_deflate"}), ("c.jpg", {}), ("d.webp", {})):
        picture(0, (32, 96)).save(tmp_path / name, exif=exif, **options)
    spec = section(images=".", captions="none", size=48, buckets={"step": 8})
    items = open_items(spec, tmp_path)
    assert items.sizes == [(96, 32)] * 4
    assert {tuple(batch["image"].shape[2:]) for batch in Loader(items, spec, 1).epoch(0)} == {(80, 24)}


def png_with_late(image, kind, data):
    """A PNG with a chunk behind its pixels."""
    written = io.BytesIO()
    image.save(written, "PNG")
    end = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return written.getvalue()[:-12] + end + written.getvalue()[-12:]


def test_a_png_may_say_at_its_end_how_it_is_turned():
    exif = Image.Exif()
    exif[0x0112] = 8
    late = png_with_late(picture(), b"eXIf", exif.tobytes()[6:])
    assert read_size(late) == (12, 8)
    assert np.array_equal(read_image(late, "x"), picture().transpose(Image.Transpose.ROTATE_90))
    xmp = b"XML:com.adobe.xmp\0\0\0\0\0" + b'<x:xmpmeta><a tiff:Orientation="6"/></x:xmpmeta>'
    for data in (png_with_late(picture(), b"iTXt", xmp),):
        assert read_size(data) == (12, 8) == np.asarray(read_image(data, "x")).shape[:2]
    plain = png_with_late(picture(), b"tEXt", b"Comment\0x")
    assert read_size(plain) == (8, 12)


def float_file(values, suffix="tif"):
    written = io.BytesIO()
    Image.fromarray(values).save(written, {"tif": "TIFF", "pfm": "PPM"}[suffix])
    return written.getvalue()


GREY = np.arange(96, dtype=np.float32).reshape(8, 12)


@pytest.mark.parametrize(
    ("values", "white"),
    [
        (GREY / 95, 1), (GREY * 2.5, 255), (GREY * 0.7, 255), (GREY * 600, 65535), ((GREY > 40).astype(np.float32), 1),
        (GREY.astype(np.int32) * 2, 255), (GREY.astype(np.int32) * 500, 65535), (GREY.astype(np.uint16) * 600, 65535),
    ],
)  # fmt: skip
def test_white_is_found_by_the_values(values, white):
    scaled = values / 256 if white == 65535 else np.rint(values * (255 / white))
    read = np.asarray(read_image(float_file(values), "x", 1))
    assert np.array_equal(read, scaled.astype(np.uint8))
    assert read.max() > 60


@pytest.mark.parametrize(
    "values",
    [
        GREY - 1, np.where(GREY == 3, np.nan, GREY), np.where(GREY == 3, np.inf, GREY), GREY / 95 + (GREY == 5) * 9,
        GREY * 1000.5, GREY.astype(np.int32) * 10**6,
    ],
)  # fmt: skip
def test_values_whose_white_is_not_known_are_refused(values):
    with pytest.raises(Unreadable, match=r"it has (values|.*nan|.*inf)") as told:
        read_image(float_file(values), "x")
    assert "must have them from 0 to" in told.value.why or "black is 0" in told.value.why


def test_a_tiff_in_which_white_is_0():
    image = Image.fromarray(GREY.astype(np.uint16) * 600)
    written = io.BytesIO()
    image.save(written, "TIFF", tiffinfo={262: 0})
    read = np.asarray(read_image(written.getvalue(), "x", 1))
    with Image.open(io.BytesIO(written.getvalue())) as image:
        assert image.tag_v2[262] == 0
    assert np.array_equal(read, 255 - (GREY.astype(int) * 600 >> 8))


def test_transparent_colours_of_16_bits(tmp_path):
    grey = Image.fromarray(np.where(GREY < 40, 0x1234, 0x8000).astype(np.uint16))
    grey.save(tmp_path / "a.png", transparency=0x1234)
    read = np.asarray(read_image(tmp_path / "a.png", "x", 3, (255, 0, 0)))
    assert (read[GREY < 40] == [255, 0, 0]).all()
    assert (read[GREY >= 40] == 128).all()


def test_pictures_of_16_bits_a_colour_keep_the_upper_8(tmp_path):
    cv2 = pytest.importorskip("cv2")
    values = np.random.RandomState(0).randint(0, 65536, (8, 12, 3)).astype(np.uint16)
    for name in ("a.png", "a.tif"):
        cv2.imwrite(str(tmp_path / name), values[..., ::-1])
        assert np.array_equal(np.asarray(read_image(tmp_path / name, "x")), values >> 8)


def test_a_tiff_that_is_not_read_is_named(tmp_path):
    cv2 = pytest.importorskip("cv2")
    cv2.imwrite(str(tmp_path / "a.tif"), np.zeros((4, 4, 3), np.float32))
    with pytest.raises(Unreadable, match="a TIFF of a kind that PIL does not read"):
        read_image(tmp_path / "a.tif", "x")


# views


def views(base, repeats, epoch=0, batch=1, workers=0, **how):
    """Name, image and caption of each sample of an epoch, cropped and mirrored by chance."""
    given = {"captions": "optional", "size": 6, "crop": "random", "flip": True, "workers": workers}
    spec = section(images=".", repeats=repeats, **given)
    batches = Loader(open_items(spec, base), spec, batch, **how).epoch(epoch)
    return [one for b in batches for one in zip(b["name"], b["image"], b["caption"], strict=True)]


REPEATED = {
    "folders": ({}, "folders", 9),
    "multiply": ({"9_dog__multiply_txt": "7"}, "none", 7),
    "a fraction": ({"9_dog__multiply_txt": "7.5"}, "folders", 7),
    "nested": ({"9_dog__deep__a_txt": "a"}, "folders", 9),
}


@pytest.mark.parametrize("case", REPEATED)
def test_each_view_of_an_image_is_drawn_anew(tmp_path, case):
    texts, repeats, times = REPEATED[case]
    name = "9_dog/deep/a.png" if case == "nested" else "9_dog/a.png"
    folder(tmp_path, [name, "b.png"], **texts)
    (tmp_path / name).with_suffix(".txt").write_text("dog, a, b, c, d, e")
    ((tmp_path / name).parent / "shuffle_tags.txt").touch()
    seen = [one for one in views(tmp_path, repeats) if one[0] == name]
    assert len(seen) in (times, times + 1)
    assert len({x.numpy().tobytes() for _, x, _ in seen}) > times // 2
    assert len({caption for *_, caption in seen}) > times // 2
    assert {x.numpy().tobytes() for _, x, _ in views(tmp_path, repeats, epoch=1)} != {x.numpy().tobytes() for _, x, _ in seen}


def test_processes_workers_and_a_resumed_epoch_have_the_same_views(tmp_path):
    folder(tmp_path, ["4_dog/a.png", "3_cat/b.png", "c.png"])
    whole = views(tmp_path, "folders", batch=2, seed=3)
    parts = [views(tmp_path, "folders", batch=1, seed=3, rank=rank, world=2) for rank in (0, 1)]
    joined = [one for pair in zip(*parts, strict=True) for one in pair]
    for other in (joined, views(tmp_path, "folders", batch=2, seed=3, workers=1)):
        assert [(n, x.tolist(), c) for n, x, c in other] == [(n, x.tolist(), c) for n, x, c in whole]
    spec = section(images=".", captions="none", size=6, crop="random", repeats="folders")
    loader = Loader(open_items(spec, tmp_path), spec, 2)
    assert [b["image"].tolist() for b in loader.epoch(1, 2)] == [b["image"].tolist() for b in loader.epoch(1)][2:]


def test_a_first_view_is_what_it_is_without_repeats(tmp_path):
    folder(tmp_path, ["2_dog/a.png", "b.png"])
    once = {n: x for n, x, _ in views(tmp_path, "none")}
    twice = [x for n, x, _ in views(tmp_path, "folders") if n == "2_dog/a.png"]
    assert sum(x.equal(once["2_dog/a.png"]) for x in twice) == 1


def test_views_are_numbered_across_processes():
    orders = [Order([range(3)], 1, seed=1, rank=rank, world=2, train=True, shuffle=True, repeats=[4, 1, 1]) for rank in (0, 1)]
    seen = [(i, view) for order in orders for r in order.requests(0) for i, view in zip(r.indices, r.views, strict=True)]
    assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]


def test_what_stands_in_for_a_broken_image_is_another_view(tmp_path):
    folder(tmp_path, ["1.png", "3.png"])
    (tmp_path / "0.png").write_text("broken")
    (tmp_path / "2.png").write_text("broken")
    spec = section(images=".", captions="none", size=6, crop="random", flip=True)
    (batch,) = Loader(open_items(spec, tmp_path), spec, 4).epoch(0)
    images = {name: [x for n, x in zip(batch["name"], batch["image"], strict=True) if n == name] for name in ("1.png", "3.png")}
    assert all(len(two) == 2 and not two[0].equal(two[1]) for two in images.values())


# other data below the folder


def files_of(items):
    return sorted(items.names)


NESTED = {
    "a path": ({"images": ".", "test": "val"}, ["a.png", "b/c.png", "b/deep/x.png", "edges/d.png"]),
    "another spelling": ({"images": "b/..", "test": "./b/../val"}, ["a.png", "b/c.png", "b/deep/x.png", "edges/d.png"]),
    "deep": ({"images": ".", "test": {"images": "b/deep"}}, ["a.png", "b/c.png", "edges/d.png", "val/d.png"]),
    "a list": ({"images": ["."], "test": {"images": ["val", "b/deep"]}}, ["a.png", "b/c.png", "edges/d.png"]),
    "conditions": ({"images": ".", "test": {"images": "val", "conditions": "edges"}}, ["a.png", "b/c.png", "b/deep/x.png"]),
}


@pytest.mark.parametrize("case", NESTED)
def test_test_data_below_the_folder_are_left_out(tmp_path, case):
    given, kept = NESTED[case]
    folder(tmp_path, ["a.png", "b/c.png", "b/deep/x.png", "val/d.png", "edges/d.png"])
    items = opened(tmp_path, **given)
    assert files_of(items) == kept
    assert any("is left out of the images around it: it has the test data" in note for note in items.notes)


def test_a_class_folder_that_is_the_test_data_is_no_class(tmp_path):
    folder(tmp_path, ["cat/0.png", "dog/0.png", "val/dog/1.png", "val/cat/1.png"])
    train, test = both(tmp_path, classes=".", test="val")
    assert train.classes == ["cat", "dog"]
    assert len(train) == len(test) == 2
    assert not [note for note in train.notes if "trained on too" in note]


def test_linked_test_data_are_left_out(tmp_path):
    folder(tmp_path / "elsewhere", ["0.png"])
    folder(tmp_path / "set", ["a.png"])
    (tmp_path / "set" / "val").symlink_to(tmp_path / "elsewhere")
    assert files_of(opened(tmp_path, images="set", test="elsewhere")) == ["a.png"]


def test_conditions_below_the_folder_are_said(tmp_path):
    folder(tmp_path, ["a.png", "edges/a.png"])
    items = opened(tmp_path, images=".", conditions="edges")
    assert files_of(items) == ["a.png"]
    assert items.notes == [f"'{tmp_path / 'edges'}' is left out of the images around it: it has the condition images"]


SHARED = {
    "the same folder": ({"images": ".", "test": "."}, "2 of 2"),
    "above": ({"images": "in", "test": "."}, "1 of 2"),
    "a list": ({"images": ".", "test": {"images": "list.json"}}, "1 of 1"),
    "of a list": ({"images": "list.json", "test": "."}, "1 of 2"),
    "no file twice": ({"images": "in", "test": "in2"}, None),
}


@pytest.mark.parametrize("case", SHARED)
def test_images_of_both_are_said(tmp_path, case):
    given, count = SHARED[case]
    folder(tmp_path, ["a.png", "in/b.png"] if count else ["in/b.png", "in2/b.png"])
    (tmp_path / "list.json").write_text('["in/b.png"]')
    train, _ = both(tmp_path, captions="none", **given)
    said = [note for note in train.notes if "test images are trained on too" in note]
    assert [note.split(" test")[0] for note in said] == ([count] if count else [])


# no repeats


ZERO = {
    "a folder's name": ({}, {"repeats": "folders"}),
    "multiply": ({"0_reg__multiply_txt": "0", "0_reg__deep__multiply_txt": "0"}, {}),
    "metadata": ({"0_reg__multiply_txt": "0", "0_reg__deep__multiply_txt": "0.0",
                  "metadata_jsonl": '{"file_name": "dog/a.png", "label": 1}'}, {"captions": "required"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ZERO)
def test_images_of_no_repeats_are_left_out(tmp_path, case):
    texts, given = ZERO[case]
    folder(tmp_path, ["0_reg/x.png", "0_reg/deep/y.png", "dog/a.png"], **texts)
    items = opened(tmp_path, images=".", **given)
    assert items.names == ["dog/a.png"]
    assert "2 of 3 images have 0 repeats and are left out" in items.notes


@pytest.mark.parametrize("given", [{"images": "."}, {"images": "list.json"}, {"images": "set.toml"}, {"classes": "."}])
def test_nothing_but_0_repeats_is_an_error(tmp_path, given):
    folder(tmp_path, ["0_a/x.png", "0_b/y.png"], **{"0_a__multiply_txt": "0", "0_b__multiply_txt": "0"})
    (tmp_path / "list.json").write_text('[{"image": "0_a/x.png", "multiply": 0}]')
    (tmp_path / "set.toml").write_text("[[datasets]]\n[[datasets.subsets]]\nimage_dir = '0_a'\nnum_repeats = 0\n")
    with pytest.raises(SpecError, match=r"data\.(images|classes): all \d images have 0 repeats"):
        opened(tmp_path, **given, **({} if "classes" in given else {"repeats": "folders"}))


# labels


def labelled(top, labels, names="abcdef"):
    folder(top, [f"{name}.png" for name, _ in zip(names, labels, strict=False)])
    lines = [json.dumps({"file_name": f"{name}.png", "label": label}) for name, label in zip(names, labels, strict=False)]
    (top / "metadata.jsonl").write_text("\n".join(lines))


def hub(top, labels, feature):
    import datasets

    kinds = {"int": datasets.Value("int64"), "text": datasets.Value("string")}
    label = kinds.get(str(feature)) or datasets.ClassLabel(names=feature)
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows = {"image": [picture(n) for n in range(len(labels))], "label": labels}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(top))


def put(base, what):
    kind, labels = what
    if kind == "metadata":
        labelled(base, labels)
        return {"images": base.name}
    if kind == "classes":
        folder(base, [f"{label}/{n}.png" for n, label in enumerate(labels)])
        return {"classes": base.name}
    hub(base, labels, kind)
    return {"dataset": base.name}


NAMES, NUMBERS = ["ant", "bee", "cat"], [0, 1, 2]


@pytest.mark.parametrize("one", [("metadata", NUMBERS), ("int", NUMBERS)])
@pytest.mark.parametrize("two", [("metadata", NAMES), ("classes", NAMES), ("text", NAMES), (NAMES, NUMBERS)])
@pytest.mark.parametrize("turned", [False, True])
def test_names_and_numbers_are_not_matched(tmp_path, one, two, turned):
    first, second = (two, one) if turned else (one, two)
    train, test = put(tmp_path / "train", first), put(tmp_path / "test", second)
    which = ("training", "test") if turned else ("test", "training")
    said = rf"data\.test: the labels of the {which[0]} data are names, such as 'ant', those of the {which[1]} data are numbers"
    with pytest.raises(SpecError, match=said):
        both(tmp_path, **train, test=test)


@pytest.mark.parametrize("one", [("metadata", NAMES), ("classes", NAMES), ("text", NAMES), (["cat", "ant", "bee"], [1, 2, 0])])
@pytest.mark.parametrize("two", [("metadata", ["cat", "bee"]), ("classes", ["cat", "bee"]), (["bee", "cat"], [1, 0])])
def test_names_are_matched_whatever_their_order(tmp_path, one, two):
    train, test = both(tmp_path, **put(tmp_path / "train", one), test=put(tmp_path / "test", two))
    assert [train.classes[train[i]["label"]] for i in range(3)] == NAMES
    assert {train.classes[test[i]["label"]] for i in range(2)} == {"bee", "cat"}
    if "classes" not in two:
        assert [train.classes[test[i]["label"]] for i in range(2)] == ["cat", "bee"]


def test_a_name_twice_is_not_matched(tmp_path):
    train = make_loader(Own(["a", "a", "b"]), 1).items
    test = make_loader(Own(["b", "a"]), 1).items
    with pytest.raises(SpecError, match="the training data have two called 'a'"):
        match_test_items(test, train)


class Own(Dataset):
    def __init__(self, classes=None, label=0, image=None):
        self.label, self.image = label, picture() if image is None else image
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.image, self.label


def test_a_data_set_of_numbers_is_not_matched_with_names(tmp_path):
    train = open_items(section(classes=folder(tmp_path, ["a/0.png"]).name), tmp_path.parent)
    with pytest.raises(SpecError, match="those of the test data are numbers"):
        match_test_items(make_loader(Own(), 1).items, train)
    named = make_loader(Own(["a", "b"]), 1).items
    assert match_test_items(make_loader(Subset(Own(["a", "b"]), [0, 1]), 1).items, named).classes == ["a", "b"]


def test_test_data_in_python_have_the_labels_of_the_training_data():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    gm = fxplug.apply(fxplug.trace(model, (torch.randn(2, 3, 8, 8),)), fxplug.load_pass("lora", at="1", rank=2))

    def trainer(*classes):
        image = torch.zeros(3, 8, 8)
        return fxplug.Trainer(gm, "classify", Own(["a", "b", "c"], image=image), Own(classes, image=image), batch=2, quiet=True)

    made = trainer("b", "c")  # a data set of its own, that begins to count at its first class
    assert next(made.tests.epoch(0))["label"].tolist() == [1, 1]
    with pytest.raises(SpecError, match="the class 'd' is not among the 3 of the training data"):
        trainer("a", "d")


@pytest.mark.parametrize("label", [2, -1, 2**40])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_label_beyond_the_classes_is_named(label, wrapped):
    data = Own(["a", "b"], label)
    said = rf"(dataset|batch 0)\[\d\] has the label {label}, and its data set has 2 classes, 0 to 1"
    with pytest.raises(TrainError, match=said):
        next(make_loader(DataLoader(data, 2, collate_fn=listed) if wrapped else data, 2).epoch(0))


def test_rows_without_a_class_have_no_label(tmp_path):
    hub(tmp_path / "d", [-1, -1], NAMES)
    items = opened(tmp_path, dataset="d", captions="none")
    assert "label" not in items[0]


class Targets(Own):
    targets = [0, 3, 1, 2]
    target_transform = None


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (TensorDataset(torch.zeros(3, 3, 4, 4), torch.tensor([0, 4, 1])), {0, 1, 4}),
        (Subset(TensorDataset(torch.zeros(3, 3, 4, 4), torch.tensor([0, 4, 1])), [0, 2]), {0, 1}),
        (Targets(), {0, 1, 2, 3}),
        (TensorDataset(torch.zeros(3, 3, 4, 4), torch.rand(3)), None),
        (Own(), None),
    ],
)
def test_labels_that_a_data_set_has_at_hand(data, labels):
    assert get_labels(data) == labels
    for wrapped in (data, DataLoader(data, 2)):
        classes = make_loader(wrapped, 2).classes
        assert classes == (None if labels is None else [str(n) for n in range(max(labels) + 1)])


# one way of normalising


def images_of(kind):
    colour = np.array(picture(1, (16, 16)))
    return {
        "uint8": torch.tensor(colour).permute(2, 0, 1),
        "float": torch.tensor(colour).permute(2, 0, 1) / 127.5 - 1,
        "numpy": colour,
        "grey numpy": colour[..., 0],
        "grey": torch.tensor(colour[..., :1]).permute(2, 0, 1),
        "rgba": torch.tensor(np.concatenate([colour, colour[..., :1]], 2)).permute(2, 0, 1),
        "PIL": picture(1, (16, 16)),
        "grey PIL": picture(1, (16, 16)).convert("L"),
        "16 bits": Image.fromarray(colour[..., 0].astype(np.uint16) * 257),
    }[kind]


def listed(samples):
    return [image for image, _ in samples], torch.tensor([label for _, label in samples])


KINDS = ["uint8", "float", "numpy", "grey numpy", "grey", "rgba", "PIL", "grey PIL", "16 bits"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_images_are_normalised_in_one_way(kind, train, normalised):
    data = Own(image=images_of(kind))
    collate = listed if "PIL" in kind or kind == "16 bits" else None
    if not normalised and kind in ("grey", "grey numpy"):
        return  # which keep their one channel in a DataLoader: no task says how many there must be
    found = []
    warnings.filterwarnings("ignore", "'dataset.*has transparent pixels")
    for given in (data, DataLoader(data, 4, collate_fn=collate), DataLoader(data, 4, collate_fn=listed)):
        loader = make_loader(given, 4, train=train)
        if normalised:
            options = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.1), "interpolation": "bicubic", "crop_pct": 0.875}
            loader.transform = Transform({**options, **({"no_aug": True} if train else {})}, 3, train)
        found.append(next(loader.epoch(0))["image"])
    if kind == "float":
        assert torch.equal(found[0], images_of("float").expand(4, -1, -1, -1))
        found[2] = found[0] if isinstance(found[2], list) else found[2]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_augmentations_of_a_data_loader_are_drawn_for_each_image_and_repeat():
    loader = make_loader(DataLoader(Own(image=images_of("uint8")), 2), 2)
    loader.transform = Transform({"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}, 3, True)
    before = torch.get_rng_state()
    one, two = list(loader.epoch(0)), list(loader.epoch(0))
    assert [b["image"].tolist() for b in one] == [b["image"].tolist() for b in two]
    rows = torch.cat([b["image"] for b in one])
    assert len({row.numpy().tobytes() for row in rows}) == 4
    assert not torch.equal(rows, torch.cat([b["image"] for b in loader.epoch(1)]))
    assert [b["image"].tolist() for b in loader.epoch(0, 1)] == [one[1]["image"].tolist()]
    assert torch.equal(torch.get_rng_state(), before)
    other = make_loader(DataLoader(Own(image=images_of("uint8")), 2), 2, rank=1)
    other.transform = loader.transform
    assert not torch.equal(next(other.epoch(0))["image"], one[0]["image"])


# what is broken


def read_broken(rank, top, said):
    """Each process reads its half of three broken images among eight, for two epochs."""
    spec = section(images=top, captions="none", size=6)
    loader = Loader(open_items(spec, Path()), spec, 1, rank=rank, world=2)
    for epoch in range(2):
        list(loader.epoch(epoch))
    torch.distributed.barrier()
    if not rank:
        Path(said).write_text(json.dumps(loader.skipped))
    else:
        assert len(loader.skipped) <= 3
    torch.distributed.barrier()


def test_the_first_process_names_what_all_could_not_read(tmp_path):
    folder(tmp_path / "set", [f"{n}.png" for n in range(8)])
    for n in (1, 4, 6):
        (tmp_path / "set" / f"{n}.png").write_text("broken")
    processes.group(read_broken, str(tmp_path / "set"), str(tmp_path / "said.json"))
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == {f"{n}.png": "not an image" for n in (1, 4, 6)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named_once_with_its_file(tmp_path, workers):
    folder(tmp_path, ["a.png", "b.png", "c.png", "edges/a.png", "edges/c.png"])
    (tmp_path / "edges" / "b.png").write_text("broken")
    spec = section(images=".", captions="none", conditions="edges", workers=workers)
    loader = Loader(open_items(spec, tmp_path), spec, 1)
    for epoch in range(3):
        list(loader.epoch(epoch))
    assert loader.skipped == {f"{tmp_path / 'edges' / 'b.png'} (the condition of b.png)": "not an image"}


def test_a_broken_image_of_a_hugging_face_data_set_has_its_path(tmp_path):
    import datasets

    (tmp_path / "lost.png").write_text("broken")
    features = datasets.Features({"image": datasets.Image()})
    one = datasets.Dataset.from_dict({"image": [{"path": str(tmp_path / "lost.png"), "bytes": None}]}, features=features)
    one.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(Unreadable) as told:
        opened(tmp_path, dataset="d", captions="none")[0]
    assert told.value.name.startswith("dataset[0] (") and "lost.png" in told.value.name


BROKEN = {
    "a caption": ({"a.txt": b"one\ntwo \xff"}, "a.txt: cannot be read: not UTF-8 text in line 2"),
    "metadata": ({"metadata.jsonl": b'{"file_name": "a.png"}\n\xe9'}, "jsonl: cannot be read: not UTF-8 text in line 2"),
    "a line": ({"metadata.jsonl": b'{"file_name": "a.png"}\n{"file_name"'}, "metadata.jsonl:2: is not JSON"),
    "a share": ({"metadata.jsonl": b'{"file_name": "a.png", "flip_p": "x"}'}, "jsonl:1: flip_p: must be a number from"),
    "a weight": ({"metadata.jsonl": b'{"file_name": "a.png", "loss_scale": []}'}, "jsonl:1: loss_scale: must be a number"),
    "YAML": ({"a.yaml": b"main_prompt: x\ntags: 5"}, "a.yaml:2: tags: must be a list"),
    "a number": ({"multiply.txt": b"x"}, "multiply.txt: multiply: must be a number"),
    "an entry": ({"list.json": b'["a.png", {"image": "a.png", "multiply": -1}]'}, r"json: \[1\].multiply: must be a number"),
    "a list": ({"list.json": b'["a.png",\n'}, r"list.json: is not JSON: .*line 2"),
    "a long name": ({"list.json": b'["' + b"x" * 5000 + b'"]'}, r"list.json: \[0\] '.*"),
    "a long caption": ({"list.json": b'[{"image": "a.png", "caption": "' + b"x" * 5000 + b'.txt"}]'}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_text_is_named_with_its_line(tmp_path, case):
    texts, said = BROKEN[case]
    folder(tmp_path, ["a.png"])
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    given = {"images": "list.json" if "list.json" in texts else ".", "captions": "optional"}
    if said is None:
        assert len(opened(tmp_path, **given)[0]["caption"]) == 5004
        return
    with pytest.raises(SpecError, match=said):
        opened(tmp_path, **given)


@pytest.mark.parametrize("label", [2**70, -(2**70)])
def test_a_label_that_no_tensor_holds_is_named(tmp_path, label):
    labelled(tmp_path, [0, label])
    spec = section(images=".")
    with pytest.raises(TrainError, match=r"b.png: 'label' must be a whole number, not"):
        list(Loader(open_items(spec, tmp_path), spec, 2).epoch(0))


# settings


HOSTILE = [0, -1, 10**30, float("nan"), float("inf"), "x", "", [], None, True, {}, "x" * 5000, "a\0b", [None], [-1, 4]]
SETTINGS = [*Data.model_fields, *(("buckets", key) for key in ("step", "min", "max"))]


@pytest.mark.parametrize("key", SETTINGS, ids=str)
def test_a_setting_is_used_or_refused_with_its_place(tmp_path, key):
    folder(tmp_path, ["a.png", "b.png"], a_txt="a", b_txt="b")
    for value in HOSTILE:
        if isinstance(key, tuple):
            given = {"images": ".", "size": 8, key[0]: {"step": 4, key[1]: value}}
        else:
            given = {"images": ".", "size": 8, key: value}
        try:
            spec = check_settings(Data, given, "data")
            items = open_items(spec, tmp_path)
            loader = Loader(items, spec.model_copy(update={"workers": 0}), 1)
            batch = next(loader.epoch(0))
        except SpecError as error:
            assert "data" in str(error).split(":")[0] or error.path[:1] == ("data",), (value, str(error))
        else:
            assert key != "size" or batch["image"].shape[2:] == (loader.size or (8, 12)), value
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.txt", "b.png", "b.txt"]


REFUSED = {
    "images": "nowhere", "classes": 5, "dataset": "a.png", "call": "nowhere:At", "split": "", "columns": [], "captions": "some",
    "repeats": 2, "conditions": "a.png", "masks": "a.png", "trigger": "", "channels": 2, "background": "none", "size": 0,
    "buckets": {"step": 999}, "crop": None, "flip": 1, "workers": -1, "shuffle": "yes", "max_corrupt": float("nan"),
    "test": {"images": "nowhere"}, "videos": 5, "frames": 4, "fps": 0, "cache": True, "prior": 5, "prior_weight": 0,
}  # fmt: skip


@pytest.mark.parametrize("key", Data.model_fields)
def test_a_refused_setting_leaves_nothing_behind(tmp_path, key):
    folder(tmp_path, ["a.png"], a_txt="a")
    given = {"images": str(tmp_path), "size": 8, key: REFUSED[key]}
    if key in ("classes", "dataset", "call", "videos"):
        del given["images"]
    config = {"model": "resnet18", "train": {"task": "classify", "steps": 1, "batch": 1}, "data": given, "device": "cpu"}
    with pytest.raises(SpecError, match=rf"data(\.test)?\.{key if key != 'test' else 'images'}\b"):
        fxplug.train(config, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()

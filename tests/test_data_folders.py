"""Folders and lists as other trainers have them: what is read of them, what is said to be ignored, what is an error."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import yaml
from PIL import Image

from fxplug.config.run_config import check_settings
from fxplug.core.errors import SpecError
from fxplug.training.data.batch_order import Order, list_bucket_sizes
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.tasks.classify import Classify
from fxplug.training.tasks.denoise import Denoise
from fxplug.training.train_section import Data


def make(top, files):
    """Files by path: images (4 x 4 unless a size is given), text, or values as YAML."""
    for name, value in files.items():
        file = top / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".png", ".jpg"):
            Image.new("RGB", value or (4, 4), (len(name), 0, 0)).save(file)
        else:
            file.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return top


def items(top, **how):
    return open_items(check_settings(Data, {"images": ".", **how}, "data"), top)


def loader(top, batch=1, **how):
    spec = check_settings(Data, {"images": ".", **how}, "data")
    return Loader(open_items(spec, top), spec, batch)


def said(found):
    """The captions and numbers of the samples by name."""
    return dict(zip(found.names, found.values, strict=True))


def texts(found):
    given = {name: value["caption"] for name, value in said(found).items()}
    return {name: caption if isinstance(caption, str) else caption.text() for name, caption in given.items()}


CAPTIONS = {
    "a text": ({"a.txt": "a cat, black\n"}, "a cat, black"),
    "a caption": ({"a.caption": "a cat"}, "a cat"),
    "the caption before the text": ({"a.caption": "a cat", "a.txt": "a dog"}, "a cat"),
    "tags of both": ({"a.caption": "a cat, ink", "a.txt": "a dog, old"}, "a cat, ink, old"),
    "a prompt with tags":
        ({"a.yaml": {"main_prompt": "a cat", "tags": ["black", {"tag": "old", "weight": 2}]}}, "a cat, old, black"),
    "a caption in YAML": ({"a.yml": {"caption": "a cat, black"}}, "a cat, black"),
    "YAML before the text": ({"a.yaml": {"main_prompt": "a cat"}, "a.txt": "a dog"}, "a cat"),
    "tags of the folder": ({"a.txt": "a cat, black", "local.yaml": {"tags": [{"tag": "ink"}]}}, "a cat, black, ink"),
    "tags of all folders":
        ({"a.txt": "a cat", "global.yaml": {"tags": ["ink"]}, "local.yml": {"tags": ["old"]}}, "a cat, old, ink"),
    "the prompt of a folder":
        ({"global.yaml": {"main_prompt": "a dog"}, "local.yaml": {"main_prompt": "a cat"}}, "a cat"),
    "an empty file": ({"a.txt": "a cat", "local.yaml": ""}, "a cat"),
}  # fmt: skip


@pytest.mark.parametrize("case", CAPTIONS)
def test_captions(tmp_path, case):
    files, caption = CAPTIONS[case]
    found = items(make(tmp_path, {"a.png": None, **files}))
    assert texts(found) == {"a.png": caption} and not found.notes


def test_a_folder_says_it_of_itself_and_a_global_file_of_those_below_too(tmp_path):
    top = make(tmp_path, {
        "global.yaml": {"tags": ["ink"]}, "local.yaml": {"tags": ["top"]}, "a.png": None, "a.txt": "a",
        "in/b.png": None, "in/b.txt": "b", "in/in/c.png": None, "in/in/c.txt": "c", "in/in/global.yaml": {"tags": ["deep"]},
        "loss_scale.txt": "0.5", "in/cond_dropout.txt": " 1.0 \n", "in/in/c.yaml": {"loss_scale": 2, "flip_p": 1},
    })  # fmt: skip
    found = items(top)
    assert texts(found) == {"a.png": "a, top, ink", "in/b.png": "b, ink", "in/in/c.png": "c, deep, ink"}
    assert [value["loss_scale"] for value in found.values] == [0.5, 1, 2]
    assert [value["flip_p"] for value in found.values] == [0, 0, 1]
    batch = next(loader(top, 3, shuffle=False, size=4).epoch(0))
    assert batch["loss_scale"].equal(torch.tensor([0.5, 1, 2]))
    assert batch["cond_dropout"].isnan().tolist() == [True, False, True] and "flip_p" not in batch


@pytest.mark.parametrize("name, caption", [("a cat, black_1.png", "a cat, black"), ("cat.png", "cat"), ("_2.png", "")])
def test_file_names_are_captions_where_that_is_said(tmp_path, name, caption):
    make(tmp_path, {name: None, "b.png": None, "b.txt": "a dog"})
    with pytest.raises(SpecError, match="1 of 2 images have no caption: .* or say 'captions: optional', 'captions: filename'"):
        items(tmp_path)
    if caption:
        assert texts(items(tmp_path, captions="filename")) == {name: caption, "b.png": "a dog"}
        make(tmp_path, {"local.yaml": {"tags": ["ink"]}})
        assert texts(items(tmp_path, captions="filename")) == {name: f"{caption}, ink", "b.png": "a dog, ink"}
    else:
        with pytest.raises(SpecError, match="have no caption"):
            items(tmp_path, captions="filename")


def test_tags_are_shuffled_when_trained_on(tmp_path):
    tags = [f"tag{number}" for number in range(8)]
    top = make(tmp_path, {"a.png": None, "a.txt": ", ".join(["a cat", *tags]), "shuffle_tags.txt": ""})
    drawn = [next(loader(top, size=4).epoch(number))["caption"][0].split(", ") for number in range(3)]
    assert all(parts[0] == "a cat" and sorted(parts[1:]) == tags for parts in drawn)
    assert len({*map(tuple, drawn)}) == 3
    assert drawn == [next(loader(top, size=4).epoch(number))["caption"][0].split(", ") for number in range(3)]
    assert loader(top, size=4).first(1)["caption"] == [", ".join(["a cat", *tags])]
    (top / "a.yaml").write_text(yaml.safe_dump({"tags": [{"tag": "heavy", "weight": 1e9}], "max_caption_length": 8}))
    assert next(loader(top, size=4).epoch(0))["caption"] == ["a cat, heavy"]


def test_multiplied_images(tmp_path):
    files = {f"{folder}/{i}.png": None for folder in ("two", "half", "one") for i in range(4)}
    top = make(tmp_path, {**files, "two/multiply.txt": "2.5", "half/multiply.txt": "0.5"})
    made = loader(top, 4, captions="none", size=4)
    assert made.steps == 4 and made.total == 4 * 2 + 4 + (2 + 2) and made.left_out == 0
    epochs = [Counter(name for batch in made.epoch(number) for name in batch["name"]) for number in range(6)]
    for counts in epochs:
        assert all(counts[f"two/{i}.png"] in (2, 3) and counts[f"one/{i}.png"] == 1 for i in range(4))
        assert sum(counts.values()) == 16 and all(counts[f"half/{i}.png"] in (0, 1) for i in range(4))
    assert len({tuple(sorted(counts.items())) for counts in epochs}) > 1
    halves = [Order([range(8)], 2, seed=0, rank=rank, world=2, train=True, shuffle=True, repeats=[1.5] * 8) for rank in (0, 1)]
    whole = Order([range(8)], 4, seed=0, rank=0, world=1, train=True, shuffle=True, repeats=[1.5] * 8)
    parts = [[request.indices for request in half.requests(3)] for half in halves]
    assert [a + b for a, b in zip(*parts, strict=True)] == [request.indices for request in whole.requests(3)]


def test_multiplied_classes(tmp_path):
    top = make(tmp_path, {"a/0.png": None, "b/0.png": None, "b/multiply.txt": "3", "b/0.txt": "no caption here"})
    spec = check_settings(Data, {"classes": ".", "size": 4}, "data")
    made = Loader(open_items(spec, top), spec, 4)
    assert sorted(next(made.epoch(0))["label"].tolist()) == [0, 1, 1, 1]


def test_folders_of_repeats(tmp_path):
    files = {"3_sks dog/a.png": None, "3_sks dog/b.png": None, "3_sks dog/b.txt": "a dog"}
    top = make(tmp_path, {**files, "c.png": None, "c.txt": "c"})
    found = items(top, captions="optional")
    assert found.repeats is None
    (note,) = found.notes
    assert note == (
        "the number in the name of a folder ('3_sks dog') is not used as a count of repeats: set 'repeats: folders' to use it"
    )
    found = items(top, repeats="folders")
    assert found.repeats == [3, 3, 1] and not found.notes
    assert texts(found) == {"3_sks dog/a.png": "sks dog", "3_sks dog/b.png": "a dog", "c.png": "c"}


def test_a_list_of_files(tmp_path):
    top = make(tmp_path / "in", {"a.png": None, "b.png": None, "b.txt": "a dog, old"})
    listed = [{"image": "in/a.png", "caption": "a cat", "multiply": 2}, {"image": str(top / "b.png"), "caption": "in/b.txt"}]
    (tmp_path / "list.json").write_text(json.dumps(listed))
    found = items(tmp_path, images="list.json")
    assert texts(found) == {"in/a.png": "a cat", "in/b.png": "a dog, old"} and found.repeats == [2, 1]
    assert found[0]["image"].size == (4, 4)


def test_a_list_of_paths_alone_has_the_captions_beside_the_files(tmp_path):
    make(tmp_path / "in", {"a.png": None, "a.txt": "a cat", "multiply.txt": "2"})
    (tmp_path / "list.json").write_text(json.dumps(["in/a.png"]))
    found = items(tmp_path, images="list.json")
    assert texts(found) == {"in/a.png": "a cat"} and found.repeats == [2]


SUBSET = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '.'\n"
BAD_TOML = {
    "a number": ("datasets = 3", "datasets: must be a list, not 3"),
    "a table": ("[datasets]\nx = 1", "datasets: must be a list, not a mapping"),
    "numbers": ("[[datasets]]\nsubsets = [1]", "datasets[0].subsets[0]: must be a mapping, not 1"),
    "general": ("general = 1", "general: must be a mapping, not 1"),
    "less than nothing": (f"{SUBSET}num_repeats = -2", "datasets[0].subsets[0].num_repeats: must be a number, 0 or more"),
    "no share": (f"{SUBSET}caption_dropout_rate = 5", "caption_dropout_rate: must be a number from 0"),
    "a suffix without its dot": (f"{SUBSET}caption_extension = 'txt'\nnum_repeat = 2", "num_repeat (did you mean"),
    "a misspelt key": (f"{SUBSET}num_repeat = 2", "num_repeat (did you mean 'num_repeats'?)"),
}


@pytest.mark.parametrize("case", BAD_TOML)
def test_a_toml_of_another_structure_is_told(tmp_path, case):
    text, told = BAD_TOML[case]
    make(tmp_path, {"a.png": None})
    (tmp_path / "set.toml").write_text(text)
    try:
        (found,) = items(tmp_path, images="set.toml", captions="none").notes
    except SpecError as error:
        found = str(error)
    assert found.removeprefix("data: ").startswith(str(tmp_path / "set.toml")) and told in found


def test_several_folders(tmp_path):
    make(tmp_path, {"x/a.png": None, "x/a.txt": "a", "y/b.png": None, "y/b.txt": "b", "y/multiply.txt": "2"})
    make(tmp_path, {"global.yaml": {"tags": ["of neither"]}})
    found = items(tmp_path, images=["x", "y"])
    assert texts(found) == {"x/a.png": "a", "y/b.png": "b"} and found.repeats == [1, 2] and found.root == str(tmp_path)


def test_an_image_may_be_listed_twice(tmp_path):
    make(tmp_path, {"a.png": None})
    subset = "[[datasets.subsets]]\nimage_dir = '.'\nclass_tokens = '{}'\n"
    (tmp_path / "set.toml").write_text("[[datasets]]\n" + subset.format("a cat") + subset.format("ink"))
    found = items(tmp_path, images="set.toml")
    assert [found[i]["caption"] for i in range(2)] == ["a cat", "ink"] and found.names == ["a.png"] * 2


def test_a_toml_of_subsets(tmp_path):
    make(tmp_path, {"x/a.png": None, "x/a.txt": "cat, black, old", "x/in/c.png": None, "y/b.png": None})
    (tmp_path / "set.toml").write_text(
        "[general]\nshuffle_caption = true\nkeep_tokens = 1\ncaption_extension = '.txt'\n[[datasets]]\nresolution = 512\n"
        "[[datasets.subsets]]\nimage_dir = 'x'\nnum_repeats = 3\nflip_aug = true\n"
        "[[datasets.subsets]]\nimage_dir = 'y'\nclass_tokens = 'dog'\ncaption_dropout_rate = 0.25\nshuffle_caption = false\n"
    )
    found = items(tmp_path, images="set.toml")
    assert texts(found) == {"x/a.png": "cat, black, old", "y/b.png": "dog"} and found.repeats == [3, 1]
    assert found.values[0]["caption"].main == "cat" and len(found.values[0]["caption"].tags) == 2
    assert found.values[0]["flip_p"] == 0.5 and found.values[1]["cond_dropout"] == 0.25
    (note,) = found.notes
    assert "set.toml: resolution are ignored" in note


WRONG = {
    "a word for a number": ({"multiply.txt": "two"}, "multiply.txt: multiply: must be a number, 0 or more, not 'two'"),
    "less than nothing": ({"multiply.txt": "-1"}, "multiply: must be a number, 0 or more"),
    "a share above 1": ({"cond_dropout.txt": "20"}, "cond_dropout: must be a number from 0 to 1, not '20'"),
    "no number": ({"loss_scale.txt": "nan"}, "loss_scale: must be a number, not 'nan'"),
    "more than an epoch can hold": ({"multiply.txt": "1e9"}, "data.images: an epoch would have 1e+09 samples"),
    "broken YAML": ({"local.yaml": "tags: ["}, "local.yaml:1: not valid YAML"),
    "a list": ({"a.yaml": ["a"]}, "a.yaml: must be a mapping or a caption"),
    "a wrong kind": ({"a.yaml": {"shuffle_tags": "yes, please"}}, "a.yaml:1: shuffle_tags: must be true or false"),
    "tags that are none": ({"a.yaml": {"tags": [["x"]]}}, "a.yaml:1: tags: a tag must be text, or a mapping"),
    "a folder in its place": ({"a.caption/x.png": None}, "a.caption: cannot be read: it is a folder, not a file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_read_is_named(tmp_path, case):
    files, text = WRONG[case]
    with pytest.raises(SpecError, match=".*") as caught:
        items(make(tmp_path, {"a.png": None, "a.txt": "a", **files}))
    assert text in str(caught.value)


@pytest.mark.parametrize("number", ["1" + "0" * 9, "9" * 190])
def test_a_folder_that_repeats_its_images_without_end_is_refused(tmp_path, number):
    top = make(tmp_path, {"9_cat/a.png": None})
    (top / "9_cat").rename(top / f"{number}_cat")
    with pytest.raises(SpecError, match=r"an epoch would have 1e\+\d+ samples, 1e\+\d+ of them from '\d+_cat.*a.png'"):
        items(top, repeats="folders")


def test_text_that_is_no_text_is_named(tmp_path):
    make(tmp_path, {"a.png": None})
    (tmp_path / "a.caption").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"a\.caption: cannot be read: not UTF-8 text; it is UTF-16"):
        items(tmp_path)


LISTS = {
    "an object": ("{}", "must be a list of images"),
    "no image": ('[{"caption": "a"}]', r"\[0\] needs 'image'"),
    "a missing file": ('[{"image": "b.png"}]', r"\[0\] '.*b.png' does not exist"),
    "not JSON": ("[", "list.json"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_cannot_be_read(tmp_path, case):
    text, finding = LISTS[case]
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(SpecError, match=finding):
        items(tmp_path, images="list.json")


def test_what_is_ignored_is_said(tmp_path):
    beside = {"rating": 2, "main_prompt": "a", "cond_droput": 1}
    files = {"batch_id.txt": "one", "x.zip": "", "a.yaml": beside, "loss_scale.txt": "2"}
    top = make(tmp_path, {"a.png": None, "b.png": None, "b.txt": "b", "c.png": None, "c.txt": "c", **files})
    made = loader(top, 2, size=4)
    notes = "\n".join(made.notes(Classify()))
    said = ["batch_id.txt is ignored", "x.zip is ignored", "'rating' is ignored", "'loss_scale' of images is ignored"]
    said += ["nothing reads 'cond_droput' (did you mean 'cond_dropout'?)", "1 of 3 samples are left out of each epoch"]
    assert [text for text in said if text not in notes] == []
    assert "loss_scale" not in "\n".join(made.notes(Denoise()))


def test_buckets_go_from_1_to_4_to_4_to_1(tmp_path):
    sizes = list_bucket_sizes((512, 512), check_settings(Data, {"images": ".", "buckets": True}, "data").buckets)
    assert sizes[0] == (1024, 256) and sizes[-1] == (256, 1024)
    make(tmp_path, {"a.png": (64, 16), "b.png": (16, 64), "c.png": (32, 32)})
    made = loader(tmp_path, captions="none", size=32, buckets={"step": 8})
    assert made.buckets == {(16, 64): 1, (32, 32): 1, (64, 16): 1}

"""A trigger word is before each caption: of the data, of tests, of pictures."""

from __future__ import annotations

import pytest
import torch
from test_data import folder, loaded, picture
from test_denoise import Recorded, traced

from fxplug.core.errors import SpecError, TrainError
from fxplug.core.spec.yaml_source import validate
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.tasks.denoise import Denoise
from fxplug.training.tasks.task import TaskInfo, make_task
from fxplug.training.train_section import Data
from fxplug.training.trigger import with_trigger


def test_the_word_is_put_before_captions_that_do_not_have_it():
    cases = {"a photo": "ohwx, a photo", "": "ohwx", "a photo of ohwx": "a photo of ohwx", "ohwx": "ohwx",
             "ohwxy, red": "ohwx, ohwxy, red", "an ohwx-like dog": "an ohwx-like dog", "OHWX": "ohwx, OHWX"}  # fmt: skip
    assert {caption: with_trigger(caption, "ohwx") for caption in cases} == cases
    assert with_trigger("a (b) c", "(b)") == "a (b) c" and with_trigger("ab", "a.") == "a., ab"
    assert with_trigger("a photo", None) == "a photo"


def test_data_and_their_test_have_it_and_tags_are_shuffled_behind_it(tmp_path):
    top = folder(tmp_path / "a", 4)
    (top / "shuffle_tags.txt").write_text("1")
    (top / "0.txt").write_text("one, two, three, four, five")
    (top / "1.txt").write_text("ohwx in the sun")
    spec = {"images": "a", "size": 16, "trigger": "ohwx", "test": "a"}
    captions = [c for epoch in range(4) for b in loaded(tmp_path, epoch=epoch, **spec) for c in b["caption"]]
    assert all(caption.startswith("ohwx, ") or caption == "ohwx in the sun" for caption in captions)
    assert len({caption for caption in captions if "three" in caption}) > 1
    tests = Data(**spec).test
    found = [c for b in Loader(open_items(tests, tmp_path), tests, 2, train=False).epoch(0) for c in b["caption"]]
    assert found == ["ohwx, one, two, three, four, five", "ohwx in the sun", "ohwx, picture 2", "ohwx, picture 3"]


def test_captions_that_may_be_missing_are_the_word_alone(tmp_path):
    folder(tmp_path / "a", 2, captions=False)
    assert loaded(tmp_path, images="a", captions="optional", trigger="ohwx")[0]["caption"] == ["ohwx", "ohwx"]


class Captioned(torch.utils.data.Dataset):
    def __init__(self, caption=True):
        self.caption = caption

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return {"image": picture(i), **({"caption": "a dog"} if self.caption else {"label": 0})}


def test_a_data_set_of_ones_own_has_it(tmp_path):
    assert loaded(tmp_path, call="test_trigger:Captioned", trigger="ohwx")[0]["caption"] == ["ohwx, a dog"] * 2
    with pytest.raises(TrainError, match=r"dataset\[0\] has no caption to put 'trigger' before|dataset\[1\] has no caption"):
        loaded(tmp_path, call={"test_trigger:Captioned": {"caption": False}}, trigger="ohwx")


def test_listed_samples_have_it_and_the_negative_has_not():
    module = Recorded(traced(text=8))
    task = Denoise(text="test_denoise:words", samples=["a dog", "ohwx"], guidance=2.0, sample_steps=1)
    seen = []
    task.setup(traced(text=8), TaskInfo((16, 16), trigger="ohwx"))
    text = task.text
    task.text = lambda captions, tokens=None: (seen.append(list(captions)), text(captions, tokens))[1]
    task.samples(module)
    assert seen == [["ohwx, a dog", "ohwx"], ["", ""]]
    assert task.beside_samples()[1] == ["ohwx, a dog", "ohwx"]


def test_a_word_without_effect_is_refused():
    for data, message in (
        ({"classes": "a", "trigger": "x"}, "trigger: has no effect with 'classes'"),
        ({"images": "a", "captions": "none", "trigger": "x"}, "trigger: has no effect with 'captions: none'"),
        ({"images": "a", "trigger": ""}, "trigger: must be a text that is not empty"),
        ({"images": "a", "trigger": 3}, "trigger: must be text"),
    ):
        with pytest.raises(SpecError, match=message):
            validate(Data, data)
    for task, text in (("denoise", "the task is given no captions"), ("classify", "reads no captions")):
        made = make_task(task)
        with pytest.raises(SpecError, match=text) as caught:
            made.setup(traced(), TaskInfo((16, 16), trigger="ohwx"))
        assert caught.value.path == ("data", "trigger")

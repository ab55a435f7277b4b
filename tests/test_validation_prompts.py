"""Prompts of one's own in a training: read from lists and files, and drawn each with its seed, size and guidance."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import test_denoise
import tiny_pipelines as tiny
import torch
from test_pipeline_denoise import SIZE, rewritten

from fxplug.core.errors import SpecError, TrainError
from fxplug.training.identity import check_same_run
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.task import TaskInfo
from fxplug.training.tasks.validation_prompts import ValidationPrompt, join_pictures, read_prompts

ENTRIES = [
    "a red ball",
    {"prompt": "a blue cat", "seed": 42, "size": [64, 128], "guidance": 7.5, "steps": 3, "negative": "blurry, grey"},
    {"prompt": "a dog", "size": 128},
]
READ = [
    ValidationPrompt("a red ball"),
    ValidationPrompt("a blue cat", "blurry, grey", 42, (64, 128), 7.5, 3),
    ValidationPrompt("a dog", size=(128, 128)),
]
LINES = """\
# a file of kohya's
a red ball

a blue cat --n blurry, grey --w 128 --h 64 --d 42 --l 7.5 --s 3
  a dog --h=128 --w=128
"""


def test_a_list_and_files_of_all_kinds_are_read_alike(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "a.json").write_text(json.dumps(ENTRIES))
    (tmp_path / "a.yaml").write_text(json.dumps(ENTRIES, indent=2))
    for given in (ENTRIES, "a.txt", "a.json", "a.yaml", str(tmp_path / "a.txt")):
        assert read_prompts(given, tmp_path) == READ
    assert read_prompts(None, tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("b.txt", "", "a.txt"),
        ("a.md", "a cat", "must end in .txt"),
        ("a.txt", "# nothing\n\n", "must have 1 to 10000 prompts, and has 0"),
        ("a.txt", "a cat\na dog --q 3", "a.txt:2: no option '--q'; there are --n"),
        ("a.txt", "a cat --d x", "a.txt:1: --d must be a number, not 'x'"),
        ("a.txt", "a cat --w 64", "a.txt:1: --w and --h must be given together"),
        ("a.txt", "a cat --d -4", "a.txt:1: seed: "),
        ("a.txt", "a cat --s 0", "a.txt:1: steps: "),
        ("a.yaml", "prompts: [a]", "must be a list of prompts"),
        ("a.yaml", "- prompt: a cat\n  sed: 3", r"a.yaml \[0\]: unknown key 'sed' \(did you mean 'seed'"),
        ("a.yaml", "- seed: 3", "a.yaml"),
        ("a.yaml", "- {prompt: a, size: [1, 2, 3]}", "height and width"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, name, text, says):
    (tmp_path / ("a" + name[1:])).write_text(text)
    with pytest.raises(SpecError, match=says):
        read_prompts(name, tmp_path)


def test_pictures_of_several_sizes_are_in_one_grid():
    whole = join_pictures([torch.ones(3, 4, 8), torch.full((3, 8, 4), 0.5)])
    assert whole.shape == (2, 3, 8, 8) and float(whole[0].sum()) == 96 and float(whole[1, :, :, 2:6].min()) == 0.5


def words(captions):
    made = [torch.full((5, 8), float(len(text))) for text in captions]
    return torch.stack(made).sin()


def test_a_single_model_draws_each_as_its_own_settings_alone_would():
    module = test_denoise.traced(text=8)
    size = test_denoise.SIDE
    second = {"prompt": "a cat", "seed": 42, "guidance": 3.0, "steps": 2, "negative": "grey", "size": [size, 2 * size]}
    prompts = ["a ball", second]
    common = {"text": "test_validation_prompts:words", "sample_steps": 3, "guidance": 2.0}
    task = test_denoise.ready(module, prompts=prompts, **common)
    assert task.check_samples(module)
    found = task.samples(module)
    assert found.shape == (2, 3, size, 2 * size) and torch.equal(task.samples(module), found)
    first = test_denoise.ready(module, samples=["a ball"], **common).samples(module)
    torch.testing.assert_close(found[:1, :, :, size // 2 : -size // 2], first, rtol=1e-4, atol=1e-5)
    other = test_denoise.ready(module, samples=["a cat"], **{**common, "sample_steps": 2, "guidance": 3.0, "negative": "grey"})
    cat: dict = {"given": {"caption": ["a cat"]}, "seed": 42, "shape": (3, size, 2 * size)}
    torch.testing.assert_close(found[1:], other.generate(module, **cat), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(other.generate(module, **cat, negative=""), found[1:])
    assert task.beside_samples()[1] == ["a ball", "a cat"]

    for options, says in (
        ({"samples": ["a"], **common}, "prompts: replace 'samples'"),
        ({**common, "guidance": 1.0, "prompts": [{"prompt": "a", "negative": "b"}]}, r"prompts\[0\].negative: has no effect"),
        ({**common, "prompts": []}, "prompts: must be a list of prompts, or the name of a file"),
        ({**common, "prompts": [{"prompt": "a", "sed": 1}]}, r"prompts\[0\].*unknown key 'sed'"),
        ({**common, "prompts": ["a", 3]}, r"prompts\[1\]: must be a mapping"),
        ({**common, "prompts": "gone.txt"}, "gone.txt"),
    ):
        with pytest.raises(SpecError, match=says):
            test_denoise.ready(module, **{"prompts": ["a"], **options})
    with pytest.raises(SpecError, match="prompts: are captions, and the model is given none"):
        test_denoise.ready(test_denoise.traced(), prompts=["a"])


def test_a_run_may_draw_other_samples_where_it_is_resumed(tmp_path):
    def check(before, now):
        kept = SimpleNamespace(run={"task": before, "seed": 0})
        check_same_run(kept, {"task": now, "seed": 0}, tmp_path)

    check("denoise", {"denoise": {"prompts": ["a"], "sample_steps": 3}})
    check({"denoise": {"samples": 4, "dropout": 0.1}}, {"denoise": {"prompts": "a.txt", "dropout": 0.1}})
    with pytest.raises(TrainError, match="dropout"):
        check({"denoise": {"samples": 4, "dropout": 0.1}}, {"denoise": {"samples": 4, "dropout": 0.2}})
    with pytest.raises(TrainError, match="samples"):
        check({"mine:Task": {"samples": 4}}, {"mine:Task": {"samples": 5}})


@pytest.mark.slow
def test_a_pipeline_draws_each_as_the_stock_pipeline_does(tmp_path):
    pipe = tiny.make("sd15")
    module = rewritten(pipe, {})
    (tmp_path / "a.txt").write_text("a red ball\na blue cat --d 7 --w 64 --h 128 --l 8 --s 2 --n grey\n")
    task = PipelineDenoise(pipe, {"guidance_scale": 4.0}, prompts="a.txt", sample_steps=3)
    task.setup(module, TaskInfo(SIZE, base=tmp_path))
    assert task.check_samples(module)
    found = task.samples(module)
    assert found.shape == (2, 3, 128, 64)
    settings = [
        {"prompt": "a red ball", "height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 4.0},
        {"prompt": "a blue cat", "height": 128, "width": 64, "num_inference_steps": 2, "guidance_scale": 8.0,
         "negative_prompt": "grey"},
    ]  # fmt: skip
    for row, seed, given in ((found[0, :, 32:96], 0, settings[0]), (found[1], 7, settings[1])):
        wanted = pipe(**given, generator=torch.Generator().manual_seed(seed), output_type="pt").images[0]
        assert torch.allclose(row, wanted, atol=1e-5)
    assert task.last_sample()[1] == 7

    bad = PipelineDenoise(pipe, {}, prompts=[{"prompt": "a", "size": 65}])
    bad.setup(module, TaskInfo(SIZE))
    with pytest.raises(SpecError, match=r"prompts\[0\].size"):
        bad.check_samples(module)
    with pytest.raises(SpecError, match="1001 steps"):
        slow = PipelineDenoise(pipe, {}, prompts=[{"prompt": "a", "steps": 1001}])
        slow.setup(module, TaskInfo(SIZE))
        slow.check_samples(module)

"""Preserving what a model makes of a class, while it learns a subject of it (differential output preservation)."""

from __future__ import annotations

import pytest
import runs
import torch
import yaml
from test_data import folder
from test_denoise import Recorded, batch, traced, words
from test_denoise_runs import CONFIG, SMALL

import fxplug
from fxplug.core.errors import SpecError
from fxplug.lowerings.regions.swapping import plan_swap
from fxplug.training.random_draws import Draws
from fxplug.training.swapped_blocks import swap_outside_steps
from fxplug.training.tasks.denoise import Denoise
from fxplug.training.tasks.task import TaskInfo, make_task
from fxplug.training.trigger import replace_trigger

CAPTIONS = ["ohwx", "a ohwx", "cat", "ohwxy"]


def rewritten(**more):
    """A LoRA that is not neutral any more, beside one that does not train."""
    torch.manual_seed(0)
    module = fxplug.apply(traced(text=8), fxplug.load_pass("lora", at="**.to_q", rank=2, name="still", train=False))
    module = fxplug.apply(module, fxplug.load_pass("lora", at="**.to_v", rank=2, **more))
    with torch.no_grad():
        for name, p in module.named_parameters():
            if ".up." in name:
                p.add_(30 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    fxplug.trainable(module)
    return module


def ready(module, trigger="ohwx", **options):
    task = Denoise(text="test_denoise:words", **{"preserve": "dog", **options})
    task.setup(module, TaskInfo((16, 16), trigger=trigger))
    return task


def test_the_class_stands_in_the_place_of_the_word():
    replaced = [replace_trigger(caption, "ohwx", "dog") for caption in (*CAPTIONS, "ohwx, an ohwx", r"\1")]
    assert replaced == ["dog", "a dog", "cat", "ohwxy", "dog, an dog", r"\1"]
    assert replace_trigger("a (b)", "(b)", r"\g<0>") == r"a \g<0>"


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_is_that_of_the_sample_and_the_distance_from_before(weight):
    module, b = rewritten(), batch(caption=CAPTIONS)
    got = ready(module, preserve_weight=weight).loss(module, dict(b), Draws(0, 7))
    alone = ready(module, preserve=None)
    plain = alone.loss(module, dict(b), Draws(0, 7))
    draw = Draws(0, 7)
    timesteps = (draw.uniform(4) * 1000).long()
    noisy = alone.noise.noisy(b["image"], draw.like(b["image"]), timesteps)
    text = words(["dog", "a dog", "cat", "ohwxy"])
    before = fxplug.apply(traced(text=8), fxplug.load_pass("lora", at="**.to_q", rank=2, name="still", train=False))
    before.load_state_dict({name: value for name, value in module.state_dict().items() if not name.startswith("lora.")})
    new, old = (m(noisy, timesteps, text, return_dict=False)[0] for m in (module, before))
    distance = (new - old).square().mean()
    assert distance > 0.01
    torch.testing.assert_close(got, plain + weight * distance, rtol=1e-5, atol=0)


def test_a_new_pass_has_nothing_to_preserve_and_only_it_gets_gradients():
    module = fxplug.apply(traced(text=8), fxplug.load_pass("lora", at="**.to_k", rank=2))
    fxplug.trainable(module)
    task = ready(module)
    losses = [one.loss(module, batch(caption=CAPTIONS), Draws(0, 7)) for one in (task, ready(module, preserve=None))]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    losses[0].backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {
        name for name, p in module.named_parameters() if name.startswith("lora.")
    }
    assert module.training and not task.untrained.training


def test_one_call_of_the_trained_module_and_none_in_a_test():
    module = rewritten()
    seen, task = Recorded(module), ready(module, dropout=0.9)
    task.loss(seen, batch(caption=CAPTIONS), Draws(0, 7))
    assert [len(given["sample"]) for given in seen.calls] == [8]
    assert torch.equal(seen.calls[0]["encoder_hidden_states"][4:], words(["dog", "a dog", "cat", "ohwxy"])), "none is dropped"
    assert torch.equal(seen.calls[0]["sample"][:4], seen.calls[0]["sample"][4:])
    task.test(seen, [batch(caption=CAPTIONS)])
    assert [len(given["sample"]) for given in seen.calls[1:]] == [4] * 4


@pytest.mark.parametrize(("options", "message"), [
    ({"trigger": None}, "needs 'trigger' in the section data"),
    ({"train_guidance": 2.0}, "both double the batch"),
])  # fmt: skip
def test_what_does_not_go_together_is_said(options, message):
    with pytest.raises(SpecError, match=message) as caught:
        ready(rewritten(), **options)
    assert caught.value.path == ("preserve",)


@pytest.mark.slow
def test_models_that_cannot_be_as_before_are_said():
    base = rewritten()
    fxplug.trainable(base, "conv_in")
    still = fxplug.apply(traced(text=8), fxplug.load_pass("lora", at="**.to_k", rank=2, train=False))
    small = {"conditioning_embedding_out_channels": [16]}
    control = fxplug.apply(traced(text=8), fxplug.load_pass("controlnet", options=small))
    for module, message in ((base, "'conv_in.bias' of it trains"), (still, "needs a pass that trains"),
                            (control, "passes without inputs")):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            ready(module)
    with pytest.raises(SpecError, match="no effect without 'preserve'"):
        ready(rewritten(), preserve=None, preserve_weight=0.5)
    with pytest.raises(SpecError, match="must be a text that is not empty"):
        make_task({"denoise": {"preserve": ""}})


@pytest.mark.slow
def test_a_run_preserves_and_goes_on_to_the_bit(tmp_path):
    folder(tmp_path / "own", 4, size=(16, 16))
    train = {**CONFIG["train"], "steps": 4, "batch": 2, "save": {"every": 2, "keep": 9}, "test": {}, "log": {}}
    config = {**CONFIG, **SMALL, "train": train, "data": {"images": "own", "size": 16, "trigger": "ohwx"}}
    config["train"]["task"] = {"denoise": {"text": "test_denoise_runs:words", "samples": 0, "preserve": "dog"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with runs.sharing():
        whole = fxplug.train(tmp_path / "run.yaml", out=tmp_path / "a", quiet=True)
        second = tmp_path / "a" / "checkpoints" / "step-00000002"
        last = fxplug.train(tmp_path / "run.yaml", out=tmp_path / "b", resume=second, quiet=True)
        without = fxplug.train(tmp_path / "run.yaml", set=["train.task.denoise.preserve=null"], out=tmp_path / "c", quiet=True)
        for change in ("train.shard=true", "train.trainable=[conv_in]"):
            with pytest.raises(SpecError, match="train.task.denoise.preserve: needs the"):
                fxplug.train(tmp_path / "run.yaml", set=[change], out=tmp_path / "d", quiet=True)
    assert [r["loss"] for r in whole.history][2:] == [r["loss"] for r in last.history]
    assert whole.history[3]["loss"] > without.history[3]["loss"]


def test_the_model_before_fetches_the_weights_of_swapped_blocks():
    module, b = rewritten(), batch(caption=CAPTIONS)
    task, plain = ready(module), ready(module)
    expected = plain.loss(module, dict(b), Draws(0, 7))
    swap = plan_swap(module, 1, "cpu", ["down_blocks.*"])
    swap.place(module)
    shown = swap_outside_steps(module, task, swap)
    before = swap.fetches
    with torch.no_grad():
        task.untrained(b["image"], torch.tensor([3, 5, 7, 9]), words(CAPTIONS), return_dict=False)
    assert swap.fetches > before, "its weights are on the host"
    assert torch.equal(task.loss(shown, dict(b), Draws(0, 7)), expected)
    assert swap.most_bytes < sum(swap.bytes_of_blocks)

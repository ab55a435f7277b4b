"""Runs that train more of a pipeline than one denoiser: both denoisers of Wan 2.2, and text encoders beside a denoiser."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import diffusers
import pytest
import runs
import tiny_pipelines as tiny
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from test_pipeline_denoise import SIZE, batch_of, config, rewritten

import fxplug
from fxplug.core.errors import SpecError
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.task import TaskInfo

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
BOTH = ("transformer", "transformer_2")
FILE = "pytorch_lora_weights.safetensors"
TEXT = {"passes": [{"lora": {"at": "re:.*[qv]_proj$", "rank": 2}}], "lr": 2e-2}
CLIPS = {"sd15": ("text_encoder",), "sdxl": ("text_encoder", "text_encoder_2")}


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The runs of this file have what is traced and seen of a tiny pipeline in common."""
    with runs.sharing():
        yield


def given(folder, name, *, part=None, text=None, train=None, task=None, **changed):
    """A configuration that trains these parts of a tiny pipeline."""
    made = config(folder, name, **changed)
    made["model"]["part"] = part
    options = {"samples": 1, "sample_steps": 8 if name == "wan22" else 2, **({"text": text} if text else {}), **(task or {})}
    made["train"] |= {"task": {"denoise": options}, "log": {"tensorboard": False}, **(train or {})}
    return made


def run_of(made, out, **more):
    return fxplug.train(made, out=out, quiet=True, **more)


def both_of_wan(**options):
    """A task on the two denoisers of Wan, set up, and their modules."""
    pipe = tiny.make("wan22")
    modules = {part: rewritten(pipe, {"num_frames": 1}, part) for part in BOTH}
    beside = {"transformer_2": modules["transformer_2"]}
    task = PipelineDenoise(pipe, {"num_frames": 1}, "transformer", beside=beside, samples=0, **options)
    return task, modules


def text_of(name, passes=TEXT, **options):
    """A task whose text encoders train, set up, and the module of its denoiser."""
    pipe = tiny.make(name)
    task = PipelineDenoise(pipe, text=dict.fromkeys(CLIPS[name], passes), samples=0, **options)
    module = rewritten(pipe, {})
    task.setup(module, TaskInfo(SIZE, sizes=(SIZE,), trigger="zzz"))
    return task, module


def fill_up(module, std=0.3):
    """Let every update of a module have an effect."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.startswith("lora."):
                torch.nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(len(key)))


# --- two denoisers


@pytest.mark.slow
def test_each_denoiser_is_trained_at_its_own_times_and_only_by_its_own_loss():
    task, modules = both_of_wan()
    task.setup(modules["transformer"], TaskInfo(SIZE, sizes=(SIZE,)))
    steps = {part: task.denoisers[part].of(SIZE).steps for part in BOTH}
    times = {part: task.sized.of(SIZE).noise.time(steps[part]) for part in BOTH}
    assert times["transformer"].min() > 860 and times["transformer_2"].max() < 890
    seen = {}
    for part, module in modules.items():
        module.register_forward_pre_hook(
            lambda _, args, kwargs, part=part: seen.update({part: kwargs["timestep"]}), with_kwargs=True
        )
        fill_up(module)
    loss, said = task.loss(modules["transformer"], batch_of("a red ball", "a blue cat"), Draws(0, 1))
    assert seen["transformer"].min() > 860 and seen["transformer_2"].max() < 890
    assert float(loss.detach()) == pytest.approx(sum(float(each.detach()) for each in said.values()))
    assert [*said] == ["loss_transformer", "loss_transformer_2"]
    own = [p for p in modules["transformer"].parameters() if p.requires_grad]
    assert all(g is None for g in torch.autograd.grad(said["loss_transformer_2"], own, allow_unused=True, retain_graph=True))
    assert any(g is not None for g in torch.autograd.grad(said["loss_transformer"], own, allow_unused=True))


def test_a_denoiser_that_is_not_called_first_gets_the_condition_of_its_own_call():
    pipe = tiny.make("wan22")
    task = PipelineDenoise(pipe, {"num_frames": 1}, "transformer_2", samples=0)
    task.setup(pipe.transformer_2, TaskInfo(SIZE, sizes=(SIZE,)))
    called = []
    pipe.transformer.patch_embedding.register_forward_hook(lambda *_: called.append(1))
    condition = task.sized.of(SIZE).call.encode(prompt="a gold box")
    assert len(called) == 1  # as one form of call, whatever the number of steps before
    wanted = pipe.encode_prompt("a gold box", do_classifier_free_guidance=False, max_sequence_length=512)[0]
    assert torch.allclose(condition.call["encoder_hidden_states"], wanted, atol=1e-5)


@pytest.mark.slow
def test_a_run_of_both_gives_what_a_run_of_each_gives_and_the_stock_pipeline_loads_both(tmp_path):
    both = run_of(given(tmp_path, "wan22", part=[*BOTH]), tmp_path / "both")
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "both" / "log.jsonl").read_text()
    assert {key for key in both.history[0] if key.startswith("loss_")} == {f"loss_{part}" for part in BOTH}
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    task = both.trainer.task
    call, seed, _ = task.last_sample()
    own = task.sampler(both.module, call, steps=8, seed=seed)
    base = task.sampler.stock(call, steps=8, seed=seed)
    for part in BOTH:
        one = given(tmp_path / part, "wan22", part=part) if not (tmp_path / part).mkdir() else None
        lacking = pytest.warns(UserWarning, match="does not read layers of 'transformer_2'")
        with lacking if part == "transformer_2" else contextlib.nullcontext():
            run_of(one, tmp_path / part / "run")
        kept = load_file(tmp_path / "both" / "adapter" / part / FILE)
        alone = load_file(tmp_path / part / "run" / "adapter" / FILE)
        assert kept.keys() == alone.keys() and all(torch.equal(kept[key], alone[key]) for key in kept)
        assert all(key.startswith(f"{part}.") for key in kept)
        pipe.__dict__[part].load_lora_adapter(kept, prefix=part)
        loaded = fxplug.load(tmp_path / "both" / "module" / part)
        trained = both.module if part == "transformer" else task.beside[part].module
        assert all(torch.equal(p, dict(trained.named_parameters())[name]) for name, p in loaded.named_parameters())
        task.sampler.pipe = pipe
        drawn = task.sampler.stock(call, steps=8, seed=seed)
        assert (float((drawn - own).abs().max()) <= 1e-5) == (part == "transformer_2")  # with both, and with both alone
    assert float((base - own).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan22", "sdxl"])
def test_a_resumed_run_is_the_same_to_the_bit(name, tmp_path):
    passes = {"passes": [{"lora": {"at": "re:.*[qv]_proj$", "rank": 2, "dropout": 0.3}}]}
    parts = {"part": [*BOTH]} if name == "wan22" else {"text": dict.fromkeys(CLIPS[name], passes)}
    train = {"ema": 0.9, "save": {"every": 2}, "clip": 1.0}
    made = given(tmp_path, name, **parts, task={"dropout": 0.4, "samples": 0}, train={**train, "steps": 6})
    whole = run_of(made, tmp_path / "whole")
    run_of({**made, "train": {**made["train"], "steps": 4}}, tmp_path / "again")
    again = run_of(made, tmp_path / "again", resume=True)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    assert {key.split(".")[0] for key in whole.trainer.trained} == {"lora", *(parts.get("text") or BOTH[1:])}
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        if "checkpoints" not in file.parts:
            assert file.read_bytes() == (tmp_path / "again" / file.relative_to(tmp_path / "whole")).read_bytes()


@pytest.mark.slow
def test_a_run_of_both_that_was_killed_goes_on(tmp_path):
    made = given(tmp_path, "wan22", part=[*BOTH], task={"samples": 0}, train={"steps": 6, "save": {"every": 1}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    words = [sys.executable, "-m", "fxplug", "train", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")]
    process = subprocess.Popen([*words, "--set", "train.steps=500"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 240
        while not [*(tmp_path / "run").glob("checkpoints/step-*3")] and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    newest = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    steps = {"train": {**made["train"], "steps": newest + 2}}
    done = run_of({**made, **steps}, tmp_path / "run", resume=True)
    assert [row["step"] for row in done.history] == [*range(1, newest + 3)]
    straight = run_of({**made, **steps}, tmp_path / "straight")
    assert [row["loss"] for row in straight.history] == [row["loss"] for row in done.history]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"quantize": "int8"}, {"checkpointing": True}, {"dtype": "bfloat16"}])
def test_both_denoisers_train_quantised_checkpointed_and_in_half_precision(change, tmp_path):
    if "quantize" in change:
        pytest.importorskip("torchao")
    made = given(tmp_path, "wan22", part=[*BOTH], task={"samples": 0, "sample_steps": 8}, train={"steps": 2})
    made["model"] |= {key: value for key, value in change.items() if key == "quantize"}
    made["train"] |= {key: value for key, value in change.items() if key == "checkpointing"}
    done = run_of({**made, **{key: value for key, value in change.items() if key == "dtype"}}, tmp_path / "run")
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()
    for part in BOTH:
        tensors = load_file(tmp_path / "run" / "adapter" / part / FILE)
        assert all(tensor.any() for key, tensor in tensors.items() if "lora_B" in key)
        fxplug.load(tmp_path / "run" / "module" / part, allow=["torchao"] if "quantize" in change else ())
    assert all(row["loss"] == row["loss"] for row in done.history)


@pytest.mark.slow
def test_what_is_preserved_of_both_is_the_sum_of_each():
    def loss(weight):
        options = {} if weight is None else {"preserve": "red", "preserve_weight": weight}
        task, modules = both_of_wan(**options)
        task.setup(modules["transformer"], TaskInfo(SIZE, sizes=(SIZE,), trigger="zzz"))
        for module in modules.values():
            fill_up(module)
        with torch.no_grad():
            return task.loss(modules["transformer"], batch_of("a zzz ball"), Draws(0, 1))[1]

    plain, single, triple = (loss(weight) for weight in (None, 1.0, 3.0))
    for name, value in plain.items():
        assert single[name] > value
        assert float(triple[name] - value) == pytest.approx(3 * float(single[name] - value), rel=1e-4)


@pytest.mark.slow
def test_lists_of_parts_that_cannot_be_trained_are_refused(tmp_path):
    made = given(tmp_path, "wan22", part=["transformer", "transformr_2"])
    refusals = {
        ("transformer", "transformr_2"): "has no model 'transformr_2' .did you mean 'transformer_2'",
        ("transformer", "transformer"): "'transformer' is listed 2 times",
        ("transformer", "text_encoder"): "has no denoiser 'text_encoder'",
        ("transformer", "vae"): "does not call 'vae'",
    }
    for parts, said in refusals.items():
        passes = [] if parts[1] != "text_encoder" else [{"lora": {"at": "re:.*(to_q|[.]q)$", "rank": 2}}]
        with pytest.raises(SpecError, match=said):
            run_of({**made, "model": {**made["model"], "part": [*parts]}, "passes": passes or made["passes"]}, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    classify = {**made["train"], "task": "classify"}
    with pytest.raises(SpecError, match="only the task denoise trains several"):
        run_of({**made, "train": classify}, tmp_path / "run")


# --- text encoders


@pytest.mark.parametrize("name", CLIPS)
def test_captions_are_encoded_anew_with_gradients_by_the_encoders_that_train(name):
    task, module = text_of(name)
    pipe = task.pipe
    before = {part: {key: value.clone() for key, value in getattr(pipe, part).state_dict().items()} for part in CLIPS[name]}
    batch = batch_of("a red ball", "a blue cat")
    plain = PipelineDenoise(pipe, samples=0)
    plain.setup(module, TaskInfo(SIZE, sizes=(SIZE,)))
    alone = float(plain.loss(module, dict(batch), Draws(0, 1)).detach())
    loss = task.loss(module, dict(batch), Draws(0, 1))
    assert float(loss.detach()) == pytest.approx(alone, rel=1e-6)  # an update that is 0 changes nothing
    loss.backward()
    for part in CLIPS[name]:
        ups = {key: p.grad for key, p in task.beside[part].module.named_parameters() if ".up." in key}
        assert sum(grad is not None and bool(grad.any()) for grad in ups.values()) >= len(ups) / 2
        fill_up(task.beside[part].module)
        assert all(torch.equal(value, before[part][key]) for key, value in getattr(pipe, part).state_dict().items())
    assert float(task.loss(module, dict(batch), Draws(0, 1)).detach()) != pytest.approx(alone, rel=1e-5)
    assert len(task.sized.memory.kept) < len(plain.sized.memory.kept)  # no caption is kept
    dropped = {**batch, "cond_dropout": torch.ones(2)}
    empty = task.loss(module, {**batch, "caption": ["", ""]}, Draws(0, 1))
    assert float(task.loss(module, dropped, Draws(0, 1)).detach()) == pytest.approx(float(empty.detach()), rel=1e-6)


def test_the_gradient_of_a_text_encoder_is_that_of_the_loss():
    """Against differences of the loss: along the gradient, as far as float32 goes."""
    task, module = text_of("sd15")
    encoder = task.beside["text_encoder"].module
    fill_up(encoder, 0.5)
    ups = [p for key, p in encoder.named_parameters() if ".up." in key]

    def loss():
        return task.loss(module, batch_of("a red ball", "a blue cat"), Draws(0, 1))

    gradients = torch.autograd.grad(loss(), ups)
    norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, g in zip(ups, gradients, strict=True):
                p += sign * 0.05 * g / norm
            found.append(float(loss()))
            for p, g in zip(ups, gradients, strict=True):
                p -= sign * 0.05 * g / norm
    assert (found[0] - found[1]) / 0.1 == pytest.approx(norm, rel=0.05)


@pytest.mark.slow
def test_what_is_preserved_beside_a_text_encoder_is_the_model_before_both():
    for filled in (False, True):
        task, module = text_of("sd15", preserve="red")
        if filled:
            fill_up(task.beside["text_encoder"].module)
        batch = batch_of("a zzz ball", "a zzz box")
        with torch.no_grad():
            index = task.sized.of(SIZE).steps[[100, 500]]
            x = torch.randn(2, *task.sized.of(SIZE).call.shape, generator=torch.Generator().manual_seed(1))
            kept = task._preserved(module, "unet", batch, x, index)
        assert bool((kept > 0).all()) == filled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
def test_the_adapter_has_the_text_encoders_and_the_stock_pipeline_draws_the_same(name, tmp_path):
    names = CLIPS.get(name, ("text_encoder",)) if name != "sd3" else CLIPS["sdxl"]
    made = given(tmp_path, name, text=dict.fromkeys(names, TEXT), train={"steps": 8})
    if name == "sdxl":
        (tmp_path / "class").mkdir()
        for n in range(2):
            Image.new("RGB", SIZE, (60, 90 * n, 30)).save(tmp_path / "class" / f"{n}.png")
            (tmp_path / "class" / f"{n}.txt").write_text("a ball")
        made["data"] |= {"prior": {"images": str(tmp_path / "class")}, "trigger": "zzz"}
    done = run_of(made, tmp_path / "run")
    tensors = load_file(tmp_path / "run" / "adapter" / FILE)
    heads = {key.partition(".")[0] for key in tensors}
    assert heads == {done.trainer.task.part, *names}
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()
    task = done.trainer.task
    call, seed, _ = task.last_sample()
    own = task.sampler(done.module, call, steps=2, seed=seed)
    off = []
    for left in ("", "text_encoder."):
        pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "pipe", dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        pipe.load_lora_weights({key: value for key, value in tensors.items() if not (left and key.startswith(left))})
        task.sampler.pipe = pipe
        off.append(float((task.sampler.stock(call, steps=2, seed=seed) - own).abs().max()))
    assert off[0] <= 1e-5 and off[1] > 1e-4  # and the text encoder has its part in it
    for part in names:
        loaded = dict(fxplug.load(tmp_path / "run" / "text" / part).named_parameters())
        assert all(torch.equal(p, loaded[key]) for key, p in task.beside[part].module.named_parameters())


@pytest.mark.slow
def test_text_encoders_in_half_precision_train_under_autocast(tmp_path):
    made = given(tmp_path, "sdxl", text=dict.fromkeys(CLIPS["sdxl"], TEXT), dtype="bfloat16")
    done = run_of(made, tmp_path / "run")
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()
    assert all(p.dtype == torch.bfloat16 for p in done.trainer.task.beside["text_encoder"].module.parameters())
    with pytest.raises(SpecError, match="train.precision: the trained parameters of text_encoder are bfloat16: set bf16"):
        run_of({**made, "passes": []}, tmp_path / "alone")


@pytest.mark.slow
def test_text_encoders_that_cannot_be_trained_are_refused(tmp_path):
    def refused(name, text, **more):
        folder = tmp_path / name
        made = given(folder, name, text=text, **more) if not folder.exists() and not folder.mkdir() else None
        made = made or kept[name][0] | {"train": {**kept[name][0]["train"], "task": {"denoise": {"text": text}}}}
        kept[name] = (made,)
        with pytest.raises(SpecError) as error:
            run_of(made, folder / "run")
        assert not (folder / "run").exists() and error.value.path[:4] == ("train", "task", "denoise", "text")
        return str(error.value)

    kept = {}
    assert "load_lora_weights of WanPipeline reads transformer, transformer_2 alone" in refused(
        "wan22", {"text_encoder": TEXT}, part="transformer"
    )
    assert "load_lora_weights of PixArtSigmaPipeline is not there" in refused("pixart", {"text_encoder": TEXT})
    assert "has no text encoder 'text_encodr' (did you mean 'text_encoder'?)" in refused("sd15", {"text_encodr": TEXT})
    assert "it names those that train, text: {text_encoder: {passes" in refused("sd15", "sd15")
    assert "passes" in refused("sd15", {"text_encoder": {"lr": 1.0}})
    assert "trainable" in refused("sd15", {"text_encoder": {**TEXT, "trainable": ["x"]}})
    assert "no pass of it has parameters that train" in refused("sd15", {"text_encoder": {"passes": []}})
    slots = [{"lora": {"at": "re:.*q_proj$", "rank": 2, "slots": 2}}]
    assert "has slots, which cannot be trained" in refused("sd15", {"text_encoder": {"passes": slots}})
    nowhere = [{"lora": {"at": "nothing_of_it", "rank": 2}}]
    assert "in the text encoder: " in refused("sd15", {"text_encoder": {"passes": nowhere}})


class Detached(diffusers.StableDiffusionPipeline):
    """Encodes captions without gradients, as some pipelines do."""

    @functools.wraps(diffusers.StableDiffusionPipeline.encode_prompt)
    @torch.no_grad()
    def encode_prompt(self, *args, **named):
        return super().encode_prompt(*args, **named)


@pytest.mark.slow
def test_a_pipeline_that_encodes_without_gradients_is_refused():
    pipe = Detached(**tiny.make("sd15").components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    task = PipelineDenoise(pipe, text={"text_encoder": TEXT}, samples=0)
    with pytest.raises(SpecError, match="text_encoder cannot be trained in Detached: it encodes captions without gradients"):
        task.setup(rewritten(pipe, {}), TaskInfo(SIZE, sizes=(SIZE,)))


@pytest.mark.slow
def test_a_cache_has_pictures_and_no_captions_where_a_text_encoder_trains(tmp_path):
    made = given(tmp_path, "sd15", text={"text_encoder": TEXT}, task={"samples": 0}, train={"steps": 1})
    made["data"]["cache"] = str(tmp_path / "cache")
    done = run_of(made, tmp_path / "run")
    task = done.trainer.task
    files = [*(tmp_path / "cache").rglob("*.safetensors")]
    assert task.latents is not None and len(files) == 5  # a file for each picture, and what the model was traced with
    assert len(task.sized.memory.kept) == 1

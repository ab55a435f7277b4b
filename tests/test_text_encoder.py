"""Passes on the UNet and on its text encoder in one run: as PEFT trains both, resumed, in one file, from HCP-Diffusion."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import peft
import pipelines
import pytest
import runs
import torch
import transformers
import unets
import yaml
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import fxplug
from fxplug.compat.hcp.convert_file import convert
from fxplug.core.errors import SpecError, TrainError
from fxplug.core.spec.yaml_source import parse_yaml
from fxplug.training.random_draws import Draws

pytestmark = pytest.mark.filterwarnings("ignore:.*Already found a `peft_config`")
RATES = {"unet": 1e-2, "text": 5e-3}
TEXT = {"lora": {"at": "re:.*[qv]_proj$", "rank": 2, "lr": RATES["text"]}}
LATENTS = {"sample": [2, 4, 8, 8], "timestep": {"shape": [2], "dtype": "int64", "low": 0, "high": 1000},
           "encoder_hidden_states": [2, 8, 12], "return_dict": False}  # fmt: skip


def unet():
    """One level: its middle block has the text."""
    return unets.sd15_model(levels=1, sample_size=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `sd`, a pipeline, and `photos` with captions."""
    folder = tmp_path_factory.mktemp("text")
    pipe = pipelines.stable_diffusion(folder)
    pipe.unet = unet()
    pipe.save_pretrained(folder / "sd")
    (folder / "photos").mkdir()
    for index, caption in enumerate(["a cat", "dog", "hat", "two"]):
        pixels = np.random.default_rng(index).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/{index}.png")
        (folder / f"photos/{index}.txt").write_text(caption)
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def config(text=(TEXT,), *, options=None, **changed):
    """Two batches of 2 are an epoch."""
    denoise = {"vae": "sd/vae", "scheduler": {"DDPMScheduler": {}}, "samples": 1, "sample_steps": 1, "dropout": 0.0}
    denoise["text"] = {"sd": {"passes": [*text], **(options or {})}}
    made = {
        "model": {"diffusers": {"_class_name": "UNet2DConditionModel", **unet().config}},
        "inputs": LATENTS,
        "passes": [{"lora": {"at": "**.to_?", "rank": 2, "lr": RATES["unet"]}}],
        "train": {"task": {"denoise": denoise}, "steps": 4, "batch": 2, "clip": 0.05, "log": {"tensorboard": False}},
        "data": {"images": "photos"},
        "device": "cpu",
        "verify": False,
    }
    made["model"]["diffusers"] = json.loads(json.dumps(made["model"]["diffusers"]))
    return runs.with_values(made, **changed)


def train(out, *given, resume=False, **changed):
    with runs.sharing():
        return fxplug.train(config(*given, **changed), out=out, resume=resume, quiet=True)


class Watch:
    """Keeps what a run begins with, and its batches."""

    def on_training_start(self, module, ed_state, **kwargs):
        parts = {"unet": module, "text": ed_state.text_encoder}
        self.begun = {part: {k: v.clone() for k, v in one.state_dict().items()} for part, one in parts.items()}
        self.batches = []

    def on_step_end(self, batch, **kwargs):
        self.batches.append(batch)


def updates(state):
    """The low-rank updates of a state dict as PEFT names them, and the base."""
    halves = {"down": "lora_A", "up": "lora_B"}
    own = {key.removeprefix("lora."): value for key, value in state.items() if key.startswith("lora.")}
    named = {}
    for key, value in own.items():
        path, _, half = key.partition(".Lora.")
        if half.split(".")[0] in halves:
            named[f"{path}.{halves[half.split('.')[0]]}.default.weight"] = value
    return named, {key: value for key, value in state.items() if not key.startswith("lora.")}


def with_peft(model, state, names):
    """A model of diffusers or transformers with PEFT's updates in it, and their parameters."""
    own, base = updates(state)
    model.load_state_dict(base, strict=False)
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=names))
    assert set(own) == {key for key, _ in model.named_parameters() if "lora_" in key}
    model.load_state_dict(own, strict=False)
    return {key: parameter for key, parameter in model.named_parameters() if "lora_" in key}


@pytest.mark.slow
def test_both_train_as_in_a_loop_with_peft(tmp_path):
    plugin = runs.plugin("Watch", **{name: hook for name, hook in vars(Watch).items() if name.startswith("on_")})
    run = train(tmp_path, train__plugins=[plugin], train__fuse=False)
    (watch,) = run.trainer.plugins._plugins.values()
    pipe = StableDiffusionPipeline.from_pretrained("sd", safety_checker=None)
    base, text = unet(), pipe.text_encoder
    trained = {"unet": with_peft(base, watch.begun["unet"], r".*\.to_(q|k|v)"),
               "text": with_peft(text, watch.begun["text"], ["q_proj", "v_proj"])}  # fmt: skip
    groups = [{"params": [*trained[part].values()], "lr": RATES[part]} for part in trained]
    optimizer, every = torch.optim.AdamW(groups, weight_decay=0.0), [p for group in groups for p in group["params"]]
    scheduler, losses = DDPMScheduler(), []
    for step, batch in enumerate(watch.batches, 1):
        draw = Draws(0, step)
        position = draw.uniform(2)
        with torch.no_grad():
            found = pipe.vae.encode(batch["image"]).latent_dist
            latents = (found.mean + found.std * draw.like(found.mean)) * pipe.vae.config.scaling_factor
        noise, times = draw.like(latents), (position * 1000).long()
        ids = pipe.tokenizer(batch["caption"], padding="max_length", truncation=True, return_tensors="pt").input_ids
        predicted = base(scheduler.add_noise(latents, noise, times), times, text(ids).last_hidden_state).sample
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(every, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.testing.assert_close([record["loss"] for record in run.history], losses, rtol=0, atol=1e-6)
    modules = {"unet": run.module, "text": run.trainer.task.encoder.traced}
    for part, own in trained.items():
        got = updates(modules[part].state_dict())[0]
        assert any(not torch.equal(got[key], updates(watch.begun[part])[0][key]) for key in got)
        torch.testing.assert_close(got, {key: p.detach() for key, p in own.items()}, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [None, []], ids=["both", "the encoder alone"])
def test_the_loss_falls(tmp_path, passes):
    changed = {} if passes is None else {"passes": passes}
    text = {"lora": {"at": "**.fc?", "rank": 4, "lr": 0.05}}
    test = {"data__test": "photos", "train__test": {"every": 2}, "train__steps": 16, "train__clip": None}
    run = train(tmp_path, [text], **changed, **test)
    tests = [line["test"]["loss"] for line in runs.logged(run.out) if "test" in line]
    assert tests[-1] < tests[0] - 1e-4
    names = {group["name"]: group["lr"] for group in run.trainer.groups}
    assert names == {**({"lora": RATES["unet"]} if passes is None else {}), "text_encoder.lora": 0.05}
    assert "load_lora_weights" in run.use
    keys = load_file(run.out / "adapter/pytorch_lora_weights.safetensors")
    assert {key.split(".")[0] for key in keys} == {"text_encoder", *({"unet"} if passes is None else ())}


@pytest.mark.slow
def test_it_resumes_to_the_bit_with_averages_and_the_best(tmp_path):
    """The encoder's dropout is on in training and off in tests, and its random numbers go on."""
    text = {"lora": {"at": "re:.*[qv]_proj$", "rank": 2, "dropout": 0.5}}
    given = {"train__ema": 0.9, "train__save": {"every": 2, "keep": 9}, "train__fuse": False, "train__steps": 6}
    given |= {"data__test": "photos", "train__test": {"every": 1, "best": True}}
    whole = train(tmp_path / "a", [text], **given)
    part = train(tmp_path / "b", [text], resume=tmp_path / "a/checkpoints/step-00000002", **given)
    assert [r["loss"] for r in part.history[-4:]] == [r["loss"] for r in whole.history[-4:]]
    for name in ("weights", "ema"):
        first, second = (load_file(tmp_path / run / f"checkpoints/step-00000006/{name}.safetensors") for run in "ab")
        assert first.keys() == second.keys() and any(key.startswith("text_encoder.lora.") for key in first)
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    ids = torch.tensor([[0, 5, 6, 7, 1, 1, 1, 1]])
    texts = {name: fxplug.load(tmp_path / "a" / name / "text_encoder") for name in ("text", "text_ema")}
    found = {name: one(ids).last_hidden_state for name, one in texts.items()}
    assert torch.equal(found["text"], whole.trainer.task.encoder.model(ids).last_hidden_state)
    assert torch.equal(found["text"], found["text_ema"])  # what tested best is the averaged weights
    with pytest.raises(TrainError, match=r"text_encoder\.lora.*rank: 2 then, 3 now"):
        train(tmp_path / "c", [{"lora": {"at": "re:.*[qv]_proj$", "rank": 3}}], resume=tmp_path / "a", **given)


@pytest.mark.slow
def test_one_adapter_file_has_both_and_the_stock_pipeline_loads_it(tmp_path):
    run = train(tmp_path / "run")
    file = run.out / "adapter/pytorch_lora_weights.safetensors"
    assert {key.split(".")[0] for key in load_file(file)} == {"unet", "text_encoder"}
    described = StableDiffusionPipeline.lora_state_dict(run.out / "adapter", return_lora_metadata=True)[2]
    assert described["unet.r"] == described["text_encoder.r"] == 2
    assert run.use.endswith(f"pipe.load_lora_weights({str(run.out / 'adapter')!r})")
    plain, ours = (StableDiffusionPipeline.from_pretrained("sd", safety_checker=None) for _ in range(2))
    base = {key: value for key, value in run.module.state_dict().items() if not key.startswith("lora.")}
    plain.unet.load_state_dict(base)
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "latent"}

    def draw(pipe):
        return pipelines.quiet(pipe)("a cat", generator=torch.Generator().manual_seed(1), **call).images

    before = draw(plain)
    plain.load_lora_weights(run.out / "adapter")
    want = draw(plain)
    ours.unet, ours.text_encoder = plain.unet, fxplug.load(run.out / "text/text_encoder")
    torch.testing.assert_close(draw(ours), want, rtol=1e-5, atol=1e-5)
    ours.text_encoder = StableDiffusionPipeline.from_pretrained("sd", safety_checker=None).text_encoder
    assert all(not torch.allclose(other, want, atol=1e-4) for other in (before, draw(ours)))
    ids = plain.tokenizer(["a cat"], padding="max_length", return_tensors="pt").input_ids
    both = [one(ids).last_hidden_state for one in (plain.text_encoder, run.trainer.task.encoder.model)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)
    with runs.sharing():
        again = fxplug.rewrite({**config(), "passes": [{"adapter": {"file": str(file)}}], "train": None, "data": None})
    sample, time, states = torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.randn(2, 8, 12)
    found = [one.eval()(sample, time, states, return_dict=False)[0] for one in (run.module, plain.unet, again.module)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_in_bf16_the_updates_are_float32(tmp_path, dtype):
    """The encoder is under the run's autocast, as accelerate has it; what it gives has the encoder's dtype."""
    floats = {name: {"shape": LATENTS[name], "dtype": dtype or "float32"} for name in ("sample", "encoder_hidden_states")}
    given = {"dtype": dtype, "inputs": {**LATENTS, **floats}, "train__precision": "bf16", "train__steps": 2}
    run = train(tmp_path, options={"dtype": dtype}, **given)
    text = run.trainer.task.encoder.traced
    own = [p for name, p in text.named_parameters() if name.startswith("lora.")]
    state = run.trainer.optimizer.state
    assert all(state[p]["exp_avg"].dtype == torch.float32 for p in own)
    assert {p.dtype for p in text.parameters()} == {getattr(torch, dtype or "float32")}


def test_an_encoder_that_is_not_clips_has_no_adapter_file(place, tmp_path):
    """T5, which is given the mask of its padding."""
    sizes = {"vocab_size": 60, "d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2, "pad_token_id": 1}
    torch.manual_seed(0)
    t5 = transformers.T5EncoderModel(transformers.T5Config(**sizes, decoder_start_token_id=0))
    t5.save_pretrained(place / "t5/text_encoder")
    shutil.copytree(place / "sd/tokenizer", place / "t5/tokenizer")
    made = config()
    made["train"]["task"]["denoise"]["text"] = {"t5": {"passes": [{"lora": {"at": "**.SelfAttention.?", "rank": 2}}]}}
    with runs.sharing(), pytest.warns(UserWarning, match="needs a UNet with CLIP's text encoder"):
        run = fxplug.train(made, out=tmp_path / "run", quiet=True)
    assert "text_encoder.lora" in {group["name"] for group in run.trainer.groups} and not (run.out / "adapter").exists()
    assert run.use.endswith(f"pipe.text_encoder = fxplug.load({str(run.out / 'text/text_encoder')!r})")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own, of the text
@pytest.mark.parametrize("key", ["compile", "checkpointing"])
def test_what_is_done_to_the_module_leaves_the_encoder(tmp_path, key, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, other = (train(tmp_path / str(on), train__fuse=False, **{f"train__{key}": on}) for on in (False, True))
    torch.testing.assert_close([r["loss"] for r in other.history], [r["loss"] for r in plain.history], rtol=1e-4, atol=1e-5)
    texts = [updates(run.trainer.task.encoder.traced.state_dict())[0] for run in (other, plain)]
    torch.testing.assert_close(*texts, rtol=1e-3, atol=1e-4)


def test_what_trains_of_the_base_of_an_encoder_is_beside_its_passes(tmp_path):
    with pytest.warns(UserWarning, match=r"adapter/ is not written; module/ and text/ have all trained weights"):
        run = train(tmp_path, options={"trainable": ["final_layer_norm"], "lr": 0.25}, train__steps=1)
    groups = {group["name"]: (group["lr"], len(group["names"])) for group in run.trainer.groups}
    assert groups["text_encoder"] == (0.25, 2) and groups["text_encoder.lora"] == (RATES["text"], 8)
    moved = run.trainer.task.encoder.traced.state_dict()["final_layer_norm.bias"]
    assert moved.abs().max() > 0.2 and not (run.out / "adapter").exists()
    assert f"pipe.text_encoder = fxplug.load({str(run.out / 'text/text_encoder')!r})" in run.use


@pytest.mark.slow
def test_a_pass_of_an_encoder_that_does_not_train_stays_as_it_is(tmp_path):
    frozen = {"lora": {**TEXT["lora"], "train": False}}
    run = train(tmp_path, [frozen], train__steps=1)
    assert [group["name"] for group in run.trainer.groups] == ["lora"]
    with pytest.raises(TrainError, match="nothing trains: no pass of the module or of the text encoder"):
        train(tmp_path / "none", [frozen], passes=[])


def test_a_layer_that_is_not_read_gets_no_gradient(tmp_path):
    with pytest.raises(TrainError, match=r"no gradient reached text_encoder\.lora\.encoder\.layers\.1\.self_attn"):
        train(tmp_path, options={"layer": -2})


BOTH = "lora: {at: '**.q_proj', slots: 2}"
WRONG = {
    "no such pass": (["- lorra: {}"], {}, r"run.yaml:\d+: .*did you mean 'lora'"),
    "no such layer": (["- lora: {at: '**.to_q'}"], {}, r"run.yaml:\d+: .*in the text encoder: .*to_q"),
    "slots": ([f"- {BOTH}"], {}, r"run.yaml:\d+: .*pass 'lora' has slots, which cannot be trained"),
    "an input": (["- controlnet: {}"], {}, r"run.yaml:\d+: .*(has inputs|no region|cannot)"),
    "twice": (["- lora: {at: '**.q_proj'}"] * 2, {}, r"run.yaml:\d+: .*another pass is named 'lora'"),
    "no list": (["lora: {}"], {}, r"run.yaml:\d+: .*must be a list"),
    "shard": (["- lora: {at: '**.q_proj'}"], {"train__shard": True}, r"run.yaml:\d+: .*one process only, without 'shard'"),
    "a clash": (
        ["- lora: {at: '**.q_proj'}"],
        {"passes": [{"lora": {"at": "**.to_q", "name": "text_encoder"}}]},
        r"run.yaml:\d+: .*a pass 'text_encoder'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_train_is_told_with_its_line(case, place, tmp_path):
    lines, changed, message = WRONG[case]
    made = config([], **changed)
    made["train"]["task"]["denoise"]["text"] = {"sd": {"passes": yaml.safe_load("\n".join(lines))}}
    (place / "run.yaml").write_text(yaml.safe_dump(made))
    with runs.sharing(), pytest.raises((SpecError, TrainError), match=message):
        fxplug.train(place / "run.yaml", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_two_encoders_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "sd"):
        (tmp_path / name).symlink_to(place / name)
    (tmp_path / "xl/text_encoder_2").mkdir(parents=True)
    for name in ("tokenizer", "text_encoder"):
        (tmp_path / "xl" / name).symlink_to(place / "sd" / name)
    made = config()
    made["train"]["task"]["denoise"]["text"] = {"xl": {"passes": [TEXT]}}
    with runs.sharing(), pytest.raises(SpecError, match=r"text\.xl\.passes: .*two text encoders"):
        fxplug.train(made, out=tmp_path / "run", quiet=True)


HCP = """
model: {pretrained_model_name_or_path: sd}
train: {train_steps: 2, scheduler: {name: constant}}
data: {dataset1: {batch_size: 2, source: {one: {img_root: photos}}}}
lora_unet: [{lr: 1e-3, rank: 2, layers: ['re:.*attn.?$']}]
lora_text_encoder: [{lr: 1e-4, rank: 2, layers: ['re:.*self_attn$']}]
plugin_unet:
  u: {_target_: hcp_guide.LoraBlock, lr: 2e-3, rank: 1, layers: [conv_in]}
plugin_TE:
  t: {_target_: hcp_guide.LoraBlock, lr: 2e-4, rank: 1, layers: ['re:.*fc1$']}
"""


@pytest.mark.slow
def test_both_parts_of_a_configuration_of_hcp_diffusion_are_one_run(place, tmp_path):
    (place / "hcp.yaml").write_text(HCP)
    (place / "model.yaml").write_text(yaml.safe_dump({key: config()[key] for key in ("model", "inputs")}))
    done = convert("hcp.yaml", model="model.yaml", out=place / "out.yaml")
    assert not [note for note in done.notes if "TE" in note or "lora_text_encoder" in note]
    (place / "out.yaml").write_text(done.text)
    with runs.sharing():
        run = fxplug.train(place / "out.yaml", out=tmp_path / "run", quiet=True, set=["device=cpu"])
    rates = {group["name"]: group["lr"] for group in run.trainer.groups}
    assert rates == {"u": 2e-3, "lora_block_0": 1e-3, "text_encoder.t": 2e-4, "text_encoder.lora_block_0": 1e-4}
    apart = convert("hcp.yaml", model="model.yaml", part="unet")
    assert parse_yaml(apart.text).data["train"]["task"]["denoise"]["text"] == "sd"
    assert any("lora_text_encoder" in note and "--part TE" in note for note in apart.notes)
    assert [next(iter(entry)) for entry in parse_yaml(convert("hcp.yaml", part="TE").text).data["passes"]] == [
        next(iter(entry)) for entry in parse_yaml(done.text).data["train"]["task"]["denoise"]["text"]["sd"]["passes"]
    ]


def test_the_encoder_of_hcp_diffusion_alone_is_a_run_too(place):
    text = HCP.partition("lora_unet")[0] + "lora_text_encoder: [{lr: 1e-4, rank: 2, layers: ['re:.*self_attn$']}]\n"
    (place / "hcp.yaml").write_text(text)
    read = parse_yaml(convert("hcp.yaml").text).data
    assert read["passes"] == [] and len(read["train"]["task"]["denoise"]["text"]["sd"]["passes"]) == 1
    (place / "hcp.yaml").write_text(f"{text}merge: {{group1: {{type: TE, base_model_alpha: 1.0}}}}\n")
    assert any("merges into the UNet alone" in note for note in convert("hcp.yaml").notes)

"""The denoising task: its losses are those of diffusers' training scripts, written out here over the schedulers."""

from __future__ import annotations

import re
from functools import cache

import diffusers
import pytest
import small
import torch
import torch.nn.functional as F
import unets
from diffusers import AutoencoderKL, AutoencoderTiny, DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3, compute_snr
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxplug
from fxplug.core.errors import SpecError
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.denoise import Denoise
from fxplug.training.tasks.model_call import list_inputs
from fxplug.training.tasks.task import TaskInfo, compute_means, make_task

SIDE = 16
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 8], "down_block_types": ["DownEncoderBlock2D"] * 2,
       "up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 4, "latent_channels": 4, "scaling_factor": 0.3,
       "shift_factor": 0.1}  # fmt: skip


def unet(channels=3, out=None, text=None, classes=None):
    attention = {"cross_attention_dim": text or 8, "attention_head_dim": 2}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    if text is None:
        down, up = ("DownBlock2D",) * 2, ("UpBlock2D",) * 2
        attention["mid_block_type"] = None
    return small.seeded(lambda: UNet2DConditionModel(
        sample_size=SIDE, in_channels=channels, out_channels=out or channels, block_out_channels=(8, 8), layers_per_block=1,
        down_block_types=down, up_block_types=up, norm_num_groups=4, num_class_embeds=classes, **attention,
    ))  # fmt: skip


@cache
def traced(channels=3, out=None, text=None, classes=None):
    inputs = {"sample": torch.randn(2, channels, SIDE, SIDE), "timestep": torch.tensor([3, 5]), "return_dict": False}
    inputs["encoder_hidden_states"] = torch.randn(2, 5, text) if text else None
    if classes:
        inputs["class_labels"] = torch.tensor([0, 1])
    return fxplug.trace(unet(channels, out, text, classes), (), inputs)


def batch(n=4, size=SIDE, channels=3, **more):
    made = torch.Generator().manual_seed(9)
    image = torch.rand(n, channels, size, size, generator=made) * 2 - 1
    return {"image": image, "index": torch.arange(n), "name": [f"{i}.png" for i in range(n)], **more}


def ready(module, size=SIDE, *, classes=None, base=None, examples=None, **options):
    task = Denoise(**options)
    info = {"base": base} if base else {}
    task.setup(module, TaskInfo((size, size), classes=classes, examples=examples, **info))
    return task


def drawn(b, shape):
    """Position and noise, drawn as the task draws them."""
    draw = Draws(0, 7)
    return draw.uniform(b), draw.normal(b, *shape)


BETAS = {
    "linear": {},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "zero terminal SNR": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
                          "rescale_betas_zero_snr": True},
}  # fmt: skip


CASES = [(betas, p) for betas in BETAS for p in ("epsilon", "v_prediction", "sample") if (betas[0], p[0]) != ("z", "e")]


@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize(("betas", "prediction"), CASES)
def test_losses_are_those_of_train_text_to_image(betas, prediction, gamma):
    """train_text_to_image.py, lines from `noise = ...` to `loss = ...`."""
    module, b = traced(), batch()
    task = ready(module, scheduler={"DDPMScheduler": BETAS[betas]}, prediction=prediction, snr_gamma=gamma)
    got = task.loss(module, b, Draws(0, 7))

    noise_scheduler = DDPMScheduler(**BETAS[betas], prediction_type=prediction)
    u, noise = drawn(4, (3, SIDE, SIDE))
    timesteps = (u * noise_scheduler.config.num_train_timesteps).long()
    noisy = noise_scheduler.add_noise(b["image"], noise, timesteps)
    target = {"epsilon": noise, "sample": b["image"]}.get(prediction)
    if target is None:
        target = noise_scheduler.get_velocity(b["image"], noise, timesteps)
    model_pred = unet()(noisy, timesteps, None, return_dict=False)[0]
    if gamma is None:
        loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
    else:
        snr = compute_snr(noise_scheduler, timesteps)
        weights = torch.stack([snr, gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
        if prediction == "epsilon":
            weights = weights / snr
        elif prediction == "v_prediction":
            weights = weights / (snr + 1)
        loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")
        loss = loss.mean(dim=list(range(1, len(loss.shape)))) * weights
        loss = loss.mean()
    assert got.dtype == torch.float32 and got.requires_grad
    torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
@pytest.mark.parametrize("density", ["uniform", "logit_normal", {"mode": {"scale": 1.29}}, {"logit_normal": {"mean": 0.5}}])
def test_losses_are_those_of_train_dreambooth_sd3(density, weighting, monkeypatch):
    """train_dreambooth_sd3.py, lines from `u = compute_density...` to `loss = ...`, with a shift of 3."""
    module, b = traced(), batch()
    scheduler = {"FlowMatchEulerDiscreteScheduler": {"shift": 3.0}}
    task = ready(module, scheduler=scheduler, density=density, weighting=weighting)
    got = task.loss(module, b, Draws(0, 7))

    noise_scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    draw = Draws(0, 7)
    scheme = density if isinstance(density, str) else next(iter(density))
    mean = density["logit_normal"]["mean"] if scheme == "logit_normal" and density != scheme else 0.0
    # the script's own function, on the task's numbers
    numbers = draw.normal(4) if scheme == "logit_normal" else draw.uniform(4)
    monkeypatch.setattr(torch, "rand", lambda size, **_: numbers)
    monkeypatch.setattr(torch, "normal", lambda mean, std, size, **_: numbers * std + mean)
    u = compute_density_for_timestep_sampling(scheme, 4, logit_mean=mean, logit_std=1.0, mode_scale=1.29)
    monkeypatch.undo()
    noise = draw.normal(4, 3, SIDE, SIDE)
    indices = (u * noise_scheduler.config.num_train_timesteps).long()
    timesteps = noise_scheduler.timesteps[indices]
    sigmas = noise_scheduler.sigmas[[(noise_scheduler.timesteps == t).nonzero().item() for t in timesteps]].view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * b["image"] + sigmas * noise
    model_pred = unet()(noisy, timesteps, None, return_dict=False)[0]
    target = noise - b["image"]
    weights = compute_loss_weighting_for_sd3(weighting, sigmas=sigmas)
    loss = torch.mean((weights.float() * (model_pred.float() - target.float()) ** 2).reshape(4, -1), 1).mean()
    torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)


def test_times_of_flow_matching_are_scaled():
    seen = []

    def forward(self, hidden_states, timestep):
        seen.append(timestep)
        return (hidden_states * timestep[:, None, None, None],)

    module, b = small.net(forward), batch()
    losses = [ready(module, scheduler="FlowMatchEulerDiscreteScheduler", time_scale=scale).loss(module, b, Draws(0, 1))
              for scale in (1.0, 0.001)]  # fmt: skip
    assert losses[0] != losses[1]
    torch.testing.assert_close(seen[0] * 0.001, seen[1])
    assert seen[1].min() > 0 and seen[1].max() <= 1


@pytest.mark.parametrize("kind", ["folder", "mapping", "tiny"])
def test_latents_are_a_sample_of_the_vae_in_its_scale(kind, tmp_path):
    if kind == "tiny":
        vae = small.seeded(lambda: AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                           num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), scaling_factor=0.7))  # fmt: skip
    else:
        vae = small.seeded(lambda: AutoencoderKL.from_config({**VAE, "in_channels": 3}))
    vae.save_pretrained(tmp_path / "vae")
    spec = {"model": VAE, "weights": str(tmp_path / "vae/diffusion_pytorch_model.safetensors")} if kind == "mapping" else "vae"
    if kind == "mapping":
        spec["model"] = {"diffusers": VAE}
    module, b = traced(4), batch(size=32)
    task = ready(module, 32, vae=spec, base=tmp_path)
    got = task.loss(module, b, Draws(0, 7))

    draw = Draws(0, 7)
    u = draw.uniform(4)
    with torch.no_grad():
        if kind == "tiny":
            x = vae.encode(b["image"]).latents * 0.7
        else:
            dist = vae.encode(b["image"]).latent_dist
            x = (dist.mean + dist.std * draw.normal(4, 4, SIDE, SIDE) - 0.1) * 0.3
    noise, scheduler = draw.normal(4, 4, SIDE, SIDE), DDPMScheduler()
    t = (u * 1000).long()
    expected = F.mse_loss(unet(4)(scheduler.add_noise(x, noise, t), t, None).sample, noise)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert task.shape == (4, SIDE, SIDE) and not any(p.requires_grad for p in task.vae.module.parameters())
    torch.testing.assert_close(task.vae.decode(x), vae.decode(x / 0.7 if kind == "tiny" else x / 0.3 + 0.1).sample)
    pictures = task.samples(module)
    assert pictures.shape == (8, 3, 32, 32) and pictures.min() >= 0 and pictures.max() <= 1


def words(captions, width=8):
    """A caption as a tensor: its letters."""
    out = torch.zeros(len(captions), 5, width)
    for row, caption in zip(out, captions, strict=True):
        for place, letter in enumerate(caption[:5]):
            row[place] = ord(letter) / 100
    return out


def named(captions):
    return {"encoder_hidden_states": words(captions), "other": torch.ones(len(captions))}


class Recorded(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, []

    def forward(self, **given):
        self.calls.append(given)
        return self.module(**given)


@pytest.mark.parametrize("use", ["test_denoise:words", {"test_denoise:words": {"width": 8}}, "test_denoise:named"])
def test_captions_reach_the_model_and_some_are_dropped(use):
    module = traced(text=8)
    task = ready(module, text=use, dropout=0.5)
    seen, captions = Recorded(module), [f"cat{i}" for i in range(40)]
    loss = task.loss(seen, batch(40, caption=captions), Draws(0, 7))
    ((given,),) = [seen.calls]
    null = words([""])[0]
    empty = [torch.equal(row, null) for row in given["encoder_hidden_states"]]
    assert 8 < sum(empty) < 32
    kept = [torch.equal(row, words([c])[0]) for row, c in zip(given["encoder_hidden_states"], captions, strict=True)]
    assert [a ^ b for a, b in zip(empty, kept, strict=True)] == [True] * 40
    assert loss.isfinite() and given["return_dict"] is False
    task.test(seen, [batch(2, caption=["a", "b"])])
    assert torch.equal(seen.calls[-1]["encoder_hidden_states"], words(["a", "b"]))  # a test drops nothing


@pytest.mark.parametrize("negative", ["", "blur"])
def test_train_guidance_has_each_sample_for_both_halves_of_the_batch(negative):
    """DreamArtist's training (arXiv 2211.11337): the same noise and time for both prompts, and one guided prediction."""
    module, captions = traced(text=8), ["cat", "dog", "owl"]
    task = ready(module, text="test_denoise:words", train_guidance=3.0, negative=negative, guidance=2.0, sample_steps=2)
    seen = Recorded(module)
    loss = task.loss(seen, batch(3, caption=captions), Draws(0, 7))
    ((given,),) = [seen.calls]
    assert torch.equal(given["encoder_hidden_states"], torch.cat([words([negative] * 3), words(captions)]))
    for key in ("sample", "timestep"):
        first, second = given[key].chunk(2)
        assert torch.equal(first, second) and len(first) == 3
    with torch.no_grad():
        both = unet(text=8)(given["sample"], given["timestep"], given["encoder_hidden_states"]).sample
    draw = Draws(0, 7)
    draw.uniform(3)
    without, own = both.chunk(2)
    expected = F.mse_loss(without + 3.0 * (own - without), draw.normal(3, 3, SIDE, SIDE))
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-5)
    seen.calls.clear()
    task.generate(seen, {"caption": captions})
    assert [len(call["sample"]) for call in seen.calls] == [6, 6]  # so that blocks for a half of the batch see their half
    assert torch.equal(seen.calls[0]["encoder_hidden_states"], given["encoder_hidden_states"])


@pytest.mark.parametrize(
    "name, value, both",
    [
        ("runt_size", 0, 0),  # what a plugin with a step hook is given beside the data
        ("strength", 0.5, 0.5),
        ("flag", True, True),
        ("scale", torch.tensor(2.0), torch.tensor(2.0)),
        ("paths", ["a", "b", "c"], ["a", "b", "c"] * 2),
        ("sizes", (1, 2, 3), [1, 2, 3] * 2),
        ("crops", torch.arange(6).view(3, 2), torch.arange(6).view(3, 2).repeat(2, 1)),
        ("nothing", None, None),
    ],
)
def test_train_guidance_doubles_what_is_for_each_sample(name, value, both, monkeypatch):
    """What is one for the whole batch stays one; the loss is that of the batch without it."""
    module, captions, given = traced(text=8), ["cat", "dog", "owl"], []
    task = ready(module, text="test_denoise:words", train_guidance=3.0)
    predict = task._predict
    monkeypatch.setattr(task, "_predict", lambda *args: given.append(args[-1]) or predict(*args))
    alone = task.loss(module, batch(3, caption=captions), Draws(0, 7))
    loss = task.loss(module, batch(3, caption=captions, **{name: value}), Draws(0, 7))
    assert torch.equal(loss, alone)
    found = given[-1][name]
    assert torch.equal(found, both) if isinstance(both, torch.Tensor) else found == both


def test_train_guidance_needs_captions():
    for options in ({"train_guidance": 2.0}, {"negative": "blur"}):
        with pytest.raises(SpecError, match=f"{next(iter(options))} needs captions"):
            ready(traced(), **options)


def test_labels_reach_the_model_and_the_last_row_stands_for_none():
    module = traced(classes=11)
    classes = [str(n) for n in range(10)]
    task = ready(module, dropout=0.3, classes=classes, guidance=2.0, samples=12, sample_steps=2)
    assert task.null_label == 10
    seen = Recorded(module)
    task.loss(seen, batch(60, label=torch.arange(60) % 10), Draws(0, 7))
    given = seen.calls[0]["class_labels"]
    dropped = given == 10
    assert 6 < dropped.sum() < 32 and torch.equal(given[~dropped], (torch.arange(60) % 10)[~dropped])
    seen.calls.clear()
    task.samples(seen)
    assert [c["class_labels"].tolist() for c in seen.calls[:2]] == [[*range(10), 0, 1], [10] * 12]


def test_guidance_and_the_loop_are_those_of_a_pipeline():
    """diffusers' own loop: DDIM from the same noise, the guided prediction at each step."""
    module = traced(classes=11)
    task = ready(module, prediction="v_prediction", scheduler={"DDPMScheduler": {"rescale_betas_zero_snr": True}},
                 null_label=10, guidance=3.0, samples=[4, 7], sample_steps=4)  # fmt: skip
    pictures = task.samples(module)
    options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    scheduler = diffusers.DDIMScheduler(prediction_type="v_prediction", **options)
    scheduler.set_timesteps(4)
    assert scheduler.timesteps[0] == 999
    x = torch.stack([torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(n)) for n in range(2)])
    model = unet(classes=11)
    with torch.no_grad():
        for t in scheduler.timesteps:
            with_label = model(x, t, None, class_labels=torch.tensor([4, 7])).sample
            without = model(x, t, None, class_labels=torch.tensor([10, 10])).sample
            x = scheduler.step(without + 3.0 * (with_label - without), t, x).prev_sample
    torch.testing.assert_close(pictures, (x / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-5)
    torch.rand(3)
    assert torch.equal(task.samples(module), pictures)
    again = task.generate(module, {"label": torch.tensor([7])}, steps=4, guidance=3.0, seed=1)
    torch.testing.assert_close(again, pictures[1:], rtol=1e-4, atol=1e-5)
    assert not torch.equal(task.generate(module, {"label": torch.tensor([7])}, guidance=1.0, seed=1), again)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' Euler on a new numpy
@pytest.mark.parametrize("scheduler", [
    "DDPMScheduler", "EulerDiscreteScheduler", {"FlowMatchEulerDiscreteScheduler": {"shift": 3.0}}, "PNDMScheduler",
    {"FlowMatchEulerDiscreteScheduler": {"use_dynamic_shifting": True}}, "EulerAncestralDiscreteScheduler",
])  # fmt: skip
def test_samples_of_a_perfect_model_are_the_data(scheduler):
    """A model that knows the data is one picture: every loop must come to it."""
    picture = torch.linspace(-0.8, 0.8, SIDE * SIDE).view(1, 1, SIDE, SIDE)

    def knows(self, sample, timestep):
        if task.noise.prediction == "flow":
            sigma = (timestep / 1000).view(-1, 1, 1, 1)
            return (sample - picture) / sigma
        kept = task.noise.scheduler.alphas_cumprod[timestep.long()].view(-1, 1, 1, 1)
        return (sample - kept.sqrt() * picture) / (1 - kept).sqrt()

    module = small.net(knows)
    task = ready(module, scheduler=scheduler, samples=3, sample_steps=12)
    task.shape = (1, SIDE, SIDE)
    pictures = task.samples(module)
    tolerance = 0.05 if "Ancestral" in str(scheduler) or "PNDM" in str(scheduler) else 0.02
    torch.testing.assert_close(pictures, (picture / 2 + 0.5).expand(3, -1, -1, -1), rtol=0, atol=tolerance)
    b = batch(4, channels=1)
    b["image"] = picture.expand(4, -1, -1, -1)
    assert task.loss(module, b, Draws(0, 1)) < 1e-6


def test_a_test_is_the_same_in_any_batches_and_processes():
    module = traced()
    task, whole = ready(module), batch(8)
    torch.manual_seed(1)
    one = compute_means(task.test(module, [whole]))
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in range(0, 8, 2)]
    totals = [task.test(module, parts[:1]), task.test(module, parts[1:])]
    both = {"loss": tuple(sum(t["loss"][i] for t in totals) for i in (0, 1))}
    assert both["loss"][1] == 32 and one["loss"] == pytest.approx(compute_means(both)["loss"], rel=1e-6)


def test_two_processes_have_the_loss_of_one():
    module = traced()
    task, whole = ready(module, snr_gamma=5.0, density="logit_normal"), batch(8)
    halves = [{k: v[i : i + 4] for k, v in whole.items()} for i in (0, 4)]
    parts = [task.loss(module, half, Draws(3, 5, rank=rank, world=2)) for rank, half in enumerate(halves)]
    torch.testing.assert_close(sum(parts) / 2, task.loss(module, whole, Draws(3, 5)))


def test_a_learned_variance_is_left_out():
    module = traced(out=6)
    task, b = ready(module), batch()
    u, noise = drawn(4, (3, SIDE, SIDE))
    t = (u * 1000).long()
    predicted = unet(out=6)(DDPMScheduler().add_noise(b["image"], noise, t), t, None).sample[:, :3]
    torch.testing.assert_close(task.loss(module, b, Draws(0, 7)), F.mse_loss(predicted, noise), rtol=1e-5, atol=0)
    assert task.samples(module).shape[1] == 3


@pytest.mark.slow
def test_a_controlnet_learns_from_the_condition():
    """train_controlnet.py: only the ControlNet's weights move, and the condition goes into its own input."""
    base = unets.sd15()
    gm = fxplug.trace(base.model, (), {**base.kwargs, "timestep": torch.tensor([1, 2])})
    new = fxplug.apply(gm, fxplug.load_pass("controlnet", network=unets.control(base.model)))
    condition = unets.picture(base)

    def examples(n):
        return {**batch(n, channels=4), "condition": condition[:n], "caption": ["a"] * n}

    task = ready(new, text={"test_denoise:words": {"width": 12}}, examples=examples, samples=2, sample_steps=2)
    assert task.call.mapping["cond"] == "condition"
    one, other = (task.loss(new, {**examples(2), "condition": c}, Draws(0, 7)) for c in (condition, 1 - condition))
    assert one != other
    one.backward()
    assert all(p.grad is not None for k, p in new.named_parameters() if k.startswith("controlnet."))
    assert task.samples(new).shape == (2, 4, SIDE, SIDE)
    with pytest.raises(SpecError, match="the data has no 'condition', which 'call' passes to the model"):
        task.loss(new, batch(2, channels=4, caption=["a", "b"]), Draws(0, 7))


@pytest.mark.slow
def test_a_call_can_be_written_out():
    xl = unets.sdxl()
    inputs = {**xl.kwargs, "timestep": torch.tensor([1, 2])}
    gm = fxplug.trace(xl.model, (), inputs)
    added = {"text_embeds": "pooled", "time_ids": "time_ids"}
    call = {"sample": "noisy", "timestep": "time", "encoder_hidden_states": "text", "added_cond_kwargs": added}
    task = ready(gm, text={"test_denoise:words": {"width": 24}}, call=call)
    pooled = inputs["added_cond_kwargs"]
    b = batch(2, channels=4, caption=["a", "b"], pooled=pooled["text_embeds"], time_ids=pooled["time_ids"])
    assert task.loss(gm, b, Draws(0, 7)).isfinite()
    with pytest.raises(SpecError, match=r"needs 'added_cond_kwargs', and no value is set for it; write call: \{added_cond"):
        ready(gm, text={"test_denoise:words": {"width": 24}})


def test_text_encoders_of_transformers_come_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "c": 3, "at</w>": 4, "a": 5, "t</w>": 6, "cat</w>": 7}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[("a", "t</w>"), ("c", "at</w>")], model_max_length=6)
    tokenizer.save_pretrained(tmp_path / "sd/tokenizer")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 4}
    tokens = {"vocab_size": 8, "max_position_embeddings": 6, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPTextConfig(**sizes, **tokens)
    for kind in (transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection):
        encoder = small.seeded(lambda kind=kind: kind(config)).eval()
        encoder.save_pretrained(tmp_path / "sd/text_encoder")
        module = traced(text=8)
        task = ready(module, text="sd", base=tmp_path)
        found = task.text(["a cat", ""])
        ids = torch.tensor([[0, 2, 7, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
        own = encoder(ids)
        torch.testing.assert_close(found["encoder_hidden_states"], own.last_hidden_state)
        torch.testing.assert_close(found["text_embeds"], own.text_embeds if "text_embeds" in own else own.pooler_output)
        assert task.loss(module, batch(2, caption=["a cat", "a"]), Draws(0, 7)).isfinite()
    before_last = ready(module, text={"sd": {"layer": -2}}, base=tmp_path).text(["a cat"])["encoder_hidden_states"]
    torch.testing.assert_close(before_last, encoder(ids[:1], output_hidden_states=True).hidden_states[-2])
    t5 = transformers.T5Config(vocab_size=8, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    small.seeded(lambda: transformers.T5EncoderModel(t5)).save_pretrained(tmp_path / "sd/text_encoder")
    found = ready(module, text="sd", base=tmp_path).text(["a cat", "a"])
    assert found["encoder_attention_mask"].sum(1).tolist() == [4, 3] and "text_embeds" not in found


def test_a_scheduler_comes_from_a_folder(tmp_path):
    diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012,
                                     prediction_type="v_prediction").save_pretrained(tmp_path / "sd/scheduler")  # fmt: skip
    module = traced()
    task = ready(module, scheduler="sd", base=tmp_path)
    assert task.noise.prediction == "v_prediction" and isinstance(task.noise.sampler(), diffusers.EulerDiscreteScheduler)
    same = ready(module, scheduler={"EulerDiscreteScheduler": {"beta_schedule": "scaled_linear", "beta_start": 0.00085,
                 "beta_end": 0.012}}, prediction="v_prediction")  # fmt: skip
    assert task.loss(module, batch(), Draws(0, 7)) == same.loss(module, batch(), Draws(0, 7))


WRONG = {
    "FlowMatchEulerDiscreteScheduler is for flow matching, where the prediction is 'flow' (noise - x0), not 'epsilon'; DDPM":
        {"scheduler": "FlowMatchEulerDiscreteScheduler", "prediction": "epsilon"},
    "DDPMScheduler supports the predictions epsilon, v_prediction, sample, not 'flow'; flow matching needs FlowMatchEuler":
        {"prediction": "flow"},
    "prediction: must be one of epsilon, v_prediction, sample, flow, not 'eps'": {"prediction": "eps"},
    "rescale_betas_zero_snr makes the last step pure noise": {"scheduler": {"DDPMScheduler": {"rescale_betas_zero_snr": True}}},
    "scheduler: diffusers has no scheduler 'DDPMSheduler' (did you mean 'DDPMScheduler'?)": {"scheduler": "DDPMSheduler"},
    "scheduler.DDPMScheduler: DDPMScheduler has no option 'beta_schedul' (did you mean 'beta_schedule'?)":
        {"scheduler": {"DDPMScheduler": {"beta_schedul": "linear"}}},
    "DDPMScheduler cannot be built with these options": {"scheduler": {"DDPMScheduler": {"beta_schedule": "quadratic"}}},
    "KarrasVeScheduler has neither betas nor sigmas to train with": {"scheduler": "KarrasVeScheduler"},
    "'here/there': no such folder": {"scheduler": "here/there"},
    "min-SNR is for epsilon, v_prediction and sample": {"scheduler": "FlowMatchEulerDiscreteScheduler", "snr_gamma": 5.0},
    "weighting is for flow matching": {"weighting": "cosmap"},
    "no weighting 'cosmop' (did you mean 'cosmap'?)": {"scheduler": "FlowMatchEulerDiscreteScheduler", "weighting": "cosmop"},
    "no density 'logit-normal' (did you mean 'logit_normal'?)": {"density": "logit-normal"},
    "density: logit_normal has no option 'sd'": {"density": {"logit_normal": {"sd": 1}}},
    "dropout needs captions or labels, and the call of the model uses none": {"dropout": 0.1},
    "dropout: must be below 1.0, not 1.5": {"dropout": 1.5},
    "guidance needs captions or labels": {"guidance": 5.0},
    "call: the model has no input 'smaple' (did you mean 'sample'?)": {"call": {"smaple": "noisy", "timestep": "time"}},
    "nothing in 'call' is 'noisy'; its inputs are sample [2, 3, 16, 16]": {"call": {"sample": "nosy", "timestep": "time"}},
    "call.sample: no value 'text.pooled'; there are noisy, time, label, condition":
        {"call": {"sample": "text.pooled", "timestep": "time"}},
    "the model needs 'timestep', and no value is set for it": {"call": {"sample": "noisy"}},
    "the model was traced with class_labels=None, which is part of the graph":
        {"call": {"sample": "noisy", "timestep": "time", "class_labels": "label"}},
    "the call of the model uses no text; there are encoder_hidden_states; its inputs are sample [2, 3, 16, 16], timestep [2]":
        {"text": "test_denoise:words"},
    "module 'test_denoise' has no attribute 'wrods'": {"text": "test_denoise:wrods"},
    "test_denoise:words has no option 'widht' (did you mean 'width'?)": {"text": {"test_denoise:words": {"widht": 8}}},
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_said(text):
    with pytest.raises(SpecError, match=re.escape(text)):
        ready(traced(), **WRONG[text])


def test_options_are_held_to_the_constructor():
    with pytest.raises(SpecError, match=r"task.denoise: denoise has no option 'snr_gama' \(did you mean 'snr_gamma'\?\)"):
        make_task({"denoise": {"snr_gama": 5.0}})


@pytest.mark.slow
def test_a_time_without_dimensions_is_said_at_once():
    base = unets.sd15()
    with pytest.raises(SpecError, match=r"'timestep' was traced without dimensions.*timestep: \{shape: \[2\], dtype: int64"):
        ready(base.gm, text={"test_denoise:words": {"width": 12}})


def test_channels_that_the_model_does_not_take_are_said():
    vae = {"diffusers": {"_class_name": "AutoencoderTiny", "latent_channels": 4, "encoder_block_out_channels": [8, 8, 8, 8],
                         "decoder_block_out_channels": [8, 8, 8, 8]}}  # fmt: skip
    with pytest.raises(SpecError, match="vae: AutoencoderTiny gives latents of 4 channels, and the model was traced with 3"):
        ready(traced(), vae=vae)
    with pytest.raises(SpecError, match="the images have 1 channels, and the model was traced with 3: set 'channels'"):
        ready(traced()).loss(traced(), batch(channels=1), Draws(0, 7))


def test_labels_that_the_model_does_not_know_are_said():
    module = traced(classes=11)
    with pytest.raises(SpecError, match="'2.png' has the label 11, and the model has 11 rows for classes, 0 to 10"):
        ready(module).loss(module, batch(label=torch.tensor([0, 10, 11, 1])), Draws(0, 7))
    with pytest.raises(SpecError, match="needs one more row in the embedding of classes, and the model has 11 for 11 classes: "
                                        "build it with 12"):
        ready(module, dropout=0.1, classes=[str(n) for n in range(11)])
    with pytest.raises(SpecError, match="the data has no captions"):
        ready(traced(text=8), text="test_denoise:words").loss(traced(text=8), batch(), Draws(0, 7))


NO_CLASS = {
    "a label of the batch": ({"dropout": 0.5}, 4, "'1.png' has the label 4, and 4 of the model's 5 rows for classes, 0 to 4, "),
    "its own row": ({"dropout": 0.5, "null_label": 2}, 2, "'1.png' has the label 2, and 2 of the model's 5 rows"),
    "for samples alone": ({"guidance": 3.0}, 4, "'1.png' has the label 4, and 4 of the model's"),
    "a share of each": ({}, 4, "'1.png' has the label 4, and 4 of"),
}


@pytest.mark.parametrize("case", NO_CLASS)
def test_the_row_of_no_class_is_none_of_the_data(case):
    options, label, said = NO_CLASS[case]
    module = traced(classes=5)
    more = {"cond_dropout": torch.tensor([0.5, 0, 1, torch.nan])} if case == "a share of each" else {}
    given = batch(label=torch.tensor([0, label, 1, 3]), **more)
    with pytest.raises(SpecError, match=said):
        ready(module, **options).loss(module, given, Draws(0, 7))
    given["label"][1] = 0
    assert ready(module, **options).loss(module, given, Draws(0, 7)).isfinite()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"null_label": 2}, r"null_label: 2 means \"no class\", and the data has 4 classes, from 0 on: it is the label of 'c'"),
        ({"null_label": 7}, "null_label: must be a row of the model's embedding of classes, 0 to 4, not 7"),
    ],
)
def test_a_row_of_no_class_that_cannot_be(options, said):
    with pytest.raises(SpecError, match=said):
        ready(traced(classes=5), dropout=0.1, classes=["a", "b", "c", "d"], **options)
    with pytest.raises(SpecError, match=f"{said}|the model has 5 rows for classes, 0 to 4, and none for 7"):
        ready(traced(classes=5), classes=["a", "b", "c", "d"], **options).set_caption_dropout(0.1)


def test_the_row_of_no_class_is_looked_for_before_the_first_step():
    images, labels = torch.zeros(12, 3, SIDE, SIDE), torch.arange(12) % 5
    for data in (TensorDataset(images, labels), DataLoader(TensorDataset(images, labels), 4)):
        with pytest.raises(SpecError, match="the model has 5 for 5 classes: build it with 6"):
            fxplug.Trainer(fxplug.apply(traced(classes=5), fxplug.load_pass("lora", at="**.time_emb_proj", rank=2)),
                           {"denoise": {"dropout": 0.5}}, data, steps=1, batch=4, device="cpu", quiet=True)  # fmt: skip


def test_labels_of_test_data_are_looked_at_even_where_the_classes_are_known():
    module = traced(classes=5)
    task = ready(module, classes=["a", "b"])
    with pytest.raises(SpecError, match="'1.png' has the label 9, and the model has 5 rows for classes"):
        task.test(module, [batch(label=torch.tensor([0, 9, 1, 1]))])


def test_the_size_is_that_of_the_images_where_nothing_says_it():
    one = Denoise()
    one.setup(traced(), TaskInfo((0, 0)))
    assert one.shape == (3, SIDE, SIDE)  # of the trace
    one.setup(traced(), TaskInfo((0, 0), examples=lambda n: batch(n, 8)))
    assert one.shape == (3, 8, 8)


def test_data_without_images_are_said():
    text = re.escape("data: the data has no 'image'; it has pixel_values; name it with columns: {image: ...}")
    task, b = ready(traced()), {"pixel_values": batch()["image"], "index": torch.arange(4)}
    with pytest.raises(SpecError, match=text):
        task.loss(traced(), b, Draws(0, 7))
    with pytest.raises(SpecError, match=text):
        task.test(traced(), [b])
    with pytest.raises(SpecError, match=text):
        ready(traced(), examples=lambda n: b, sample_steps=1).samples(traced())
    with pytest.raises(SpecError, match=text):
        Denoise().setup(traced(), TaskInfo((0, 0), examples=lambda n: b))


def test_there_are_as_many_samples_as_asked_for_however_few_the_data():
    more = {"bounds": [torch.arange(2)] * 3, "about": {"maker": ["c", "d"]}}
    some = {"examples": lambda n: batch(2, caption=["a", "b"], **more) if n else {}, "sample_steps": 1}
    module = traced(classes=11)
    known = [str(i) for i in range(10)]
    listed = ready(module, classes=known, null_label=10, samples=[3, 1, 4, 1, 5], **some)
    images = listed.samples(module)
    assert images.shape == (5, 3, SIDE, SIDE)
    assert torch.equal(images, listed.generate(module, {"label": torch.tensor([3, 1, 4, 1, 5])}))
    assert len(ready(module, classes=known, null_label=10, samples=12, **some).samples(module)) == 12
    spoken = traced(text=8)
    task = ready(spoken, text="test_denoise:words", samples=5, **some)
    given = {"caption": ["a", "b", "a", "b", "a"]}
    assert torch.equal(task.samples(spoken), task.generate(spoken, given))
    assert len(ready(traced(), samples=3, **some).samples(traced())) == 3
    assert ready(traced(), samples=0, **some).samples(traced()) is None


def test_inputs_are_read_off_the_graph():
    inputs = list_inputs(traced(text=8))
    assert [name for name, i in inputs.items() if i.required] == ["sample", "timestep", "encoder_hidden_states"]
    assert inputs["return_dict"].fixed and inputs["return_dict"].value is False

"""The task `denoise` on stock pipelines: trained, resumed, drawn, refused, with no line about their models."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import diffusers
import pytest
import runs
import tiny_pipelines as tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

import fxplug
from fxplug.core.errors import FxplugError, SpecError
from fxplug.pipelines.call_forms import add_size_forms
from fxplug.pipelines.denoiser_call import example_call, make_denoiser_call
from fxplug.pipelines.example_call import ExampleCall, call_arguments
from fxplug.pipelines.observation import observe
from fxplug.training.adapter_output import prove_adapter
from fxplug.training.random_draws import Draws, RunDraws
from fxplug.training.tasks.pipeline_conditions import MemoryStore, as_pictures
from fxplug.training.tasks.pipeline_denoise import NoisyBatch, PipelineDenoise
from fxplug.training.tasks.pipeline_options import check_options
from fxplug.training.tasks.task import TaskInfo
from fxplug.training.train_section import Use

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of some schedulers
SIZE = (tiny.SIZE, tiny.SIZE)
AT = ["to_q", "to_k", "to_v", "to_out.0"]
QUICK = ("sd15", "z_image")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.CALLS]


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The tests of this file have what is traced and seen of a tiny pipeline in common."""
    with runs.sharing():
        yield


class Balls(Dataset):
    """Squares of four colours: captions of two lengths in tokens, so that two forms of call are in a batch."""

    colours = {"red": (1, -1, -1), "blue": (-1, -1, 1), "gold": (1, 0.6, -1), "green": (-1, 1, -1)}

    def __init__(self, count=8, conditions=False):
        self.count, self.conditions = count, conditions

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        name = [*self.colours][index % 4]
        image = torch.ones(3, *SIZE)
        image[:, 16:48, 16:48] = torch.tensor(self.colours[name]).view(3, 1, 1)
        found = {"image": image, "caption": f"a {name} ball" + " on a box" * (index % 2)}
        return {**found, "condition": image / 2 + 0.5} if self.conditions else found


def part_of(name):
    return "transformer" if name == "wan22" else None


_rewritten = {}


def rewritten(pipe, call, part=None, **example):
    """The denoiser of a pipeline with LoRA, that takes any form of call: a copy of one trace for all that are made alike."""
    seen = runs.observe_once(pipe, {"height": SIZE[0], "width": SIZE[1], **call, **example}, part)
    model = getattr(pipe, seen.part)
    key = runs.describe(pipe, call, part, example)
    if key is None or key not in _rewritten:
        traced = fxplug.trace(model, kwargs=example_call(pipe, seen, **example))
        torch.manual_seed(0)
        made = fxplug.variants(fxplug.apply(traced, fxplug.load_pass("lora", at=AT, rank=4, alpha=2)), model)
        arguments = call_arguments(pipe, {**call, **example}, SIZE)
        add_size_forms(made, [ExampleCall(pipe, seen.part, arguments)])  # as a training begins
        _rewritten[key] = made
    torch.manual_seed(1)
    return fxplug.variants(copy.deepcopy(_rewritten[key]), model)


def trainer_of(module, task, data=None, **settings):
    loader = DataLoader(data or Balls(), batch_size=2)
    return fxplug.Trainer(module, task, loader, batch=2, quiet=True, **{"steps": 4, "lr": 2e-2, **settings})


def set_up(task, examples=None, sizes=(SIZE,)):
    task.setup(nn.Identity(), TaskInfo(sizes[0], examples=examples, sizes=sizes))
    return task


def batch_of(*captions, seed=0, **more):
    image = torch.rand(len(captions), 3, *SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return {"image": image, "caption": list(captions), **more}


@torch.no_grad()
def loss_of(task, batch, step=1):
    return float(task.loss(getattr(task.pipe, task.part), batch, Draws(0, step)))


# --- what else is kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "z_image"])
def test_what_the_model_made_of_the_class_is_preserved(name):
    """The loss of the trigger's captions, and the distance to the base for those of the class: 0 while the adapter is 0."""
    pipe = tiny.make(name)
    module, batch = rewritten(pipe, tiny.CALLS[name]), batch_of("a zzz ball", "a zzz ball on a box")
    info = TaskInfo(SIZE, sizes=(SIZE,), trigger="zzz")

    def loss(weight):
        options = {} if weight is None else {"preserve": "red", "preserve_weight": weight}
        task = PipelineDenoise(pipe, tiny.CALLS[name], samples=0, **options)
        task.setup(module, info)
        return task, float(task.loss(module, dict(batch), Draws(0, 1)).detach())

    assert loss(3.0)[1] == loss(None)[1]
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.startswith("lora."):
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(key)))
    plain, (task, single), triple = loss(None)[1], loss(1.0), loss(3.0)[1]
    assert single > plain and triple - plain == pytest.approx(3 * (single - plain), rel=1e-4)
    # by hand: both modules on the same noisy latents, with the captions of the class
    one, draw, apart = task.sized.of(SIZE), Draws(0, 1), []
    position = draw.uniform(2)
    with torch.no_grad():
        x = task._latents(batch, draw, one)
        noise = draw.like(x)
        index = one.steps[(position * len(one.steps)).long()]
        noisy = one.noise.noisy(x, noise, index)
        for row, caption in enumerate(("a red ball", "a red ball on a box")):
            call = one.call(one.conditions.of({}, [caption]), noisy[row : row + 1], one.noise.time(index[row : row + 1]))
            new, base = (one.call.predictions(each(**call), 1) for each in (module, getattr(pipe, task.part)))
            apart.append((new - base).square().mean())
    assert single - plain == pytest.approx(float(sum(apart) / 2), rel=1e-3)


def test_the_loss_of_prior_images_counts_beside_that_of_the_others():
    task = set_up(PipelineDenoise(tiny.make("sd15"), samples=0))
    batch = batch_of("a red ball", "a dog", "a blue cube", "a cat")
    both = {"prior": torch.tensor([False, True, False, True]), "loss_scale": torch.tensor([1.0, 0.5, 1.0, 0.5])}
    scales = [torch.eye(4)[row] for row in range(4)]
    single = [4 * loss_of(task, {**batch, "loss_scale": scale}) for scale in scales]
    wanted = (single[0] + single[2]) / 2 + 0.5 * (single[1] + single[3]) / 2
    assert loss_of(task, {**batch, **both}) == pytest.approx(wanted, rel=1e-5)


def test_a_class_to_preserve_needs_a_trigger():
    with pytest.raises(SpecError, match="preserve: needs 'trigger' in the section data"):
        set_up(PipelineDenoise(tiny.make("sd15"), samples=0, preserve="dog"))
    with pytest.raises(SpecError, match="preserve_weight: has no effect without 'preserve'"):
        set_up(PipelineDenoise(tiny.make("sd15"), samples=0, preserve_weight=2.0))


# --- every family


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_the_stock_pipeline_draws_the_same_with_its_adapter(name, tmp_path):
    pipe = tiny.make(name)
    module = rewritten(pipe, tiny.CALLS[name], part_of(name))
    task = PipelineDenoise(pipe, tiny.CALLS[name], part_of(name), samples=1, sample_steps=2)
    run = trainer_of(module, task, out=tmp_path / "run", steps=6)
    losses = [record["loss"] for record in run.fit()]
    assert all(0 < loss < 10 for loss in losses)
    assert task.sized.of(SIZE).call.observation.time in module.meta["input_groups"]["time"]  # for lower(hoist=True)
    call, seed, added = task.last_sample()
    own = task.sampler(module, call, steps=2, seed=seed)
    base = task.sampler.stock(call, steps=2, seed=seed)
    fxplug.save_adapter(module, tmp_path / "adapter", as_="diffusers", part=task.part)
    if not hasattr(pipe, "load_lora_weights"):
        assert name == "pixart"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.load_lora_weights(str(tmp_path / "adapter"))
    stock = task.sampler.stock(call, steps=2, seed=seed)
    assert float((stock - own).abs().max()) <= 1e-5
    assert float((stock - base).abs().max()) > 1e-3  # and it changes the picture


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_in_a_batch_have_the_losses_that_they_have_alone(name):
    """Conditions are joined, latents packed and outputs taken apart for each sample."""
    pipe = tiny.make(name)
    task = set_up(PipelineDenoise(pipe, tiny.CALLS[name], part_of(name), samples=0))
    one = task.sized.of(SIZE)
    captions = ["a red ball", "a blue cat on a box"]
    image = batch_of(*captions)["image"]
    x = one.call.latents(task.sized.encode(image, Draws(0, 1), one.call.observation))
    index = one.steps[[100, 200]]
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    model = getattr(pipe, task.part)
    with torch.no_grad():
        conditions = [one.conditions.one(caption, {}) for caption in captions]
        both = [NoisyBatch([condition] * 2, x, index, target, {}, {}) for condition in conditions]
        alone = [task._compute_group(model, one, both[n].take([n])) for n in (0, 1)]
        joint = [task._compute_group(model, one, given) for given in both]
    for n in (0, 1):
        assert float(joint[n][n]) == pytest.approx(float(alone[n][0]), rel=2e-5)


# --- the run


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    def run(out, steps, resume=None):
        pipe = tiny.make("sd15")
        module = rewritten(pipe, {})
        task = PipelineDenoise(pipe, {}, samples=0, dropout=0.3, density="logit_normal")
        trainer = trainer_of(module, task, out=out, steps=steps, save={"every": 2})
        return trainer, trainer.fit(resume=resume), module

    whole = run(tmp_path / "whole", 4)
    checkpoint = sorted((tmp_path / "whole" / "checkpoints").iterdir())[0]
    again = run(tmp_path / "again", 4, resume=checkpoint)
    assert [r["loss"] for r in again[1]][-2:] == [r["loss"] for r in whole[1]][-2:]
    kept, found = dict(whole[2].named_parameters()), dict(again[2].named_parameters())
    assert all(torch.equal(kept[name], found[name]) for name in kept)


def test_two_micro_batches_draw_what_one_batch_draws():
    pipe = tiny.make("sd15")
    task = set_up(PipelineDenoise(pipe, {}, samples=0))
    batch = batch_of("a red ball", "a blue cat", "a dog", "a gold box")
    whole = loss_of(task, dict(batch))
    draws, halves = RunDraws(0), []
    for micro, rows in enumerate((slice(0, 2), slice(2, 4))):
        half = {key: value[rows] for key, value in batch.items()}
        with torch.no_grad():
            halves.append(float(task.loss(pipe.unet, half, draws.of(1, micro, 2))))
    assert sum(halves) / 2 == pytest.approx(whole, rel=1e-5)


def test_a_loss_scale_and_a_dropped_caption_of_a_sample_count():
    task = set_up(PipelineDenoise(tiny.make("sd15"), {}, samples=0))
    batch = batch_of("a red ball", "a blue cat")
    assert loss_of(task, {**batch, "loss_scale": torch.tensor([0.0, 0.0])}) == 0
    dropped = loss_of(task, {**batch, "cond_dropout": torch.tensor([1.0, 1.0])})
    assert dropped == pytest.approx(loss_of(task, {**batch, "caption": ["", ""]}), rel=1e-6)
    assert dropped != loss_of(task, batch)


@pytest.mark.parametrize("name", ["sd15", "flux", "wan"])
def test_a_mask_weighs_the_places_of_the_picture_however_latents_are_packed(name):
    pipe = tiny.make(name)
    task = set_up(PipelineDenoise(pipe, tiny.CALLS[name], samples=0))
    batch = batch_of("a red ball", "a blue cat")
    whole = loss_of(task, dict(batch))
    masks = torch.zeros(2, 1, *SIZE)
    assert loss_of(task, {**batch, "loss_mask": masks}) == 0
    left, right = masks.clone(), masks.clone()
    left[..., :32], right[..., 32:] = 1, 1
    halves = [loss_of(task, {**batch, "loss_mask": mask}) for mask in (left, right)]
    assert sum(halves) == pytest.approx(whole, rel=1e-5) and min(halves) > 0.2 * whole
    one = task.sized.of(SIZE)
    z = torch.randn(2, *one.call.decoded, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one.call.as_decoded(one.call.as_latents(z)), z)


def test_the_offset_of_noise_is_one_number_in_a_channel_of_the_vae():
    task = set_up(PipelineDenoise(tiny.make("flux"), {}, samples=0, noise_offset=0.5))
    plain = set_up(PipelineDenoise(tiny.make("flux"), {}, samples=0))
    batch, seen = batch_of("a red ball", "a blue cat"), []
    for each in (task, plain):
        one = each.sized.of(SIZE)
        target = one.noise.target
        one.noise.target = lambda x, noise, index, one=one, target=target: (
            seen.append(one.call.as_decoded(noise)) or target(x, noise, index)
        )
        loss_of(each, dict(batch))
    added = seen[0] - seen[1]
    assert float((added - added.mean((2, 3), keepdim=True)).abs().max()) < 1e-6
    assert float(added.abs().max()) > 0.05


def test_captions_are_encoded_once_and_the_memory_for_them_is_bounded():
    pipe = tiny.make("sd15")
    task = set_up(PipelineDenoise(pipe, {}, samples=0))
    loss_of(task, batch_of("a red ball", "a blue cat"))
    one = task.sized.of(SIZE).conditions
    calls = []
    encode = one.call.encode
    one.call.encode = lambda **given: calls.append(given) or encode(**given)
    loss_of(task, batch_of("a red ball", "a blue cat"), step=2)
    assert calls == []
    small = MemoryStore(limit=2 * one.one("a red ball", {}).nbytes)
    for caption in ("a", "b", "c"):
        small.put(caption, one.one(caption, {}))
    assert small.get("a") is None and small.get("c") is not None and small.size <= small.limit


def test_every_bucket_is_observed_before_the_training_and_others_when_they_come():
    task = set_up(PipelineDenoise(tiny.make("flux"), {}, samples=0), sizes=(SIZE, (48, 80)))
    assert [*task.sized.made] == [SIZE, (48, 80)]
    loss_of(task, {"image": torch.zeros(2, 3, 80, 48), "caption": ["a", "b"]})
    assert task.sized.of((80, 48)).call.observation.condition["img_ids"].shape[0] == 5 * 3
    assert task.sized.of((48, 80)).call.observation.shape == (1, 15, 16)


# --- conditions


def named(pipe):
    """A pipeline of its kind that `runs` knows again: all that is called so is made alike."""
    pipe.set_progress_bar_config(disable=True)
    pipe.made_of = type(pipe).__name__
    return pipe


def pix2pix():
    unet = tiny.unet(in_channels=8, cross_attention_dim=12, attention_head_dim=2)
    parts = {**tiny.make("sd15").components, "unet": unet}
    return named(diffusers.StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False))


def inpainting():
    unet = tiny.unet(in_channels=9, cross_attention_dim=12, attention_head_dim=2)
    parts = {**tiny.make("sd15").components, "unet": unet}
    return named(diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False))


def kontext():
    parts = {k: v for k, v in tiny.make("flux").components.items() if k not in ("image_encoder", "feature_extractor")}
    return named(diffusers.FluxKontextPipeline(**parts))


PICTURED = {
    "pix2pix": (pix2pix, {}, "image"), "inpainting": (inpainting, {}, "mask_image"),
    "kontext": (kontext, {"_auto_resize": False, "max_area": SIZE[0] * SIZE[1]}, "image"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURED)
def test_each_sample_has_its_own_condition(name):
    make, call, argument = PICTURED[name]
    pipe = make()
    both = batch_of("a red ball", "a blue cat", condition=torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(9)))
    task = set_up(PipelineDenoise(pipe, call, samples=0), lambda count: {k: v[:count] for k, v in both.items()})
    assert task.sized.condition == argument
    first = loss_of(task, dict(both))
    assert loss_of(task, {**both, "condition": both["condition"].flip(0)}) != first
    assert loss_of(task, dict(both)) == first
    one = task.sized.of(SIZE)
    conditions = one.conditions.of(both, both["caption"])
    call = one.call(conditions, torch.zeros(2, *one.call.shape), torch.tensor([300.0, 700.0]))
    given = call[one.call.observation.noisy]
    alone = [one.call([c], torch.zeros(1, *one.call.shape), torch.tensor([300.0])) for c in conditions]
    for n in (0, 1):
        assert torch.equal(given[n], alone[n][one.call.observation.noisy][0])
    assert not torch.equal(given[0], given[1])  # what is no latents differs


def test_a_pipeline_that_needs_a_picture_and_gets_none_says_condition():
    for make in (pix2pix, inpainting):
        with pytest.raises(SpecError, match="condition") as error:
            set_up(PipelineDenoise(make(), {}, samples=0))
        assert error.value.path == ("data", "conditions")


def test_a_pipeline_without_pictures_refuses_conditions():
    both = batch_of("a red ball", condition=torch.rand(1, 3, *SIZE))
    with pytest.raises(SpecError, match="condition"):
        set_up(PipelineDenoise(tiny.make("sd15"), {}, samples=0), lambda count: both)


def test_pictures_of_conditions_are_exact():
    levels = torch.arange(256).repeat(3, 1)[None, :, None] / 255
    assert torch.equal(pil_to_tensor(as_pictures(levels)[0])[:, 0].long(), torch.arange(256).repeat(3, 1))


def test_the_size_and_the_crop_of_a_picture_reach_sdxl():
    task = set_up(PipelineDenoise(tiny.make("sdxl"), {}, samples=0))
    sizes = {"original_size": torch.tensor([[640, 480], [64, 64]]), "crop": torch.tensor([[5, 7], [0, 0]])}
    batch = batch_of("a red ball", "a red ball", **sizes)
    conditions = task.sized.of(SIZE).conditions.of(batch, batch["caption"])
    found = [condition.call["added_cond_kwargs"]["time_ids"][0].tolist() for condition in conditions]
    assert found == [[640, 480, 5, 7, 64, 64], [64, 64, 0, 0, 64, 64]]


# --- samples


def test_samples_are_what_the_stock_pipeline_draws(tmp_path):
    pipe = tiny.make("sd15")
    module = rewritten(pipe, {})
    task = PipelineDenoise(pipe, {"guidance_scale": 4.0}, samples=["a red ball", "a blue cat"], sample_steps=3)
    task.setup(module, TaskInfo(SIZE))
    found = task.samples(module)
    for n, caption in enumerate(("a red ball", "a blue cat")):
        generator = torch.Generator().manual_seed(n)
        wanted = pipe(prompt=caption, height=SIZE[0], width=SIZE[1], num_inference_steps=3, guidance_scale=4.0,
                      generator=generator, output_type="pt").images[0]  # fmt: skip
        assert torch.allclose(found[n], wanted, atol=1e-5)


def test_guidance_of_samples_is_that_of_the_task_where_it_is_given():
    pipe = tiny.make("sd15")
    drawn = []
    for guidance in (None, 1.0, 8.0):
        task = PipelineDenoise(pipe, {}, samples=["a red ball"], sample_steps=2, guidance=guidance)
        task.setup(pipe.unet, TaskInfo(SIZE))
        drawn.append(task.samples(pipe.unet))
    assert not torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_a_number_of_steps_that_the_scheduler_does_not_take_is_said_before_the_training():
    pipe = tiny.make("sd15")
    task = set_up(PipelineDenoise(pipe, {}, samples=["a"], sample_steps=1001))
    with pytest.raises(SpecError, match="1001 steps"):
        task.check_samples(pipe.unet)


# --- refusals


@pytest.mark.parametrize("option", ["scheduler", "prediction", "vae", "text", "call", "null_label", "time_scale"])
def test_options_of_other_models_say_where_they_are_set(option):
    given = {"call": {"call": {}}} if option == "call" else {option: "x"}
    with pytest.raises(SpecError, match="pipeline") as error:
        check_options(Use("denoise", given))
    assert error.value.path == ("train", "task", "denoise", option)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"densty": "uniform"}, "density"),
        ({"density": "as_sampeld"}, "as_sampled"),
        ({"density": {"as_sampled": {"mean": 1}}}, "mean"),
        ({"samples": [1, 2]}, "captions"),
        ({"dropout": 2.0}, "dropout"),
        ({"weighting": "cosmos", "samples": 0}, "weighting"),
        ({"snr_gamma": 5.0}, None),
        ({"negative": "bad", "samples": 0}, None),
    ],
)
def test_wrong_options_are_refused(options, said):
    def make():
        return set_up(PipelineDenoise(tiny.make("sd15"), {}, **options))

    if said is None:
        make()
        return
    with pytest.raises(SpecError, match=said):
        make()


def test_weights_of_the_other_kind_of_noise_are_refused():
    with pytest.raises(SpecError, match="min-SNR"):
        set_up(PipelineDenoise(tiny.make("flux"), {}, samples=0, snr_gamma=5.0))


@pytest.mark.parametrize(
    ("call", "said"),
    [({"guidence_scale": 1.0}, "guidance_scale"), ({"height": 128}, "height"), ({"num_images_per_prompt": "two"}, "call")],
)
def test_wrong_arguments_of_the_pipeline_are_refused(call, said):
    with pytest.raises(FxplugError, match=said):
        set_up(PipelineDenoise(tiny.make("sd15"), call, samples=0))


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(SpecError, match="pipeline"):
        set_up(PipelineDenoise(nn.Linear(2, 2), {}, samples=0))


def test_a_wrong_part_names_those_that_are_there():
    with pytest.raises(SpecError, match="unet"):
        set_up(PipelineDenoise(tiny.make("sd15"), {}, "unett", samples=0))
    with pytest.raises(SpecError, match="transformer_2"):
        set_up(PipelineDenoise(tiny.make("wan22"), {"num_frames": 1}, samples=0))


@pytest.mark.parametrize(("name", "side", "multiple"), [("flux", 60, 16), ("sd15", 60, 8), ("sd15", 36, 8)])
def test_a_size_that_latents_do_not_divide_says_of_what_it_must_be_a_multiple(name, side, multiple):
    with pytest.raises(SpecError, match=rf"multiple of {multiple}\b"):
        set_up(PipelineDenoise(tiny.make(name), {}, samples=0), sizes=((side, side),))


def test_a_denoiser_of_a_batch_keeps_its_sentences():
    pipe = tiny.make("flux")
    seen = observe(pipe, {"height": SIZE[0], "width": SIZE[1]})
    call = make_denoiser_call(pipe, seen, torch.device("cpu"))
    with pytest.raises(SpecError, match="output of FluxPipeline"):
        call.predictions(torch.zeros(2, 3, 3), 2)


# --- configurations


def config(folder, name, **changed):
    pictures = folder / "pictures"
    pictures.mkdir()
    for colour in ("red", "blue", "orange", "green"):
        Image.new("RGB", SIZE, colour).save(pictures / f"{colour}.png")
        (pictures / f"{colour}.txt").write_text(f"a {colour} ball")
    tiny.save(name, folder / "pipe")
    part = {"part": "transformer"} if name == "wan22" else {}
    return {
        "model": {"pipeline": str(folder / "pipe"), "call": tiny.CALLS[name], **part},
        "passes": [{"lora": {"at": AT, "rank": 4, "alpha": 2}}],
        "train": {"task": {"denoise": {"samples": 1, "sample_steps": 2}}, "steps": 2, "batch": 2, "lr": 1e-2},
        "data": {"images": str(pictures), "size": SIZE[0], "cache": False}, "device": "cpu", "verify": False, **changed,
    }  # fmt: skip


@pytest.mark.slow
def test_a_configuration_trains_a_family_and_its_adapter_is_proved(tmp_path):
    """tests/test_recipes.py has the other families."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fxplug.train(config(tmp_path, "ltx"), out=tmp_path / "run", quiet=True)
    assert [p.name for p in (tmp_path / "run" / "adapter").iterdir()] == ["pytorch_lora_weights.safetensors"]
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()
    part = run.trainer.task.part
    assert all(key.startswith(f"{part}.") for key in load_file(Path(run.out) / "adapter" / "pytorch_lora_weights.safetensors"))


@pytest.mark.slow
def test_what_is_encoded_in_a_run_is_in_the_cache_of_the_next(tmp_path):
    given = config(tmp_path, "sana")
    given["data"]["cache"] = str(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [fxplug.train(given, out=tmp_path / f"run{n}", quiet=True) for n in (0, 1)]
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    store = runs[1].trainer.task.store
    assert store.get(["condition", next(iter(runs[1].trainer.task.sized.memory.kept))]) is not None
    assert [r["loss"] for r in runs[0].history] == [r["loss"] for r in runs[1].history]


@pytest.mark.slow
def test_an_adapter_with_which_the_pipeline_draws_something_else_is_said(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fxplug.train(config(tmp_path, "sana"), out=tmp_path / "run", quiet=True)
        file = tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors"
        save_file({key: value * 3 for key, value in load_file(file).items()}, file, {"format": "pt"})
        prove_adapter(run.trainer, run.trainer.task, file.parent)
    notes = [line for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines() if "adapter/" in line]
    assert "equal" in notes[0] and "differs" in notes[1]


@pytest.mark.slow
def test_a_pipeline_without_a_loader_is_said_before_the_training(tmp_path):
    with pytest.warns(UserWarning, match="no load_lora_weights"):
        run = fxplug.train(config(tmp_path, "pixart"), out=tmp_path / "run", quiet=True)
    assert "fxplug.load" in run.use

"""What stock pipelines do around their denoiser: observed, confirmed on real steps, or refused in words."""

from __future__ import annotations

import threading

import diffusers
import pytest
import recipe_twins
import tiny_pipelines as tiny
import torch
from fuzz_observation import TRAITS, fuzz_observation

import fxplug
from fxplug.pipelines.conditions import encode_condition, find_batching
from fxplug.pipelines.observation import confirm, find_denoisers, observe
from fxplug.pipelines.recorded_run import record_run

# of numpy, about what schedulers of diffusers make of tensors
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning", "ignore:.upcast_vae. is:FutureWarning")
SIZE = {"height": tiny.SIZE, "width": tiny.SIZE}
# part, argument of the latents, time, divisor of the last latents where it is one number
KNOWN = {
    "sd15": ("unet", "sample", (1.0, 0.0)), "sdxl": ("unet", "sample", (1.0, 0.0)),
    "sd3": ("transformer", "hidden_states", (1.0, 0.0)), "flux": ("transformer", "hidden_states", (0.001, 0.0)),
    "pixart": ("transformer", "hidden_states", (1.0, 0.0)), "sana": ("transformer", "hidden_states", (1.0, 0.0)),
    "qwen_image": ("transformer", "hidden_states", (0.001, 0.0)), "z_image": ("transformer", "x", (-0.001, 1.0)),
    "wan": ("transformer", "hidden_states", (1.0, 0.0)), "ltx": ("transformer", "hidden_states", (1.0, 0.0)),
    "ltx2": ("transformer", "hidden_states", (1.0, 0.0)),
}  # fmt: skip


def call_of(name: str) -> dict:
    return {**tiny.CALLS[name], **SIZE}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_a_stock_pipeline_is_observed_and_confirmed(name):
    pipe = tiny.make(name)
    before = tiny.draw(pipe, name)
    seen = observe(pipe, call_of(name))
    assert (seen.part, seen.noisy, (seen.slope, seen.offset)) == KNOWN[name]
    assert confirm(pipe, seen) < 1e-6
    scale = pipe.vae.config.get("scaling_factor") or 1.0
    if name in ("sd15", "sdxl", "pixart", "sana"):
        assert torch.allclose(seen.to_decoder.factor, torch.tensor(1 / scale), rtol=1e-6)
    assert torch.equal(tiny.draw(pipe, name), before)  # nothing is left of it in the pipeline
    for part in pipe.components.values():
        assert not isinstance(part, torch.nn.Module) or "forward" not in vars(part)


@pytest.mark.slow
def test_a_denoiser_that_is_called_before_another_one_of_its_class_is_observed():
    """Ideogram 4 has a second transformer for what is without a caption, whose share guidance 1 makes zero."""
    torch.manual_seed(0)
    pipe = recipe_twins.ideogram4()
    pipe.set_progress_bar_config(disable=True)
    call = {**SIZE, "max_sequence_length": 256, "guidance_schedule": None, "guidance_scale": 7.0}
    assert find_denoisers(pipe, {**call, "prompt": "a ball"}) == ["transformer", "unconditional_transformer"]
    with pytest.raises(fxplug.SpecError, match="has 2 denoisers: set 'part' to one of transformer, unconditional_transformer"):
        observe(pipe, call)
    with pytest.raises(fxplug.SpecError, match="has no denoiser 'transformer_2'"):
        observe(pipe, call, "transformer_2")
    seen = observe(pipe, call, "transformer")
    assert confirm(pipe, seen) < 1e-6
    assert (seen.call["guidance_scale"], seen.others, seen.slope, seen.offset) == (1.0, (), -0.001, 1.0)
    assert seen.to_output.factor.unique().tolist() == [-1.0] and not seen.to_output.term.any()
    assert call["guidance_scale"] == 7.0 and "at other times" not in seen.describe()
    one, two = (encode_condition(pipe, seen, prompt=text) for text in ("a ball", "two old green boats"))
    assert not torch.equal(one["encoder_hidden_states"], two["encoder_hidden_states"])


def test_a_share_of_a_second_denoiser_that_no_guidance_switches_off_is_refused():
    class Mixed(diffusers.Ideogram4Pipeline):
        def check_inputs(self, *args, guidance_scale=None, **named):
            assert guidance_scale is None or guidance_scale > 1.5, "guidance_scale must be above 1.5"

    torch.manual_seed(0)
    pipe = Mixed(**recipe_twins.ideogram4().components)
    pipe.set_progress_bar_config(disable=True)
    call = {**SIZE, "max_sequence_length": 256, "guidance_schedule": None, "guidance_scale": 7.0}
    with pytest.raises(fxplug.SpecError, match="share of unconditional_transformer, too|guidance_scale must be above 1.5"):
        observe(pipe, call, "transformer")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sdxl", "z_image", "wan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_maps_are_those_of_float32(name, dtype):
    wide = observe(tiny.make(name), call_of(name))
    pipe = tiny.make(name).to(dtype)
    half = observe(pipe, call_of(name))
    for key in ("to_input", "to_output", "to_decoder"):
        one, two = getattr(half, key), getattr(wide, key)
        assert torch.equal(one.index, two.index)
        assert torch.allclose(one.factor, two.factor, rtol=1e-6) and torch.allclose(one.term, two.term, atol=1e-6)
    assert (half.slope, half.offset) == (wide.slope, wide.offset)
    confirm(pipe, half)
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert {p.dtype for model in models for p in model.parameters()} == {dtype}  # SDXL's pipeline makes its VAE float32


def test_a_pipeline_that_asks_for_the_very_class_of_its_scheduler_is_observed():
    """It takes any other for one that scales, and schedulers of flow have no such method (Bria)."""
    running = []

    class Asking(diffusers.FluxPipeline):
        def progress_bar(self, *args, **named):
            running.append(self)  # a copy, in a run
            return super().progress_bar(*args, **named)

    def scale(module, args, given):
        scheduler = running[-1].scheduler
        if type(scheduler) is not diffusers.FlowMatchEulerDiscreteScheduler:
            given["hidden_states"] = scheduler.scale_model_input(given["hidden_states"], given["timestep"])
        return args, given

    pipe = Asking(**tiny.make("flux").components)

    with pipe.transformer.register_forward_pre_hook(scale, with_kwargs=True):
        seen = observe(pipe, call_of("flux"))
        assert confirm(pipe, seen) < 1e-6 and (seen.slope, seen.offset) == (0.001, 0.0)


@pytest.mark.slow
def test_both_denoisers_of_a_pipeline_are_seen():
    pipe = tiny.make("wan22")
    with pytest.raises(fxplug.SpecError, match="2 denoisers: set 'part' to one of transformer, transformer_2"):
        observe(pipe, call_of("wan22"))
    seen = observe(pipe, call_of("wan22"), "transformer_2")
    assert (seen.part, seen.others) == ("transformer_2", ("transformer",))
    confirm(pipe, seen)


def test_a_part_that_is_not_there_and_an_argument_that_is_not_taken():
    pipe = tiny.make("sd3")
    with pytest.raises(fxplug.SpecError, match=r"no denoiser 'transfomer' \(did you mean 'transformer'\?\); it calls"):
        observe(pipe, call_of("sd3"), "transfomer")
    with pytest.raises(fxplug.SpecError, match=r"not called with 'guidance_scal' \(did you mean 'guidance_scale'\?\)"):
        observe(pipe, {**call_of("sd3"), "guidance_scal": 3})
    with pytest.raises(fxplug.SpecError, match=r"a call of StableDiffusion3Pipeline with .* fails: ValueError: `height`"):
        observe(pipe, {"height": 63, "width": 64})


def test_a_call_for_several_samples_and_a_compiled_model_are_refused():
    pipe = tiny.make("sd15")
    for name, value in {"prompt": ["a ball", "a cube"], "num_images_per_prompt": 2}.items():
        with pytest.raises(fxplug.SpecError, match=rf"model\.call\.{name}: asks for several samples"):
            observe(pipe, {**call_of("sd15"), name: value})
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    with pytest.raises(fxplug.SpecError, match="unet of StableDiffusionPipeline is compiled: put the model itself in"):
        observe(pipe, call_of("sd15"))


@pytest.mark.slow
def test_a_traced_denoiser_is_observed_as_the_model():
    pipe = tiny.make("flux")
    plain = observe(pipe, call_of("flux"))
    pipe.transformer = fxplug.trace_pipeline(
        pipe, parts=["transformer"], prompt="a ball", num_inference_steps=2, **call_of("flux")
    )["transformer"]  # fmt: skip
    seen = observe(pipe, call_of("flux"))
    assert seen.describe() == plain.describe() and confirm(pipe, seen) < 1e-6


def test_threads_that_observe_one_pipeline_take_turns():
    pipe, found = tiny.make("sd15"), []
    plain = observe(pipe, call_of("sd15"))

    def look():
        found.append(observe(pipe, call_of("sd15")).describe())

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain.describe()] * 4


def test_a_controlnet_is_refused_in_words():
    unet = tiny.make("sd15").unet
    network = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8, 8, 16))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    base = tiny.make("sd15").components
    pipe = diffusers.StableDiffusionControlNetPipeline(**{**base, "controlnet": network})
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(fxplug.SpecError, match="input of StableDiffusionControl.*must be one argument.*such as a ControlNet"):
        observe(pipe, {"image": torch.rand(1, 3, 64, 64), **SIZE})


def test_what_is_said_of_it():
    text = observe(tiny.make("flux"), call_of("flux")).describe()
    assert "denoiser    transformer\n" in text and "time        timestep = 0.001 x the scheduler's\n" in text
    assert "condition   encoder_hidden_states, guidance, img_ids, pooled_projections, txt_ids" in text
    assert "rearranged, times 2.7" in text


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen_image", "z_image", "ltx"])
def test_the_calls_of_captions_join_to_the_call_of_all(name):
    pipe = tiny.make(name)
    seen = observe(pipe, call_of(name))
    batching = find_batching(pipe, seen)
    captions = ["a red ball", "a blue cube"]
    calls = [encode_condition(pipe, seen, prompt=caption) for caption in captions]
    assert batching.form(calls[0]) == batching.form(calls[1])
    joined = batching.join(calls)
    whole = encode_condition(pipe, seen, prompt=captions)
    assert joined.keys() == whole.keys()
    leaves = [torch.utils._pytree.tree_leaves({k: v for k, v in call.items() if k != seen.noisy}) for call in (joined, whole)]
    for one, two in zip(*leaves, strict=True):
        assert torch.allclose(one, two, atol=1e-5) if isinstance(one, torch.Tensor) else one == two


def test_captions_of_other_token_counts_are_no_batch():
    pipe = tiny.make("qwen_image")
    seen = observe(pipe, call_of("qwen_image"))
    batching = find_batching(pipe, seen)
    short, long = (encode_condition(pipe, seen, prompt=text) for text in ("a ball", "a red ball on the green grass in a box"))
    assert batching.form(short) != batching.form(long)


def test_a_pipeline_that_takes_a_picture_for_each_prompt_has_samples_by_pictures_too():
    """As image to video does: the prompt twice fails beside one picture, and `num_images_per_prompt` is ignored."""
    pipe = tiny.make("sd15")
    seen = observe(pipe, call_of("sd15"))
    inner = type(pipe).__call__

    class Pictured(type(pipe)):
        def __call__(self, prompt=None, picture=None, num_images_per_prompt=1, **more):
            prompts = [prompt] if isinstance(prompt, str) else prompt
            if len(prompts) != len(picture):  # and the number is ignored, as CogVideoX does
                raise RuntimeError("Sizes of tensors must match")
            return inner(self, prompts, **more)

    pipe.__class__ = Pictured
    plain = find_batching(tiny.make("sd15"), seen)
    assert find_batching(pipe, seen, picture=torch.zeros(1, 3, 8, 8)).dims == plain.dims
    with pytest.raises(fxplug.SpecError, match="Sizes of tensors must match"):
        find_batching(pipe, seen, picture="none")


def test_calls_with_expanded_times_have_a_form():
    batching = find_batching(*(pipe := tiny.make("sd15"), observe(pipe, call_of("sd15"))))
    forms = [batching.form({"other": torch.tensor([value]).expand(1).as_strided((1,), (0,))}) for value in (5, 5, 6)]
    assert forms[0] == forms[1] != forms[2]


def test_a_run_stops_where_it_is_to_and_draws_by_its_seed():
    pipe = tiny.make("sd15")
    state = torch.random.get_rng_state()
    call = {**call_of("sd15"), "prompt": "a ball", "guidance_scale": 1.0}
    runs = [record_run(pipe, call, steps=2, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(runs[0].decoded["vae"], runs[1].decoded["vae"])
    assert not torch.equal(runs[0].decoded["vae"], runs[2].decoded["vae"])
    assert len(runs[0].steps) == 2 and runs[0].steps[1].calls[-1][0] == "unet"


@pytest.mark.slow
def test_random_pipelines_are_observed_as_they_are_or_refused():
    assert fuzz_observation(60, 100) == []


@pytest.mark.slow
def test_each_trait_that_no_map_describes_is_refused():
    import random

    from fuzz_observation import Pipeline, check

    for trait in TRAITS:
        for seed in range(4):
            assert (trait, check(Pipeline(random.Random(seed), trait))) == (trait, None)

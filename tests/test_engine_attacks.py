"""Pipelines and callers that an engine did not expect: as the stock pipeline or refused in words, and no harm to others."""

from __future__ import annotations

import copy
import gc
import random
import signal
import threading
import time
from functools import wraps

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusionPipeline
from diffusers.models.transformers.transformer_z_image import RopeEmbedder
from fuzz_serving import fuzz_serving
from test_engine import SD, alone, ask, make, run

import fxplug
from fxplug.serving import Engine, Request
from fxplug.serving.model_state import find_change, list_state
from fxplug.serving.parked import CountedStep, StepCount

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
REST = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
CALL = {"prompt": "a cat", "height": 32, "width": 32, "output_type": "pt", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def sd():
    return make(SD)


@pytest.mark.slow
def test_random_requests_beside_loads_cancels_and_errors_have_the_bits_that_they_have_alone():
    assert fuzz_serving(4, 1) == []


def test_lists_several_pictures_and_latents_are_joined_right(sd):
    more = {"num_images_per_prompt": 2}, {"prompt": ["a cat", "dog"]}, {"output_type": "latent"}, {"guidance_scale": 1.0}
    requests = [Request(call={**CALL, **one}, seed=n) for n, one in enumerate(more)]
    want = [alone(sd, one) for one in requests]
    engine = Engine(sd)
    for _ in range(2):
        for ticket, picture in zip(run(engine, requests), want, strict=True):
            assert (ticket.result().images - picture).abs().max() < 1e-5 * max(1, picture.abs().max())  # latents are up to 7


def test_callbacks_change_their_own_request_alone(sd):
    def spoil(pipe, step, time, given):
        pipe.scheduler.set_timesteps(5)
        pipe._guidance_scale = 1.0
        return {"latents": given["latents"] * 0}

    def stop(pipe, step, time, given):
        pipe._interrupt = True
        return given

    def write(pipe, step, time, given):
        pipe.unet.conv_act.inplace = True
        return given

    requests = [Request(call=CALL, seed=9), *(Request(call={**CALL, "callback_on_step_end": one}) for one in (spoil, stop))]
    tickets = run(Engine(sd), requests)
    assert torch.allclose(tickets[0].result().images, alone(sd, requests[0]), atol=1e-5)
    assert [ticket.state for ticket in tickets] == ["done", "failed", "done"]  # as the stock pipeline
    (ticket,) = run(Engine(sd), [Request(call={**CALL, "callback_on_step_end": write})])
    sd.unet.conv_act.inplace = False
    with pytest.raises(fxplug.SpecError, match="a callback writes into UNet2DConditionModel.conv_act.inplace"):
        ticket.result()


def test_a_generator_is_one_request_s(sd):
    engine, generator = Engine(sd), torch.Generator().manual_seed(1)
    engine.submit(Request(call={**CALL, "generator": generator}))
    with pytest.raises(fxplug.SpecError, match="has this generator: give each its own"):
        engine.submit(Request(call={**CALL, "generator": [generator]}))
    engine.drain(0)


class Drawing(type(make(SD))):
    """Draws without its generator, writes into its prompts, and asks for the very class of its scheduler."""

    @wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt, num_inference_steps=2, generator=None, **kwargs):
        assert type(self.scheduler) is type(make(SD).scheduler) and self.scheduler.config.steps_offset == 1
        self.log = [*getattr(self, "log", []), prompt]
        prompt[0] += " x"
        noise = torch.randn(1, 4, 4, 4, generator=generator) + torch.rand(1, 4, 4, 4)
        return super().__call__(prompt, num_inference_steps=num_inference_steps, latents=noise, generator=generator, **kwargs)


def test_what_a_pipeline_draws_and_writes_is_its_request_s(sd):
    pipe = Drawing(**sd.components)
    call = {**CALL, "prompt": ["cat"]}
    requests = [Request(call={**call, "num_inference_steps": n}, seed=n) for n in (2, 3, 4)]
    torch.manual_seed(0)
    engine = Engine(pipe)
    tickets = run(engine, requests)
    for request, ticket in zip(requests, tickets, strict=True):
        torch.manual_seed(0)
        own = Request(call={**request.call, "prompt": ["cat"]}, seed=request.seed)
        assert request.call["prompt"] == ["cat"]
        assert torch.allclose(ticket.result().images, alone(pipe, own), atol=1e-5)


class Nested(DiffusionPipeline):
    """Calls another pipeline, which is no component of it but has its models."""

    def __init__(self, unet, vae, text_encoder, tokenizer, scheduler):
        super().__init__()
        self.register_modules(unet=unet, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, scheduler=scheduler)
        self.inner = StableDiffusionPipeline(**self.components, **REST)

    @wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt, num_inference_steps=2, generator=None, **kwargs):
        return self.inner(prompt, num_inference_steps=num_inference_steps, generator=generator, **kwargs)


def test_a_pipeline_in_a_pipeline_is_joined_and_has_the_request_s_scheduler(sd):
    parts = {name: part for name, part in sd.components.items() if name not in (*REST, "image_encoder")}
    pipe, engine = Nested(**parts), Engine(sd)
    requests = [Request(call=CALL, seed=n, scheduler="EulerDiscreteScheduler") for n in range(3)]
    want = [alone(sd, one) for one in requests]
    engine = Engine(pipe)
    for _ in range(2):
        for ticket, picture in zip(run(engine, requests), want, strict=True):
            assert (ticket.result().images - picture).abs().max() < 1e-5
            assert (ticket.step, ticket.of) == (2, 2)
    assert any(form.proven for form in engine.forms.forms.values())


class Direct(StableDiffusionPipeline):
    """Calls its UNet's layers by itself: an adapter would do nothing."""

    @wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt, generator=None, **kwargs):
        return torch.randn(1, 4, 2, 2, generator=generator) + self.unet.conv_in.bias.sum()


def test_adapters_that_would_do_nothing_are_refused(sd):
    slots = fxplug.load_pass("lora", at="**.to_q", rank=2, slots=1)
    pipe = fxplug.rewrite_pipeline(copy.copy(sd), passes={"unet": [slots]}, prompt="a cat", height=32, width=32)
    layers = {n: m for n, m in sd.unet.named_modules() if n.endswith("to_q")}
    sizes = {"A": lambda m: (2, m.in_features), "B": lambda m: (m.out_features, 2)}
    state = {f"{n}.lora_{x}.weight": torch.ones(size(m)) for n, m in layers.items() for x, size in sizes.items()}
    pipe.unet.adapters.load("ink", state)
    (ticket,) = run(Engine(Direct(**pipe.components)), [Request(call={"prompt": "a cat"}, adapters={"ink": 1.0}, seed=1)])
    with pytest.raises(fxplug.SpecError, match="calls no model that has ink in a way that is seen"):
        ticket.result()


class Thread(StableDiffusionPipeline):
    """Calls its models in a thread of its own."""

    @wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt, **kwargs):
        def call():
            try:
                found.append(super(Thread, self).__call__(prompt, **kwargs))
            except Exception as error:
                found.append(error)

        found = []
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]


class Later(StableDiffusionPipeline):
    """Calls its models after its end."""

    @wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt, **kwargs):
        return (super(Later, self).__call__(prompt, **kwargs) for _ in range(1))


@pytest.mark.parametrize("kind", [Thread, Later])
def test_a_call_of_a_model_outside_of_its_request_is_refused(sd, kind):
    (ticket,) = run(Engine(kind(**sd.components)), [Request(call=CALL)])
    with pytest.raises(fxplug.SpecError, match="was called outside of its request"):
        next(ticket.result())


def test_interrupts_at_any_place_leave_an_engine_that_goes_on(sd):
    def interrupt(*_):
        raise KeyboardInterrupt

    engine, draw, count, free = Engine(sd, rows=8, buckets=[8]), random.Random(0), 0, False
    requests = [ask(SD, i) for i in range(3)]
    want = [run(engine, [one])[0].result().images for one in requests]
    begun = time.perf_counter()
    run(engine, requests[:1])
    longest = time.perf_counter() - begun  # of some ten steps
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(40):
            tickets = [engine.submit(one) for one in requests]
            while not engine.is_idle:
                free = not free  # each second step, so that it goes on wherever it is slow
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0 if free else draw.uniform(1e-4, longest / 4))
                    engine.step()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    count += 1
            for ticket, picture in zip(tickets, want, strict=True):
                assert torch.equal(ticket.result().images, picture)
            if count > 5:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 5


def test_a_copy_of_a_scheduler_counts_its_own_steps():
    scheduler, count = FlowMatchEulerDiscreteScheduler(), StepCount()
    scheduler.step = CountedStep(scheduler, count)
    other = copy.deepcopy(scheduler)
    for one in (scheduler, other):
        one.set_timesteps(2)
    scheduler.step(torch.ones(1), scheduler.timesteps[0], torch.ones(1))
    assert (count.steps, scheduler.step_index, other.step_index) == (1, 1, None)
    other.step(torch.ones(1), other.timesteps[0], torch.ones(1))
    assert (count.steps, other.step_index) == (1, 1)


@pytest.mark.slow
def test_memory_is_flat(sd):
    engine = Engine(sd, rows=8)
    call = {**CALL, "height": 16, "width": 16, "output_type": "latent", "num_inference_steps": 1, "guidance_scale": 1.0}

    def held(count):
        for ticket in engine.generate(Request(call=call, seed=n) for n in range(count)):
            ticket.result()
        del ticket
        gc.collect()
        return sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor), threading.active_count()

    assert held(20) == held(300)


def test_tensors_that_a_model_makes_at_its_first_call_are_no_change_and_numbers_are():
    """As the tables of Z-Image's positions; a pipeline that sets a scale gives it to all requests."""
    model = torch.nn.Linear(2, 2)
    model.rope, model.scale = RopeEmbedder(axes_dims=[4, 4, 4], axes_lens=[8, 8, 8]), None
    before = list_state(model)
    model.rope(torch.zeros(2, 3, dtype=torch.int64))
    made = list_state(model)
    assert find_change(before, made) is None and find_change(before, made, additions=True) == "rope.freqs_cis"
    model.rope.freqs_cis[0] = model.rope.freqs_cis[0] * 2
    assert find_change(made, list_state(model)) == "rope.freqs_cis"
    model.scale = 0.5
    assert find_change(before, list_state(model)) == "scale"

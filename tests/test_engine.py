"""Stock pipelines in an engine: equal to the bit when alone, right when joined, and refused where they would not be."""

from __future__ import annotations

import copy
import random
import types

import pytest
import tiny
import torch
from diffusers import ControlNetModel

import fxplug
from fxplug.core.errors import SpecError
from fxplug.serving import Cancelled, Engine, QueueFull, Request
from fxplug.serving import engine as engines

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers' Euler schedulers
SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler")
SD, XL, SD3 = "StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline"
FLUX, IMAGE, CONTROL = "FluxPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline"
WORDS = ("a cat", "dog", "red sea", "blue")


def make(name):
    pipe = tiny.pipeline(name, **({"controlnet": ControlNetModel.from_unet(tiny.unet())} if name == CONTROL else {}))
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe


@pytest.fixture(scope="module")
def sd():
    return make(SD)


def noise(seed, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def ask(name, i, **more):
    """The request of one number: each has another prompt, guidance, seed and number of steps."""
    size = 32 if name in (SD, XL, IMAGE, CONTROL) else 64
    call = {"num_inference_steps": 2 + i % 3, "guidance_scale": (7.5, 1.0, 3.0)[i % 3], "output_type": "pt"}
    if name in (SD, IMAGE, CONTROL):
        call["prompt"] = WORDS[i % 4]
    else:
        call |= {"prompt_embeds": noise(i, 1, 5, 12), "pooled_prompt_embeds": noise(i + 50, 1, 8)}
    if name in (XL, SD3):
        call |= {"negative_prompt_embeds": noise(90, 1, 5, 12), "negative_pooled_prompt_embeds": noise(91, 1, 8)}
    if name in (IMAGE, CONTROL):
        call["image"] = noise(i, 1, 3, size, size).sigmoid()
    if name == IMAGE:
        call["strength"] = 0.99
    else:
        call |= {"height": size, "width": size}
    given = {"seed": i, "call": call, "scheduler": SCHEDULERS[i % 4] if size == 32 else None, **more}
    return Request(**given)


def alone(pipe, request):
    """What the stock pipeline gives."""
    own = copy.copy(pipe)
    kind = type(pipe.scheduler) if request.scheduler is None else getattr(__import__("diffusers"), request.scheduler)
    own.scheduler = kind.from_config(pipe.scheduler.config)
    return own(**request.call, generator=torch.Generator().manual_seed(request.seed)).images


def run(engine, requests):
    tickets = [engine.submit(one) for one in requests]
    while not engine.is_idle:
        engine.step()
    return tickets


def made(engine):
    return sum(engine.caller.made[id(m)] for m in engine.models.values() if not hasattr(m, "decode"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [SD, XL, SD3, FLUX, IMAGE, CONTROL])
def test_alone_it_is_equal_to_the_stock_pipeline_and_joined_as_near_as_a_last_bit(name):
    pipe = make(name)
    requests = [ask(name, i) for i in range(5)]
    want = [alone(pipe, one) for one in requests]
    engine = Engine(pipe)
    for one, picture in zip(requests, want, strict=True):
        (ticket,) = run(engine, [one])
        assert torch.equal(ticket.result().images, picture), one
    single = made(engine)
    for part in (requests, requests):  # the first proves the forms
        before = made(engine)
        for ticket, picture in zip(run(engine, part), want, strict=True):
            assert (ticket.result().images - picture).abs().max() < 1e-4
            assert (ticket.state, ticket.step) == ("done", ticket.of) and ticket.of >= 1
    assert made(engine) - before <= 0.75 * single
    assert not any(form.refused for form in engine.forms.forms.values())
    assert all(type(part) is type(pipe.components[key]) for key, part in make(name).components.items() if part is not None)


@pytest.mark.slow
def test_whoever_shares_the_batch_a_picture_has_the_same_bits(sd):
    engine, draw = Engine(sd, rows=8, buckets=[8]), random.Random(0)
    requests = [ask(SD, i) for i in range(6)]
    want = [run(engine, [one])[0].result().images for one in requests]
    for _ in range(6):
        order = [draw.randrange(6) for _ in range(4)]
        tickets = [engine.submit(requests[i]) for i in order]
        while not engine.is_idle:
            engine.step()
            if draw.random() < 0.2:
                draw.choice(tickets).cancel()
            if draw.random() < 0.1 and len(order) < 8:
                order.append(draw.randrange(6))
                tickets.append(engine.submit(requests[order[-1]]))
        for i, ticket in zip(order, tickets, strict=True):
            assert ticket.state == "cancelled" or torch.equal(ticket.result().images, want[i])
    assert engine.caller.buckets == [8]


class Mean(torch.nn.Module):
    """Adds the mean of the batch: rows look at each other."""

    def forward(self, x):
        return x + x.mean(0, keepdim=True)


def test_a_form_whose_rows_look_at_each_other_is_never_joined(sd, caplog):
    pipe = copy.copy(sd)
    pipe.unet = copy.deepcopy(sd.unet)
    pipe.unet.conv_out = torch.nn.Sequential(pipe.unet.conv_out, Mean())
    requests = [ask(SD, i, scheduler=None, call=dict(ask(SD, 0).call)) for i in (0, 0, 1, 2)]
    want = [alone(pipe, one) for one in requests]
    engine = Engine(pipe)
    tickets = run(engine, requests[:2]) + run(engine, requests)  # of equal ones each looks right, and proves nothing
    for ticket, picture in zip(tickets, want[:2] + want, strict=True):
        assert torch.equal(ticket.result().images, picture)
    assert "not made jointly" in caplog.text
    (ticket,) = run(Engine(pipe, buckets=[4]), requests[:1])  # nor padded
    assert torch.equal(ticket.result().images, want[0])


class Writing(type(make(SD))):
    """A pipeline that puts something into its UNet while it runs, and takes it out at the end, as PAG does."""

    def __call__(self, prompt, num_inference_steps=2, **kwargs):
        before = self.unet.conv_act.inplace
        self.unet.conv_act.inplace = True
        try:
            return super().__call__(prompt, num_inference_steps=num_inference_steps, **kwargs)
        finally:
            self.unet.conv_act.inplace = before


def test_a_pipeline_that_writes_into_its_models_is_refused(sd):
    (ticket,) = run(Engine(Writing(**sd.components)), [Request(call={"prompt": "a cat", "num_inference_steps": 3})])
    with pytest.raises(fxplug.SpecError, match=r"while it runs \(UNet2DConditionModel.conv_act.inplace\)"):
        ticket.result()
    assert sd.unet.conv_act.inplace is False and ticket.state == "failed"


@pytest.mark.parametrize(("fault", "text"), [(RuntimeError("not yet"), "not yet"), (SystemExit(3), "ended with SystemExit: 3")])
def test_what_cannot_be_watched_is_not_run(sd, fault, text):
    class Late(Writing):
        calls = 0

        def __call__(self, prompt, num_inference_steps=2, **kwargs):
            Late.calls += 1
            if Late.calls <= 2:  # a short run, and the call as it is
                raise fault
            return super().__call__(prompt, num_inference_steps, **kwargs)

    engine = Engine(Late(**sd.components))
    request = Request(call={"prompt": "a cat", "num_inference_steps": 3})
    for error, found in ((RuntimeError, text), (fxplug.SpecError, "writes into")):
        with pytest.raises(error, match=found):
            run(engine, [request])[0].result()
    assert Late.calls == 4


def test_who_fails_or_is_cancelled_takes_nobody_down(sd):
    def stop(pipe, step, t, given):
        if step == 1:
            raise RuntimeError("stop here")
        return given

    requests = [ask(SD, i) for i in range(3)]
    bad = Request(call={**ask(SD, 2).call, "callback_on_step_end": stop}, seed=1)
    large = Request(call={**ask(SD, 0).call, "height": 33})
    late = ask(SD, 2, deadline_s=1e-9)
    want = [alone(sd, one) for one in requests]
    engine = Engine(sd)
    tickets = [engine.submit(one) for one in (*requests, bad, large, late, ask(SD, 2))]
    engine.step()
    tickets[-1].cancel()
    while not engine.is_idle:
        engine.step()
    for ticket, picture in zip(tickets, want, strict=False):
        assert (ticket.result().images - picture).abs().max() < 1e-4
    ends = (RuntimeError, "stop here"), (ValueError, "divisible"), (Cancelled, "deadline"), (Cancelled, "was cancelled")
    for ticket, (error, text) in zip(tickets[3:], ends, strict=True):
        with pytest.raises(error, match=text):
            ticket.result()


def test_a_joint_call_that_fails_is_made_apart_and_lack_of_memory_halves_it(sd, caplog):
    requests = [ask(SD, i, scheduler=None) for i in range(4)]
    engine = Engine(sd)
    want = [t.result().images for t in run(engine, requests)]
    real = engine.caller._call

    def lacking(call, args, kwargs, mixtures):
        if len(mixtures) > 3:
            raise torch.OutOfMemoryError("no memory")
        return real(call, args, kwargs, mixtures)

    engine.caller._call = lacking
    for ticket, picture in zip(run(engine, requests), want, strict=True):
        assert (ticket.result().images - picture).abs().max() < 1e-4
    assert "rows of UNet2DConditionModel: from now on at most 2 are called at once" in caplog.text

    def poisoned(call, args, kwargs, mixtures):
        if len(mixtures) > 2 or poison in mixtures:
            raise RuntimeError("poison")
        return real(call, args, kwargs, mixtures)

    engine.caller._call, poison = poisoned, {"ink": 1}
    for one in engine.forms.forms.values():
        one.limit = None
    tickets = [engine.submit(one) for one in requests]
    engine.step()
    for one in engine._active:
        one.mixture = types.MethodType(lambda self, model, own=one is engine._active[0]: poison if own else {}, one)
    while not engine.is_idle:
        engine.step()
    assert sorted(t.state for t in tickets) == ["done", "done", "done", "failed"]


def test_bad_input_is_refused_in_words(sd):
    engine = Engine(sd, queue=2)
    for given, text in (
        ({"call": {"promt": "a"}}, "not called with 'promt' .did you mean 'prompt'"),
        ({"call": {}, "scheduler": "EulerDiscretScheduler"}, "did you mean 'EulerDiscreteScheduler'"),
        ({"call": {}, "scheduler": "UNet2DModel"}, "no scheduler 'UNet2DModel'"),
        ({"call": {}, "task": "image"}, "no task 'image'"),
        ({"call": {}, "adapters": {"ink": 1.0}}, "none of the models has slots"),
        ({"call": {}, "adapters": {"ink": float("nan")}}, "adapters.ink: must be a finite number"),
        ({"call": {}, "adapters": {"ink": True}}, "adapters.ink: must be a number, not true"),
        ({"call": {}, "seed": -1}, "seed: must be 0 or more"),
        ({"call": {}, "seed": 0.5}, "seed"),
        ({"call": {}, "sed": 1}, "did you mean 'seed'"),
        ({"call": [1]}, "call"),
        ({"call": {"generator": torch.Generator()}, "seed": 1}, "seed and generator are both given"),
    ):
        with pytest.raises(fxplug.SpecError, match=text):
            engine.submit(Request(**given))
    for options, text in (
        ({"rows": 0}, "rows must be a whole number"), ({"buckets": [1, 2]}, "buckets must be whole numbers, 2 or more"),
        ({"buckets": []}, "buckets"), ({"models": ["unets"]}, "did you mean 'unet'"),
        ({"also": {"x": 3}}, "must be a pipeline"),
    ):  # fmt: skip
        with pytest.raises(fxplug.SpecError, match=text):
            Engine(sd, **options)
    with pytest.raises(fxplug.SpecError, match="must be a fxplug.serving.Request"):
        engine.submit({"call": {}})
    tickets = [engine.submit(ask(SD, i)) for i in range(2)]
    with pytest.raises(QueueFull, match="the queue holds 2"):
        engine.submit(ask(SD, 2))
    with pytest.raises(TimeoutError, match="queued"):
        tickets[0].result(timeout=0)
    engine.drain(0)
    assert [t.state for t in tickets] == ["cancelled"] * 2


def test_a_request_with_more_rows_than_a_call_runs_alone_and_generate_takes_any_number(sd):
    request = Request(call={**ask(SD, 0).call, "num_images_per_prompt": 3}, seed=0)
    want = alone(sd, request)
    engine = Engine(sd, rows=4, queue=2)
    tickets = list(engine.generate([request, *(ask(SD, i) for i in range(7))]))
    assert len(tickets) == 8 and all(t.state == "done" for t in tickets)
    (large,) = (t for t in tickets if t.request is request)
    assert torch.equal(large.result().images, want)


def test_a_thread_of_its_own_and_a_newcomer_that_joins_the_next_call_of_its_form(sd):
    engine = Engine(sd)
    engine.start()
    tickets = [engine.submit(ask(SD, i)) for i in range(4)]
    assert all(torch.isfinite(t.result(60).images).all() for t in tickets)
    engine.drain(10)
    assert engine._thread is None and not [t for t in engines.threading.enumerate() if t.name.startswith("fxplug")]
    with pytest.raises(QueueFull, match="drained"):
        engine.submit(ask(SD, 0))


def test_new_weights_between_steps_all_or_none(sd):
    pipe = copy.copy(sd)
    pipe.unet = copy.deepcopy(sd.unet)
    engine, request = Engine(pipe), ask(SD, 0)
    (before,) = run(engine, [request])
    weight = pipe.unet.conv_out.weight.detach() * 1.5
    for state, text in (
        ({"unet.conv_out.weight": weight, "unet.conv_out.wight": weight}, "did you mean 'conv_out.weight'"),
        ({"unet.conv_out.weight": weight, "unets.x": weight}, "did you mean 'unet'"),
        ({"unet.conv_out.weight": weight, "unet.conv_in.bias": weight}, "must be a tensor of shape"),
        ({"unet.conv_out.weight": weight.to("meta")}, "is on the meta device"),
        ({"unet.conv_out.weight": weight.to_sparse()}, "sparse_coo, and its tensor torch.float32 and dense"),
        ({"unet.conv_out.weight": weight.to(torch.complex64)}, "is torch.complex64"),
    ):
        with pytest.raises(fxplug.SpecError, match=text):
            engine.update(state)
    assert torch.equal(run(engine, [request])[0].result().images, before.result().images)
    engine.update({"unet.conv_out.weight": weight})
    (after,) = run(engine, [request])
    assert torch.equal(after.result().images, alone(pipe, request))
    assert not torch.equal(after.result().images, before.result().images)


def test_a_request_cannot_wait_for_its_engine(sd):
    """It would wait for ever: the engine goes on when the request does."""
    engine, steps = Engine(sd), []

    def callback(pipe, step, time, values):
        ways = engine.step, engine.drain, first.result, lambda: engine.update({}), lambda: next(engine.generate([ask(SD, 1)]))
        for way in ways:
            with pytest.raises(SpecError, match="a request cannot wait for its own engine"):
                way()
        steps.append(step)
        return values

    first = engine.submit(Request(call=ask(SD, 0).call | {"callback_on_step_end": callback}, seed=0))
    while not engine.is_idle:
        engine.step()
    first.result()
    assert steps == [0, 1]


@pytest.mark.parametrize("end_only", [False, True])
def test_events_tell_each_step_or_the_end(sd, end_only):
    import asyncio

    engine = Engine(sd)
    ticket = engine.submit(ask(SD, 1))

    async def listen():
        found = []
        async for event in ticket.events(end_only):
            if not found:
                stepping = asyncio.create_task(asyncio.to_thread(lambda: [engine.step() for _ in range(9)]))
            found.append(event)
        await stepping
        return found

    found = asyncio.run(listen())
    states, steps = [event.state for event in found], [event.step for event in found]
    assert states[-1] == "done" and steps == sorted(steps) and found[-1].of == 3
    assert states[1:] == ["done"] if end_only else {1, 2} <= {*steps}


@pytest.mark.slow
def test_a_strength_by_block_and_by_step_is_that_of_each_request():
    """As in the pipeline alone with a callback that sets it: over shares, and over sigmas of schedulers of both kinds."""
    file = str(tiny.lora(make(SD), "engine_steps.safetensors", unet=["to_q", "to_v"]))
    slots = fxplug.load_pass("lora", at=["**.to_q", "**.to_v"], rank=4, slots=2, per_sample=1, groups="block")
    pipe = fxplug.rewrite_pipeline(make(SD), {"unet": [slots]}, prompt="a cat", height=32, width=32)
    pipe.unet.adapters.load("ink", file)
    blocks = fxplug.Strength(4.0, {"down_blocks.0": 0.0})
    half = fxplug.Schedule([(0, 5.0), (0.5, blocks)])
    sigma = fxplug.Schedule([(12.0, 0.0), (1.0, 6.0)], over="sigma", between="linear")
    cases = (1, half), (0, sigma), (1, sigma), (2, blocks), (4, 0.0)
    requests = [ask(SD, i, adapters={"ink": strength}) for i, strength in cases]
    engine = Engine(pipe)
    pictures = [ticket.result().images for ticket in run(engine, requests)]
    for request, picture in zip(requests, pictures, strict=True):
        own, strength = copy.copy(pipe), request.adapters["ink"]
        own.scheduler = getattr(__import__("diffusers"), request.scheduler).from_config(pipe.scheduler.config)
        steps = request.call["num_inference_steps"]
        own.scheduler.set_timesteps(steps)

        def use(step, own=own, strength=strength, steps=steps):
            if isinstance(strength, fxplug.Schedule):
                if hasattr(own.scheduler, "sigmas"):
                    noise = float(own.scheduler.sigmas[step])
                else:
                    signal = float(own.scheduler.alphas_cumprod[own.scheduler.timesteps[min(step, steps - 1)]])
                    noise = (1 / signal - 1) ** 0.5
                strength = strength.at(step / steps if strength.over == "share" else noise)
            own.unet.adapters.use({"ink": strength})

        def change(pipe, step, time, values, use=use):
            use(step + 1)
            return values

        use(0)
        want = own(**request.call, generator=torch.Generator().manual_seed(request.seed), callback_on_step_end=change).images
        assert (picture - want).abs().max() < 1e-4
    plain = alone(pipe, requests[0]) if pipe.unet.adapters.use(None) is None else None
    assert (plain - pictures[0]).abs().max() > 1e-3
    with pytest.raises(fxplug.SpecError, match="no layer with adapters is at 'down_block.0'"):
        engine.submit(ask(SD, 0, adapters={"ink": fxplug.Schedule([(0, 1.0), (0.5, fxplug.Strength(1, {"down_block.0": 0}))])}))


@pytest.mark.slow
def test_each_request_has_its_own_adapters_in_every_model_with_slots():
    layers = {"unet": ["to_q", "to_v"], "text_encoder": ["q_proj"]}
    files = {f"s{i}": str(tiny.lora(make(SD), f"engine{i}.safetensors", seed=i, **layers)) for i in (1, 2)}
    pipe = fxplug.rewrite_pipeline(make(SD), adapters=files, slots=3, prompt="a cat", height=32, width=32)
    mixtures = {"s1": 1.0}, {}, {"s1": 0.5, "s2": 0.5}, {"s2": 1.0}
    requests = [ask(SD, i, adapters=mixture) for i, mixture in enumerate(mixtures)]
    engine = Engine(pipe, buckets=[8])
    want = [run(engine, [one])[0].result().images for one in requests]
    for _ in range(2):
        for ticket, picture in zip(run(engine, requests), want, strict=True):
            assert torch.equal(ticket.result().images, picture)
    for mixture, request, picture in zip(mixtures, requests, want, strict=True):
        pipe.unet.adapters.use(mixture)
        pipe.text_encoder.adapters.use(mixture)
        assert (alone(pipe, request) - picture).abs().max() < 1e-4
    with pytest.raises(fxplug.SpecError, match="adapters: no adapter 's3'.*; there are s1, s2"):
        engine.submit(ask(SD, 0, adapters={"s3": 1.0}))
    state = {f"unet.{name}": value for name, value in pipe.unet.state_dict().items()}
    engine.update(state)  # what is there
    table = next(name for name in state if name.endswith("gates.table.names"))
    with pytest.raises(fxplug.SpecError, match="says which adapters are in slots"):
        engine.update({table: torch.zeros_like(state[table])})
    assert pipe.unet.adapters.names == ["s1", "s2"]

    ticket = engine.submit(requests[0])  # what a request uses is neither taken away nor replaced
    engine.step()
    for model in (pipe.unet, pipe.text_encoder):
        with pytest.raises(fxplug.SpecError, match="'s1' is pinned"):
            model.adapters.unload("s1")
    while not engine.is_idle:
        engine.step()
    assert torch.equal(ticket.result().images, want[0])
    late = engine.submit(requests[0])
    for model in (pipe.unet, pipe.text_encoder):
        model.adapters.unload("s1")
    engine.step()
    with pytest.raises(fxplug.SpecError, match="no adapter 's1'"):
        late.result()
    assert not any(lock.pins.get(name) for model in (pipe.unet, pipe.text_encoder) for lock in model.adapters.locks
                   for name in ("s1", "s2"))  # fmt: skip

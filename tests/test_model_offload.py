"""Models of an engine that wait on the CPU while another one is called: pictures are the same."""

from __future__ import annotations

import pytest
import tiny
import torch
from diffusers import AutoPipelineForImage2Image

import fxplug
from fxplug.serving import Engine, Request, offloading
from fxplug.serving.offloading import ModelOffload, load_for_call

SIZE = {"height": 32, "width": 32}
CPU, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
PIPELINES = [
    "StableDiffusionPipeline",
    pytest.param("StableDiffusionXLPipeline", marks=pytest.mark.slow),
    pytest.param("StableDiffusion3Pipeline", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `tiny` writes


@pytest.fixture
def two_devices(monkeypatch):
    """A device of its own: a weight that is not there is NaN; numbers and names, which the CPU reads, are at both. Gives the
    bytes that are there."""
    away, count = {}, {"now": 0, "most": 0}

    def move(model, device):
        for tensor in offloading._list_tensors(model):
            if device == CPU and id(tensor) not in away:
                away[id(tensor)] = tensor.data
                tensor.data = torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.clone()
                count["now"] -= tensor.nbytes
            elif device == DEVICE and id(tensor) in away:
                tensor.data = away.pop(id(tensor))
                count["now"] += tensor.nbytes
                count["most"] = max(count["most"], count["now"])

    monkeypatch.setattr(offloading, "_move", move)
    return count


def make_pipelines(name, slots):
    pipe = tiny.pipeline(name)
    if slots:
        model = "unet" if hasattr(pipe, "unet") else "transformer"
        bank = fxplug.load_pass("lora", at=["**.to_q", "**.to_v"], rank=4, slots=2, per_sample=2)
        pipe = fxplug.rewrite_pipeline(pipe, {model: [bank]}, **tiny.prompt(pipe), **SIZE)
        file = tiny.lora(tiny.pipeline(name), f"offload_{name}", seed=0, **{model: ["to_q", "to_v"]})
        getattr(pipe, model).adapters.load("ink", file)
    return {"": pipe, "image": AutoPipelineForImage2Image.from_pipe(pipe)}


def list_models(pipes):
    parts = (part for pipe in pipes.values() for part in pipe.components.values() if isinstance(part, torch.nn.Module))
    return list({id(part): part for part in parts}.values())


def draw(pipes, adapters):
    engine = Engine(pipes[""], also={"image": pipes["image"]}, rows=4)
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    call = {"num_inference_steps": 2, "output_type": "pt"}
    words = tiny.prompt(pipes[""])
    requests = [
        Request(call={**words, **call, **SIZE}, seed=0, adapters=adapters),
        Request(call={**words, **call, **SIZE}, seed=1),
        Request(call={**words, "image": picture, "strength": 0.9, **call}, seed=2, task="image", adapters=adapters),
    ]
    return {ticket.request.seed: ticket.result().images for ticket in engine.generate(requests)}


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_one_model_at_a_time_is_on_the_device(name, slots, two_devices):
    adapters = {"ink": 0.8} if slots else {}
    right = draw(make_pipelines(name, slots), adapters)
    pipes = make_pipelines(name, slots)
    models = list_models(pipes)
    sizes = [sum(tensor.nbytes for tensor in offloading._list_tensors(model)) for model in models]
    two_devices["now"] = sum(sizes)
    ModelOffload(models, DEVICE)
    assert two_devices["now"] == 0 and all(pipe._execution_device == DEVICE for pipe in pipes.values())
    found = draw(pipes, adapters)
    assert all(torch.equal(found[seed], right[seed]) for seed in right) and len(found) == 3
    assert two_devices["most"] == max(sizes)


def test_what_is_written_into_a_model_that_waits_is_kept(two_devices):
    one, two = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    two_devices["now"] = 1000
    ModelOffload([one, two], DEVICE)
    weight, before = one.weight, one.weight._version
    load_for_call(one)
    assert one.weight is weight and weight._version == before and weight.isfinite().all() and two.running_mean.isnan().all()
    with torch.no_grad():
        weight.fill_(7)
    load_for_call(two)
    assert weight.isnan().all() and two.running_mean.isfinite().all()
    load_for_call(one)
    assert (weight == 7).all()
    load_for_call(torch.nn.Linear(2, 2))  # which no offload knows


@pytest.mark.gpu
def test_on_a_gpu():
    whole = make_pipelines("StableDiffusionPipeline", True)
    right = draw({task: pipe.to("cuda") for task, pipe in whole.items()}, {"ink": 0.8})
    pipes = make_pipelines("StableDiffusionPipeline", True)
    models = list_models(pipes)
    ModelOffload(models, torch.device("cuda", 0))
    found = draw(pipes, {"ink": 0.8})
    assert all(torch.equal(found[seed], right[seed]) for seed in right)
    assert sum(next(model.parameters()).is_cuda for model in models) == 1

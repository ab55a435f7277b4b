"""What tools around a model do to a traced one: they get what they get of the model, or are refused in words."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import accelerate
import pipelines
import pytest
import small
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import fxplug

CPU = torch.device("cpu")


class Block(nn.Module):
    """Has a parameter of its own beside its layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj, self.statistics = nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.gamma = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return self.statistics(x + self.proj(self.norm(x)) * self.gamma)


class Net(nn.Module):
    """Has one of each of torch's containers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 4))
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.shifts = nn.ParameterList([torch.zeros(4), torch.ones(4)])
        self.gains = nn.ParameterDict({"u": torch.ones(4)})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.named["b"](self.named["a"](self.head(x))) * self.gains["u"] + self.shifts[0] + self.shifts[1]


@pytest.fixture
def both():
    """A model, and the trace of a copy of it, with its own weights."""
    model = small.seeded(Net)
    return model, fxplug.trace(copy.deepcopy(model), X)


X = small.seeded(lambda: torch.randn(5, 6))


# --- what is asked of the parts


READS = {
    "blocks": [lambda m: [*m], len, lambda m: m[1:], lambda m: m[-1], lambda m: [*reversed(m)]],
    "head": [lambda m: [*m], len, lambda m: m[:2](X), lambda m: m[-1]],
    "named": [lambda m: [*m], len, lambda m: "a" in m, lambda m: [*m.keys()], lambda m: dict(m.items())],
    "shifts": [lambda m: [*m], len, lambda m: m[1:], lambda m: m[-1]],
    "gains": [lambda m: [*m], len, lambda m: "v" in m, lambda m: [*m.values()], lambda m: dict(m.items())],
}


def plain(value):
    """What two models have alike: the weights of modules, and the names and numbers of all else."""
    if isinstance(value, nn.Module):
        return {name: plain(parameter) for name, parameter in value.named_parameters()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", READS)
def test_containers_are_read_as_those_of_torch(both, name, tmp_path):
    fxplug.save(both[1], tmp_path / "saved")
    for gm in (both[1], copy.deepcopy(both[1]), fxplug.load(tmp_path / "saved")):
        for read in READS[name]:
            wanted, got = (read(module.get_submodule(name)) for module in (both[0], gm))
            assert plain(got) == plain(wanted)


def own_parameters(module):
    """The parameters of a module, as tools collect them that go through the members of what can be iterated."""
    if isinstance(module, Iterable):
        return [parameter for member in module for parameter in own_parameters(member)]
    return [parameter for part in module.modules() for parameter in part.parameters(recurse=False)]


def test_a_part_is_no_list_of_its_layers(both):
    model, gm = both
    assert not isinstance(gm.blocks[0], Iterable) and not isinstance(gm, Iterable)
    for name in ("blocks", "head"):
        found = [own_parameters(module.get_submodule(name)) for module in (gm, model)]
        assert len(found[0]) == len([*model.get_submodule(name).parameters()]) and plain(found[0]) == plain(found[1])


# --- averages of weights


def test_an_average_of_the_weights(both):
    found = []
    for module in both:
        average = AveragedModel(module.train(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(X).square().sum().backward()
            optimizer.step()
            average.update_parameters(module)
        update_bn([X, X + 1], average)
        found.append((average.state_dict(), average.eval()(X), module.eval()(X)))
    (theirs, *wanted), (ours, *got) = found
    assert list(theirs) == list(ours) and all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert all(map(torch.equal, wanted, got)) and not torch.equal(*got)


# --- offloading


MOVES = {
    "cpu_offload": lambda m: accelerate.cpu_offload(m, CPU),
    "cpu_offload_with_hook": lambda m: accelerate.cpu_offload_with_hook(m, CPU),
    "leaf_level": lambda m: apply_group_offloading(m, CPU, CPU, offload_type="leaf_level"),
    "block_level": lambda m: apply_group_offloading(m, CPU, CPU, offload_type="block_level", num_blocks_per_group=1),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_model_that_is_offloaded_is_not_traced(both, how):
    model = both[0].eval()
    MOVES[how](model)
    with pytest.raises(fxplug.TraceError, match=r"is offloaded \(\w+\).*offload the traced module"):
        fxplug.trace(model, X)
    if how.startswith("cpu"):
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(fxplug.trace(model, X)(X), model(X))


@pytest.mark.parametrize("how", ["block_level", "casting"])
def test_hooks_of_diffusers(both, how):
    found = []
    for module in both:
        if how == "casting":
            apply_layerwise_casting(module.eval(), torch.bfloat16, torch.float32)
        else:
            MOVES[how](module.eval())
        found.append((module(X), [name for name, p in module.named_parameters() if p.dtype == torch.bfloat16]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_groups_of_single_layers_need_parts_without_weights_of_their_own(both):
    with pytest.raises(fxplug.SpecError, match=r"forward' of a traced \w+ has no effect"):
        MOVES["leaf_level"](both[1])


@pytest.mark.slow
def test_a_rewritten_pipeline_is_offloaded_layer_by_layer(tmp_path):
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "pt"}

    def image(pipe):
        return pipe("a cat", generator=torch.Generator().manual_seed(1), **call).images

    pipe = pipelines.stable_diffusion(tmp_path)
    want = image(pipe)
    fxplug.rewrite_pipeline(pipe, {"unet": fxplug.load_pass("lora", at=["to_q"], rank=2)}, prompt="a cat", **call)
    for part in (pipe.unet, pipe.vae):  # what enable_sequential_cpu_offload does, which takes no CPU
        accelerate.cpu_offload(part, CPU)
    assert torch.equal(image(pipe), want) and torch.equal(image(pipe), want)
    assert all(parameter.is_meta for parameter in pipe.unet.parameters())
    for name in ("enable_group_offload", "enable_layerwise_casting"):
        with pytest.raises(AttributeError, match=rf"'{name}' is a method of UNet2DConditionModel.*diffusers\.hooks\.apply_"):
            getattr(pipe.unet, name)()


# --- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_script_has_no_code_to_compile(both):
    gm = both[1].eval()
    for module in (gm, nn.Sequential(gm), gm.blocks[0]):
        with pytest.raises(fxplug.SpecError, match=r"torch\.jit\.trace\(module, args\)"):
            torch.jit.script(module)
    assert torch.equal(torch.jit.trace(gm, X)(X), gm(X))

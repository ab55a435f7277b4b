"""Calls of hoisted denoisers between random changes: each is equal, to the bit, to that of the same module not hoisted.

`fuzz_hoist(cases, seed)` makes so many calls and returns a row for each miss; `python tests/fuzz.py hoist --cases N`.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import diffusers
import pytest
import tiny_pipelines
import torch

import fxplug
from fxplug.core.errors import FxplugError, SpecError
from fxplug.core.ir.containers import list_leaves, map_leaves
from fxplug.core.ir.traced_module import TracedModule
from fxplug.lowerings.hoist.hoisted import HoistedModule
from fxplug.lowerings.hoist.sameness import has_same_bits

CALLS = 100  # of one subject in its turn
FAMILIES = tuple(name for name in tiny_pipelines.CALLS if name != "wan22")
TIMES, LATENTS = {"timestep", "t"}, {"hidden_states", "sample", "x"}
TIME_VALUES = (999.0, 500.0, 0.5, 1.0)


@contextmanager
def switched(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    """A setting of torch within a block."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


SETTINGS = (
    (torch.set_flush_denormal, True, False), (torch.set_num_threads, 2, 1), (torch.use_deterministic_algorithms, True, False),
    (torch.set_float32_matmul_precision, "medium", "highest"),
    (partial(setattr, torch.backends.mkldnn.matmul, "fp32_precision"), "bf16", "none"),
)  # fmt: skip
CONTEXTS = (
    *[nullcontext] * 6, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16),
    partial(torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH),
    *[partial(switched, *row) for row in SETTINGS],
)  # fmt: skip


@cache
def record_call(name: str) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """The denoiser of a tiny pipeline, and the first call that it gets."""
    pipe = tiny_pipelines.make(name)
    model = pipe.unet if getattr(pipe, "unet", None) is not None else pipe.transformer
    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True)
    tiny_pipelines.draw(pipe, name)  # the schedule of Qwen-Image for one step has a NaN
    hook.remove()
    args, kwargs = calls[0]
    return model, kwargs, args


def list_groups(gm: TracedModule) -> dict[str, list[str]]:
    """Groups by names, as users write them."""
    names = [str(node.target).lstrip("*") for node in gm.graph.nodes if node.op == "placeholder"]
    return {
        "conditions": [name for name in names if name not in TIMES | LATENTS],
        "time": [name for name in names if name in TIMES],
    }


@cache
def trace_family(name: str) -> TracedModule:
    model, kwargs, args = record_call(name)
    return fxplug.trace(model, args, kwargs).eval()


def make_slotted(name: str) -> TracedModule:
    """A traced denoiser with two adapters in its slots, on weights and slots of its own."""
    gm = fxplug.apply(trace_family(name), fxplug.load_pass("lora", at="**", rank=2, slots=2))
    gm = copy.deepcopy(gm)
    for number, adapter in enumerate(("ink", "film")):
        gm.adapters.load(adapter, make_adapter(gm, number))
    return gm.eval()


def make_gathered(name: str) -> TracedModule:
    """The same with more slots than a sample has rows: each takes its own from the bank."""
    gm = fxplug.apply(trace_family(name), fxplug.load_pass("lora", at="**", rank=2, slots=4, per_sample=2))
    gm = copy.deepcopy(gm)
    for number, adapter in enumerate(("ink", "film", "oil")):
        gm.adapters.load(adapter, make_adapter(gm, number))
    return gm.eval()


def make_int8(name: str) -> TracedModule:
    """The same on layers of torchao with eight bits."""
    quantization = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(record_call(name)[0])
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return _make_on(name, model)


def make_nf4(name: str) -> TracedModule:
    """The same on layers of bitsandbytes with four bits."""
    bnb = pytest.importorskip("bitsandbytes")
    model = copy.deepcopy(record_call(name)[0])
    for path, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear:
            sizes = (layer.in_features, layer.out_features, layer.bias is not None)
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
            new.load_state_dict(layer.state_dict())
            home, _, key = path.rpartition(".")
            setattr(model.get_submodule(home), key, new.to("cpu"))
    return _make_on(name, model)


def _make_on(name: str, model: Any) -> TracedModule:
    _, kwargs, args = record_call(name)
    gm = fxplug.trace(model.requires_grad_(False), args, kwargs).eval()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    for number, adapter in enumerate(("ink", "film")):
        gm.adapters.load(adapter, make_adapter(gm, number))
    return gm.eval()


def make_controlled(name: str) -> TracedModule:
    """A denoiser that adds what a ControlNet gives, other values at each step."""
    model, kwargs, args = record_call(name)
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return fxplug.trace(model, kwargs={**given, **draw_residuals(name)}).eval()


@cache
def draw_residuals(name: str) -> dict[str, Any]:
    """What a ControlNet gives the denoiser of a tiny pipeline."""
    model, kwargs, args = record_call(name)
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    if name == "sd15":
        net = diffusers.ControlNetModel.from_unet(model)
        for part in net.parameters():
            torch.nn.init.normal_(part, std=0.05, generator=torch.Generator().manual_seed(0))
        sample, size = given["sample"], given["sample"].shape[-1] * 8  # the hint is of pixels
        hint = torch.ones(sample.shape[0], 3, size, size)
        down, mid = net(sample, given["timestep"], given["encoder_hidden_states"], hint, return_dict=False)
        return {"down_block_additional_residuals": [x.detach() for x in down], "mid_block_additional_residual": mid.detach()}
    tokens = given["hidden_states"].shape[:2]
    return {"controlnet_block_samples": [torch.ones(*tokens, model.inner_dim)]}


FORMS: dict[str, Callable[[str], TracedModule]] = {
    "slotted": make_slotted, "gathered": make_gathered, "int8": make_int8, "nf4": make_nf4, "controlled": make_controlled
}  # fmt: skip
CONTROLLED = ("sd15", "flux")
RESIDUALS = {"down_block_additional_residuals", "mid_block_additional_residual", "controlnet_block_samples"}


def make_adapter(gm: TracedModule, seed: int) -> dict[str, torch.Tensor]:
    """An adapter for some layers of a module, in PEFT's layout."""
    gen, rng, found = torch.Generator().manual_seed(seed), random.Random(seed), {}
    for path, layer in gm.named_modules():
        if isinstance(layer, torch.nn.Linear) and not path.startswith("lora") and rng.random() < 0.7:
            found[f"{path}.lora_A.weight"] = torch.randn(2, layer.in_features, generator=gen) * 0.3
            found[f"{path}.lora_B.weight"] = torch.randn(layer.out_features, 2, generator=gen) * 0.3
    return found


def is_same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal to the bit, tensor by tensor."""
    a, b = ([leaf for leaf in list_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (ours, theirs))
    return [t.shape for t in a] == [t.shape for t in b] and all(has_same_bits([pair]) for pair in zip(a, b, strict=True))


class Subject:
    """One denoiser, plain and hoisted on the same weights, and what its next call is made with."""

    def __init__(self, name: str, seed: int, form: str = "slotted", **options: Any) -> None:
        self.rng, self.gen = random.Random(seed), torch.Generator().manual_seed(seed)
        gm = FORMS[form](name)
        self.groups = list_groups(gm)
        self.latents = LATENTS | RESIDUALS if form == "controlled" and self.rng.random() < 0.7 else LATENTS
        self.groups["conditions"] = [x for x in self.groups["conditions"] if x not in self.latents]
        self.hoisted = fxplug.lower(gm, hoist=self.groups, **options)
        self.plain = self.hoisted.module
        _, kwargs, args = record_call(name)
        signature = inspect.signature(record_call(name)[0].forward).bind(*args, **kwargs)
        self.inputs = {**signature.arguments, **(draw_residuals(name) if form == "controlled" else {})}
        self.prompts = [self.draw_conditions() for _ in range(2)]
        self.changes = [getattr(self, name) for name in dir(type(self)) if name.startswith("change_")]
        self.context: Any = nullcontext
        self.gathers = form == "gathered"
        self.has_slots, self.choices = form != "controlled", [None, "ink", "film", {"ink": 0.8, "film": 0.3}, {"film": -1.0}]
        if form == "gathered":
            samples = len(self.inputs[next(name for name in self.inputs if name in LATENTS)])
            rows = [None, "oil", {"oil": 0.5, "ink": -1.0}, "film"]
            self.choices += [[self.rng.choice(rows) for _ in range(samples)] for _ in range(4)]

    def draw(self, value: Any) -> Any:
        """The same kind of input with other numbers; masks and whole numbers stay."""

        def new(tensor: torch.Tensor, _: Any) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            return torch.randn(tensor.shape, generator=self.gen).to(tensor.dtype)

        return map_leaves(value, new)

    def draw_conditions(self) -> dict[str, Any]:
        return {name: self.draw(self.inputs[name]) for name in self.groups["conditions"] if name in self.inputs}

    def list_layers(self) -> list[torch.nn.Module]:
        """Layers whose weights are plain tensors, which none are in a quantised model's."""
        layers = [m for m in self.plain.modules() if isinstance(m, (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Conv2d))]
        return [m for m in layers if type(m.weight) is torch.nn.Parameter and m.weight.is_floating_point()]

    def pick_weight(self) -> torch.Tensor:
        weights = [p for p in self.plain.parameters() if type(p) is torch.nn.Parameter and p.is_floating_point()]
        return self.rng.choice(weights)

    # --- what may happen between two calls

    def change_time(self) -> None:
        time = self.rng.choice(TIME_VALUES)
        for name in self.groups["time"]:
            self.inputs[name] = map_leaves(self.inputs[name], lambda t, _: torch.full(t.shape, time).to(t.dtype))

    def change_prompt(self) -> None:
        self.inputs.update(self.rng.choice(self.prompts))

    def change_new_prompt(self) -> None:
        self.prompts[self.rng.randrange(2)] = new = self.draw_conditions()
        self.inputs.update(new)

    def change_prompt_in_place(self) -> None:
        """Writes into the caller's own tensor, also where torch does not count it, as numpy's and other libraries' writes."""
        name = self.rng.choice(self.groups["conditions"])
        for tensor in list_leaves(self.inputs.get(name)):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and 0 not in tensor.stride():  # none is expanded
                self.rng.choice([tensor, tensor.data]).mul_(self.rng.choice([1.5, -1.0, 0.0]))

    def change_layout(self) -> None:
        """Gives an input the same numbers in memory of another layout, or one number in the place of many."""
        name = self.rng.choice([name for names in self.groups.values() for name in names if name in self.inputs])
        before, way = self.inputs[name], self.rng.choice(["offset", "transposed", "gaps", "expanded"])

        def lay(tensor: torch.Tensor, _: Any) -> torch.Tensor:
            if not tensor.dim() or not tensor.is_floating_point():
                return tensor
            if way == "offset":
                memory = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
                return memory[self.rng.randrange(4) :][: tensor.numel()].view(tensor.shape).copy_(tensor)
            if way == "transposed":
                return tensor.transpose(0, -1).contiguous().transpose(0, -1)
            if way == "gaps":
                return torch.stack([tensor, torch.randn(tensor.shape, generator=self.gen).to(tensor.dtype)], -1)[..., 0]
            return tensor[:1].clone().expand(tensor.shape)

        self.inputs[name] = map_leaves(before, lay)
        try:
            with torch.no_grad():
                self.plain(**self.inputs)
        except (RuntimeError, FxplugError):  # of an operation that takes no such layout
            self.inputs[name] = before

    def change_adapter(self) -> None:
        if not self.has_slots:
            return
        choice = self.rng.choice(self.choices)
        self.hoisted.adapters.use(self.hoisted.adapters.rows(choice) if self.gathers and self.rng.random() < 0.5 else choice)

    def change_slot(self) -> None:
        if self.has_slots:
            self.hoisted.adapters.load("ink", make_adapter(self.plain, self.rng.randrange(4)), replace=True)

    def change_weight(self) -> None:
        weight = self.pick_weight()
        with torch.no_grad():
            weight.add_(self.rng.choice([0.01, -0.01]))

    def change_by_fused_optimizer(self) -> None:
        """Writes by a fused optimizer, which no version counts."""
        weight = self.pick_weight()
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], 0.01, fused=True).step()
        weight.grad = None

    def change_parameter(self) -> None:
        """Puts another Parameter into the place of one."""
        layers = [m for m in self.list_layers() if m.bias is not None]
        if not layers:
            return
        layer = self.rng.choice(layers)
        layer.bias = torch.nn.Parameter(layer.bias.detach() + 0.01, requires_grad=False)

    def change_state(self) -> None:
        """Loads weights, into the tensors that are there or in their place."""
        state = {key: value for key, value in self.plain.named_parameters() if type(value) is torch.nn.Parameter}
        key = self.rng.choice([key for key, value in state.items() if value.is_floating_point() and "gates" not in key])
        new = {key: state[key].detach() * 1.01}
        self.hoisted.load_state_dict(new, strict=False, assign=self.rng.random() < 0.5)

    def change_layer(self) -> None:
        """Puts another layer into the place of one."""
        layers = self.list_layers()
        found = [path for path, m in self.plain.named_modules() if m in layers and not path.startswith("lora")]
        if not found:
            return
        home, _, key = self.rng.choice(found).rpartition(".")
        owner = self.plain.get_submodule(home)
        new = copy.deepcopy(owner._modules[key])
        with torch.no_grad():
            new.weight.mul_(1.01)
        owner._modules[key] = new

    def change_memory_of_a_weight(self) -> None:
        """Gives a weight other memory: another Parameter's, another tensor's, or a cast there and back."""
        layers = self.list_layers()
        if not layers:
            return
        layer = self.rng.choice(layers)
        new = torch.nn.Parameter(layer.weight.detach() * 1.01, requires_grad=layer.weight.requires_grad)
        way = self.rng.choice(["swap", "set", "data", "cast"])
        with torch.no_grad():
            if way == "swap":
                torch.utils.swap_tensors(layer.weight, new)
            elif way == "set":
                layer.weight.set_(new.detach())
            elif way == "data":
                layer.weight.data = new.data
            else:
                layer.bfloat16().float()

    def change_together(self) -> None:
        """Writes many weights by one kernel, or a few of their rows."""
        weights = [layer.weight for layer in self.list_layers()]
        with torch.no_grad():
            if weights and self.rng.random() < 0.5:
                torch._foreach_mul_(weights, 1.001)
            elif weights:
                self.rng.choice(weights)[:1].mul_(1.01)

    def change_scale(self) -> None:
        """Writes what a quantised weight is made of."""
        weights = [p for p in self.plain.parameters() if hasattr(p, "__tensor_flatten__") and type(p) is not torch.nn.Parameter]
        if weights:
            inner = self.rng.choice(weights)
            scale = next(t for name in inner.__tensor_flatten__()[0] if (t := getattr(inner, name)).is_floating_point())
            scale.mul_(1.01)

    def change_setting(self) -> None:
        layers = [m for m in self.plain.modules() if isinstance(m, torch.nn.LayerNorm)]
        if layers:
            self.rng.choice(layers).eps = self.rng.choice([1e-6, 1e-2])

    def change_data(self) -> None:
        """Writes where no version tells, which the caller says."""
        self.pick_weight().data.mul_(1.01)
        self.hoisted.reset()

    def change_memory(self) -> None:
        """Makes new memory for all weights, as a move does."""
        self.hoisted._apply(torch.clone)

    def change_offload(self) -> None:
        """Lets weights leave, or come back for good."""
        if self.rng.random() < 0.5:
            self.hoisted.offload(None)
            return
        with suppress(SpecError):  # of LTX-2 the time is one tensor with an input of another group
            self.hoisted.prepare(**self.inputs, times=self.rng.sample(TIME_VALUES, 2))
            self.hoisted.offload("cpu")

    def change_context(self) -> None:
        self.context = self.rng.choice(CONTEXTS)

    def change_to_a_copy(self) -> None:
        if self.rng.random() < 0.1:  # which takes as long as some hundred calls
            self.hoisted = copy.deepcopy(self.hoisted)
            self.plain = self.hoisted.module

    def change_limits(self) -> None:
        self.hoisted.limit(conditions=self.rng.choice([1, 2, 8]), times=self.rng.choice([1, 8]))

    def change_nothing(self) -> None:
        pass

    # --- a call

    def call(self) -> bool:
        """Whether one step after a change or two is equal to the plain one."""
        for _ in range(self.rng.choice([0, 0, 0, 1, 2])):
            self.last = self.rng.choice(self.changes)
            self.last()
        for name in self.inputs:
            if name in self.latents:
                self.inputs[name] = self.draw(self.inputs[name])
        with torch.no_grad(), self.context():
            if self.has_slots and self.rng.random() < 0.2:
                with self.hoisted.adapters.using(self.rng.choice(["ink", "film"])):
                    return self.compare()
            return self.compare()

    def compare(self) -> bool:
        try:
            ours = self.hoisted(**self.inputs)
        except FxplugError as error:  # as autocast is no form of call that was traced
            try:
                self.plain(**self.inputs)
            except FxplugError as other:
                return str(other) == str(error)
            return False
        first = map_leaves(ours, lambda tensor, _: tensor.clone())
        for tensor in list_leaves(ours):
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()  # a result is the caller's, who may write it
        return is_same(first, self.plain(**self.inputs))


def fuzz_hoist(cases: int, seed: int) -> list[str]:
    """So many calls, of families in turn."""
    misses = []
    for start in range(0, cases, CALLS):
        number = seed + start
        name = FAMILIES[number // CALLS % len(FAMILIES)] if cases > 1 else FAMILIES[number % len(FAMILIES)]
        draw = random.Random(number)
        form = draw.choice([*FORMS, "slotted"])
        name = draw.choice(CONTROLLED) if form == "controlled" else name
        subject = Subject(name, number, form, fuse=draw.choice(["auto", None]))
        for turn in range(min(CALLS, cases - start)):
            if not subject.call():
                misses.append(f"{name}, {form}, seed {number}, call {turn}: another result, after {subject.last.__name__}")
                break
    return misses


def count_kept(hoisted: HoistedModule) -> int:
    """How often a stage was taken from what was kept."""
    steps = hoisted.counts["step"]
    return sum(steps - count for name, count in hoisted.counts.items() if name != "step")

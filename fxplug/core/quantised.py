"""Layers of torchao and bitsandbytes, whose weights are packed: known by where their classes are from, and never imported.

A torchao layer is an `nn.Linear` whose weight is a tensor subclass. A bitsandbytes layer is a class of its own, derived from
`nn.Linear`, whose weight is a parameter of integers with its scales beside it. Both stay whole in a graph, as one call with
`in_features` and `out_features`: what computes is the library's own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import TraceError
from .torch_internals.modules import forward_hooks

LIBRARIES = ("torchao", "bitsandbytes")
PACKS = "support_avx512bf16_for_cpu"  # whether a Linear4bit changes its weight in place when it is called in evaluation


def library(value: Any) -> str:
    """Return the library of LIBRARIES that defines a tensor's or a module's class, or ""; derived classes count."""
    for base in type(value).__mro__:
        package = str(base.__module__).partition(".")[0]
        if package in LIBRARIES:
            return package
        if package == "torch":
            break
    return ""


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor's values are packed, and not the numbers that its layer computes with: nothing can be added to
    them."""
    return isinstance(tensor, Tensor) and bool(library(tensor))


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module is a layer of one of the libraries, or of torch.nn with a packed weight."""
    return any(is_packed(parameter) for parameter in module._parameters.values())


def get_plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors with the values of a packed one; another tensor itself."""
    if not is_packed(tensor):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor.detach().as_subclass(Tensor)]


def is_own_layer(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of bitsandbytes, with its own forward."""
    if not isinstance(module, nn.Linear):
        return False
    forward: Any = type(module).forward
    return str(getattr(forward, "__module__", "")).partition(".")[0] == "bitsandbytes"


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer has a weight (in, out): transformers' `Conv1D`, with `nx` inputs and `nf` outputs."""
    weight = layer._parameters.get("weight") if type(layer).__name__ == "Conv1D" else None
    return weight is not None and tuple(weight.shape) == (getattr(layer, "nx", None), getattr(layer, "nf", None))


def get_weight_shape(layer: nn.Module, weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a layer's weight in its product, (out, in) for a linear layer, however it is stored."""
    shape = tuple(weight.shape[::-1] if is_transposed(layer) else weight.shape)
    return (layer.out_features, layer.in_features) if is_own_layer(layer) else shape  # type: ignore[return-value]


def count_parameters(root: nn.Module) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters of a module; a packed layer counts the numbers of its weight."""
    owners = {id(p): (module, p) for module in root.modules() for p in module._parameters.values() if p is not None}
    counts = [(p, math.prod(get_weight_shape(owner, p)) if is_packed(p) else p.numel()) for owner, p in owners.values()]
    return sum(n for p, n in counts if p.requires_grad), sum(n for _, n in counts)


def make_result_like(layer: Any, x: Tensor) -> Tensor:
    """Return the result of a layer of bitsandbytes for x, (..., in) to (..., out), on tensors without values."""
    return F.linear(x, x.new_empty((layer.out_features, layer.in_features))).to(x.dtype)


class WithoutValues(nn.Module):
    """Stands for a layer of bitsandbytes where its weight has no values: gives what has the layer's shape and dtype."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._parameters.update(layer._parameters)
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        return make_result_like(self, x)


def check_ready(model: nn.Module, whole: Collection[str]) -> None:
    """Raise TraceError for a layer of bitsandbytes that is not quantised yet, is packed for evaluation on a CPU, or is hooked
    and none of those that are kept `whole`.
    """
    for path, layer in model.named_modules():
        if not is_own_layer(layer):
            continue
        weight: Any = layer.weight
        kind = type(layer).__name__
        if ("forward" in vars(layer) or any(forward_hooks(layer))) and path not in whole:
            raise TraceError(
                f"'{path}' ({kind}) has hooks or a replaced forward, as accelerate adds them, which a graph cannot record: "
                "remove them before the trace with accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
        quantised = getattr(weight, "bnb_quantized", not weight.is_floating_point())
        if not quantised and not getattr(weight, "has_fp16_weights", False):
            raise TraceError(f"'{path}' ({kind}) is not quantised yet: move the model to its device first, model.to('cpu')")
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            raise TraceError(
                f"'{path}' ({kind}) was packed by bitsandbytes for evaluation on this CPU when it was first called: its scales "
                "are rounded and it has no gradient. Trace before the first call, or unpack it with model.state_dict()"
            )


@contextlib.contextmanager
def keep_unpacked(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from packing a model's weights for evaluation on this processor, inside the context."""
    layers = [m for m in model.modules() if is_own_layer(m) and vars(m).get(PACKS)]
    before = [vars(m)[PACKS] for m in layers]
    for layer in layers:
        vars(layer)[PACKS] = False
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            vars(layer)[PACKS] = value


def disable_packing(layer: Any) -> None:
    """Disable packing for the copy of a layer in a graph, also if the original layer is packed.

    Its packed form has no gradient, and differs from that in training. The values are shared.
    """
    weight: Any = layer._parameters["weight"]
    if PACKS not in vars(layer) or getattr(weight, "quant_state", None) is None:
        return
    own = copy.copy(weight)
    own.quant_state = layer.__dict__["quant_state"] = copy.copy(weight.quant_state)
    own.module = None
    layer._parameters["weight"] = own
    vars(layer)[PACKS] = False


def unwrap_layer(layer: nn.Module) -> nn.Module:
    """Return the layer without torchao's `extra_repr`, on the same tensors; another module itself."""
    if "extra_repr" not in vars(layer) or not is_quantised(layer):
        return layer
    plain = object.__new__(type(layer))
    plain.__dict__ = {name: value for name, value in vars(layer).items() if name != "extra_repr"}
    return plain


def get_arguments(layer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return constructor arguments for a layer of bitsandbytes, and attributes to set afterwards; the rest comes with its
    weight."""
    arguments = {"input_features": layer.in_features, "output_features": layer.out_features, "bias": layer.bias is not None}
    state, weight = vars(layer).get("state"), layer.weight
    if state is not None:
        return {**arguments, "has_fp16_weights": state.has_fp16_weights, "threshold": state.threshold}, {}
    facts = {"compress_statistics": weight.compress_statistics, "quant_storage": layer.quant_storage}
    if "quant_type" in inspect.signature(type(layer)).parameters:  # of the classes of one type each it is no argument
        facts["quant_type"] = weight.quant_type
    kept = {name: getattr(layer, name) for name in ("compute_dtype", "compute_type_is_set")}
    return {**arguments, **facts}, kept


def describe_layer(module: nn.Module) -> str:
    """Describe a quantised layer for messages: its class, or that of its weight, and the library."""
    kept = next((p for p in module._parameters.values() if is_packed(p)), None)
    made: Any = module if is_own_layer(module) else kept
    name: str = type(made).__name__
    return f"{name} of {library(made)}"


def explain_fixed(root: nn.Module, path: str) -> str:
    """Return why the weight at a path cannot be changed, "" if the module there is not quantised."""
    try:
        module = root.get_submodule(path.partition("@")[0])
    except AttributeError:
        return ""
    if not is_quantised(module):
        return ""
    return f"the layer is quantised ({describe_layer(module)}), so nothing can be added to its packed weight"


def cut_gradient(root: nn.Module) -> str:
    """Return the path of a layer of torchao without a gradient to its input, or "": one that quantises its input has none, nor
    have some of its kernels. Each kind is tried once, on one row of zeros.
    """
    tried: dict[Any, bool] = {}
    for path, layer in root.named_modules():
        weight: Any = layer._parameters.get("weight")
        if not isinstance(layer, nn.Linear) or not is_packed(weight) or is_own_layer(layer) or weight.is_meta:
            continue
        kind = (type(weight), layer.in_features, layer.out_features)
        if kind not in tried:
            tried[kind] = _differentiates(layer, weight)
        if not tried[kind]:
            return str(path)
    return ""


def _differentiates(layer: nn.Linear, weight: Tensor) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device, requires_grad=True)
        try:
            torch.autograd.grad(layer(x).sum(), x)
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    return True

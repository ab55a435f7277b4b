"""What does not fit: a batch and the traced graph, before the run or in it; and where values first are not finite."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, fx, nn

from ..core.capture.fake_tensors import silence_torch
from ..core.errors import GuardError, SpecError, TrainError
from ..core.ir.containers import list_leaves, map_leaves
from ..core.ir.graph import without_edges
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.probe import GraphRun, make_empty, swap_weights
from ..core.torch_internals.tensors import FakeTensorMode
from .random_draws import Draws, preserve_random_state
from .shared_samples import find_call
from .tasks.model_call import list_inputs
from .tasks.task import Task


def describe_misfit(
    error: Exception, module: nn.Module, batch: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Describe how a batch differs from the inputs of the trace, with the configuration key to change.

    The module is called with `args` and `kwargs` for this batch.
    """
    inputs = {name: one for name, one in list_inputs(module).items() if one.shape is not None}
    given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    called = inputs_by_name(module, args, kwargs)
    got = {name: called[name] for name in inputs if isinstance(called.get(name), Tensor)}
    lines = [f"the model was traced with inputs that differ from those of the run: {error}"]
    lines.append("  traced: " + _listed(inputs))
    lines.append("  in a batch: " + _listed(given))
    if any(name not in given for name in got):
        lines.append("  called with: " + _listed(got))
    kind = re.search(r"argument '(\w+)' was torch\.\w+ .* now it is torch\.(\w+)", str(error))
    if kind:
        return "\n".join([*lines, f"  write inputs.{kind[1]}.dtype: {kind[2]}"])
    advice = [line for name, value in got.items() for line in _differs(name, inputs[name].shape or (), tuple(value.shape))]
    sizes = "  set the inputs in the configuration to the sizes of a batch: inputs." + ", inputs.".join(inputs)
    return "\n".join([*lines, *(advice or [sizes])])


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {list(v.shape or ())} {str(v.dtype).removeprefix('torch.')}" for n, v in values.items())


def _differs(name: str, traced: tuple[int, ...], got: tuple[int, ...]) -> list[str]:
    """Return advice about an input whose shape differs from the trace; none where only the batch size differs."""
    if len(traced) != len(got):
        return [f"  {name} has {len(got)} dimensions and inputs.{name} {len(traced)}: write inputs.{name}: {list(got)}"]
    if len(got) == 4 and traced[1] != got[1]:
        latents = "; for latents set a VAE (train.task.denoise.vae)" if got[1] == 3 else ""
        return [f"  {name} has {got[1]} channels and inputs.{name} {traced[1]}: use data with that number of channels{latents}"]
    if len(got) == 4 and traced[2:] != got[2:]:
        both = f"images are {list(got[2:])} and inputs.{name} is {list(traced)}"
        return [f"  {both}: set the same size in data.size and inputs.{name}"]
    if len(got) == 3 and traced[2] != got[2]:
        found = f"a text in {name} has {got[2]} numbers a word and in inputs.{name} {traced[2]}"
        return [f"  {found}: set the text encoder that the model was trained with (train.task.denoise.text)"]
    if len(got) == 3 and traced[1] != got[1]:
        found = f"a text in {name} has {got[1]} words and in inputs.{name} {traced[1]}"
        return [f"  {found}: write inputs.{name}: {[traced[0], *got[1:]]}"]
    return []


def inputs_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the module's inputs."""
    return {**dict(zip(list_inputs(module), args, strict=False)), **kwargs}


def find_first_not_finite(module: TracedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return where values first stop being finite in a call; None where they do not.

    Non-finite arguments and parameters come before the graph: they are named as the cause.
    """
    finding = _bad(dict(module.named_parameters()), "parameter") or _bad(inputs_by_name(module, args, kwargs), "input")
    if finding is not None:
        return finding
    given = inspect.signature(module.forward).bind(*args, **kwargs)
    given.apply_defaults()
    run = GraphRun(module, without_edges(module.graph), list(given.arguments.values()), keep=False)
    for node, value in run:
        if node.op not in ("output", "get_attr") and (bad := _not_finite(value)):
            return _described(node, bad[0], run.env)
    return None


def _bad(values: Mapping[str, Any], what: str) -> str | None:
    for name, value in values.items():
        if bad := _not_finite(value):
            return f"{what} '{name}' has {_counted(bad[0])}"
    return None


def _not_finite(value: Any) -> list[Tensor]:
    return [x for x in list_leaves(value) if isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all()]


def _counted(value: Tensor) -> str:
    nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
    return " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "Inf")) if count) + f" of {value.numel()}"


def _described(node: fx.Node, value: Tensor, env: Mapping[fx.Node, Any]) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    region = next((path for path, _ in reversed(list(stack.values())) if path), "")
    if node.op == "call_module":
        region = str(node.target)
    operation = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    inputs = [x for n in node.all_input_nodes for x in list_leaves(env.get(n)) if isinstance(x, Tensor)]
    sizes = [x.abs().max().item() for x in inputs if x.is_floating_point() and x.numel()]
    largest = f"; its largest input is {max(sizes):.3g}" if sizes else ""
    where = f"region '{region}'" if region else "the model's own forward"
    return f"the first non-finite values are in {where}: {operation} returned {_counted(value)}{largest}"


@torch.no_grad()
def find_bad_gradients(named: Mapping[str, Tensor], shown: int = 3) -> str | None:
    """Name the first parameters, in the order of the model, whose gradient is not finite; None if there are none."""
    names = [name for name, p in named.items() if p.grad is not None and not p.grad.isfinite().all()]
    if not names:
        return None
    more = f" and {len(names) - shown} more" * (len(names) > shown)
    return f"the gradient of {', '.join(names[:shown])}{more} is not finite"


def check_fits(module: TracedModule, task: Task, batch: Mapping[str, Any], draws: Draws, accelerator: Accelerator) -> None:
    """Raise TrainError if the graph's guards fail for the task's call of the module with this batch.

    The task's loss runs up to that call; the graph runs on fake tensors, so nothing is computed or changed. What that cannot
    find out (a graph that reads values, an operation without a fake form, a task that fails) is left to the first step.
    """
    if any(n.op == "call_method" and n.target in ("item", "tolist") for graph in module.graphs.values() for n in graph.nodes):
        return
    try:
        with preserve_random_state():
            args, kwargs = find_call(task, batch, draws, accelerator)
    except SpecError as error:
        if error.path == ("train", "task"):  # a loss that does not call the module, perhaps this once
            return
        raise
    except Exception:  # the task's own, which the first step tells with its traceback
        return
    given, inputs = inputs_by_name(module, args, kwargs), list_inputs(module)
    traced = {name: one for name, one in inputs.items() if one.shape is not None and isinstance(given.get(name), Tensor)}
    like = all(one.shape == tuple(given[name].shape) and one.dtype == given[name].dtype for name, one in traced.items())
    if like and accelerator.mixed_precision == "no":
        return
    failure = _failure(module, args, kwargs, accelerator.autocast())
    if failure is None:
        return
    if isinstance(failure, GuardError) and _failure(module, args, kwargs, nullcontext()) is None:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[accelerator.mixed_precision]
        raise TrainError(
            f"the graph of this model does not hold under autocast (precision: {accelerator.mixed_precision}): {failure}\n  "
            f"convert the model before the trace (dtype: {dtype}; trained parameters stay float32), or set precision: fp32"
        ) from failure
    for name, one in traced.items():
        given[name] = torch.empty(one.shape or (), dtype=one.dtype, device=given[name].device)
    if _failure(module, (), given, accelerator.autocast()) is None:  # else it is nothing about the batch
        raise TrainError(describe_misfit(failure, module, batch, args, kwargs)) from failure


def _failure(module: TracedModule, args: Any, kwargs: Any, autocast: AbstractContextManager[Any]) -> Exception | None:
    """Return the exception of a call of the module on fake tensors of the same geometry, or None."""
    with FakeTensorMode(allow_non_fake_inputs=True), swap_weights(module, make_empty), autocast, silence_torch():
        args, kwargs = map_leaves((args, kwargs), lambda t, _: make_empty(t) if isinstance(t, Tensor) else t)
        try:
            module(*args, **kwargs)
        except Exception as error:  # of any operation of the model's
            return error
    return None


def find_without_gradient(
    module: nn.Module, task: Task, batch: Mapping[str, Any], draws: Draws, accelerator: Accelerator
) -> list[str]:
    """Return the names of trainable parameters that get no gradient from a batch. Buffers, gradients and generators are
    restored."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with preserve_random_state(), accelerator.autocast():
            found = task.loss(module, dict(batch), draws)
            loss = found[0] if isinstance(found, tuple) else found
            accelerator.backward(loss)
        return [name for name, p in trained.items() if p.grad is None]
    except Exception:  # the task's own, which the first step tells
        return []
    finally:
        for p in trained.values():
            p.grad = None
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])

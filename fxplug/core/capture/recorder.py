"""What torch functions do during one run of a model, as nodes of a graph."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..errors import TraceError
from ..ir import functions, ops
from ..ir.containers import list_leaves, map_leaves
from ..torch_internals import CHECKPOINTS, SCRIPTED
from ..torch_internals.modules import set_grad_enabled
from ..torch_internals.tensors import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    unset_fake_temporarily,
    version,
)
from .fake_tensors import NeedsValues, Number
from .graph_builder import NUMBERS, SMALL, Recording
from .reads import Dtypes, guard_parts, read_size, read_value
from .user_code import (
    find_calling_frame,
    find_source_line,
    find_user_frame,
    is_comparing_identity,
    is_inside_try,
    is_irrelevant_branch,
    is_text_for_people,
)

MANY = 256  # so many numbers that go to numpy are held by one guard


class NeedsAutograd(Exception):
    """The model asks what autograd knows, which fake tensors are told only in a second try."""


class Listener(TorchFunctionMode):
    """A mode that gives each call of a torch function to its handler, which writes it down in a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        recording.listener, recording.dtypes = self, Dtypes(recording)

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, kwargs = self.recording, kwargs or {}
        if recording.paused or func is set_grad_enabled:
            return func(*args, **kwargs)
        if type(func) is types.MethodWrapperType:  # the getter of a property; a new object at each access
            return read_attribute(recording, func, *args)
        if recording.journal is not None and recording.journal.dispatching:  # in code that is no Python sizes are numbers
            sizes = [recording.shape(x) for x in list_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            for size in itertools.chain(*sizes):
                recording.decide(size)
        name = functions.list_method_names().get(func)
        handler: Callable[..., Any] = HANDLERS.get(name or func, record_call)
        return handler(recording, func, name, args, kwargs)


def _calling_frame() -> types.FrameType:
    """Find the frame that called the torch function which is handled."""
    frame, handled = sys._getframe(1), False
    while frame.f_code.co_filename == __file__ and not handled and frame.f_back is not None:
        handled = frame.f_code is Listener.__torch_function__.__code__
        frame = frame.f_back
    return frame


def refuse_backward(recording: Recording, func: Any, name: str | None, args: Any, kwargs: Any) -> Any:
    """Raise TraceError for what runs a backward pass, or waits for one."""
    raise TraceError(
        f"{recording.place()}: calls Tensor.{name or 'backward'}(); autograd calls cannot be captured in a graph; "
        f"{recording.way_out()}"
    )


def record_gradients(recording: Recording, func: Any, name: str | None, args: Any, kwargs: Any) -> Any:
    """Record `torch.autograd.grad`, which needs what autograd knows."""
    if not recording.autograd:
        raise NeedsAutograd
    return record_call(recording, func, name, args, kwargs)


def record_text(recording: Recording, func: Any, name: str | None, args: Any, kwargs: Any) -> Any:
    """Make the text of a tensor. Raises TraceError where its values matter: what people read may be told, all else hangs on
    them.
    """
    user = find_calling_frame(_calling_frame()) if recording.computed(args[0]) else None
    if user is not None and not is_text_for_people(user):
        raise TraceError(
            f"{recording.place()}: turns a tensor's values into a string, which cannot be captured in a graph; "
            f"{recording.way_out()}"
        )
    return record_call(recording, func, name, args, kwargs)


def leave_torch(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Let a tensor's values go where they cannot be followed: a few of them can be held by a guard."""
    tensor = args[0]
    if not recording.computed(tensor):
        return record_call(recording, func, name, args, kwargs)
    if recording.fake:
        raise NeedsValues(recording.needs_values())
    if name not in ("numpy", "__array__") or tensor.numel() > MANY:
        raise TraceError(
            f"{recording.place()}: converts a tensor to a value outside torch ({name}), so what is computed from it cannot be "
            f"captured; {recording.way_out()}"
        )
    node = recording.node("call_method", "tolist", (recording.lookup(tensor),), {}, recording.named("tolist"))
    recording.guard(node, tensor.tolist(), does=f"converts values that it computes to values outside torch ({name})")
    return func(*args, **kwargs)


def copy_tensor(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Record a copy of its own: gradients reach it and not the tensor."""
    tensor = args[0]
    new = record_call(recording, torch.clone, None, (tensor,), {})
    new = record_call(recording, torch.Tensor.detach, "detach", (new,), {})
    if not tensor.is_floating_point():
        return new
    args = (recording.lookup(tensor), "requires_grad")
    asked = recording.node("call_function", ops.autograd_query, args, {}, recording.named("requires_grad"))
    return recording.mark(new, recording.node("call_method", "requires_grad_", (recording.lookup(new), asked), {}, "copied"))


def reverse(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Record what `reversed` gives of a tensor."""
    return record_call(recording, torch.Tensor.flip, "flip", (args[0], 0), {}) if args[0].dim() else args[0]


def read_attribute(recording: Recording, func: Any, tensor: torch.Tensor, *rest: Any) -> Any:
    """Read an attribute of a tensor. Raises TraceError where a graph cannot say it, as for setting one."""
    name = func.__self__.__name__
    if func.__name__ != "__get__":
        raise TraceError(f"{recording.place()}: sets Tensor.{name}, which cannot be captured in a graph; {recording.way_out()}")
    if name == "shape":
        return recording.shape(tensor)
    node = recording.recorded(tensor) if isinstance(tensor, torch.Tensor) else None
    if name in ("nbytes", "itemsize") and node is not None:
        count = recording.size_of(node, "numel", tensor.numel()) if name == "nbytes" else 1
        return count * recording.size_of(node, "element_size", tensor.element_size())
    out = func(tensor, *rest)
    if name == "dtype":
        return recording.dtypes.read(tensor, out, _calling_frame())
    if name in (*ops.QUESTIONS, *functions.HISTORY) and find_calling_frame(_calling_frame()) is not None:
        if name not in functions.HISTORY:
            return query_autograd(recording, tensor, name)
    elif not isinstance(out, torch.Tensor) or name == "grad":
        return out
    if name not in functions.ATTRIBUTES:
        raise TraceError(
            f"{recording.place()}: reads Tensor.{name}, which cannot be captured in a graph; {recording.way_out()}"
        )
    op, target, extra = functions.ATTRIBUTES[name](tensor)
    return recording.bind(out, recording.node(op, target, (recording.lookup(tensor), *extra), {}, recording.named(name)))


def record_call(recording: Recording, func: Any, method: str | None, args: Any, kwargs: Any) -> Any:
    """Run a torch function and record it under its public name."""
    if kwargs.get("generator") is torch.default_generator:
        kwargs = {**kwargs, "generator": None}  # which is the one without any
    if func in functions.CONSTANTS and not any(isinstance(x, (Number, torch.Tensor)) for x in list_leaves((args, kwargs))):
        made = make_constant(recording, func, args, kwargs)
        if made is not None:
            return made
    plain, nodes = recording.lower(tuple(args))
    plain_kw, node_kw = recording.lower(dict(kwargs))
    short = str(method or getattr(func, "__name__", "")).strip("_")
    several = [x if type(x) in (list, tuple) else (x,) for x in (*plain, *plain_kw.values())]
    given = [x for some in several for x in some if isinstance(x, torch.Tensor)]
    called = str(method or getattr(func, "__name__", ""))
    writes = called.endswith("_") or called.startswith(("__i", "__set")) or "out" in kwargs or kwargs.get("inplace") is True
    if recording.fake and writes:
        for x in given:  # a tensor that the model holds and that is no weight is written for real
            if type(x) is not FakeTensor:
                with unset_fake_temporarily():
                    recording.overwritten.keep(x)
    versions = [version(x) for x in given]
    run = functions.SHAPE_OF_FIRST.get(func) if recording.fake else None
    views = tuple(recording.parameter_of(x) is not None for x in given)
    key = recording.results.key(func, plain, plain_kw, views) if recording.fake and not ops.is_applied(func) else None
    remembered = recording.results.get(key, recording.mode)
    out = remembered
    if remembered is None:
        try:
            recording.paused = ops.is_applied(func)
            out = run(given[0]) if run else func(*plain, **plain_kw)
        except Exception:  # torch's, raised again
            if find_calling_frame(_calling_frame()) is not None:
                recording.failed = recording.failed or recording.place()
            raise
        finally:
            recording.paused = False
    changed = [x for x, before in zip(given, versions, strict=True) if version(x) != before]
    if called.endswith("_") and several and isinstance(several[0], list):  # functions on lists count no versions
        changed += several[0]
    if any(views) and (written := next(filter(None, map(recording.parameter_of, changed)), None)):
        raise TraceError(
            f"{recording.place()}: writes the parameter '{written}' in place, and a graph never writes parameters: make it a "
            f"buffer (register_buffer), whose writes are recorded, or {recording.way_out()}"
        )
    if isinstance(out, (str, torch.dtype)) or short == "can_cast":
        for x in given:
            recording.dtypes.read(x, x.dtype, _calling_frame())
        if isinstance(out, torch.dtype):  # of an integer and a float
            recording.reads_default_dtype()
    if out is NotImplemented or isinstance(out, functions.KIND_ANSWERS) or short in functions.KIND_QUESTIONS:
        return out
    is_query = isinstance(out, bool) and short.startswith(("is_", "has_", "can_", "_"))
    if is_query and find_calling_frame(_calling_frame()) is None:
        return out  # torch asks for itself, and will ask again
    if short == "is_inference" and recording.inference[-1]:
        raise TraceError(
            f"{recording.place()}: calls Tensor.is_inference() in inference mode: trace outside of torch.inference_mode"
        )
    if out is None and method is None and func not in functions.name_functions() and not changed:
        return None
    if isinstance(func, OpOverload) and func.namespace == "aten" and not kwargs:  # as scripted functions call them
        method = functions.list_method_names().get(getattr(torch.Tensor, func.overloadpacket.__name__, None), method)
    operator_name = functions.get_operator_name(func, called)
    op, target, nodes = find_target(recording, func, method, nodes)
    short = functions.get_short_name(target)
    in_place = bool(changed) or getattr(target, "__name__", str(target)).endswith("_")
    # running statistics, unseen
    moves = func in functions.SHAPE_OF_FIRST and any(flag is True for flag in (*plain, *plain_kw.values()))
    effect = (
        (in_place and not isinstance(out, bool))
        or short in functions.RANDOM
        or (out is None and method is not None)
        or moves
    )
    # a remembered result has memory of its own, which does not tell what it is a view of
    if remembered is None and not in_place and not (any(views) and recording.is_view_of_parameter(out)):
        recording.results.put(key, out, given)
    node = recording.node(op, target, nodes, node_kw, recording.named(short), effect)
    if any(recording.recorded(x) is not None for x in given):  # a weight has the sizes it has
        guard_parts(recording, func, operator_name, node, out, (plain, plain_kw), _calling_frame())
    if short in functions.SAME_OR_COPY and isinstance(out, torch.Tensor) and given and is_comparing_identity(find_user_frame()):
        guard_itself(recording, node, out, given[0])
        if out is given[0]:
            return out
    if is_inside_try(find_user_frame()):
        recording.node("call_function", ops.tried, (node,), {}, f"{node.name}_tried", effect=True)
    if isinstance(target, str) and target in functions.RESHAPING:
        repeat_reshape(recording, func, plain[0], plain[1:], plain_kw)
    if any(out is x for x in changed):
        node.meta.update(shape=tuple(out.shape), dtype=out.dtype)
        return recording.mark(out, node) if recording.recorded(out) is not None else out
    if out is not None and not isinstance(out, (torch.Tensor, tuple, list, dict)) and type(out) not in NUMBERS:
        raise TraceError(
            f"{recording.place()}: {short} returns a {type(out).__name__}, which cannot be captured in a graph; "
            f"{recording.way_out()}"
        )
    return recording.bind(out, node)


def query_autograd(recording: Recording, tensor: torch.Tensor, question: str) -> Any:
    """Ask autograd about a tensor: the answer holds as long as it is the same."""
    if not recording.autograd:
        raise NeedsAutograd
    root = tensor
    while (of := getattr(root, "_fxplug_of", None)) is not None:
        root = of
    with DisableTorchFunction():
        answer = ops.autograd_query(root, question)
    frame = find_user_frame()
    if frame is None or not is_irrelevant_branch(frame):
        args = (recording.lookup(tensor), question)
        node = recording.node("call_function", ops.autograd_query, args, {}, recording.named(question))
        node.meta["value"] = answer
        recording.guard(node, answer)
    return answer


def guard_itself(recording: Recording, node: fx.Node, out: torch.Tensor, given: torch.Tensor) -> None:
    """Hold whether an operation gives its argument itself, which code with `a is b` can tell from a copy."""
    same = recording.node("call_function", ops.is_same, (node, recording.lookup(given)), {}, f"{node.name}_itself")
    recording.guard_after(same, out is given, (*find_source_line(), "whether it returns its argument itself"))


def find_target(
    recording: Recording, func: Any, method: str | None, nodes: tuple[Any, ...]
) -> tuple[str, Any, tuple[Any, ...]]:
    """Find a public name for what was called: FX op, target, and the arguments in that target's order."""
    if ops.is_applied(func):
        return "call_function", func, nodes
    if listed := functions.find_allowed(func):
        return "call_function", listed, nodes
    if method is not None:
        if method in functions.DUNDERS:
            function, swapped = functions.DUNDERS[method]
            return "call_function", function, (nodes[1], nodes[0]) if swapped else nodes
        if method.startswith("__i") and method.endswith("__"):
            return "call_method", method.strip("_")[1:] + "_", nodes
        if not method.startswith("_"):
            return "call_method", method, nodes
    public = getattr(torch, getattr(func, "__name__", ""), None)
    if listed := functions.find_allowed(public):
        return "call_function", listed, nodes
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return "call_function", func, nodes
    owner = sys.modules.get(getattr(func, "__module__", None) or "")
    if owner is not None and getattr(owner, getattr(func, "__name__", ""), None) is func:
        return "call_function", func, nodes
    raise TraceError(
        f"{recording.place()}: calls {torch.overrides.resolve_name(func) or func!r}, which has no public name in torch, so a "
        f"graph cannot call it; {recording.way_out()}"
    )


def repeat_reshape(recording: Recording, func: Any, tensor: torch.Tensor, rest: Any, kwargs: Any) -> None:
    """Change the shape of what a tensor is an alias of, as it changed its own in place."""
    recording.numbers.clear()
    while (tensor := getattr(tensor, "_fxplug_of", None)) is not None:  # type: ignore[assignment]
        func(tensor, *rest, **kwargs)


def make_constant(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a tensor from Python or numpy data a buffer; None for a small one, which each call makes anew."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if not isinstance(data, (list, tuple, np.ndarray)) or (
        not isinstance(data, np.ndarray) and np.asarray(data, dtype=object).size <= SMALL
    ):
        return None
    with unset_fake_temporarily(), DisableTorchFunction():
        real = func(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")})
    if not isinstance(data, np.ndarray) and kwargs.get("dtype") is None and (real.is_floating_point() or real.is_complex()):
        recording.reads_default_dtype()
    return fresh_constant(recording, real)


def fresh_constant(recording: Recording, real: torch.Tensor) -> torch.Tensor:
    """Record a constant as the new tensor that each call gets."""
    with DisableTorchFunction():
        if recording.journal is not None:
            recording.journal.forget(real)
        source = recording.lookup(real)
        node = recording.node("call_method", "clone", (source,), {}, f"{source.name}_clone")
        return recording.mark(recording.mode.from_tensor(real) if recording.mode is not None else real.clone(), node)


def list_patches(recording: Recording) -> Iterator[tuple[Any, str, Any]]:
    """Give what stands for functions of torch of whose calls no mode hears: owner, name and value."""
    apply = vars(torch.autograd.Function)["apply"]
    yield torch.autograd.Function, "apply", patch_apply(recording, apply)
    yield torch.jit.ScriptFunction, "__call__", patch_script(recording, torch.jit.ScriptFunction.__call__)
    for name in CHECKPOINTS:
        if name in vars(checkpoint):
            yield checkpoint, name, patch_checkpoint(recording, vars(checkpoint)[name])
    kind: Any = type(nn.Parameter)
    yield kind, "__instancecheck__", patch_instance_check(recording, kind.__instancecheck__)
    for name in ("from_numpy", "frombuffer"):
        yield torch, name, patch_from_numpy(recording, getattr(torch, name))


def patch_apply(recording: Recording, original: Any) -> Any:
    """Make what stands for `torch.autograd.Function.apply`: a call of the class, whose backward the graph has so.

    torch's own checkpoint, which is given code to run, is recorded as what that code does.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recording.recording_here():
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *given = args
            recording.checkpointed = recording.checkpointed or f"{recording.place()}: a checkpoint"
            return inline(recording, given, lambda: function(*given))
        try:
            recording.lower(args)
        except TraceError as error:  # functions, modules, objects
            raise TraceError(
                f"{recording.place()}: {cls.__name__} has a backward of its own and is given more than tensors and plain "
                f"values, which cannot be captured in a graph: turn it off where it is checkpointing, or {recording.way_out()}"
            ) from error
        return record_call(recording, ops.applied(cls), None, args, kwargs)

    return classmethod(apply)


def inline(recording: Recording, given: Any, run: Callable[[], Any]) -> Any:
    """Record what a checkpoint runs. Its results, and tuples of them, have gradients where an argument has."""
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    enabled = not recording.autograd or ops.any_gradients(*tensors)
    nodes = tuple(map(recording.lookup, tensors))
    flag = recording.node("call_function", ops.any_gradients, nodes, {}, recording.named("any_gradients"))
    opened = recording.node("call_function", ops.enter_grad, (flag,), {}, recording.named("enter_grad"), effect=True)
    before = torch.is_grad_enabled()
    set_grad_enabled(before and enabled)
    out = run()
    set_grad_enabled(before)
    recording.node("call_function", ops.exit_grad, (opened,), {}, recording.named("exit_grad"), effect=True)
    recording.switched += 2
    several = out if type(out) is tuple else (out,)
    parts = [x if isinstance(x, torch.Tensor) else map_leaves(x, lambda t, _: t.detach()) for x in several]
    return tuple(parts) if several is out else parts[0]


def patch_checkpoint(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make what stands for what runs a checkpoint that is not reentrant."""

    def begin(*args: Any, **kwargs: Any) -> Any:
        if recording.recording_here():
            recording.checkpointed = recording.checkpointed or f"{recording.place()}: a checkpoint"
        return original(*args, **kwargs)

    return begin


def patch_script(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make what stands for the call of a scripted function: its Python code, which torch.compile takes, too."""

    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        code = getattr(script, SCRIPTED, None) if recording.recording_here() else None
        return original(script, *args, **kwargs) if code is None else code(*args, **kwargs)

    return call


def patch_instance_check(recording: Recording, original: Callable[..., bool]) -> Callable[..., bool]:
    """Make what stands for the `isinstance` of nn.Parameter, which the model may ask of an input."""

    def check(cls: Any, value: Any) -> bool:
        found = original(cls, value)
        if cls is nn.Parameter and recording.recording_here() and find_calling_frame(sys._getframe(1)) is not None:
            node = recording.recorded(value) if isinstance(value, torch.Tensor) else None
            if node is not None:
                args = (node, "is_parameter")
                asked = recording.node("call_function", ops.autograd_query, args, {}, recording.named("is_parameter"))
                recording.guard_after(asked, found, (*find_source_line(), "whether it is a parameter"))
        return found

    return check


def patch_from_numpy(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make what stands for a function that makes a tensor and does not report to torch."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if not recording.recording_here():
            return original(*args, **kwargs)
        with unset_fake_temporarily(), DisableTorchFunction():
            real = original(*args, **kwargs)
        return fresh_constant(recording, real)

    return make


# by the name of a method of torch.Tensor, or by the function; all others are recorded as calls
HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(functions.SIZES, read_size),
    **dict.fromkeys((*functions.VALUES, torch.is_nonzero), read_value),
    **dict.fromkeys((*functions.LATER, torch.autograd.backward), refuse_backward),
    torch.autograd.grad: record_gradients,
    **dict.fromkeys(functions.LEAVING, leave_torch),
    **dict.fromkeys(functions.TEXT, record_text),
    "__deepcopy__": copy_tensor,
    "__reversed__": reverse,
}

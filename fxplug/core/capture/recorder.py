"""What torch functions do during one run of a model, as nodes of a graph."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction

from ..errors import TraceError
from ..ir import functions, ops
from ..ir.containers import leaves, map_leaves
from ..torch_internals import SCRIPTED
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
from .graph_builder import NUMBERS, SMALL
from .reads import Dtypes, RecordedNumbers
from .user_code import (
    CONSTANTS,
    ITSELF,
    KIND_ANSWERS,
    KIND_QUESTIONS,
    KIND_TESTS,
    LATER,
    LEAVING,
    MANY,
    OUTSIDE,
    RESHAPING,
    SHAPE_OF_FIRST,
    SIZES,
    TEXT,
    VALUES,
    asker,
    decides_nothing,
    decision_at,
    is_text_for_people,
    is_tried,
    source_line,
    tells_apart,
    user_frame,
)

default_dtype = torch.get_default_dtype  # torch's own, whatever a run puts in its place
LEAVING |= {"apply_", "map_", "map2_", "__cuda_array_interface__"}


class NeedsAutograd(Exception):
    """The model asks what autograd knows, which fake tensors are told only in a second try."""


class Recording(RecordedNumbers):
    """A graph that grows while the model runs inside it: every call of a torch function becomes a node."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dtypes = Dtypes(self)
        self.checkpointed = ""  # where code is recorded that the model's backward runs again

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func is set_grad_enabled:
            return func(*args, **kwargs)
        if type(func) is types.MethodWrapperType:  # the getter of a property; a new object at each access
            return self.attribute(func, *args)
        name = functions.method_names().get(func)
        if self.journal is not None and self.journal.dispatching:  # in code that is no Python sizes are numbers
            sizes = [self.shape(x) for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            for size in itertools.chain(*sizes):
                self.decide(size)
        if name in SIZES:
            return self.size(func, name, args, kwargs)
        if name in VALUES or func is torch.is_nonzero:
            return self.value(func, name or "is_nonzero", args)
        if name in LATER or func is torch.autograd.backward:
            called = name or "backward"
            raise TraceError(
                f"{self.place()}: calls Tensor.{called}(); autograd calls cannot be captured in a graph; {self.way_out()}"
            )
        if func is torch.autograd.grad and not self.autograd:
            raise NeedsAutograd
        if name in TEXT and self.computed(args[0]):
            self.text(sys._getframe(1))
        if name in LEAVING and self.computed(args[0]):
            self.leave_torch(name, args[0])
            return func(*args, **kwargs)
        if name == "__deepcopy__":
            return self.copied(args[0])
        if name == "__reversed__":
            return self.call(torch.Tensor.flip, "flip", (args[0], 0), {}) if args[0].dim() else args[0]
        return self.call(func, name, args, kwargs)

    def copied(self, tensor: torch.Tensor) -> Any:
        """Return a recorded copy of a tensor as a new leaf: gradients reach it and not the tensor."""
        new = self.call(torch.clone, None, (tensor,), {})
        new = self.call(torch.Tensor.detach, "detach", (new,), {})
        if not tensor.is_floating_point():
            return new
        args = (self.lookup(tensor), "requires_grad")
        asked = self.node("call_function", ops.autograd_query, args, {}, self.named("requires_grad"))
        return self.mark(new, self.node("call_method", "requires_grad_", (self.lookup(new), asked), {}, "copied"))

    def text(self, frame: types.FrameType) -> None:
        """Check text made from a tensor's values. Raises TraceError unless it only goes into a message."""
        user = asker(frame)
        if user is not None and not is_text_for_people(user):
            raise TraceError(
                f"{self.place()}: turns a tensor's values into a string, which cannot be captured in a graph; {self.way_out()}"
            )

    def attribute(self, func: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        """Return the value of an attribute of a tensor. Raises TraceError if a graph cannot represent it, and for setting
        one."""
        name = func.__self__.__name__
        if func.__name__ != "__get__":
            raise TraceError(f"{self.place()}: sets Tensor.{name}, which cannot be captured in a graph; {self.way_out()}")
        if name == "shape":
            return self.shape(tensor)
        node = self.recorded(tensor) if isinstance(tensor, torch.Tensor) else None
        if name in ("nbytes", "itemsize") and node is not None:
            count = self.size_of(node, "numel", tensor.numel()) if name == "nbytes" else 1
            return count * self.size_of(node, "element_size", tensor.element_size())
        out = func(tensor, *rest)
        if name == "dtype":
            return self.dtypes.read(tensor, out, sys._getframe(2))
        if name in (*ops.QUESTIONS, *OUTSIDE) and asker(sys._getframe(2)) is not None:
            if name not in OUTSIDE:
                return self.query_autograd(tensor, name)
            raise TraceError(f"{self.place()}: reads Tensor.{name}, which cannot be captured in a graph; {self.way_out()}")
        if not isinstance(out, torch.Tensor) or name == "grad":
            return out
        if name not in functions.ATTRIBUTES:
            raise TraceError(f"{self.place()}: reads Tensor.{name}, which cannot be captured in a graph; {self.way_out()}")
        op, target, extra = functions.ATTRIBUTES[name](tensor)
        return self.bind(out, self.node(op, target, (self.lookup(tensor), *extra), {}, self.named(name)))

    def call(self, func: Any, method: str | None, args: Any, kwargs: Any) -> Any:
        """Run a torch function and record it under its public name."""
        if kwargs.get("generator") is torch.default_generator:
            kwargs = {**kwargs, "generator": None}  # which is the one without any
        if func in CONSTANTS and not any(isinstance(x, (Number, torch.Tensor)) for x in leaves((args, kwargs))):
            made = self.made_constant(func, args, kwargs)
            if made is not None:
                return made
        plain, nodes = self.lower(tuple(args))
        plain_kw, node_kw = self.lower(dict(kwargs))
        short = str(method or getattr(func, "__name__", "")).strip("_")
        several = [x if type(x) in (list, tuple) else (x,) for x in (*plain, *plain_kw.values())]
        given = [x for some in several for x in some if isinstance(x, torch.Tensor)]
        called = str(method or getattr(func, "__name__", ""))
        writes = called.endswith("_") or called.startswith(("__i", "__set")) or "out" in kwargs or kwargs.get("inplace") is True
        if self.fake and writes:
            for x in given:  # a tensor that the model holds and that is no weight is written for real
                if type(x) is not FakeTensor:
                    with unset_fake_temporarily():
                        self.overwritten.keep(x)
        versions = [version(x) for x in given]
        run = SHAPE_OF_FIRST.get(func) if self.fake else None
        views = tuple(self.parameter_of(x) is not None for x in given)
        key = self.results.key(func, plain, plain_kw, views) if self.fake and not ops.is_applied(func) else None
        remembered = self.results.get(key, self.mode)
        out = remembered
        if remembered is None:
            try:
                self.paused = ops.is_applied(func)
                out = run(given[0]) if run else func(*plain, **plain_kw)
            except Exception:  # torch's, raised again
                if asker(sys._getframe(2)) is not None:
                    self.failed = self.failed or self.place()
                raise
            finally:
                self.paused = False
        changed = [x for x, before in zip(given, versions, strict=True) if version(x) != before]
        if called.endswith("_") and several and isinstance(several[0], list):  # functions on lists count no versions
            changed += several[0]
        if any(views) and (written := next(filter(None, map(self.parameter_of, changed)), None)):
            raise TraceError(
                f"{self.place()}: writes the parameter '{written}' in place, and a graph never writes parameters: make it a "
                f"buffer (register_buffer), whose writes are recorded, or {self.way_out()}"
            )
        if isinstance(out, (str, torch.dtype)) or short == "can_cast":
            for x in given:
                self.dtypes.read(x, x.dtype, sys._getframe(2))
            if isinstance(out, torch.dtype):  # of an integer and a float
                self.reads_default_dtype()
        if out is NotImplemented or isinstance(out, KIND_ANSWERS) or short in KIND_QUESTIONS | KIND_TESTS:
            return out
        if isinstance(out, bool) and short.startswith(("is_", "has_", "can_", "_")) and asker(sys._getframe(2)) is None:
            return out  # torch asks for itself, and will ask again
        if short == "is_inference" and self.inference[-1]:
            raise TraceError(
                f"{self.place()}: calls Tensor.is_inference() in inference mode: trace outside of torch.inference_mode"
            )
        if out is None and method is None and func not in functions.names() and not changed:
            return None
        if isinstance(func, OpOverload) and func.namespace == "aten" and not kwargs:  # as scripted functions call them
            method = functions.method_names().get(getattr(torch.Tensor, func.overloadpacket.__name__, None), method)
        operator_name = functions.operator_name(func, called)
        op, target, nodes = self.target(func, method, nodes)
        short = functions.short_name(target)
        in_place = bool(changed) or getattr(target, "__name__", str(target)).endswith("_")
        # running statistics, unseen
        moves = func in SHAPE_OF_FIRST and any(flag is True for flag in (*plain, *plain_kw.values()))
        effect = (
            (in_place and not isinstance(out, bool))
            or short in functions.RANDOM
            or (out is None and method is not None)
            or moves
        )
        # a remembered result has memory of its own, which does not tell what it is a view of
        if remembered is None and not in_place and not (any(views) and self.is_view_of_parameter(out)):
            self.results.put(key, out, given)
        node = self.node(op, target, nodes, node_kw, self.named(short), effect)
        if any(self.recorded(x) is not None for x in given):  # a weight has the sizes it has
            self.guard_parts(func, operator_name, node, out, (plain, plain_kw), sys._getframe(2))
        if short in ITSELF and isinstance(out, torch.Tensor) and given and tells_apart(user_frame()):
            self.guard_itself(node, out, given[0])
            if out is given[0]:
                return out
        if is_tried(user_frame()):
            self.node("call_function", ops.tried, (node,), {}, f"{node.name}_tried", effect=True)
        if isinstance(target, str) and target in RESHAPING:
            self.reshaped(func, plain[0], plain[1:], plain_kw)
        if any(out is x for x in changed):
            node.meta.update(shape=tuple(out.shape), dtype=out.dtype)
            return self.mark(out, node) if self.recorded(out) is not None else out
        if out is not None and not isinstance(out, (torch.Tensor, tuple, list, dict)) and type(out) not in NUMBERS:
            raise TraceError(
                f"{self.place()}: {short} returns a {type(out).__name__}, which cannot be captured in a graph; {self.way_out()}"
            )
        return self.bind(out, node)

    def guard_itself(self, node: fx.Node, out: torch.Tensor, given: torch.Tensor) -> None:
        """Guard whether an operation returns its argument itself, which code with `a is b` can tell from a copy."""
        same = self.node("call_function", ops.is_same, (node, self.lookup(given)), {}, f"{node.name}_itself")
        self.guard_after(same, out is given, (*source_line(), "whether it returns its argument itself"))

    def leave_torch(self, name: str, tensor: torch.Tensor) -> None:
        """Guard the values of a small tensor that are converted to numpy. Raises TraceError for other conversions."""
        if self.fake:
            raise NeedsValues(self.needs_values())
        if name not in ("numpy", "__array__") or tensor.numel() > MANY:
            raise TraceError(
                f"{self.place()}: converts a tensor to a value outside torch ({name}), so what is computed from it cannot be "
                f"captured; {self.way_out()}"
            )
        node = self.node("call_method", "tolist", (self.lookup(tensor),), {}, self.named("tolist"))
        self.guard(node, tensor.tolist(), does=f"converts values that it computes to values outside torch ({name})")

    def dynamic_dtype(self, dtype: torch.dtype) -> Any:
        return self.dtypes.dtype_argument(dtype)

    def finish(self) -> None:
        for read in self.dtypes.decided():
            self.guard_after(read.node, read.node.meta["value"], (read.where, read.line, decision_at(read.node)[2]))
        super().finish()

    def query_autograd(self, tensor: torch.Tensor, question: str) -> Any:
        """Return what autograd knows of a tensor, and guard the answer."""
        if not self.autograd:
            raise NeedsAutograd
        root = tensor
        while (of := getattr(root, "_fxplug_of", None)) is not None:
            root = of
        with DisableTorchFunction():
            answer = ops.autograd_query(root, question)
        frame = user_frame()
        if frame is None or not decides_nothing(frame):
            node = self.node("call_function", ops.autograd_query, (self.lookup(tensor), question), {}, self.named(question))
            node.meta["value"] = answer
            self.guard(node, answer)
        return answer

    def state(self, name: str, args: tuple[Any, ...], value: Any) -> Any:
        """Return what a torch function says about its modes, and guard the answer."""
        frame = user_frame()
        key = (name, args, self.switched)
        if key not in self.states and (frame is None or not decides_nothing(frame)):
            self.states.add(key)
            decision = (*source_line(), f"{name}({', '.join(map(repr, args))})")
            checked = (name, args, value, decision)
            self.node("call_function", ops.check_state, checked, {}, self.named("check_state"), effect=True)
        return value

    def target(self, func: Any, method: str | None, nodes: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
        """Return a public name for a called function: FX op, target, and the arguments in that target's order."""
        if ops.is_applied(func):
            return "call_function", func, nodes
        if listed := functions.listed(func):
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
        if listed := functions.listed(public):
            return "call_function", listed, nodes
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            return "call_function", func, nodes
        owner = sys.modules.get(getattr(func, "__module__", None) or "")
        if owner is not None and getattr(owner, getattr(func, "__name__", ""), None) is func:
            return "call_function", func, nodes
        raise TraceError(
            f"{self.place()}: calls {torch.overrides.resolve_name(func) or func!r}, which has no public name in torch, so a "
            f"graph cannot call it; {self.way_out()}"
        )

    def reshaped(self, func: Any, tensor: torch.Tensor, rest: Any, kwargs: Any) -> None:
        """Repeat an in-place change of a tensor's shape on the tensors that it is an alias of."""
        self.numbers.clear()
        while (tensor := getattr(tensor, "_fxplug_of", None)) is not None:  # type: ignore[assignment]
            func(tensor, *rest, **kwargs)

    def made_constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a tensor made from Python or numpy data as a buffer; None for a small one, which each call makes anew."""
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, (list, tuple, np.ndarray)) or (
            not isinstance(data, np.ndarray) and np.asarray(data, dtype=object).size <= SMALL
        ):
            return None
        with unset_fake_temporarily(), DisableTorchFunction():
            real = func(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")})
        if not isinstance(data, np.ndarray) and kwargs.get("dtype") is None and (real.is_floating_point() or real.is_complex()):
            self.reads_default_dtype()
        return self.fresh(real)

    def reads_default_dtype(self) -> None:
        """Guard the default dtype, in which a constant is made."""
        self.state("torch.get_default_dtype", (), default_dtype())

    def fresh(self, real: torch.Tensor) -> torch.Tensor:
        """Return a constant as a new tensor, cloned at each call."""
        with DisableTorchFunction():
            if self.journal is not None:
                self.journal.forget(real)
            source = self.lookup(real)
            node = self.node("call_method", "clone", (source,), {}, f"{source.name}_clone")
            return self.mark(self.mode.from_tensor(real) if self.mode is not None else real.clone(), node)

    def function_apply(self, original: Any) -> Any:
        """Wrap `torch.autograd.Function.apply` to record a call of the class, so that the graph has its backward.

        torch's own checkpoint, which takes code to run, is recorded as what that code does.
        """

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recording_here():
                return original.__get__(None, cls)(*args, **kwargs)
            if cls is CheckpointFunction:
                function, _, *given = args
                self.checkpointed = self.checkpointed or f"{self.place()}: a checkpoint"
                return self.inline(given, lambda: function(*given))
            try:
                self.lower(args)
            except TraceError as error:  # functions, modules, objects
                raise TraceError(
                    f"{self.place()}: {cls.__name__} has a backward of its own and is given more than tensors and plain "
                    f"values, which cannot be captured in a graph: turn it off where it is checkpointing, or {self.way_out()}"
                ) from error
            return self.call(ops.applied(cls), None, args, kwargs)

        return classmethod(apply)

    def inline(self, given: Any, run: Callable[[], Any]) -> Any:
        """Record what a checkpoint runs. Its results, and tuples of them, have gradients where an argument has."""
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        enabled = not self.autograd or ops.any_gradients(*tensors)
        flag = self.node("call_function", ops.any_gradients, tuple(map(self.lookup, tensors)), {}, self.named("any_gradients"))
        opened = self.node("call_function", ops.enter_grad, (flag,), {}, self.named("enter_grad"), effect=True)
        before = torch.is_grad_enabled()
        set_grad_enabled(before and enabled)
        out = run()
        set_grad_enabled(before)
        self.node("call_function", ops.exit_grad, (opened,), {}, self.named("exit_grad"), effect=True)
        self.switched += 2
        several = out if type(out) is tuple else (out,)
        parts = [x if isinstance(x, torch.Tensor) else map_leaves(x, lambda t, _: t.detach()) for x in several]
        return tuple(parts) if several is out else parts[0]

    def checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that runs a non-reentrant checkpoint to note its place."""

        def begin(*args: Any, **kwargs: Any) -> Any:
            if self.recording_here():
                self.checkpointed = self.checkpointed or f"{self.place()}: a checkpoint"
            return original(*args, **kwargs)

        return begin

    def script_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a scripted function to run its Python code, as torch.compile does."""

        def call(script: Any, *args: Any, **kwargs: Any) -> Any:
            code = getattr(script, SCRIPTED, None) if self.recording_here() else None
            return original(script, *args, **kwargs) if code is None else code(*args, **kwargs)

        return call

    def instance_check(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """Wrap the `isinstance` check of nn.Parameter, which the model may ask of an input, to guard the answer."""

        def check(cls: Any, value: Any) -> bool:
            found = original(cls, value)
            if cls is nn.Parameter and self.recording_here() and asker(sys._getframe(1)) is not None:
                node = self.recorded(value) if isinstance(value, torch.Tensor) else None
                if node is not None:
                    args = (node, "is_parameter")
                    asked = self.node("call_function", ops.autograd_query, args, {}, self.named("is_parameter"))
                    self.guard_after(asked, found, (*source_line(), "whether it is a parameter"))
            return found

        return check

    def from_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that makes a tensor without reporting to torch, to record its result as a constant."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if not self.recording_here():
                return original(*args, **kwargs)
            with unset_fake_temporarily(), DisableTorchFunction():
                real = original(*args, **kwargs)
            return self.fresh(real)

        return make

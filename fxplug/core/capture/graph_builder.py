"""The graph that a run writes: which node computes a tensor, and what an argument looks like in the graph."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, get_default_dtype, nn  # torch's own, whatever a run puts in its place
from torch.nn.utils.rnn import PackedSequence

from ..errors import TraceError
from ..ir import functions, ops
from ..ir.containers import list_members
from ..ir.graph import Graph, erase_unused, insert
from ..spec.addresses import make_identifier
from ..torch_internals.tensors import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    function_modes,
    memory_id,
    unset_fake_temporarily,
)
from .fake_tensors import KINDS, Number, Results, RetryState, TensorClass, make_fake
from .module_state import Journal, get_storage
from .user_code import find_source_line, find_user_frame, is_irrelevant_branch

PRINTABLE: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
PRINTABLE += (torch.memory_format, torch.layout, range)
NUMBERS = (bool, *KINDS)
DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
SMALL = 16  # a constant of at most so many numbers is written into the code, a larger one becomes a buffer


class Frame:
    """One call of a traced-through module: its path, `@k` when it is not the first, and what torch calls its stack."""

    def __init__(self, key: str, kind: str, parent: Frame | None):
        self.key = key
        self.flat = make_identifier(key) if key else ""
        self.stack: dict[str, tuple[str, str]] = {**(parent.stack if parent else {}), key: (key.partition("@")[0], kind)}
        self.parent = parent


class Recording:
    """The graph under construction in one run of a model: tensors and numbers are tied to its nodes."""

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode | None,
        device: torch.device,
        measured: bool,
        results: Results,
        tries: RetryState,
    ):
        self.results = results
        self.model = model
        self.mode = mode
        self.fake = mode is not None
        self.device = device
        self.measured = measured
        self.graph = Graph()
        self.paths = {id(m): name for name, m in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.parameters: dict[int, str] = {}
        self.weights: dict[int, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.named_weights: tuple[int, set[str]] = (0, set())  # how many there were, and their names
        self.repeated: Counter[str] = Counter()  # how often a constant's name was taken
        self.buffers: list[tuple[str, nn.Module, torch.Tensor]] = []
        self.marked: list[weakref.ref[torch.Tensor]] = []
        self.journal: Journal | None = None
        self.kept: list[Any] = []  # objects whose id is a key above or below must stay alive
        self.opaque: dict[int, fx.Node] = {}
        self.frame = Frame("", type(model).__qualname__, None)
        self.numbers: dict[Any, fx.Node] = {}
        self.guards: set[fx.Node] = set()
        self.overwritten = Journal()  # of real tensors that a run on fakes writes
        self.memory: dict[int, str] = {}  # the parameter whose memory a storage is
        self.views: set[fx.Node] = set()  # parameters and what may be views of them
        self.failed = ""  # where an operation raised an error first
        self.device_node: fx.Node | None = None
        self.first_tensor: fx.Node | None = None
        self.reads_training = False
        self.modes_read: set[tuple[str, str]] = set()  # a region's module, and another whose mode its code reads or sets
        self.autograd = tries.autograd or mode is None
        self.one_or_two = tries.one_or_two
        self.states: set[Any] = set()
        self.switched = 0  # how often the model changed a mode of torch so far
        self.inference: list[bool] = [torch.is_inference_mode_enabled()]
        self.plain, self.stand_ins = tries.plain, tries.stand_ins
        self.open_numbers = tries.open_numbers
        self.checkpointed = ""  # where code is recorded that the model's backward runs again
        self.listener: Any = None  # the mode of torch functions that reports to it
        self.dtypes: Any = None  # the reads of dtypes, by which it knows whose one among arguments is
        self.active = False
        self.paused = False
        self.thread = threading.get_ident()
        self.modules = [model]

    def recording_here(self) -> bool:
        """Whether the running code is the model's own: not torch's inside, not a leaf's, not another thread's."""
        return (
            not self.paused
            and threading.get_ident() == self.thread
            and self.listener in function_modes()
        )

    def stop(self) -> None:
        """Record nothing more, wherever this mode still listens."""
        self.active, self.paused = False, True

    def finish(self) -> None:
        """Hold the dtypes that were read, and drop what nothing uses and has no effect."""
        for read in self.dtypes.decided():
            self.guard_after(read.node, read.node.meta["value"], (read.where, read.line, functions.describe(read.node)))
        ports = ((node, node.meta.get("port")) for node in self.graph.nodes)
        erase_unused(
            node
            for node, port in ports
            if node.op != "call_module" and not node.meta.get("effect") and (port is None or port.side == "in")
        )
        self.graph.lint()

    def guard_after(self, node: fx.Node, expected: Any, decision: ops.Decision) -> None:
        """Hold a value to what it is now, from where it is computed on."""
        args = (node, expected, decision)
        self.node("call_function", ops.guard, args, {}, f"{node.name}_guard", effect=True, after=node)

    # --- nodes and values

    def node(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str, effect: bool = False, after: fx.Node | None = None
    ) -> fx.Node:
        """A new node, in the region that runs, at the end or `after` another.

        With `effect` it is no dead code though nothing reads it.
        """
        if target is operator.pow and not isinstance(args[0], fx.Node):
            target = pow  # FX writes `-1 ** x`, which is -(1 ** x)
        node = insert(self.graph, op, target, args, kwargs, after=after, name=name, meta={"nn_module_stack": self.frame.stack})
        if (frame := find_user_frame()) is not None:
            node.meta["line"] = frame.f_code.co_filename, frame.f_lineno
        if effect:
            node.meta["effect"] = True
        return node

    def named(self, short: str) -> str:
        """A name for a node: this one behind the path of the region that runs."""
        return f"{self.frame.flat}_{short}" if self.frame.flat else make_identifier(short)

    def mark(self, tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """Tie a tensor to the node that computes it, which learns its shape and dtype; gives the tensor."""
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
        if node.op != "call_module" and not self.views.isdisjoint(node.all_input_nodes):
            self.views.add(node)
        tensor._fxplug = node  # type: ignore[attr-defined]
        self.marked.append(weakref.ref(tensor))
        return tensor

    def unmark(self) -> None:
        """Take the marks off all tensors that are still there: a mark holds the whole graph, and copies with its tensor."""
        for reference in self.marked:
            tensor = reference()
            if tensor is not None:
                for name in ("_fxplug", "_fxplug_of"):
                    tensor.__dict__.pop(name, None)
        self.marked.clear()

    def recorded(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node of a tensor that this run computed."""
        node = getattr(tensor, "_fxplug", None)
        return node if node is not None and node.graph is self.graph else None

    def lookup(self, tensor: torch.Tensor) -> fx.Node:
        """The node that computes a tensor: recorded, a weight, or a constant of the trace."""
        node = self.recorded(tensor) or self.weights.get(id(tensor))
        if node is None:
            held = self.parameters.get(id(tensor))
            name = held or self.constant(tensor)
            node = self.node("get_attr", name, (), {}, make_identifier(name))
            if held is None:
                node.meta["constant"] = True
            node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
            if id(tensor) in self.parameters:
                self.views.add(node)
            self.weights[id(tensor)] = node
            self.kept.append(tensor)
        return node

    def constant(self, tensor: torch.Tensor) -> str:
        """Keep a tensor that was there before the run as a buffer, under the attribute that holds it if there is one."""
        if isinstance(tensor, FakeTensor) or (self.journal is not None and self.journal.makes(tensor)):
            raise TraceError(
                f"{self.place()}: a tensor is from a function that torch does not dispatch (numpy, a scripted function, an "
                f"extension), so it cannot be recorded; {self.way_out()}"
            )
        name = self.attribute_name(tensor) or "constant"
        if kind := ops.other_kind(tensor):
            raise TraceError(
                f"{self.place()}: '{name}' is a {kind} tensor, which a graph cannot hold: {ops.TO_DENSE}, or {self.way_out()}"
            )
        if self.named_weights[0] != len(self.parameters):  # most have their names before the model is called
            self.named_weights = len(self.parameters), set(self.parameters.values())
        base, (path, _, last) = name, name.rpartition(".")
        while name in self.constants or name in self.named_weights[1] or (last == "constant" and name == base):
            name = f"{path}." * bool(path) + f"{last}_{self.repeated[base]}"
            self.repeated[base] += 1
        with unset_fake_temporarily(), DisableTorchFunction():
            self.constants[name] = tensor.detach()
        return name

    def attribute_name(self, tensor: torch.Tensor) -> str | None:
        """The path of the attribute in which a module that runs holds this tensor, the innermost first; else None."""
        for module in reversed(self.modules):
            path = self.paths.get(id(module))
            for key, value in vars(module).items():
                if value is tensor and path is not None and not key.startswith("_"):
                    return f"{path}.{key}" if path else key
        return None

    def lower(self, value: Any) -> tuple[Any, Any]:
        """An argument twice: plain, to run the function with, and as nodes, to record."""
        if isinstance(value, torch.Tensor):
            return value, self.lookup(value)
        if isinstance(value, Number):
            return value.value, value.fx_node if value.recorder is self else value.value
        if isinstance(value, np.generic):
            return value, value.item()
        if isinstance(value, torch.device):
            return value, self.dynamic_device(value)
        if isinstance(value, torch.dtype):
            return value, self.dtypes.dtype_argument(value)
        if isinstance(value, PRINTABLE):
            return value, value
        if isinstance(value, type) and value in DTYPES:
            return DTYPES[value], DTYPES[value]
        if isinstance(value, TensorClass):
            name = f"torch.{value.__name__}"
            return name, name
        if isinstance(value, slice):
            plain, nodes = self.lower((value.start, value.stop, value.step))
            return slice(*plain), slice(*nodes)
        if isinstance(value, (tuple, list)):
            pairs = [self.lower(v) for v in value]
            plain_items, node_items = [p for p, _ in pairs], [n for _, n in pairs]
            if isinstance(value, list):
                return plain_items, node_items
            if isinstance(value, PackedSequence):
                made, name = functions.make_packed_sequence, self.named("packed")
                packed = self.node("call_function", made, tuple(node_items), {}, name)
                return PackedSequence(*plain_items), packed
            return type(value)(*plain_items) if hasattr(value, "_fields") else tuple(plain_items), tuple(node_items)
        if isinstance(value, dict):
            lowered = {k: self.lower(v) for k, v in value.items()}
            return {k: p for k, (p, _) in lowered.items()}, {k: n for k, (_, n) in lowered.items()}
        if isinstance(value, np.ndarray) and value.size <= SMALL and value.dtype != object:
            return value, value.tolist()
        if id(value) in self.opaque:
            return vars(value).get("_fxplug_of", value) if hasattr(value, "__dict__") else value, self.opaque[id(value)]
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TraceError(
            f"{self.place()}: {what} is passed to a torch function and cannot be an argument in a graph; {self.way_out()}"
        )

    def dynamic_device(self, device: torch.device) -> Any:
        """A node that asks a tensor for its device in the stead of one of the model's kind; another device as it is."""
        # a graph that is traced here must run wherever its inputs are moved later
        if device.type != self.device.type or self.first_tensor is None:
            return device
        if self.device_node is None:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            after = last if self.first_tensor.op == "placeholder" else self.first_tensor
            args = (self.first_tensor,)
            self.device_node = self.node("call_function", ops.device_of, args, {}, "input_device", after=after)
        return self.device_node

    def bind(self, out: Any, node: fx.Node) -> Any:
        """Tie what a call returned to its node; members of a tuple, list or dict get `getitem` nodes."""
        if isinstance(out, torch.Tensor):
            if (self.recorded(out) or id(out) in self.parameters) and not node.meta.get("effect"):
                out = self.alias(out)
            return self.mark(out, node)
        if type(out) in NUMBERS:
            return self.wrap_number(node, out)
        members = list_members(tuple(out) if isinstance(out, torch.Size) else out)
        if members is None:
            return out
        new: dict[Any, Any] = {}
        for key, member in members:
            new[key] = member
            if isinstance(member, (torch.Tensor, tuple, list, dict)) or type(member) in NUMBERS:
                item = self.node("call_function", operator.getitem, (node, key), {}, f"{node.name}_{key}")
                new[key] = self.bind(member, item)
        if isinstance(out, dict):
            return type(out)(new)
        if isinstance(out, (list, torch.Size)) or type(out).__module__ == "torch.return_types":
            return type(out)(list(new.values()))
        return type(out)(*new.values()) if type(out) is not tuple else tuple(new.values())

    def wrap_number(self, node: fx.Node, value: Any) -> Any:
        """A plain value that a node gives, as Python gets it: numbers remember their node, what is true or false is decided."""
        node.meta["value"] = value
        kind = KINDS.get(type(value))
        frame = find_user_frame() if self.plain else None
        if kind is None or (frame is not None and frame.f_code in self.plain):  # of code that failed on recorded numbers before
            return self.settle(node, value)
        return kind(self, node, value)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values as another tensor object, which can have a node of its own."""
        with DisableTorchFunction():
            if type(tensor) is not FakeTensor or tensor.requires_grad:
                new: torch.Tensor = torch.ops.aten.alias.default(tensor)
            else:
                # a fake tensor has no storage to share, and making one anew costs a fraction of a dispatch
                assert self.mode is not None
                new = make_fake(tensor, self.mode, tensor.fake_device, tensor.constant)
                if (name := self.parameter_of(tensor)) is not None:
                    self.holds(new, name)
            new._fxplug_of = tensor  # type: ignore[attr-defined]
            return new

    def holds(self, tensor: torch.Tensor, name: str) -> None:
        """Note that a tensor's memory is that of a parameter."""
        storage = get_storage(tensor)
        if storage is not None:
            self.memory[memory_id(storage)] = name
            self.kept.append(storage)

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that would be written with a tensor: itself, or what it is a view of."""
        if id(tensor) not in self.parameters and self.recorded(tensor) not in self.views:
            return None  # asking for memory is dear
        storage = get_storage(tensor)
        return None if storage is None else self.memory.get(memory_id(storage))

    def is_view_of_parameter(self, out: Any) -> bool:
        """Whether what a function gave, or a member of it, is in the memory of a parameter."""
        storages = map(get_storage, out if isinstance(out, (tuple, list)) else (out,))
        return any(storage is not None and memory_id(storage) in self.memory for storage in storages)

    def computed(self, value: torch.Tensor | fx.Node) -> bool:
        """Whether a value depends on the inputs, and not on constants and weights alone."""
        todo = [value if isinstance(value, fx.Node) else self.lookup(value)]
        seen = set(todo)
        while todo:
            node = todo.pop()
            if node.op == "placeholder":
                return True
            todo.extend(new := set(node.all_input_nodes) - seen)
            seen |= new
        return False

    # --- numbers

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of a tensor in recorded numbers, that of a weight in plain ones."""
        node = self.recorded(tensor)
        if node is None:
            return tensor.shape  # a weight has the size it has
        return torch.Size([self.size_of(node, "size", s, d) for d, s in enumerate(tensor.shape)])

    def size_of(self, node: fx.Node, method: str, value: int, dim: int | None = None) -> Any:
        """A size of a tensor, read from the node by a method: `x.size(1)`, `x.numel()`."""
        args = (node,) if dim is None else (node, dim)
        name = f"{node.name}_{method}" + ("" if dim is None else f"_{dim}")
        return self.memo((node, method, dim), "call_method", method, args, value, name)

    def memo(self, key: Any, op: str, target: Any, args: Any, value: Any, name: str) -> Any:
        """A number whose node is made once for all that ask with the same key."""
        if key not in self.numbers:
            self.numbers[key] = self.node(op, target, args, {}, name)
        return self.wrap_number(self.numbers[key], value)

    def number(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """`target(*args)` on recorded numbers."""
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) not in NUMBERS:
            for number in args:
                self.decide(number)
            return value
        _, nodes = self.lower(args)
        key = (target, tuple((type(n), n) for n in nodes))
        return self.memo(key, "call_function", target, nodes, value, self.named(functions.get_short_name(target)))

    def decide(self, number: Any) -> Any:
        """Python needs the plain value of a number: hold it by a guard."""
        if not isinstance(number, Number):
            return number
        return self.settle(number.fx_node, number.value) if number.recorder is self else number.value

    def settle(self, node: fx.Node, value: Any) -> Any:
        """Python needs the plain value of a node: hold it by a guard, unless nothing hangs on it."""
        if node not in self.guards:
            frame = find_user_frame()
            if frame is None or not is_irrelevant_branch(frame):
                self.guard(node, value)
        return value

    def guard(self, node: fx.Node, expected: Any, does: str = "branches on a value that it computes") -> None:
        """Hold a number to what it is now."""
        if node in self.guards:
            return
        self.guards.add(node)
        if not self.fake:
            refuse_drawn(self, node)
            if not self.measured and self.computed(node):
                refuse_measured(self, node, does)
        decision = self.describe_decision(node)
        self.node("call_function", ops.guard, (node, expected, decision), {}, self.named("guard"), effect=True)
    # --- what torch says of its modes

    def state(self, name: str, args: tuple[Any, ...], value: Any) -> Any:
        """What a function of torch says about its modes: an answer that holds as long as it is the same."""
        frame = find_user_frame()
        key = (name, args, self.switched)
        if key not in self.states and (frame is None or not is_irrelevant_branch(frame)):
            self.states.add(key)
            decision = (*find_source_line(), f"{name}({', '.join(map(repr, args))})")
            checked = (name, args, value, decision)
            self.node("call_function", ops.check_state, checked, {}, self.named("check_state"), effect=True)
        return value

    def reads_default_dtype(self) -> None:
        """Hold the default dtype, in which a constant is made, to what it is now."""
        self.state("torch.get_default_dtype", (), get_default_dtype())

    # --- words for messages

    def describe_decision(self, node: fx.Node) -> ops.Decision:
        """Return the running line of the model's code, and what a node computes, for a guard."""
        return (*find_source_line(), functions.describe(node))

    def region(self) -> str:
        """The region that runs, as messages name it."""
        return f"'{self.frame.key}'" if self.frame.key else type(self.model).__name__

    def place(self, error: BaseException | None = None) -> str:
        """The region and the line of the model's code that is running, or that raised an error."""
        where, line = find_source_line(error)
        return f"the result of {self.region()}" if where == "?" else f"{self.region()} ({where}: {line})"

    def way_out(self) -> str:
        """What messages advise in the region that runs: which module to keep whole."""
        if not self.frame.key:
            return "move it into a submodule and keep that whole: leaf: [its path]"
        return f"keep that module whole: leaf: [{self.frame.key.partition('@')[0]}]"

    def needs_values(self, error: BaseException | None = None) -> str:
        """The message about a value that is read out of fake data: where that is, and what to do."""
        where, line = find_source_line(error)
        return (
            f"{self.region()} reads a value from its data ({where}: {line}), and fake tensors have none; {self.way_out()}, or "
            "trace on real tensors: real=True"
        )


def refuse_drawn(recording: Recording, node: fx.Node) -> None:
    """Refuse a branch on a random number, which has another outcome at each call."""

    def look(current: fx.Node, short: str) -> list[fx.Node]:
        if short in functions.DRAWS:
            refuse_way(recording, "branches on a random number")
        return current.all_input_nodes

    functions.visit_sources(node, look)


def refuse_measured(recording: Recording, node: fx.Node, does: str) -> None:
    """Refuse a branch on a measured value; one on masks, counts or equality is a property of the input."""

    def look(current: fx.Node, short: str) -> list[fx.Node]:
        given = [a for a in current.args if isinstance(a, fx.Node)]
        floating = any(getattr(a.meta.get("dtype"), "is_floating_point", False) for a in given)
        if floating and (short in functions.ORDERED or short in ("item", "tolist")):
            refuse_way(recording, does, ", or trace on real tensors, with the values of this call as a guard: trace(..., "
                                  "real=True)")
        follows = not floating or short in ("isnan", "isinf")
        return current.all_input_nodes if follows else []

    functions.visit_sources(node, look)


def refuse_way(recording: Recording, does: str, more: str = "") -> None:
    """Raises TraceError: what the model `does` here goes one way or another."""
    where, line = find_source_line()
    raise TraceError(
        f"{recording.region()} {does} ({where}: {line}), and a graph records one branch only; {recording.way_out()}{more}"
    )

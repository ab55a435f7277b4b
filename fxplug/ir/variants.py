"""Other ways of calling a traced module: further graphs on its weights, one for each way that the model's code takes."""

from __future__ import annotations

import inspect
import operator
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ..errors import FxplugError, GuardError, TraceError, shown
from ..torch_internals.compiling import apart
from ..torch_internals.modules import NormBase
from ..turns import turns_of
from . import functions, ops, ways
from .containers import Container
from .editing import change, copy_nodes, insert

if TYPE_CHECKING:
    from .traced_module import TracedModule

Make = Callable[["TracedModule", tuple[Any, ...], dict[str, Any]], "TracedModule"]
Step = Callable[["TracedModule"], "TracedModule"]

LIMIT = 8  # variants that a module makes by itself
REFUSED = 64  # calls that it remembers to refuse
TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# what checks how a graph is called, before it computes anything
ENTRY = (ops.same, ops.check_inputs, ops.check_members, ops.check_generator, ops.check_numbers)
AT_ENTRY = (*ENTRY, operator.getitem, ops.edge, ops.device_of, ops.given)
HARMLESS = (
    *ENTRY, ops.guard, ops.tried, ops.check_state, ops.check_added, ops.any_gradients, ops.enter_grad, ops.exit_grad,
    ops.enter_autocast, ops.exit_autocast,
)  # fmt: skip
# what may give the memory of its first argument
VIEWS = """view reshape transpose permute unsqueeze squeeze expand getitem chunk split unbind flatten unflatten narrow select t
detach contiguous to float half bfloat16 double type edge alias real imag swapaxes swapdims movedim moveaxis expand_as view_as
diagonal tensor_split type_as as_strided""".split()  # noqa: SIM905
NONE = object()


class Passing(TraceError):
    """A refusal that may be none at the next call: it depends on values, or on a model that was changed."""


class Variants:
    """The variants of one module: graphs for calls that its own does not hold for.

    `made` has each as a module over the very tables of parameters, buffers and children that its owner has. `make` traces the
    model for another call, and is None where no model is at hand; `steps` are what was done to the trace since, each again for
    a new variant, and `earlier` are variants of what this module was made of, with how many of the steps they have behind them.
    """

    def __init__(
        self, owner: TracedModule, limit: int, make: Make | None = None, steps: tuple[Step, ...] = (), earlier: Any = ()
    ) -> None:
        self.limit, self.make, self.steps = limit, make, steps
        self.earlier: list[tuple[TracedModule, int]] = list(earlier)
        self.made: list[TracedModule] = []
        self.codes = dict(_codes(owner))
        self.refused: dict[Any, str] = {}  # why a call cannot be traced, by its key: to find that out takes a trace
        self.lock = threading.RLock()

    def after(self, owner: TracedModule, new: TracedModule, step: Step) -> None:
        """Let `new`, which `step` made of `owner`, have the variants that the step makes of the owner's."""
        if _codes(owner) == self.codes:  # what is done to a graph by hand cannot be done again
            earlier = [*self.earlier, *((variant, len(self.steps)) for variant in self.made)]
            new._variants = Variants(new, self.limit, self.make, (*self.steps, step), earlier)

    def of_copy(self, new: TracedModule, graphs: Callable[[TracedModule], dict[bool, Any]]) -> None:
        """Let `new`, a copy of the owner on tensors of its own, have copies of the variants."""
        new._variants = Variants(new, self.limit, self.make, self.steps, self.earlier)
        new._variants.codes = self.codes
        new._variants.made = [view(new, graphs(variant), variant.twin_error) for variant in self.made]

    def carry(self, owner: TracedModule) -> None:
        """Make those variants again that were there before the owner was made; warns of one that cannot be."""
        while self.earlier:
            row = ways.labels(owner)[len(self.made)]
            try:
                self.bring(owner, 0)
            except FxplugError as error:
                del self.earlier[0]
                warnings.warn(f"the variant '{shown(row, 120)}' of what this was made of is not in it: {error}", stacklevel=4)

    def bring(self, owner: TracedModule, index: int) -> TracedModule:
        """An earlier variant, with the steps that it lacks."""
        variant, done = self.earlier[index]
        found = tie(owner, self.stepped(variant, done))
        del self.earlier[index]
        self.made.append(found)
        return found

    def stepped(self, variant: TracedModule, done: int) -> TracedModule:
        """A variant after the steps that it lacks; what they draw is not missed by others."""
        with torch.random.fork_rng(enabled=True):
            for step in self.steps[done:]:
                variant = step(variant)
        return variant

    @apart
    def add(self, owner: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
        """A new variant, for this call. Raises FxplugError where there cannot be one."""
        if _codes(owner) != self.codes:
            raise GuardError("its graph was changed by hand since it was made, and another way of calling would lack that")
        for index, (variant, _) in enumerate(self.earlier):
            given, named = call_for(variant, owner, args, kwargs)
            if refusal(variant, given, named) is None:
                return self.bring(owner, index)
        for variant in self.made:
            if fits(owner, variant) and refusal(variant, args, kwargs) is None and not repeatable(variant):
                raise GuardError("its graph has written or drawn something by then")
        if self.make is None:
            raise GuardError("the model is not at hand to trace it so, only what was saved of it")
        if len(self.made) + len(self.earlier) >= self.limit:
            rows = "; ".join(shown(row, 120) for row in ways.labels(owner))
            raise GuardError(
                f"it has {len(self.made)} variants already, which differ from the first in: {rows or 'nothing yet'}; "
                "trace(..., variants=N) allows more"
            )
        if why := self.refused.get(key := ways.key(owner, args, kwargs)):
            raise GuardError(why)
        try:
            found = tie(owner, self.stepped(self.make(owner, args, kwargs), 0))
        except Passing:
            raise
        except FxplugError as error:
            if len(self.refused) >= REFUSED:
                self.refused.pop(next(iter(self.refused)))
            self.refused[key] = str(error)
            raise
        self.made.append(found)
        return found


def _codes(module: TracedModule) -> Any:
    return module.code and vars(module)["_codes"]  # asked for, code is written


# --- calling


@apart
def chosen(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
    """The module, or the variant whose first checks hold for a call: made, where there is none. Raises GuardError."""
    why = refusal(module, args, kwargs) if "_variants" in module.__dict__ else None
    if why is None:
        return module
    while True:
        known = len(module._variants.made)
        found = next(_fitting(module, args, kwargs, 0, known), None)
        if found is None:
            found = _added(module, args, kwargs, why, known)
        if found is not None:
            return found


def call_other(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """What a variant gives for a call that ended in an error; `NONE` where the error is none of how it was called.

    Raises GuardError where no variant can be made.
    """
    why = refusal(module, args, kwargs)
    if why is None:
        if not isinstance(error, GuardError) or isinstance(error, ops.AddedInput) or not repeatable(module):
            return NONE
        traceback.clear_frames(error.__traceback__)  # they hold what was computed so far
    tried = known = 0
    while True:
        tried, known = known, len(module._variants.made)
        for variant in _fitting(module, args, kwargs, tried, known):
            try:
                return variant.forward(*args, **kwargs)
            except GuardError:
                if not repeatable(variant):
                    raise
        if (new := _added(module, args, kwargs, why or str(error), known)) is not None:
            return new.forward(*args, **kwargs)


def _fitting(
    module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any], first: int, end: int
) -> Iterator[TracedModule]:
    for variant in module._variants.made[first:end]:
        if fits(module, variant):
            variant.__dict__["training"] = module.training
            if refusal(variant, args, kwargs) is None:
                yield variant


def _added(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any], why: str, known: int) -> TracedModule | None:
    """A new variant; None where another thread has added one to those that are `known`."""
    try:
        with module._variants.lock:
            if len(module._variants.made) > known:
                return None
            variant: TracedModule = module._variants.add(module, args, kwargs)
    except FxplugError as reason:
        raise GuardError(f"{why}. The graph for this call could not be added: {reason}") from None
    variant.__dict__["training"] = module.training
    return variant


def call_for(
    other: TracedModule, module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of a module without the inputs that what it was made of does not have."""
    bound = signature_of(module).bind(*args, **kwargs)
    known = signature_of(other).parameters
    for name in [name for name in bound.arguments if name not in known]:
        del bound.arguments[name]
    return bound.args, bound.kwargs


def signature_of(module: TracedModule) -> inspect.Signature:
    """How a module is called, whatever an offloader has put in the place of its `forward`."""
    return inspect.signature(type(module).forward.__get__(module))


def fits(module: TracedModule, variant: TracedModule) -> bool:
    """Whether a variant has a graph for the mode that its module is in."""
    return not variant.twin_error or module.training in variant.graphs


@apart
def refusal(module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a graph does not hold for a call, as far as its first checks tell; None where it does, or takes no such call."""
    graph = _graph(module)
    known: Any = module.__dict__.get("_entry")
    if known is None or known[0] is not graph:
        known = module.__dict__["_entry"] = graph, _entry(graph, module)
    try:
        known[1](*args, **kwargs)
    except GuardError as error:
        return str(error)
    except TypeError:
        return None
    return None


def _entry(graph: fx.Graph, module: nn.Module) -> Callable[..., None]:
    """The first checks of a graph alone."""
    head, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        first = node.op == "call_function" and node.target in AT_ENTRY
        held = node.op == "get_attr" and any(user.target is ops.given for user in node.users)
        if node.op == "placeholder" or held or first and all(read in values for read in node.all_input_nodes):
            copy_nodes([node], head, values)
        elif node.op != "get_attr" and not first:
            break
    insert(head, "output", "output", (None,))
    forward: Callable[..., None] = fx.GraphModule(module, head).forward
    return forward


def _graph(module: TracedModule) -> fx.Graph:
    return module.graphs.get(module.training, module.graph)


@apart
def repeatable(module: TracedModule) -> bool:
    """Whether a call that a guard ended can be made again in another way: nothing was written or drawn that stays."""
    for node in _graph(module).nodes:
        if ops.is_applied(node.target):
            return False  # its code may do either
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            ours = type(leaf).__module__.startswith(("torch.nn.modules.", "fxplug.blocks."))
            if not ours or any(functions.draws(m, module.training) for m in leaf.modules()):
                return False
            if module.training and isinstance(leaf, NormBase):
                return False
        if not node.meta.get("effect") or node.target in HARMLESS:
            continue
        short = functions.short_name(node.target)
        if short in functions.RANDOM:
            if short in functions.DRAWS or module.training:
                return False
        elif node.op not in ("call_function", "call_method") or _owner(node).op in ("placeholder", "get_attr"):
            return False
    return True


def _owner(node: fx.Node) -> fx.Node:
    """Whose memory a node writes, as far back as it may be: an input, a tensor of the module, or what was computed."""
    while node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if functions.short_name(node.target) not in VIEWS:
            break
    return node


# --- making


def view(owner: TracedModule, graphs: dict[bool, Any], twin_error: str | None) -> TracedModule:
    """Other graphs on the very parameters, buffers and children of a module."""
    made = owner.derived(Container(owner.classes), graphs)
    for table in TABLES:
        made.__dict__[table] = owner.__dict__[table]
    made.meta, made.twin_error = owner.meta, twin_error
    made.__dict__["training"] = owner.training
    made.__dict__["_turns"] = turns_of(owner)
    return made


def tie(owner: TracedModule, other: TracedModule) -> TracedModule:
    """The graphs of another module with the same layers, on the tensors of this one, which learns the constants that it lacks.

    Raises GuardError where that one has other layers.
    """
    ports = [inputs_of(module) for module in (owner, other)]
    if ports[0] != ports[1]:
        raise GuardError(f"it would take other inputs: {', '.join(ports[1])}")
    constants: dict[str, torch.Tensor] = {}
    adopted: dict[str, nn.Module] = {}
    names: dict[str, str] = {}
    for graph in other.graphs.values():
        for node in graph.nodes:
            name = str(node.target)
            if node.op == "call_module":
                adopted.update(_leaf(owner, other, name))
            elif node.op == "get_attr" and name not in names:
                names[name] = _constant(owner, other, name, constants) if node.meta.get("constant") else name
                _same_shape(owner, other, name) if names[name] == name and name not in constants else None
    for graph in other.graphs.values():
        for node in graph.nodes:
            if node.op == "get_attr" and names[str(node.target)] != node.target:
                change(node, target=names[str(node.target)])
    for name, value in constants.items():
        home, _, key = name.rpartition(".")
        owner.get_submodule(home).register_buffer(key, value, persistent=False)
    for name, leaf in adopted.items():
        home, _, key = name.rpartition(".")
        owner.get_submodule(home)._modules[key] = leaf
    return view(owner, other.graphs, other.twin_error)


def inputs_of(module: TracedModule) -> list[str]:
    """The arguments of a module, with their defaults."""
    nodes = module.graph.find_nodes(op="placeholder")
    return [f"{node.target}={node.args[0]!r}" if node.args else str(node.target) for node in nodes]


def _leaf(owner: TracedModule, other: TracedModule, name: str) -> dict[str, nn.Module]:
    """The layer that a variant calls, where the owner has its weights but not its code."""
    theirs = other.get_submodule(name)
    try:
        mine = owner.get_submodule(name)
    except AttributeError:
        raise GuardError(f"it calls '{name}' ({type(theirs).__name__}), which this module does not have") from None
    if type(mine) is type(theirs):
        return {}
    found = dict(mine.named_parameters())
    same = all(found.get(key) is value for key, value in theirs.named_parameters())
    if not isinstance(mine, Container) or not same:
        raise GuardError(f"it calls '{name}', a {type(theirs).__name__} there and a {type(mine).__name__} here")
    return {name: theirs}


def _tensor(module: TracedModule, name: str) -> torch.Tensor | None:
    home, _, key = name.rpartition(".")
    try:
        tables = module.get_submodule(home)
    except AttributeError:
        return None
    found = tables._parameters.get(key)
    return tables._buffers.get(key) if found is None else found


def _same_shape(owner: TracedModule, other: TracedModule, name: str) -> None:
    mine, theirs = _tensor(owner, name), _tensor(other, name)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        raise GuardError(f"it reads '{name}', which this module does not have in that shape")


def _constant(owner: TracedModule, other: TracedModule, name: str, found: dict[str, torch.Tensor]) -> str:
    """The name under which the owner has a constant of another trace; `found` gets those that are new to it."""
    value = _tensor(other, name)
    if value is None:
        raise GuardError(f"it reads the constant '{name}', which is not there")
    number, new = 0, name
    while (known := found.get(new, _tensor(owner, new))) is not None:
        if known.dtype == value.dtype and known.shape == value.shape and _equal(known, value):
            return new
        number += 1
        new = f"{name}_way{number}"
    found[new] = value
    return new


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.is_meta is b.is_meta and (a.is_meta or torch.equal(a.to(b.device), b)))

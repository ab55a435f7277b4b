"""A traced module that answers other forms of call too: further graphs on its weights, one for each way through the model."""

from __future__ import annotations

import itertools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ..errors import FxplugError, GuardError, format_brief, quote
from ..extensions import note_unrepeatable
from ..locks import get_locks
from ..torch_internals.modules import TABLES, is_listening, leave_frame, without_compiler
from . import ops
from .calls import Code, call_code
from .comparison import is_equal
from .containers import Container, SharedCode, find_tensor
from .entry_checks import find_refusal, is_repeatable
from .graph import Graph, change
from .part_modes import MixedModes
from .traced_module import Step, TracedModule, copy_graphs, strip_to_container

DECIDED = "decided: "  # before what is no argument


def labels(module: TracedModule, variants: Sequence[TracedModule]) -> list[str]:
    """What each variant is for: how its call differs from the one that the module itself was traced with."""
    own = _checked(module)
    found: list[str] = []
    for variant in variants:
        rows = {key: row for key, row in _checked(variant).items() if own.get(key) != row}
        label = ", ".join(row for key, row in rows.items() if not key.startswith(DECIDED))
        if not label or label in found:
            label = ", ".join(rows.values())
        found.append(label or "other sizes")
    return found


def _checked(module: TracedModule) -> Mapping[str, str]:
    """How a graph is called, by argument; decisions that it has taken come last."""
    rows: dict[str, str] = {}
    decided: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        args: Any = node.args
        if node.target is ops.check_constants:
            rows.update({name: f"{name}={quote(value, 60)}" for value, name in zip(args[1], args[2], strict=True)})
        elif node.target is ops.check_numbers:
            rows.update({name: f"{name}: {kind}" for kind, name in zip(args[1], args[2], strict=True)})
        elif node.target is ops.check_inputs:
            for rank, dtype, name in zip(args[1], args[2], args[3], strict=True):
                kind = "tensor" if dtype is None else str(dtype).removeprefix("torch.")
                rows[name] = f"{name}: {kind} of {rank} dimensions"
        elif node.target is ops.check_members:
            rows[args[2]] = f"{args[2]} with {', '.join(map(str, args[1])) or 'nothing'}"
        elif node.target is ops.guard:
            what = args[2] if isinstance(args[2], str) else args[2][2]
            decided[what] = f"{what}, {format_brief(args[1], 40)}"
    return {**rows, **{f"{DECIDED}{key}": text for key, text in decided.items()}}


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Retrace = Callable[["Variants", Args, Kwargs], TracedModule]
V = TypeVar("V", bound="Variants")

NO_MODEL = (
    "the module was loaded from an artifact, and the model to trace is not available: call it in this form before it is saved; "
    "in a configuration name the size in data.size, data.buckets or model.call, or give model.call as many texts"
)
LIMIT = 8  # graphs that a module gets beside its first


class VariantCache:
    """The further graphs of one module, `made`, each a module on the very parameters, buffers and children that its owner has.

    `retrace` traces the model for another call, None where no model is at hand.
    """

    def __init__(self, retrace: Retrace | None = None, limit: int = 0) -> None:
        self.retrace, self.limit = retrace, limit
        self.made: list[TracedModule] = []
        self.lock = threading.RLock()


class Variants(TracedModule):
    """A traced module with a graph for each form of call that it has met: see `fxplug.variants`, which makes one.

    A call that the checks of one graph admit is answered by that graph; for another one the model is traced, the steps that
    were done to this module since its trace are done to the new graph, and it is kept, on the same weights.
    """

    _variants: VariantCache

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._variants = VariantCache()

    @property
    def variants(self) -> list[str]:
        """The forms of call that have a graph of their own: how each differs from the first."""
        return labels(self, self._variants.made)

    @property
    def modules_by_form(self) -> list[TracedModule]:
        """This module and its variants."""
        return [self, *self._variants.made]

    def derived(self, tree: nn.Module, graphs: dict[bool, Graph], **meta: Any) -> TracedModule:
        """As of a traced module. The variants are none of the result's until `made_by` says how these can be made."""
        new = super().derived(tree, graphs, **meta)
        assert isinstance(new, Variants)
        new._variants = VariantCache(self._variants.retrace, self._variants.limit)
        return new

    def made_by(self, step: Step, source: TracedModule) -> TracedModule:
        """As of a traced module; the step is done to the variants of the source, too. Warns of one that cannot have it."""
        super().made_by(step, source)
        if isinstance(source, Variants) and self._steps is not None:
            for label, variant in zip(source.variants, source._variants.made, strict=True):
                try:
                    self._variants.made.append(tie(self, _stepped(variant, [step])))
                except FxplugError as error:
                    text = f"the variant '{quote(label, 120)}' is not in the new module: {error}"
                    warnings.warn(text, stacklevel=4)
        return self

    def recompile(self) -> Any:
        """As of a traced module; a graph that was edited by hand has no variants any more, which would lack the edit."""
        if "_variants" in vars(self):
            self._variants = VariantCache(self._variants.retrace, self._variants.limit)
        return super().recompile()

    def _call_code(self, code: Code, args: Args, kwargs: Kwargs) -> Any:
        """Call the code of the first graph that holds for a call: another one where a check refuses the call, at the beginning
        or later, as long as nothing was written or drawn. Raises GuardError where there is none and none can be made.
        """
        if is_listening():  # a check that fails is the end of what a compiler compiles
            found = choose_module(self, args, kwargs)
            return call_code(self, code, args, kwargs) if found is self else found.forward(*args, **kwargs)
        why = find_refusal(self, args, kwargs)
        if why is None:
            try:
                return call_code(self, code, args, kwargs)
            except GuardError as error:
                if isinstance(error, (ops.AddedInput, MixedModes)) or not is_repeatable(self):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold what was computed so far
                why = str(error)
        for variant in _admitting(self, args, kwargs, why):
            try:
                return variant.forward(*args, **kwargs)
            except GuardError:
                if not is_repeatable(variant):
                    raise
        raise GuardError(why)

    def _copy_on(self, tree: nn.Module) -> TracedModule:
        new = super()._copy_on(tree)
        assert isinstance(new, Variants)
        _copy_variants(self, new)
        return new

    def _constants(self) -> set[str]:
        return super()._constants().union(*(variant._constants() for variant in self._variants.made))

    def keep_only(self, graphs: list[tuple[dict[bool, Graph], str | None]]) -> None:
        """Have variants with these graphs, as they were saved or pruned, and make no others: no model is at hand."""
        self._steps = ()  # since then
        self._variants = VariantCache()
        self._variants.made = [view(self, each, twin_error) for each, twin_error in graphs]

    # --- adding one

    def add_variant(self, args: Args, kwargs: Kwargs) -> TracedModule:
        """A new variant, for this call. Raises FxplugError where there cannot be one."""
        cache = self._variants
        for variant in cache.made:
            if _has_mode(self, variant) and find_refusal(variant, args, kwargs) is None and not is_repeatable(variant):
                raise GuardError(
                    "its graph has written to a buffer or drawn random numbers, so the call cannot be repeated with another "
                    "graph"
                )
        if self._steps is None:
            raise GuardError(
                "what was done to this module since its trace cannot be repeated (it was merged, split over processes or into "
                "the steps of a cache, or its graph was edited by hand): do it to a trace for this call"
            )
        if cache.retrace is None:
            raise GuardError(NO_MODEL)
        if len(cache.made) >= cache.limit:
            rows = "; ".join(quote(row, 120) for row in self.variants)
            raise GuardError(
                f"the limit of {len(cache.made)} variants is reached, which differ from the first in: {rows or 'nothing yet'}; "
                "raise it with variants(module, model, limit=N)"
            )
        found = tie(self, _stepped(cache.retrace(self, args, kwargs), self._steps))
        cache.made.append(found)
        return found


def as_kind(kind: type[V], module: TracedModule) -> V:
    """A traced module again, on the same tensors and with the same variants, of a subclass of Variants."""
    new = kind(strip_to_container(module), copy_graphs(module), module._origin, module._extras)
    new.twin_error, new.meta, new._steps = module.twin_error, dict(module.meta), module._steps
    note_unrepeatable(new)  # what it was made from is of another kind
    if isinstance(module, Variants):
        _copy_variants(module, new)
    return new


def _copy_variants(module: Variants, new: Variants) -> None:
    old = module._variants
    new._variants = VariantCache(old.retrace, old.limit)
    new._variants.made = [view(new, copy_graphs(variant), variant.twin_error) for variant in old.made]


def _stepped(module: TracedModule, steps: Iterable[Step]) -> TracedModule:
    """A module after further steps; what they draw is not missed by others."""
    with torch.random.fork_rng(enabled=True):
        for step in steps:
            module = step(module)
    return module


# --- calling


leave_frame(Variants._call_code.__code__)


@without_compiler
def choose_module(module: TracedModule, args: Args, kwargs: Kwargs) -> TracedModule:
    """The module, or its variant whose first checks hold for a call: made, where there is none. Raises GuardError."""
    if not isinstance(module, Variants) or (why := find_refusal(module, args, kwargs)) is None:
        return module
    return next(_admitting(module, args, kwargs, why))


def _admitting(module: Variants, args: Args, kwargs: Kwargs, why: str) -> Iterator[TracedModule]:
    """The variants whose first checks hold for a call, and at last one that is made for it. Raises GuardError."""
    tried, new = 0, None
    while new is None:
        known = len(module._variants.made)
        for variant in module._variants.made[tried:known]:
            if _has_mode(module, variant):
                variant.__dict__["training"] = module.training
                if find_refusal(variant, args, kwargs) is None:
                    yield variant
        tried, new = known, _added(module, args, kwargs, why, known)
    yield new


@without_compiler
def _added(module: Variants, args: Args, kwargs: Kwargs, why: str, known: int) -> TracedModule | None:
    """A new variant; None where another thread has added one to those that are `known`."""
    try:
        with module._variants.lock:
            if len(module._variants.made) > known:
                return None
            variant = module.add_variant(args, kwargs)
    except FxplugError as reason:
        raise GuardError(f"{why}. The graph for this call could not be added: {reason}") from None
    variant.__dict__["training"] = module.training
    return variant


def _has_mode(module: TracedModule, variant: TracedModule) -> bool:
    """Whether a variant has a graph for the mode that its module is in."""
    return not variant.twin_error or module.training in variant.graphs


# --- on the weights of the owner


def view(owner: TracedModule, graphs: dict[bool, Any], twin_error: str | None) -> TracedModule:
    """Other graphs on the very parameters, buffers and children of a module."""
    made = TracedModule(Container(owner.classes), graphs, owner._origin, owner._extras)
    for table in TABLES:
        made.__dict__[table] = owner.__dict__[table]
    made.meta, made.twin_error, made._steps = owner.meta, twin_error, owner._steps
    made.__dict__["training"] = owner.training
    made.__dict__["_locks"] = get_locks(owner)
    return made


def tie(owner: TracedModule, other: TracedModule) -> TracedModule:
    """The graphs of another module with the same layers, on the tensors of this one, which learns the constants that it lacks.

    Raises GuardError where that one has other layers.
    """
    ports = [get_inputs(module.graph) for module in (owner, other)]
    if ports[0] != ports[1]:
        raise GuardError(f"its graph takes other inputs: {', '.join(ports[1])}")
    constants: dict[str, torch.Tensor] = {}
    adopted: dict[str, nn.Module] = {}
    names: dict[str, str] = {}
    for graph in other.graphs.values():
        for node in graph.nodes:
            name = str(node.target)
            if node.op not in ("call_module", "get_attr") or name in names:
                continue
            path, _, key = name.rpartition(".")
            names[name], value = name, getattr(other.get_submodule(path), key)
            if isinstance(value, SharedCode):
                names[name] = _name_for_code(owner, name)
                adopted[names[name]] = value
                for read in value.constants:
                    if _constant(owner, other, read, constants) != read:
                        raise GuardError(f"an outlined region reads the constant '{read}', which differs here")
            elif node.op == "call_module":
                adopted.update(_leaf(owner, other, name))
            elif isinstance(value, nn.Module):  # an outlined region is given it, and calls the layers inside
                for layer, module in value.named_modules(prefix=name):
                    adopted.update({} if isinstance(module, Container) else _leaf(owner, other, layer))
            elif node.meta.get("constant"):
                names[name] = _constant(owner, other, name, constants)
            else:
                _same_shape(owner, other, name)
    for graph in other.graphs.values():
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr") and names[str(node.target)] != node.target:
                change(node, target=names[str(node.target)])
    for name, value in constants.items():
        home, _, key = name.rpartition(".")
        owner.get_submodule(home).register_buffer(key, value, persistent=False)
    for name, leaf in adopted.items():
        home, _, key = name.rpartition(".")
        owner.get_submodule(home)._modules[key] = leaf
    return view(owner, other.graphs, other.twin_error)


def get_inputs(graph: fx.Graph) -> list[str]:
    """The arguments of a graph, with their defaults."""
    nodes = graph.find_nodes(op="placeholder")
    return [f"{node.target}={node.args[0]!r}" if node.args else str(node.target) for node in nodes]


def _leaf(owner: TracedModule, other: TracedModule, name: str) -> dict[str, nn.Module]:
    """The layer that a variant calls, where the owner has its weights but not its code."""
    theirs = other.get_submodule(name)
    try:
        mine = owner.get_submodule(name)
    except AttributeError:
        raise GuardError(f"its graph calls '{name}' ({type(theirs).__name__}), which this module does not have") from None
    if type(mine) is type(theirs):
        return {}
    found = dict(mine.named_parameters())
    same = all(found.get(key) is value for key, value in theirs.named_parameters())
    if not isinstance(mine, Container) or not same:
        raise GuardError(f"its graph calls '{name}', a {type(theirs).__name__} there and a {type(mine).__name__} here")
    return {name: theirs}


def _name_for_code(owner: TracedModule, name: str) -> str:
    """A name for code that only the graphs of a variant call, beside that of its owner's."""
    home, _, key = name.rpartition(".")
    try:
        taken = owner.get_submodule(home)._modules
    except AttributeError:
        raise GuardError(f"its graph calls '{name}', and no region of this module is outlined") from None
    return next(f"{home}.{new}" for n in itertools.count() if (new := f"{key}_way{n}" if n else key) not in taken)


def _same_shape(owner: TracedModule, other: TracedModule, name: str) -> None:
    mine, theirs = find_tensor(owner, name), find_tensor(other, name)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        raise GuardError(f"its graph reads '{name}', which this module does not have in that shape")


def _constant(owner: TracedModule, other: TracedModule, name: str, found: dict[str, torch.Tensor]) -> str:
    """The name under which the owner has a constant of another trace; `found` gets those that are new to it."""
    value = find_tensor(other, name)
    if value is None:
        raise GuardError(f"its graph reads the constant '{name}', which this module does not have")
    number, new = 0, name
    while (known := found.get(new, find_tensor(owner, new))) is not None:
        if known is value or (known.is_meta is value.is_meta and is_equal(known, value.to(known.device))):
            return new
        number += 1
        new = f"{name}_way{number}"
    found[new] = value
    return new

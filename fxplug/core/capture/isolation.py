"""A trace leaves the model, modes and random states as they were; what it recorded is put together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

from .. import quantised
from ..errors import SpecError, TraceError
from ..ir import context_managers, ops
from ..ir.comparison import is_equal
from ..ir.containers import HOOKED, RESERVED, Container, FixedNames, get_plain_attributes, list_members
from ..ir.graph import Graph, note_tied
from ..ir.traced_module import OWN_STATE, TracedModule, list_class_names
from ..torch_internals.modules import COMPILED, backward_hooks, get_modes, set_modes
from ..torch_internals.tensors import memory_id
from .fake_tensors import Number
from .module_state import Journal, State, StatePlace, get_storage, split_place


@contextlib.contextmanager
def restore_after(state: State) -> Iterator[None]:
    """Give back what a run of `forward` changes in what was noted in `state`, random generators, and modes of torch.

    No cache of a function may keep a fake tensor. The values of tensors are given back where they are written: see `Journal`.
    """
    modes, draws = get_modes(), get_random_state()
    for cache in state.caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in state.caches:
            cache.cache_clear()
        state.restore()
        state.restore_tensors()
        set_random_state(draws)
        set_modes(modes)


def get_random_state() -> tuple[Any, ...]:
    """Where the generators of Python, numpy and torch (CPU, and CUDA where it runs) stand."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def is_same_random_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two of what `get_random_state` gives are the same."""
    tensors = zip([a[2], *a[3]], [b[2], *b[3]], strict=False)
    return a[0] == b[0] and _same_numpy(a[1], b[1]) and all(torch.equal(x, y) for x, y in tensors)


def _same_numpy(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put the generators where `get_random_state` found them."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])


@contextlib.contextmanager
def refuse_python_random(model: nn.Module) -> Iterator[None]:
    """Refuse a model that draws from Python's or numpy's generator: the graph would repeat that one draw forever.

    One that seeds a generator itself, and leaves it as it was, draws the same numbers at every call.
    """
    before, numpy_before = random.getstate(), np.random.get_state()
    yield
    drew = "random" if random.getstate() != before else ""
    if not _same_numpy(np.random.get_state(), numpy_before):
        drew = "numpy.random"
    if drew:
        raise TraceError(  # or another thread has drawn them
            f"{type(model).__name__} draws random numbers from Python's '{drew}' in "
            f"{'training' if model.training else 'evaluation'}, and a graph would return the same numbers at every call; keep "
            "the module that does so whole: leaf: [its path]"
        )


@contextlib.contextmanager
def switch_mode(training: bool, *modules: TracedModule) -> Iterator[None]:
    """Training or evaluation for the time of a check; each module's own mode is given back. Raises TraceError as train()."""
    previous = {root: [(module, module.training) for module in root.modules()] for root in modules}
    roots = [(root, root.training) for root in modules]
    try:
        for root, parts in previous.items():
            if root.meta.get("modes") or any(before != training for _, before in parts):
                root.train(training)
        yield
    finally:
        for root, before in roots:
            if root.training != before:
                root.train(before)
        for module, before in (part for parts in previous.values() for part in parts):
            if module.training != before and not isinstance(module, TracedModule):
                module.training = before


COPIED = (list, dict, set, deque, OrderedDict)


DEPTH = 40  # nested deeper than this, values count as equal


def freeze_value(value: Any, depth: int = 0) -> Any:
    """A copy of what a value holds, for `is_alike`: later changes in place do not reach it."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Number):
        return value.value
    if depth > DEPTH or isinstance(value, (str, bytes, int, float, complex, type, type(None), fx.Graph)):
        return value  # the nodes of a graph hold each other, so that copies of it would never end
    if isinstance(value, FunctionType):
        return ("function", value.__code__)
    if isinstance(value, MethodType):
        return ("method", value.__func__.__qualname__)
    if isinstance(value, (set, frozenset)):
        return ("set", set(value))
    found = list_members(value)
    if found is None and isinstance(attributes := getattr(value, "__dict__", None), dict):
        found = iter(attributes.items())
    if found is None:
        return value
    return (type(value), {key: freeze_value(member, depth + 1) for key, member in list(found)})


def is_alike(a: Any, b: Any) -> bool:
    """Whether two frozen values are the same: tensors in every bit, objects in what they hold."""
    return is_equal(a, b, same=_alike)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.dtype == object or a.tobytes() == b.tobytes())
    plain = isinstance(a, (str, bytes, int, float, complex, type, set))
    return a == b or a != a and b != b if plain else True  # an object without a content: any other will do


def has_equal_contents(a: Any, b: Any) -> bool:
    """Tell whether two objects that are no tensors hold the same."""
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    return is_alike(freeze_value(a), freeze_value(b))


class RecordedRun(NamedTuple):
    """What one run gives."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    called: set[str]
    reads_training: bool
    leaves_read_training: bool
    written: list[StatePlace]
    modes_read: set[tuple[str, str]]
    checkpointed: str  # where code is recorded that the model's backward runs again

    def text(self, without: tuple[fx.Node, ...] = ()) -> str:
        """What the graph does, for comparing two of them."""
        return "\n".join(node.format_node() or "" for node in self.graph.nodes if node not in without)

    def asks_for_gradients(self) -> tuple[fx.Node, ...]:
        """The checks that gradients are enabled, or are not."""
        checks = self.graph.find_nodes(op="call_function", target=ops.check_state)
        return tuple(node for node in checks if node.args[0] == "torch.is_grad_enabled")


def assemble(model: nn.Module, recordings: dict[bool, RecordedRun], twin_error: str | None) -> TracedModule:
    """The module tree of the model with its leaves, weights and constants around the recorded graphs."""
    leaves = set().union(*(r.called for r in recordings.values()))
    constants: dict[str, torch.Tensor] = {}
    for recording in recordings.values():
        constants.update(recording.constants)
    copies: dict[int, nn.Module] = {}
    places = [place for recording in recordings.values() for place in recording.written]
    # an attribute that forward writes would stay what it was before the trace
    stale = {(id(place.owner), place.key) for place in places}
    written: dict[int, set[Any]] = {}
    for space, name in stale:
        written.setdefault(space, set()).add(name)
    owners = {id(place.owner) for place in places if place.key is None or isinstance(place.owner, dict)}

    def kept(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
        space = id(vars(module))
        return {k: v for k, v in attributes.items() if (space, k) not in stale and id(v) not in owners}

    def copy_tree(module: nn.Module, path: str, whole: bool) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if whole or path in leaves:
            new = object.__new__(type(module))
            # containers as well: an LSTM keeps its weights in a list and changes it in place
            new.__dict__ = {k: v.copy() if type(v) in COPIED else v for k, v in vars(module).items() if k != COMPILED}
            whole = True
        else:
            if any(backward_hooks(module)):
                where = f"'{path}' ({type(module).__name__})" if path else type(module).__name__
                raise TraceError(
                    f"{where} has backward hooks, and a graph does not call it: remove them for the trace, put them on a layer "
                    "or on the traced module, or keep the module whole: leaf: [its path]"
                )
            new = Container(list_class_names(module), kept(module, get_plain_attributes(module)))
            new.__dict__["training"] = module.training
            new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
            new.__dict__["_fixed"] = FixedNames(path, fixed_names(module, not path) - written.get(id(vars(module)), set()))
        copies[id(module)] = new
        for table in ("_parameters", "_buffers"):
            new.__dict__[table] = dict(getattr(module, table))
        if whole and quantised.is_own_layer(new):
            quantised.disable_packing(new)
        new.__dict__["_modules"] = {
            key: None if child is None else copy_tree(child, f"{path}.{key}" if path else key, whole)
            for key, child in module._modules.items()
        }
        return new

    tree = copy_tree(model, "", False)
    for name, value in constants.items():
        owner, _, key = name.rpartition(".")
        tree.get_submodule(owner).register_buffer(key, value, persistent=False)
    graphs = {mode: recording.graph for mode, recording in recordings.items()}
    note_tied(tree, graphs.values())
    gm = TracedModule(tree, graphs, type(model), kept(model, extras(model)))
    gm.twin_error, gm._steps = twin_error, ()
    if contexts := context_managers.list_context_managers(type(model)):
        gm.meta[context_managers.NAMES] = contexts
    return gm


# what pipelines and trainers note on a model, also where its forward looks into it
NOTES = {"config", "_internal_dict", "peft_config", "hf_device_map", "_diffusers_hook", HOOKED, "_old_forward"}
OF_ALL = {*vars(nn.Module()), *dir(nn.Module)}  # what every module has
BY_NAME = {"getattr", "hasattr"}  # functions that read an attribute whose name is a string


def fixed_names(module: nn.Module, is_root: bool) -> frozenset[str]:
    """The attributes of a part that the graph may have read, tensors and modules apart.

    Of the root these are the names in the code that its forward runs, of a part all of its public attributes as well, which
    the code around it may read.
    """
    own = {name for name, value in vars(module).items() if not isinstance(value, (torch.Tensor, nn.Module))}
    names, strings = _names(type(module), "forward")  # type: ignore[arg-type]
    for value in vars(module).values():
        if callable(value) and not isinstance(value, (type, nn.Module)):  # diffusers' attention processors get the module
            more = _code_names(value.__code__) if isinstance(value, FunctionType) else _called_names(value)
            names, strings = names | more[0], strings | more[1]
    found = {name for name in names if name in own or hasattr(type(module), name)} | strings
    if not is_root:
        found |= {name for name in own if not name.startswith("_")}
    return frozenset(found - OF_ALL - NOTES)


def _called_names(value: Any) -> tuple[frozenset[str], frozenset[str]]:
    return _names(type(value), "__call__")  # type: ignore[arg-type]


@functools.lru_cache(1 << 12)
def _names(cls: type, start: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names in the code of a method, and of what of the class that code names; and the strings it may read by."""
    names: set[str] = set()
    strings: set[str] = set()
    seen: set[CodeType] = set()
    todo = [start]
    while todo:
        for function in _functions(inspect.getattr_static(cls, todo.pop(), None)):
            if (function.__module__ or "").partition(".")[0] == "torch" or function.__code__ in seen:
                continue
            seen.add(function.__code__)
            more, texts = _code_names(function.__code__)
            todo += [name for name in more - names if name not in OF_ALL and hasattr(cls, name)]
            names, strings = names | more, strings | texts
            for name in more:  # a function beside the class, which may be given the module
                helper = function.__globals__.get(name)
                if isinstance(helper, FunctionType) and helper.__module__ == function.__module__:
                    names, strings = names | _code_names(helper.__code__)[0], strings | _code_names(helper.__code__)[1]
    return frozenset(names), frozenset(strings)


@functools.lru_cache(1 << 14)
def _code_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    names, strings = set(code.co_names), set[str]()
    if not BY_NAME.isdisjoint(names):
        strings = {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _code_names(inner)
            names, strings = names | more[0], strings | more[1]
    return frozenset(names), frozenset(strings)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions of a method or property, those in it that a decorator has wrapped included."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", getattr(value, "func", value))
    while isinstance(value, FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def extras(model: nn.Module) -> dict[str, Any]:
    """The root's public attributes that are neither tensors nor modules: what a pipeline reads, `config` among them."""
    found = {
        k: v
        for k, v in vars(model).items()
        if not k.startswith("_") and not isinstance(v, (torch.Tensor, nn.Module)) and k not in RESERVED
    }
    with contextlib.suppress(Exception):  # a property of the model's
        found["config"] = model.config
    found.pop("forward", None)
    found.pop("training", None)
    return found


class MutationGuard(Journal):  # type: ignore[no-untyped-call]
    """The classes, attributes, hooks, children and tensors of all modules of a model as they are when this is made.

    What is written into the tensors' memory is seen while this is entered, whichever alias it is written through.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.state = State(root)
        self.kinds = [(module, path, type(module)) for module, path in self.state.modules.values()]
        self.memory = {memory_id(s) for r in self.state.tensors.values() if (s := get_storage(r.alias)) is not None}

    def keep(self, value: Any) -> None:
        """Copy the memory of a tensor, once, if it is the model's."""
        storage = get_storage(value)
        if storage is not None and memory_id(storage) in self.memory:
            super().keep(value)

    def undo(self) -> dict[str, list[str]]:
        """Take back what was done since; the names of what was changed, by the path of the module."""
        changed = [(path, "__class__") for module, path, kind in self.kinds if type(module) is not kind]
        for module, _, kind in self.kinds:
            if type(module) is not kind:
                module.__class__ = kind
        for place in self.state.changes():
            home, *keys = split_place(place.link if place.key is None else (place.link, place.key))
            name = keys[keys[0] == "_extras"]
            worked_out = isinstance(inspect.getattr_static(home.kind, str(name), None), functools.cached_property)
            if keys[0] not in OWN_STATE - {"_extras"} and not worked_out:
                changed.append((home.path, name))
        for record in reversed(self.state.tensors.values()):
            storage = get_storage(record.alias)
            if not record.is_as_it_was() or (storage is not None and memory_id(storage) in self.kept):
                home, *keys = split_place(record.link)
                changed.append((home.path, keys[-1]))
        self.state.restore()
        self.put_back()
        self.state.restore_tensors()
        found: dict[str, list[str]] = {}
        for path, name in dict.fromkeys(changed):
            found.setdefault(path, []).append(str(name))
        return found


@contextlib.contextmanager
def forbid_mutation(root: nn.Module, who: str, where: object = "") -> Iterator[MutationGuard]:
    """Take back what is done to a model meanwhile. Raises SpecError for it, with `where` what does it is asked for."""
    before, changed = MutationGuard(root), dict[str, list[str]]()
    try:
        yield before
    finally:
        changed = before.undo()
    if changed:
        path, names = next(iter(changed.items()))
        more = f" and {len(changed) - 1} more modules" if len(changed) > 1 else ""
        raise SpecError(
            f"{who} changes the model while it is built: {', '.join(names)} of '{path}'{more}; change a copy of it, or change "
            "the model before it is traced",
            where=where,
        )

"""The module a trace gives: a `torch.fx.GraphModule` with one graph a mode and the model's attributes."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .. import extensions
from ..errors import LONGEST, SpecError, TraceError, cut
from ..locks import get_locks, has_lock, read_lock, write_lock
from ..quantised import count_parameters, is_transposed
from ..torch_internals.modules import COMPILED, leave_frame, without_compiler
from .calls import CHECKPOINTING, FORWARD, call_code, choose_by_gradients, choose_by_mode, make_forward
from .containers import HOOKED, RESERVED, WATCHED, Container, SharedCode, TracedRoot, find_module, get_child
from .context_managers import get_context_manager
from .graph import OF_THE_ROOT, Graph, compile_graph, copy_graph, list_tied, note_uncalled, report_loaded

if TYPE_CHECKING:
    from .part_modes import PartModes


def check_traced(gm: Any, caller: str) -> None:
    """Raises SpecError for what is no traced module."""
    if not isinstance(gm, TracedModule):
        stands = isinstance(getattr(gm, "module", None), TracedModule)
        way = "give it what that was made from, its attribute module" if stands else "fxplug.trace(model, inputs) makes one"
        raise SpecError(f"{caller} takes a traced module, not {type(gm).__name__}: {way}")


TRAINED = "trained"  # the key in `meta` of the names of the base's parameters that were made trainable
BEFORE_TRAINING = "values_before_training"  # an attribute: what these were then, by name


OWN_STATE = set(
    "_graph _twin _extras _origin _code _graph_mode _accessors _locks _block _steps _variants _entry _slots _samples "  # noqa
    "_parts _mixed _part_modes checkpointing _diffusers_hook".split()  # noqa: SIM905
) | {WATCHED}
NOT_COPIED = OWN_STATE | {HOOKED, "forward", "_old_forward"}  # of a root: accelerate's hook is bound to it
FORWARDS = {True: "_forward_train", False: "_forward_eval"}  # the forward of a class with a graph for each mode
WRITTEN = ("_code", "_lineno_map", "_prologue_start")  # what FX notes of a code; dynamo asks for the second
Step = Callable[["TracedModule"], "TracedModule"]


class _LazyForward:
    """Stands for the `forward` of a module whose code is not written yet."""

    def __init__(self, module: TracedModule) -> None:
        self.module = weakref.ref(module)

    @without_compiler
    def __get__(self, module: TracedModule | None, cls: Any) -> Any:
        if (owner := self.module()) is not None:
            owner._compile()
        return cls.forward if module is None else module.forward


def copy_graphs(module: TracedModule) -> dict[bool, Graph]:
    """Copies of the graphs of a module, by training mode."""
    return {mode: copy_graph(graph) for mode, graph in module.graphs.items()}


def list_class_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and its bases, down to but without nn.Module.

    A linear layer that holds its weight as (in, out) is a TransposedLinear too.
    """
    if isinstance(module, (Container, TracedModule)):
        return module.classes
    names = tuple(c.__name__ for c in type(module).__mro__ if issubclass(c, nn.Module) and c is not nn.Module)
    return (*names, "TransposedLinear") if is_transposed(module) else names or ("Module",)


def strip_to_container(module: nn.Module) -> nn.Module:
    """The module tree again on the same tensors: changing one tree, or the mode of its modules, leaves the other alone.

    The root comes back as a Container; a module that stands in two places does so in the copy.
    """
    copies: dict[int, nn.Module] = {}

    def copy_of(old: nn.Module) -> nn.Module:
        if id(old) not in copies:
            root = isinstance(old, TracedModule)
            new = object.__new__(Container if root else type(old))
            # the dictionaries of hooks are copied: a hook on one tree is none on the other
            new.__dict__ = {
                k: v.copy() if type(v) is OrderedDict else v for k, v in vars(old).items() if not (root and k in NOT_COPIED)
            }
            new.__dict__.pop(COMPILED, None)  # `module.compile()` has compiled the call of the old one
            drop_forward(old, new.__dict__)  # others may read the old one's meanwhile
            for table in ("_parameters", "_buffers"):
                new.__dict__[table] = dict(getattr(old, table))
            new.__dict__["_non_persistent_buffers_set"] = set(old._non_persistent_buffers_set)
            copies[id(old)] = new
            new.__dict__["_modules"] = {k: m if m is None else copy_of(m) for k, m in old._modules.items()}
        return copies[id(old)]

    return copy_of(module)


def drop_forward(module: nn.Module, table: dict[str, Any] | None = None) -> None:
    """Delete a forward of the class's that is a module's own attribute, too. Raises SpecError for another, such as a hook's."""
    if "forward" in (own := vars(module) if table is None else table):
        from . import fixed  # for few modules
        fixed.check_own_forward(module, vars(module).get(HOOKED), FORWARD)
        own.pop("forward", None)


def _is_ours(name: str) -> bool:
    """Whether an attribute of that name would take the place of a method or property of a traced module."""
    return not name.startswith("_") and hasattr(TracedModule, name)


class TracedModule(TracedRoot, fx.GraphModule):
    """A `torch.fx.GraphModule` that takes the place of the model it was traced from.

    It has the model's `state_dict` keys, signature and result, and its plain attributes; properties of the model's class
    (`dtype`, `device`) are answered from here. Where the model computes other things in training than in evaluation it
    holds a graph for each and `train()` / `eval()` choose; `graph` and `code` show the one in force. `graphs` gives all.
    """

    _twin: fx.Graph | None
    _steps: tuple[Step, ...] | None  # what was done to the trace since, each to any trace of the model; None: not known
    _kind: type[TracedModule]
    _codes: dict[bool, str]  # by training mode, as far as it was asked for
    _parts: tuple[nn.Module, ...]  # those whose code differs between training and evaluation
    _part_modes: PartModes | None  # what is known of them, None before the first call
    _mixed: dict[tuple[bool, ...], Any]  # the forward for each mixture of the modes of the root and these, as far as called
    classes: tuple[str, ...]

    def __init__(
        self,
        tree: nn.Module,
        graphs: dict[bool, Graph],
        origin: type | None = None,
        extras: dict[str, Any] | None = None,
    ):
        """`tree` holds parameters and children; `graphs` has one graph, or one for each of training False and True."""
        cls = type(self)  # its own: FX makes one for each module
        cls._codes = {}
        super().__init__(nn.Module(), fx.Graph())
        cls._kind = cls.__bases__[0]
        cls.__name__ = cls.__qualname__ = TracedModule.__name__
        cls.__module__ = __name__.partition(".")[0]
        mode = tree.training if tree.training in graphs else next(iter(graphs))
        kept = RESERVED | {"_modules", "_parameters", "_buffers"}
        self.__dict__.update({k: v for k, v in vars(tree).items() if k not in kept and not _is_ours(k)})
        self._non_persistent_buffers_set = set(tree._non_persistent_buffers_set)
        self.classes = list_class_names(tree)
        self.training = tree.training
        self._origin, self._extras = origin, dict(extras or {})
        self._steps = None
        self.twin_error: str | None = None
        self._parts, self._part_modes, self._mixed = (), None, {}
        self._graph_mode = mode
        self._twin = graphs[not mode] if len(graphs) == 2 else None
        self._graph = graphs[mode]
        for graph in graphs.values():
            graph.owning_module = self
        del self._code
        cls._codes, cls.forward = {}, _LazyForward(self)  # type: ignore[assignment]
        # last, as nn.Module gives no other value to a name that one of them has
        self._parameters.update(tree._parameters)
        self._buffers.update(tree._buffers)
        self._modules.update(tree._modules)
        if "_tied" in vars(self):  # not where a pass or lowering has given one of them another tensor
            self.__dict__["_tied"] = list_tied(self)

    def __repr__(self) -> str:
        """One line: a graph has thousands, and `show`, `fxplug.core.ir.text.show_modules` and `code` print them."""
        nodes = " and ".join(str(len(graph.nodes)) for graph in self.graphs.values())
        passes = ", ".join(f"{entry['name']} ({len(entry['sites'])} sites)" for entry in self.meta.get("passes", []))
        count = f"{sum(p.numel() for p in self.parameters()):,} parameters"
        found = f"{count}, graph of {nodes} nodes{passes and f', passes {passes}'}"
        return cut(f"TracedModule({self.classes[0]}: {found}; fxplug.show(module) prints the graph)", LONGEST)

    __str__ = __repr__

    @property
    def graphs(self) -> dict[bool, fx.Graph]:
        """The graphs by training mode; one entry when both modes are the same."""
        one = {self._graph_mode: self._graph}
        return one if self._twin is None else {**one, not self._graph_mode: self._twin}

    def recompile(self) -> Any:
        """Write the code of the graph anew; with a graph for each mode `forward` takes that of the mode it is in."""
        drop_forward(self)
        self._steps = None  # whoever calls this has edited the graph, and an edit by hand cannot be made in another graph
        self._part_modes = None
        vars(self).pop(CHECKPOINTING, None)
        return self._compile()

    @without_compiler  # the first call of a variant comes here
    def _compile(self, mode: bool | None = None) -> Any:
        """Write the code of the graph in force, or of a mode's; the other is written when `train` or a call comes to it."""
        if CHECKPOINTING not in vars(self) and vars(self).get("meta", {}).get(CHECKPOINTING):
            try:  # as that which this one was derived from, or a file; the method is an extension's
                self.enable_gradient_checkpointing()
            except AttributeError as error:
                raise SpecError(f"the module has gradient checkpointing enabled: {error}") from error
        graphs = self.graphs if "_twin" in vars(self) else {True: self._graph}
        in_force = next(iter(graphs))
        mode = in_force if mode is None else mode
        blank, code, forward = compile_graph(graphs[mode])
        cls = type(self)
        if mode == in_force:
            vars(self).update({WATCHED: None, **{key: value for key, value in vars(blank).items() if key in WRITTEN}})
        cls._codes[mode] = blank._code
        own = vars(self)
        if self._may_differ(len(graphs)) and own["_part_modes"] is None:
            from .part_modes import PartModes  # for few modules

            self._part_modes = PartModes(self, self.graphs, self.meta, self.twin_error)
            self._parts, self._mixed = tuple(self._part_modes.modules.values()), {}
        if len(graphs) == 2:
            setattr(cls, FORWARDS[mode], forward)
        if len(graphs) == 2 or own.get("_parts"):
            forward = choose_by_mode(forward, len(graphs) == 2)
        if CHECKPOINTING in own:
            forward = choose_by_gradients(forward)
        cls.forward = make_forward(forward)
        return code

    _call_code = call_code

    def _may_differ(self, graphs: int) -> bool:
        """Whether it matters to so many graphs that a part is in another mode."""
        own = vars(self)
        return graphs == 2 or bool(own.get("twin_error")) or "modes_read" in own.get("meta", ())

    @property
    def has_mixed_modes(self) -> bool:
        """Whether a part whose code differs between training and evaluation is in another mode than the module."""
        if self._part_modes is None and self._may_differ(len(self.graphs)):
            self._compile()
        return any(part.training != self.training for part in self._parts)

    @property
    def graph_in_force(self) -> fx.Graph:
        """The graph that a call runs: that of the mode, or one in which each part is in its own. Raises GuardError."""
        if self.has_mixed_modes:
            assert self._part_modes is not None
            return self._part_modes.compose(self.training)
        return self.graphs.get(self.training, self._graph)

    @without_compiler
    def _forward_of_parts(self) -> Any:
        """The forward for the modes that the parts are in now. Raises GuardError where there can be none."""
        key = (self.training, *[part.training for part in self._parts])
        if key not in self._mixed:
            self._mixed[key] = compile_graph(self.graph_in_force)[2]
        return self._mixed[key]

    def set_checkpointing(self, view: TracedModule | None) -> None:
        """Call another module where there will be a backward pass.

        Args:
            view: This module with regions that are computed again in the backward pass, on its layers; None for none.
        """
        for table in (vars(self), self.meta):
            table.pop(CHECKPOINTING, None)
        if view is not None:
            vars(self)[CHECKPOINTING], self.meta[CHECKPOINTING] = view, True
        self._forget_code()

    def _forget_code(self) -> None:
        """Write the code anew when it is next asked for: the graphs are as they were, and what is around them is not."""
        drop_forward(self)
        cls = type(self)
        vars(self).pop("_code", None)
        cls._codes, cls.forward = {}, _LazyForward(self)  # type: ignore[assignment]
        for name in FORWARDS.values():
            if name in vars(cls):
                delattr(cls, name)

    def bind(self, **inputs: Any) -> TracedModule:
        """Keep inputs in the module, for callers who do not know of them: `bind(cond=image, strength=0.7)`.

        They are in `bound`, and move and are saved with the module. An input that is given in a call comes before what is held.
        To bind what is bound already changes the value, in this module, and a value of the same shape asks for no new
        compilation.

        Args:
            **inputs: Tensors, or numbers where a pass has added the input.

        Returns:
            The module that holds them.

        Raises:
            SpecError: There is no such input.
        """
        from .bound_inputs import bind  # for few modules

        return bind(self, inputs)

    def train(self, mode: bool = True) -> TracedModule:
        """Go into training, or out of it, with all parts, or as far as the model's own `train` puts them into it.

        Args:
            mode: True for training.

        Returns:
            This module.

        Raises:
            TraceError: The model has no graph for it.
        """
        others = self.meta.get("modes", {}).get("train" if mode else "eval", ())
        given, mode = mode, (not mode if "" in others else mode)
        if self._twin is None and mode != self._graph_mode and self.twin_error:
            raise TraceError(
                f"this module has no graph for {'training' if mode else 'evaluation'}, because the model could not be traced "
                f"in it: {self.twin_error}"
            )
        super().train(given)
        for path in others:
            if (part := find_module(self, path)) is not None:
                part.training = not given
        view: Any = vars(self).get(CHECKPOINTING)
        for part in () if view is None else view.modules():
            if isinstance(part, TracedModule):  # its layers are those of this module
                part.training = given
        if self._twin is not None and mode != self._graph_mode:
            self._graph_mode, self._graph, self._twin = mode, self._twin, self._graph
            if mode in self._codes:
                self._code = self._codes[mode]
            elif self._codes:
                self._compile()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> TracedModule:
        locks = get_locks(self)
        with nullcontext() if has_lock(locks) else write_lock(locks):  # an offloader moves it for a run
            constants = {name: self.get_buffer(name) for name in self._constants()}
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, value in constants.items():
                home, _, key = name.rpartition(".")
                buffers = self.get_submodule(home)._buffers
                if (new := buffers[key]) is not None and new.dtype != value.dtype:
                    buffers[key] = value.to(new.device)
        return self

    def _constants(self) -> set[str]:
        """What the model's code holds or makes and is no buffer of it: its dtype is that of the code, also after a cast."""
        found = (node for graph in self.graphs.values() for node in graph.find_nodes(op="get_attr"))
        shared = (module.constants for module in self.modules() if isinstance(module, SharedCode))
        return {str(node.target) for node in found if node.meta.get("constant")}.union(*shared)

    @property
    def variants(self) -> list[str]:
        """The forms of call that have a graph of their own, as `fxplug.variants` adds them; none of another module."""
        return []

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Count the parameters that require a gradient, and all, as PEFT does: a packed layer has as many as its weight."""
        return count_parameters(self)

    def print_trainable_parameters(self) -> None:
        """Print these two numbers and their ratio, PEFT's line. `fxplug.trainable` freezes all that no pass put in."""
        some, every = self.get_nb_trainable_parameters()
        share = 100 * some / every if every else 0.0
        print(f"trainable params: {some:,d} || all params: {every:,d} || trainable%: {share:.4f}")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Do as torch's `load_state_dict`, between calls: those that run are waited for.

        Args:
            state_dict: Tensors by name.
            strict: As in torch.
            assign: As in torch.

        Returns:
            The names that are missing, and those that are unexpected.

        Raises:
            SpecError: `assign` would make two tensors of one that the graph reads once; before anything is loaded.
        """
        if assign:
            from .fixed import check_assigned

            check_assigned(self, state_dict)
        with write_lock(get_locks(self)):
            return report_loaded(self, super().load_state_dict(state_dict, strict, assign))

    def __getitem__(self, key: int | str) -> Any:
        return get_child(self, key)

    def _missing_attribute(self, name: str) -> Any:
        """Get code that is not written yet, or what the model or an extension has. Raises AttributeError."""
        if name == "_code" and "_twin" in vars(self):  # not written yet, or taken back with a trial
            self._compile()
            return self._code
        if name in FORWARDS.values() and self._twin is not None:  # a call after `training` was set without `train`
            self._compile(name == FORWARDS[True])
            return getattr(self, name)
        extras = self.__dict__.get("_extras", {})
        if name in extras:
            return extras[name]
        found = inspect.getattr_static(self.__dict__.get("_origin") or object, name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        accessors = self.__dict__.setdefault("_accessors", {})
        if name in accessors:
            return accessors[name]
        own = found is None or callable(found)  # a method that works on the model's code, which an extension has for a graph
        if own and (accessor := extensions.import_part("accessors", name)) is not None:
            try:
                return accessors.setdefault(name, accessor(self))
            except SpecError as error:
                raise AttributeError(error.finding) from None
        if (context := get_context_manager(self, name, found)) is not None:  # leaves nothing behind: a pipeline may open it
            return context
        if callable(found):
            raise AttributeError(
                f"'{name}' is a method of {self.classes[0]}, which a traced graph does not have: call it on the model before "
                "tracing"
            )
        if name in ("dtype", "device"):
            first: torch.Tensor | None = next(self.parameters(), None)
            if first is None:
                first = next(self.buffers(), torch.empty(0))
            return getattr(first, name)
        raise AttributeError(f"the traced {self.classes[0]} has no attribute '{name}'{extensions.describe_unusable()}")

    @property
    def modules_by_form(self) -> list[TracedModule]:
        """This module and its variants."""
        return [self]

    def derived(self, tree: nn.Module, graphs: dict[bool, Graph], **meta: Any) -> TracedModule:
        """Derive the same model computed in another way: other graphs on another tree.

        What makes the same of another trace of the model is not known until `made_by` says it.

        Args:
            tree: The modules that the graphs call.
            graphs: A graph for training (True) and evaluation (False).
            **meta: What changes in the meta of this module.

        Returns:
            The new module.
        """
        note_uncalled(tree, self.graphs.values(), graphs.values())
        new: TracedModule = self._kind(tree, graphs, self._origin, self._extras)
        new.twin_error, new.meta = self.twin_error, {**self.meta, **meta}
        return new

    def made_by(self, step: Step, source: TracedModule) -> TracedModule:
        """Note that `step` made this module of `source`, and makes so of any other trace of the model.

        Args:
            step: A function from a traced module to another.
            source: The module that it was made of.

        Returns:
            This module.
        """
        self._steps = None if source._steps is None else (*source._steps, step)
        return self

    def copied(self) -> TracedModule:
        """Copy the graphs, on the same tensors, in a tree of its own."""
        return self._copy_on(strip_to_container(self))

    def _copy_on(self, tree: nn.Module) -> TracedModule:
        new = self.derived(tree, copy_graphs(self))
        new._steps = self._steps
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        new = memo[id(self)] = self._rebuilt(lambda value: copy.deepcopy(value, memo))
        return new

    def __copy__(self) -> TracedModule:
        """The same graphs on the same tensors and children."""
        return self._rebuilt(lambda value: value.copy() if isinstance(value, (dict, set)) else value)

    def _rebuilt(self, copied: Callable[[Any], Any]) -> TracedModule:
        tree: Any = Container(self.classes)
        with read_lock(get_locks(self), reads=True):
            for key, value in vars(self).items():
                ours = key in NOT_COPIED or _is_ours(key) or getattr(value, "__self__", None) is self
                if not ours and key != "meta":  # which may hold whole modules
                    tree.__dict__[key] = copied(value)
        return self._copy_on(tree)

    def __reduce__(self) -> Any:
        raise TypeError("a traced module cannot be pickled: use fxplug.save(module, folder)")


OF_THE_ROOT.update(RESERVED, OWN_STATE, dir(TracedModule), vars(fx.GraphModule(nn.Module(), fx.Graph())))
leave_frame(TracedModule._missing_attribute.__code__)  # a compiler does not look up what is missing

"""A model that goes in steps: it stands for a traced module, tells runs and calls at one time apart, and has parts to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, fx, nn

from ..core.clock import Clock
from ..core.errors import SpecError
from ..core.extensions import DistributedPart
from ..core.ir import ops
from ..core.ir.calls import check_samples
from ..core.ir.containers import list_leaves
from ..core.ir.graph import Graph, get_meta, insert
from ..core.ir.traced_module import TracedModule, strip_to_container
from ..core.locks import call_with_read_lock, get_choices, get_locks
from ..core.torch_internals.modules import TABLES

F = TypeVar("F", bound=Callable[..., Any])
ROOT = {"": ("", "")}  # the nn_module_stack of what is put into a graph here


@dataclass
class StepRun:
    """What is remembered of one run: values by name, the step, and what the next call must have in common with the last."""

    kept: dict[str, Tensor]
    index: int
    shapes: tuple[Any, ...]
    changes: tuple[Any, ...]


def put(graph: Graph, op: str, target: Any, args: Any, like: fx.Node, **where: Any) -> fx.Node:
    """Insert a node, with the shape and dtype of another one."""
    return insert(graph, op, target, args, meta={**get_meta(like), "nn_module_stack": ROOT}, **where)


def put_check(graph: Graph, given: fx.Node, name: str, like: fx.Node, first: fx.Node | None, **where: Any) -> fx.Node:
    """Insert a check of a cached input: its shape and dtype are those of a value, its device that of the `first` input."""
    shape = like.meta["shape"]
    args = (given, name, (None,) * len(shape), str(list(shape)), True, like.meta["dtype"], first)
    checked = put(graph, "call_function", ops.check_added, args, like, **where)
    checked.meta["effect"] = True
    return checked


def disable_compile(function: F) -> F:
    """Disable torch.compile for a function that decides on the host, and for all it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def compile_graphs_only(function: F) -> F:
    """Disable torch.compile for a function, but not for the graphs that it calls."""
    return torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call, no-any-return]


def give_signature(module: nn.Module, signature: inspect.Signature) -> None:
    """Give the forward of one module a signature, which pipelines read to see what a model takes: in a class of its own."""
    kind = type(module)
    old: Any = kind.forward
    new: Any = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
    vars(new).update(vars(old), __signature__=signature)
    # Nothing plainer works: a signature is a function's, which all modules of a class share
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": new})


class Stepped(nn.Module):
    """What stands for a traced module in its pipeline, step by step. Its parts are traced modules on the same tensors.

    `clock` is the input that says where in a run a call is, or None. `_streams` has what is remembered of each of the calls at
    one time. A class of this kind says `graphs_of` a part, which parts are `used`, and what a `_step` is.
    """

    def __init__(self, module: TracedModule, clock: str | None, inputs: TracedModule | None = None) -> None:
        """Set the model up; `inputs` has the inputs of a call, where `module` is given more than these."""
        super().__init__()
        if not isinstance(module, TracedModule):
            way = "give it what that was made from" if isinstance(module, Stepped) else "fxplug.trace makes one"
            raise SpecError(f"a step cache takes a traced module, not {type(module).__name__}: {way}")
        self.__dict__.update({table: vars(module)[table] for table in TABLES}, module=module, written_from=module)
        self.training = module.training
        give_signature(self, inspect.signature(type(inputs or module).forward))
        self._clock = Clock(clock, [str(n.target) for n in (inputs or module).graph.nodes if n.op == "placeholder"])
        self._options: dict[str, Any] | None = None
        self._locks = get_locks(module)
        part: Any = next((m for m in module.modules() if isinstance(m, DistributedPart)), None)
        self._everywhere: Callable[[Tensor], Tensor] | None = part and part.everywhere
        self._before: Callable[..., None] | None = part and part.before_call
        self._parts: dict[str, TracedModule] = {}  # no submodules: they hold what `module` holds

    # --- the parts

    def graphs_of(self, name: str) -> dict[bool, Graph]:
        """Return the graphs of a part, by training mode."""
        raise NotImplementedError

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the parts that steps run."""
        raise NotImplementedError

    def _part(self, name: str) -> TracedModule:
        if name not in self._parts:
            self._parts[name] = self._made(name)
        return self._parts[name]

    def get_step(self) -> TracedModule:
        """Get the part that runs at each call, of which a step cache may take values. Raises SpecError where there is none."""
        raise SpecError(f"a step cache takes a traced module, not {type(self).__name__}: give it what that was made from")

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one call in which `step` stands for that part; it is given what the part takes."""
        raise NotImplementedError

    @disable_compile
    def _made(self, name: str) -> TracedModule:
        module = self.written_from
        part: TracedModule = module.derived(strip_to_container(module), self.graphs_of(name), part=name)
        for table in TABLES:
            part.__dict__[table] = vars(module)[table]  # what moves or changes one of them does so for all
        if self._options is not None:
            part.compile(**self._options)
        return part

    def map(self, function: Callable[[TracedModule], Any]) -> None:
        """Replace each used part by `function(part)`, such as a lowering that keeps signature and result."""
        for name in self.used:
            self._parts[name] = function(self._part(name))

    def compile(self, **options: Any) -> None:
        """Compile each part, by default with fullgraph=True; the choice between them stays on the host."""
        self._options = {"fullgraph": True, **options}
        for name in self.used:
            self._part(name).compile(**self._options)

    # --- a run

    def reset(self) -> None:
        """Clear the cached values: the next call begins a run."""
        self._streams: dict[int, Any] = {}  # runs
        self._clock.reset()

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """Reset the cache, as pipelines of diffusers call it on each of their models at the end of a run."""
        self.reset()

    @compile_graphs_only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step with the module's arguments."""
        if self._before is not None:
            self._before(self.module, args, kwargs)
            self._before = None  # later inputs may differ by rounding
        return call_with_read_lock(self._locks, self._checked_step, *args, **kwargs)

    @compile_graphs_only
    def _checked_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._locks:
            check_samples(self.module, args, kwargs)  # which parts behind the first do not see
        try:
            return self._step(*args, **kwargs)
        except BaseException:  # what a step has kept that was broken off is no step's
            self.reset()
            raise

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _summed(self, row: list[Tensor]) -> list[float]:
        """Sum numbers over all processes."""
        if self._everywhere is None:
            return torch.stack(row).tolist()
        return self._everywhere(torch.stack(row)).sum(0).tolist()

    def _changes(self) -> tuple[Any, ...]:
        """Return a value that is equal for two calls which use the same adapters."""
        return sum(lock.changes for lock in self._locks), get_choices(self._locks)

    def _owned(self, values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Detach values; copy those of a CUDA graph, as its next run overwrites them."""
        replayed = (self._options or {}).get("mode") in ("reduce-overhead", "max-autotune")
        return {k: v.detach().clone() if replayed else v.detach() for k, v in values.items()}

    @disable_compile
    def _advance(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leave: Collection[str] = ()
    ) -> tuple[int, tuple[Any, ...], Any]:
        """Return the number of this call among those at one time, its shapes, and its run, or None for a new run.

        Arguments in `leave` say nothing of these.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in leave}
        begins, number = self._clock.tick(args, kwargs)
        self._streams = {} if begins else {n: run for n, run in self._streams.items() if n in self._clock.numbers}
        shapes = tuple((x.shape, x.dtype, x.device) for x in list_leaves((args, kwargs)) if isinstance(x, Tensor))
        run = self._streams.get(number)
        return number, shapes, run if run is not None and run.shapes == shapes else None

    # --- it stands for the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__:
                raise
        return getattr(self.module, name)

    def __getitem__(self, key: int | str) -> nn.Module:
        return self.module[key]  # type: ignore[no-any-return]

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: use fxplug.save(module, folder)")

    def train(self, mode: bool = True) -> Self:
        """Put the module and all parts into a mode."""
        self.training = mode
        self.module.train(mode)
        for part in self._parts.values():
            part.train(mode)
        return self

    def _apply(self, function: Any, recurse: bool = True) -> Self:
        self.module._apply(function, recurse)
        self.reset()
        return self


def find_device(*values: Any) -> torch.device | None:
    """Return the device of the first tensor in these values, or None."""
    return next((x.device for x in list_leaves(values) if isinstance(x, Tensor)), None)

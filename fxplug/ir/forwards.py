"""What is around the code that FX generates for a graph: modes that are given back, and turns."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import turns
from ..errors import FxplugError, GuardError, shown
from ..torch_internals.compiling import (
    CONTEXT_VARIABLES,
    apart,
    as_it_stands,
    break_graph,
    is_listening,
    leave_frame,
    leave_module,
)
from ..turns import during, turns_of
from . import ops

if TYPE_CHECKING:
    from .traced_module import TracedModule


AROUND = (
    "a program compiled around a module with slots does not see adapters.using(...): compile the module itself, "
    "or leave fullgraph=True away"
)


def unwound(forward: Any) -> Any:
    """A forward that gives gradients and autocast their modes back when an error leaves it between enter and exit."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        before = ops.modes()
        try:
            return forward(self, *args, **kwargs)
        except BaseException:  # whatever leaves the model's forward, an interrupt, too
            ops.set_modes(before)
            raise

    return wrapper


def going_on(forward: Any) -> Any:
    """A forward of operations that the model's code has in a `try`: where one fails, the model may go on, and no graph can."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except FxplugError:
            raise
        except Exception as error:  # torch's
            text = shown(f"{type(error).__name__}: {error}", 300)
            raise GuardError(f"an operation fails, and the model, which has some in a `try`, may go on: {text}") from error

    return wrapper


def in_turn(forward: Any) -> Any:
    """A forward during which what is in the module's slots is not changed.

    A compiler that is given the module runs this as it stands and compiles what is below; one that compiles something around
    the module leaves it out.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if CONTEXT_VARIABLES and turns.has_choice() and any("turns" in vars(module) for module in self.modules()):
                break_graph(AROUND)
            return forward(self, *args, **kwargs)
        own = self.__dict__.get("_turns")
        if own is None or self.__dict__.get("_block") is not None:
            _begin(self, args, kwargs)
        if own is None:
            own = self.__dict__["_turns"] = turns_of(self)
        return during(own, forward, self, *args, **kwargs) if own else forward(self, *args, **kwargs)

    return wrapper


def by_regions(forward: Any) -> Any:
    """A forward of which a compiler that is given the module compiles outlined regions, and leaves the rest as it stands."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or "nested" not in self.meta or not is_listening():
            return forward(self, *args, **kwargs)
        times = max(map(len, self.meta["nested"].values()))
        return as_it_stands(times, forward, self, *args, **kwargs)

    return wrapper


@apart
def _begin(module: TracedModule, args: Any, kwargs: Any) -> None:
    """What a block does before a call of the module that it is in; the first of those that do something."""
    own = module.__dict__
    if "_block" not in own:
        own["_block"] = next((m for m in module.modules() if hasattr(type(m), "before_call")), None)
    if own["_block"] is not None:
        own["_block"].before_call(module, args, kwargs)


# these frames are not compiled, what they call is; all wrappers have one code
leave_frame(in_turn(nn.Module.forward).__code__)
leave_frame(by_regions(nn.Module.forward).__code__)
leave_module(turns)

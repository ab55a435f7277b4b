"""A model traced once more, for another call: on the weights that its traced module has by now, if it is still the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from .. import quantised
from ..errors import FxplugError, SpecError, TraceError, quote
from ..ir.containers import PLAIN_TYPES, Container, find_tensor, list_leaves
from ..ir.entry_checks import get_signature
from ..ir.traced_module import TracedModule, check_traced
from ..ir.variants import LIMIT, VariantCache, Variants, as_kind
from ..torch_internals.modules import forward_hooks
from .fake_tensors import KINDS
from .tracer import retrace

V = TypeVar("V", bound=Variants)


def variants(gm: TracedModule, model: nn.Module, limit: int = LIMIT) -> Variants:
    """Let a traced module also answer calls that its graph does not hold for, on the same weights.

    A call that the guards of `gm` refuse (a number for a tensor, another dtype, an optional input, another size that Python
    decides on) is traced from the model when it first comes, and checked beside it; what was done to `gm` since its trace is
    done to that graph too, and it is kept. Numbers are inputs of such a graph. `.variants` lists them, a saved module has them,
    and so has what `apply`, `lower` and `bind` make of the result.

    Each call of the result raises GuardError where it cannot be answered so: above the limit, after the model or the graph was
    changed, where a check fails after the graph has written a buffer or drawn a number, and for what the model does not take.

    Args:
        gm: A trace of `model`, or what `apply`, `lower` and `bind` have made of one.
        model: The model that was traced.
        limit: How many further graphs there may be.

    Returns:
        A module that answers these calls, too.

    Raises:
        SpecError: Something else has made `gm`, such as `load` or `merge`, or it is a trace of another model.
    """
    return with_retracer(as_kind(Variants, _checked(gm)), model, limit)


def with_retracer(module: V, model: nn.Module, limit: int = LIMIT) -> V:
    """Attach a model to the module, to trace it for further calls; return the module. Raises SpecError as `variants` does."""
    _checked(module)
    if not isinstance(model, nn.Module) or isinstance(model, TracedModule):
        raise SpecError(f"variants(gm, model) takes the model that was traced, not {quote(model, 80)}")
    if type(limit) is not int or limit < 0:
        raise SpecError(f"variants: limit must be a number of graphs, not {quote(limit)}")
    if path := _difference(model, module):
        raise SpecError(f"variants: the model is not the one that was traced, or was changed since: '{path}' differs")
    made = module._variants.made
    module._variants = VariantCache(Retracer(model), limit)
    module._variants.made = made
    return module


def _checked(gm: Any) -> TracedModule:
    check_traced(gm, "variants")
    saved = isinstance(gm, Variants) and gm._variants.retrace is None and gm._variants.made
    if gm._steps is None or saved:
        raise SpecError(
            "variants cannot repeat what was done to this module since its trace (it was loaded, merged, split over processes "
            "or into the steps of a cache, or its graph was edited by hand): call variants(...) on the traced module, or on "
            "what apply, lower and bind have made of it"
        )
    return gm  # type: ignore[no-any-return]


class Retracer:
    """Traces a model for calls of a module that was made of its trace."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.built = model, _built(model)

    def __call__(self, owner: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
        """Return the trace for this call, checked against the model. Raises TraceError if the model cannot be traced."""
        bound = get_signature(owner).bind(*args, **kwargs)
        for entry in owner.meta.get("passes", []):
            for name in entry.get("inputs", ()):
                bound.arguments.pop(name, None)
        self.check()
        call, options = (bound.args, bound.kwargs), owner.meta.get("trace", {"leaf": [], "real": None, "keep": False})
        with _with_tensors_of(owner, self.model):
            if any(type(x) in KINDS for x in list_leaves(call)):
                with contextlib.suppress(Exception):  # the model's, which is reported below
                    return retrace(self.model, call, True, **options)
            try:
                return retrace(self.model, call, False, **options)
            except FxplugError:
                raise
            except Exception as error:  # the model's
                raise TraceError(f"the model itself fails on this call: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raise TraceError for a model that was changed since it was traced."""
        now = _built(self.model)
        for path in dict.fromkeys([*self.built, *now]):
            if self.built.get(path) != now.get(path):
                raise TraceError(f"the model was changed since it was traced, at '{path or type(self.model).__name__}'")


def _difference(model: nn.Module, traced: TracedModule) -> str:
    """Return the path of the first part that differs between a model and the tree of its trace: its class, or a plain
    attribute.

    Parts that passes and lowerings have replaced or removed are not compared.
    """
    if traced._origin is not type(model):
        return type(model).__name__
    for path, module in model.named_modules():
        try:
            part = traced.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(part, Container):
            names: Iterable[str] = part.attributes
        elif type(part) is type(module):
            names = [name for name in vars(part) if not name.startswith("_") and name not in ("training", quantised.PACKS)]
        else:
            continue
        for name in names:
            before, now = vars(part).get(name), vars(module).get(name)
            if isinstance(before, PLAIN_TYPES) and (type(before) is not type(now) or before != now):
                return f"{path}.{name}"
    return ""


def _built(model: nn.Module) -> dict[str, Any]:
    """Return the state that determines a model's computation besides its inputs and weights: the classes of its modules, their
    public attributes, hooks, and functions that replace their own."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        rows: dict[str, Any] = {}
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in vars(module).items():
            if value is None:
                continue
            if isinstance(value, PLAIN_TYPES) and not name.startswith("_") and name != "training":
                rows[name] = (type(value), value)
            elif name == "forward" or not name.startswith("_") and not isinstance(value, (torch.Tensor, nn.Module)):
                rows[name] = type(value) if name != "forward" else id(value)
        hooks = [sorted(table) for table in forward_hooks(module)]
        found[path] = (type(module), rows, hooks)
    return found


@contextlib.contextmanager
def _with_tensors_of(owner: TracedModule, model: nn.Module) -> Iterator[None]:
    """Give a model the tensors of a module made from its trace, inside the context. Raises TraceError if these differ."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, module in model.named_modules():
            for table in ("_parameters", "_buffers"):
                own = getattr(module, table)
                for key, value in own.items():
                    name = f"{path}.{key}" if path else key
                    found = find_tensor(owner, name)
                    if value is None or found is value:
                        continue
                    if found is None or found.shape != value.shape:
                        raise TraceError(f"'{name}' of this module is no longer the model's")
                    before.append((own, key, value))
                    own[key] = found
        yield
    finally:
        for own, key, value in reversed(before):
            own[key] = value

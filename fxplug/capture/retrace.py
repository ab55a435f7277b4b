"""A model traced once more, for another call: on the weights that its traced module has by now, if it is still the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import FxplugError
from ..ir.containers import PLAIN_TYPES
from ..ir.peers import instead, unseen_scale
from ..ir.pytree import leaves
from ..ir.traced_module import TracedModule
from ..ir.variants import Passing, signature_of
from ..torch_internals.modules import forward_hooks
from .numbers import KINDS

Record = Callable[[Any, bool], TracedModule]


class Again:
    """Traces a model for a call of a module that was made of its trace; `record` takes a call, and whether its numbers are
    inputs of the graph."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model, self.record, self.built = model, record, _built(model)

    def __call__(self, owner: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
        """The trace for this call, checked beside the model. Raises TraceError where it cannot be had, Passing where that
        depends on more than the way of calling.
        """
        bound = signature_of(owner).bind(*args, **kwargs)
        if name := unseen_scale(owner.meta.get("passes"), bound.arguments):
            raise Passing(
                f"'scale' in {name} is the strength of LoRA that another library has put in, and no pass sees it: "
                f"{instead('set_adapters')}"
            )
        for entry in owner.meta.get("passes", []):
            for name in entry.get("inputs", ()):
                bound.arguments.pop(name, None)
        self.check()
        call = bound.args, bound.kwargs
        with _wearing(self.model, owner):
            if any(type(x) in KINDS for x in leaves(call)):
                with contextlib.suppress(Exception):  # the model's, which is told below
                    return self.record(call, True)
            try:
                return self.record(call, False)
            except FxplugError:
                raise
            except Exception as error:  # the model's
                raise Passing(f"the model itself does not take it: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raises TraceError for a model that was changed since it was traced."""
        now = _built(self.model)
        for path in dict.fromkeys([*self.built, *now]):
            if self.built.get(path) != now.get(path):
                raise Passing(f"the model was changed since it was traced, at '{path or type(self.model).__name__}'")


def _built(model: nn.Module) -> dict[str, Any]:
    """What decides what a model computes beside its inputs and weights: the classes of its modules, their public attributes,
    hooks, and functions in the place of their own."""
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
def _wearing(model: nn.Module, owner: TracedModule) -> Iterator[None]:
    """A model on the tensors of a module that was made of its trace. Raises TraceError where that has others."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, module in model.named_modules():
            for table in ("_parameters", "_buffers"):
                own = getattr(module, table)
                for key, value in own.items():
                    name = f"{path}.{key}" if path else key
                    found = _held(owner, path, table, key)
                    if value is None or found is value:
                        continue
                    if found is None or found.shape != value.shape:
                        raise Passing(f"the module no longer has '{name}' as the model has it")
                    before.append((own, key, value))
                    own[key] = found
        yield
    finally:
        for own, key, value in reversed(before):
            own[key] = value


def _held(owner: nn.Module, path: str, table: str, key: str) -> Any:
    try:
        return getattr(owner.get_submodule(path), table).get(key)
    except AttributeError:
        return None

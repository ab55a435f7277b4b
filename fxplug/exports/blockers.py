"""What stands in the way of an export: errors, and what a module, its inputs and its result show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ..core import quantised
from ..core.errors import FxplugError
from ..core.ir.containers import list_leaves
from ..core.verifier import Subject, Unsupported

PLAIN = (torch.Tensor, torch.SymInt, int, float, bool, str, type(None))  # what an exported program may give
GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward")


class Unfit(FxplugError):
    """A module whose package would not follow its adapters, however many sizes are free."""


class CompileRefused(Exception):
    """What torch does not take, with as many free sizes as were asked for; its own error is the cause."""


@contextlib.contextmanager
def report_refusals() -> Iterator[None]:
    """Raise errors of torch.export and its compilers as CompileRefused: another try, with fewer dynamic sizes, may succeed."""
    try:
        yield
    except (FxplugError, OSError):
        raise
    except Exception as error:  # torch's, and the module's: they raise many kinds
        raise CompileRefused(str(error).strip() or type(error).__name__) from error


def check_export(subject: Subject) -> str:
    """Raise Unsupported for a known obstacle to torch.export, as a check of `verify`.

    Nothing is exported for it: torch's own objections to a single operation are found by exporting only.
    """
    for node in (node for graph in subject.new.graphs.values() for node in graph.nodes):
        if node.op.startswith("call") and node.target in GRADIENTS:
            raise Unsupported(f"'{node.name}' computes gradients inside the model, which torch.export does not support")
    if found := describe_packed_layer(subject.new):
        raise Unsupported(found)
    if any(isinstance(value, torch.Generator) for value in list_leaves(subject.call)):
        raise Unsupported("one of the inputs is a random generator, which torch.export does not support")
    odd = next((value for value in list_leaves(subject.results) if not isinstance(value, (*PLAIN, torch.Size))), None)
    if odd is not None:
        it = f"{type(odd).__module__}.{type(odd).__qualname__}"
        raise Unsupported(f"the result contains a {it}, which torch.export does not support")
    return "no known obstacle to torch.export"


def describe_packed_layer(module: nn.Module) -> str:
    """Describe the first layer with a packed weight in a clause; return "" if there is none."""
    own = next(((path, layer) for path, layer in module.named_modules() if quantised.is_own_layer(layer)), None)
    if own is None:
        return ""
    return f"'{own[0]}' is a {quantised.describe_layer(own[1])}, whose weight torch.export does not support"

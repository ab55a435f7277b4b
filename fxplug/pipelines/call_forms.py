"""The graphs of a module for the forms in which its pipeline calls it: made while the model is at hand, for where it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..core.errors import FxplugError, GuardError
from ..core.ir.containers import map_leaves
from ..core.ir.entry_checks import find_refusal
from ..core.ir.variants import Variants
from ..core.rewriter.probe import make_empty, make_meta, swap_weights
from ..core.torch_internals.tensors import FakeTensorMode
from .example_call import ExampleCall
from .pipeline_errors import catch_pipeline_errors

FORMS = 32  # so many forms of call a part may get a graph for: sizes and numbers of texts are some


def add_call_forms(module: Variants, call: ExampleCall) -> None:
    """Give a module the graphs that its pipeline needs for other sizes, numbers and lengths of texts, and with guidance.

    A form that one of its graphs answers gets none, as those do whose graph takes sizes as inputs; nor does one that the model
    cannot be called in, or for which memory is lacking: a call in it is an error where the module was loaded again.

    Args:
        module: The part of the pipeline, which knows its model.
        call: How the pipeline is called.
    """
    for given in call.forms():
        _add_form(module, given)


def add_size_forms(module: Variants, calls: Iterable[ExampleCall]) -> None:
    """Give a module the graphs that its pipeline needs for one text and for two in the sizes of calls, as `add_call_forms`.

    Args:
        module: The part of the pipeline, which knows its model.
        calls: How the pipeline is called. Whether its steps have calls of several forms is seen in the first.
    """
    several = None
    for call in calls:
        for count in (1, 2):
            with catch_pipeline_errors():  # it may take one text alone
                found = [call.first(count)] if several is False else call.step_calls(count)
                several = len(found) > 1 if several is None else several
                for given in found:
                    _add_form(module, given)


def _add_form(module: Variants, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    if not has_graph_for(module, call):
        with contextlib.suppress(FxplugError, torch.OutOfMemoryError):
            module.add_variant(*call)


def has_graph_for(module: Variants, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether one of the graphs that a module has holds for a call, which is (args, kwargs).

    Guards within a graph are asked by a run on tensors without values; of one that reads values its first checks are asked.
    """
    with _without_model(module):
        if all(find_refusal(each, *call) is not None for each in module.modules_by_form):
            return False
        # the meta device takes half the time of fake tensors, which know their device: what it refuses may depend on that
        with contextlib.suppress(Exception), torch.random.fork_rng([]):
            _run_without_values(module, call, make_meta)
            return True
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                _run_without_values(module, call, make_empty)
        except GuardError:
            return False
        except Exception:  # an operation's, which needs values
            return True
    return True


def _run_without_values(module: Variants, call: tuple[tuple[Any, ...], dict[str, Any]], make: Callable[..., Any]) -> None:
    with swap_weights(module, make), torch.no_grad():
        args, kwargs = map_leaves(call, lambda tensor, _: make(tensor))
        module.forward(*args, **kwargs)


@contextlib.contextmanager
def _without_model(module: Variants) -> Iterator[None]:
    """Let a module make no further graphs inside."""
    cache = module._variants
    before, cache.retrace = cache.retrace, None
    try:
        yield
    finally:
        cache.retrace = before

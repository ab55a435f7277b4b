"""A module as an engine calls it: each sample is a request of its own, and their calls are made as one."""

from __future__ import annotations

from typing import Any

import torch
from matrix_models import DEVICE
from matrix_state import COMPILER, NotApplicable, State, is_float
from torch import Tensor

import fxplug
from fxplug.core.torch_internals.trees import tree_flatten, tree_unflatten
from fxplug.serving.forms import CallForms
from fxplug.serving.joint_calls import ModelCaller

MIXTURE = {"a": 0.7, "b": 0.3}
MIXTURES = {"lora_slots": [MIXTURE, {"b": 1.0}], "lora_mixed": [MIXTURE, MIXTURE]}  # of the samples


def served(state: State) -> State:
    """Return the state with what makes one call of the calls for each sample, as `fxplug.serving` does."""
    if state.ways:
        raise NotApplicable("an engine's pipeline is on one process here")
    if state.calls > 1:
        raise NotApplicable("what an earlier step has kept is one request's: an engine refuses a cache over steps")

    def wrap(module: Any, now: State) -> Any:
        if now.gradients:
            raise NotApplicable("an engine is for inference")
        if now.compiled:
            module = torch.compile(module, backend=COMPILER, fullgraph=True)
        forms = CallForms()
        caller = ModelCaller(forms, [module], None, False)
        mixtures = next((MIXTURES[name] for name in now.done if name in MIXTURES and caller.slots), [{}, {}])

        def call(**kwargs: Any) -> Any:
            for _ in range(2):  # the first proves the form
                calls = [forms.describe(module, "__call__", (), _take_row(kwargs, row)) for row in (0, 1)]
                with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.is_autocast_enabled(DEVICE)):
                    caller.make(list(zip(calls, mixtures, strict=True)))
            if errors := [one.result for one in calls if isinstance(one.result, Exception)]:
                raise errors[0]
            form = forms.form_of(calls[0])
            if not form.proven:
                raise fxplug.SpecError(f"its calls are not made jointly: {form.refused}")
            return _join([one.result for one in calls], form.splits)

        return call

    return State(**{**vars(state), "around": (*state.around, wrap)})


def _take_row(kwargs: dict[str, Any], row: int) -> dict[str, Any]:
    first = next(x for x in tree_flatten(kwargs)[0] if is_float(x) and x.dim() > 1)
    if len(first) != 2:
        raise NotApplicable("the call has not two samples")
    leaves, structure = tree_flatten(kwargs)
    own = [x[row : row + 1].clone() if isinstance(x, Tensor) and x.dim() and len(x) == 2 else x for x in leaves]
    made: dict[str, Any] = tree_unflatten(own, structure)
    return made


def _join(results: list[Any], splits: tuple[bool, ...]) -> Any:
    (first, structure), (second, _) = map(tree_flatten, results)
    return tree_unflatten([torch.cat([a, b]) if s else a for a, b, s in zip(first, second, splits, strict=True)], structure)

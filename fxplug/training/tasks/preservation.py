"""The model of a run as it was before it, beside the one that trains: for losses that preserve what it could do."""

from __future__ import annotations

from torch import nn

from ...core.errors import SpecError
from ...core.ir.traced_module import TRAINED, TracedModule
from ...core.rewriter.removing import remove


def without_training(module: nn.Module) -> TracedModule:
    """Return a rewritten module without its passes that train, on the same weights, in evaluation.

    The modes of its parts are its own, and so is its graph: the rewritten module stays as it is.

    Raises SpecError if no pass trains, one has inputs of its own or cannot be removed, or the base trains too.
    """
    if not isinstance(module, TracedModule) or not (trained := [e for e in module.meta.get("passes", []) if e["train"]]):
        raise SpecError("needs a pass that trains")
    base = {name for name, p in module.named_parameters() if p.requires_grad}.intersection(module.meta.get(TRAINED, []))
    if base:
        raise SpecError(f"needs the model as it was, and '{min(base)}' of it trains: leave 'trainable' out")
    if inputs := [name for entry in trained for name in entry["inputs"]]:
        raise SpecError(f"is for passes without inputs of their own, and there is {', '.join(inputs)}")
    for entry in reversed(trained):
        try:
            module = remove(module, entry["name"])
        except SpecError as error:
            raise SpecError(f"needs the model without its passes: {error.finding}") from error
    module.eval()
    return module

"""New weights for an engine's models, as a training of a policy gives them: checked first, then written all or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, did_you_mean, quote

TABLE = ".gates.table."  # in the names of what slots keep about their adapters


def check_weights(models: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Find the tensors that new weights are for.

    Args:
        models: The models by name.
        state: Tensors by the model's name and theirs in its state dict: "unet.conv_in.weight".

    Returns:
        The tensor of the model and its new value, each.

    Raises:
        SpecError: For a model or tensor that there is not, with the nearest name, for another shape, values that the tensor
            cannot take, other values for one tensor of two names, and a table that says which adapters are in slots.
    """
    pairs, known = dict[int, tuple[Tensor, Tensor]](), dict[str, dict[str, Tensor]]()
    for key, value in state.items():
        part, _, name = key.partition(".")
        if part not in models:
            listed = f"{did_you_mean(part, models)}; there are {', '.join(models)}"
            raise SpecError(f"no model {quote(part)}{listed}", key=key)
        own = known.get(part) or known.setdefault(part, models[part].state_dict(keep_vars=True))
        if name not in own:
            raise SpecError(f"{part} has no tensor {quote(name)}{did_you_mean(name, own)}", key=key)
        if not isinstance(value, Tensor) or value.shape != own[name].shape:
            shape = list(value.shape) if isinstance(value, Tensor) else quote(value)
            raise SpecError(f"{key} must be a tensor of shape {list(own[name].shape)}, not {shape}", key=key)
        if value.is_meta or value.layout != torch.strided or value.is_complex() != own[name].is_complex():
            kind = "on the meta device" if value.is_meta else f"{value.dtype}, {value.layout}"
            raise SpecError(f"{key} is {kind}, and its tensor {own[name].dtype} and dense: convert it first", key=key)
        if TABLE in f".{name}" and not torch.equal(value, own[name]):
            raise SpecError(f"{key} says which adapters are in slots: load, unload and use them by {part}.adapters", key=key)
        same = pairs.setdefault(id(own[name]), (own[name], value))[1]
        if same is not value and not torch.equal(same.to(own[name]), value.to(own[name])):
            raise SpecError(f"{key} shares its tensor with another key, and their values differ: give one of them", key=key)
    return [*pairs.values()]


@torch.no_grad()
def write_weights(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Write new values into tensors: all, or where one fails none.

    Args:
        pairs: The tensors, each with its new value, as `check_weights` gives them.
    """
    before = [target.clone() for target, _ in pairs]
    try:
        for target, value in pairs:
            target.copy_(value)
    except BaseException:  # an interrupt, too: all is put back
        for (target, _), old in zip(pairs, before, strict=True):
            target.copy_(old)
        raise

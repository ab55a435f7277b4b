"""The gains of adapters in slots beside layers: made of the base and a slot's factors, and anew where these change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..blocks.gathered import GatheredDora, compute_gain
from ..core.errors import SpecError
from ..core.torch_internals.tensors import version
from .banks import Bank, check_base_values

There = Callable[[str], Tensor | None]  # gives a parameter or buffer by name


def get_base(bank: Bank, there: There) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight of a bank's layer, and its bias; None for what it has not."""
    return there(f"{bank.path}.weight"), there(f"{bank.path}.bias")


def make_gains(bank: Bank, slot: int, there: There) -> dict[str, Tensor]:
    """Make the gain and the shift of what a slot holds with magnitudes.

    Args:
        bank: Of a layer.
        slot: The slot.
        there: Gives the tensors of the module.

    Returns:
        The values by parameter of the bank, (out,) each, in the dtype of the slots.

    Raises:
        SpecError: Where the base is not at hand, or a gain is out of range.
    """
    weight, bias = get_base(bank, there)
    weight = check_base_values(bank, weight)
    own: dict[str, Any] = {key: there(name) for key, name in bank.names.items()}
    views = {key: bank.views(key, own[key], slot) for key in ("down", "up", "magnitude")}
    value = weight.T if bank.transposed or bank.kind == "Embedding" else weight
    made = compute_gain(value.detach(), bias if "shift" in own else None, **views)
    found = {key: value.to(own[key].dtype) for key, value in zip(GatheredDora.gains, made, strict=False)}
    if not all(bool(value.isfinite().all()) for value in found.values()):
        raise SpecError(f"the gain of an adapter at '{bank.path}' is out of range for {own['gain'].dtype}, the slots' dtype")
    return found


def list_gained(bank: Bank, there: There) -> list[int]:
    """Return the slots of a bank with gains that hold magnitudes."""
    found = there(bank.names["magnitude"])
    return [] if found is None or found.is_meta else found.any(1).nonzero()[:, 0].tolist()


class BaseVersions:
    """The weights of which gains were made, and which values they had: one that is written has another version, and one that is
    replaced is another tensor, or has other memory."""

    def __init__(self, banks: Mapping[str, Sequence[Bank]]) -> None:
        self.banks = [bank for rows in banks.values() for bank in rows if bank.has_gain and "magnitude" in bank.parameters]
        self._known: dict[str, tuple[Tensor, int, int]] = {}

    def note(self, banks: Iterable[Bank], there: There) -> None:
        """Store which values the layers of these banks have now."""
        for bank in banks:
            for name, tensor in zip(("weight", "bias"), get_base(bank, there), strict=True):
                if tensor is not None and not tensor.is_inference():  # nothing counts what is written there
                    self._known[f"{bank.path}.{name}"] = tensor, tensor.data_ptr(), version(tensor)

    def find_changed(self, there: There) -> bool:
        """Return whether one of the weights was written or replaced since."""
        for name, (tensor, place, number) in self._known.items():
            now = there(name)
            if now is not tensor or now.data_ptr() != place or version(now) != number:
                return True
        return False

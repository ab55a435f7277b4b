"""The gains of adapters in slots beside layers: made of the base and a slot's factors, and anew where these change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem, is_
from typing import Any

from torch import Tensor, nn

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
        self._known: dict[str, tuple[Tensor, int, int]] = {}  # each with its version and address
        self._columns: tuple[tuple[Any, ...], ...] = ()  # the same by column
        self._homes: list[tuple[Any, ...]] = []  # see `_list_homes`

    def note(self, banks: Iterable[Bank], there: There) -> None:
        """Store which values the layers of these banks have now."""
        for bank in banks:
            for name, tensor in zip(("weight", "bias"), get_base(bank, there), strict=True):
                if tensor is not None and not tensor.is_inference():  # nothing counts what is written there
                    self._known[f"{bank.path}.{name}"] = tensor, version(tensor), tensor.data_ptr()
                    self._columns = ()

    def find_changed(self, root: nn.Module, where: Mapping[str, str], there: There) -> bool:
        """Return whether one of the weights was written or replaced since; a call each step, so it takes no step of Python for
        each of them.

        Args:
            root: The module that has them.
            where: The names that some have in it.
            there: Gives the tensors of the module by the other names.
        """
        if not self._known:
            return False
        if not self._columns:
            self._columns = (*zip(*self._known.values(), strict=True),)
            self._homes = _list_homes(root, [where.get(name, name) for name in self._known], self._columns[0])
        tensors, versions, places = self._columns
        try:
            same = all(map(is_, map(getitem, *self._homes[:2]), self._homes[2])) if self._homes else None
        except KeyError:
            same = False
        if same is None:  # where a live merge has others in their places
            same = all(there(name) is tensor for name, tensor in zip(self._known, tensors, strict=True))
        return not (same and tuple(map(version, tensors)) == versions and tuple(map(Tensor.data_ptr, tensors)) == places)


def _list_homes(root: nn.Module, names: Iterable[str], tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return the tables of modules that lead to these tensors, with the key in each and what it has there: of submodules, of
    parameters and of buffers; empty where they do not lead there."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        *path, last = name.split(".")
        home: Any = root
        for key in path:
            if (inner := home._modules.get(key)) is None:
                return []
            found[id(home), key] = home._modules, key, inner
            home = inner
        table = home._parameters if last in home._parameters else home._buffers
        if table.get(last) is not tensor:
            return []
        found[id(home), f"{last}."] = table, last, tensor
    return [*zip(*found.values(), strict=True)]

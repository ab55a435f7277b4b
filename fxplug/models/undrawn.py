"""A model whose weights come from a file, made without the random numbers that the file replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

# what fills a tensor with random numbers, and what an initialisation does to it after that
DRAWN = frozenset({
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_", "log_normal_", "cauchy_", "exponential_", "geometric_", "random_", "bernoulli_",
})  # fmt: skip
AFTER = frozenset({"mul_", "div_", "add_", "sub_", "clamp_", "erfinv_"})
FILLED = frozenset({"zeros_", "ones_", "constant_", "eye_", "dirac_", "zero_", "fill_"})
ASKED = frozenset({  # reads no number
    "size", "dim", "numel", "nelement", "requires_grad_", "is_floating_point", "is_complex", "stride", "is_contiguous",
    "__hash__", "_calculate_fan_in_and_fan_out", "element_size", "__len__", "register_hook",
})  # fmt: skip
ATTRIBUTES = frozenset({
    "shape", "dtype", "device", "requires_grad", "is_meta", "ndim", "layout", "is_leaf", "grad", "is_sparse",
})  # fmt: skip


class Undrawn(TorchFunctionMode):
    """While it lasts, parameters that would be filled with random numbers keep what their memory holds.

    `read` says that something was computed from such a parameter: what was made then has to be made again, without this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, nn.Parameter] = {}
        self.read = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        name = getattr(function, "__name__", "")
        first = args[0] if args else kwargs.get("tensor")
        if name in DRAWN and isinstance(first, nn.Parameter):
            self.left[id(first)] = first
            return first
        if id(first) in self.left:
            if name in AFTER and not any(self._given(args[1:], kwargs)):
                return first
            if name in FILLED:
                del self.left[id(first)]
        if any(self._given(args, kwargs)) and name not in ASKED and not self._attribute(function):
            self.read = True
        return function(*args, **kwargs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[bool]:
        for value in (*args, *kwargs.values()):
            yield from (id(one) in self.left for one in (value if isinstance(value, (list, tuple)) else (value,)))

    @staticmethod
    def _attribute(function: Any) -> bool:
        """Whether it gives or sets an attribute that is no number of the tensor's."""
        of = getattr(getattr(function, "__self__", None), "__name__", "")
        return getattr(function, "__name__", "") in ("__get__", "__set__") and of in ATTRIBUTES

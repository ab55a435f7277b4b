"""A module in the place of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..core.errors import SpecError
from ..core.spec.pass_file import check_known, get_arguments
from .base import Block, find_torch_class

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


class Replace(Block):
    """Another class of torch.nn in the place of a module, such as PReLU for SiLU; called with the region's input.

    `to` is the name of a class in torch.nn. Its constructor gets `options`, and for the rest what the replaced module has
    under the same names.
    """

    def __init__(self, kind: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.kind, self.options = kind, dict(options or {})
        self.module = find_torch_class(kind)(**self.options)

    @classmethod
    def at(cls, site: Site, to: str, options: Mapping[str, Any] | None = None) -> Replace:
        """Make the module. Raises SpecError for an unknown class of torch.nn, an option it does not take, and a missing one."""
        kind = find_torch_class(to)
        given = dict(options or {})
        known = get_arguments(kind, leave=("device", "dtype")).names
        check_known(given, known, f"{to} takes no")
        for name in known:
            if name not in given and hasattr(site.module, name):
                value = getattr(site.module, name)
                if name == "bias" and not isinstance(value, bool):
                    value = value is not None
                if not isinstance(value, (Tensor, nn.Module)):
                    given[name] = value
        try:
            return cls(to, given)
        except TypeError as error:
            raise SpecError(f"{to} cannot be built for {site.path} ({site.classes[0]}): {error}; set it in 'options'") from None

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

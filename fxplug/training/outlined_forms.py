"""A module with graphs for several forms of call, each with checkpointed regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..core.ir.traced_module import TracedModule
from ..core.ir.variants import Variants, choose_module

Cut = Callable[[TracedModule], TracedModule]


class OutlinedForms(nn.Module):
    """Module whose graphs for further forms of call are outlined when they are first met, on the same weights.

    An outlined module is of one graph, as its regions own their weights. `source` is what is outlined, `cut` outlines one
    of its graphs.
    """

    source: Variants
    cut: Cut
    made: dict[TracedModule, TracedModule]

    def __init__(self, source: Variants, cut: Cut) -> None:
        super().__init__()
        first = cut(source)
        self.forms = nn.ModuleList([first])
        # no children: their weights are those of the outlined ones
        self.__dict__.update(source=source, cut=cut, made={source: first}, training=source.training)

    def train(self, mode: bool = True) -> OutlinedForms:
        """Set the mode of all graphs."""
        self.source.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph for this form of call. Raises GuardError where there is none and none can be made."""
        found = choose_module(self.source, args, kwargs)
        if found not in self.made:
            self.made[found] = self._outlined(found)
        return self.made[found](*args, **kwargs)

    def _outlined(self, found: TracedModule) -> TracedModule:
        """Outline a graph; its modules have the modes of those of the first: blocks may train in a base that does not."""
        new = self.cut(found)
        modes = {name: part.training for name, part in self.forms[0].named_modules()}
        for name, part in new.named_modules():
            part.__dict__["training"] = modes.get(name, self.training)
        self.forms.append(new)
        return new

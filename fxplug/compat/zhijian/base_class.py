"""The class that add-ins written for ZhiJian inherit from."""

from __future__ import annotations

from typing import Any

from torch import nn


class AddinBase(nn.Module):
    """A module with methods that stand at places of another model, as in ZhiJian.

    `adapt...(module, inputs)` gets the positional arguments that a module is called with, as a tuple, and returns a tensor
    for the first of them, or a tuple for all; `adapt...(module, inputs, outputs)` gets its result too and returns another
    one. Keyword arguments stay as they are.
    `inputs_cache` is the value at the line's in point, for as long as the method runs.
    """

    inputs_cache: Any

    def __init__(self, config: Any = None, model_config: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.inputs_cache = None

    def get_pre(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Store and return the first argument."""
        self.inputs_cache = inputs[0]
        return inputs[0]

    def get_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Store and return the result."""
        self.inputs_cache = output
        return output

    def add_pre(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Return the sum of the first argument and the stored value."""
        return inputs[0] + self.inputs_cache

    def add_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Return the sum of the result and the stored value."""
        return output + self.inputs_cache

    def get_log_str(self) -> str:
        """Return the add-in's text for a log: here none."""
        return ""

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
        """Keep the first argument."""
        self.inputs_cache = inputs[0]
        return inputs[0]

    def get_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Keep the result."""
        self.inputs_cache = output
        return output

    def add_pre(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """The first argument and what was kept."""
        return inputs[0] + self.inputs_cache

    def add_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """The result and what was kept."""
        return output + self.inputs_cache

    def get_log_str(self) -> str:
        """What an add-in says of itself in a log: here nothing."""
        return ""

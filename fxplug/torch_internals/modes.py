"""Gradients and autocast, switched without a context manager: a graph has one node where a region starts and one at its end."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

__all__ = ["autocast_settings", "enter_autocast", "exit_autocast", "set_grad_enabled"]

# switches gradients; unlike torch.set_grad_enabled it makes no object. We need that modes of torch functions see it called
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# enters an autocast region (kind of device, dtype, enabled, cache) and gives what leaves it; compilers know both
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[[Any], Any] = torch.amp.autocast_mode._exit_autocast
# of a torch.autocast that was entered: whether it is enabled, and whether it keeps casted weights
autocast_settings: Callable[[Any], tuple[bool, bool]] = attrgetter("_enabled", "_cache_enabled")

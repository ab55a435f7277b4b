"""What one try to record a model finds that the next one needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from traceback import walk_tb
from types import CodeType

from .user_code import is_user_code

NUMBER_KIND = re.compile(r"\b(Number|Int|Float|SymInt|SymFloat|int|float)\b")  # in the message of a TypeError
NUMBER = re.compile(r"\b(Int|Float|SymInt|SymFloat)\b")  # in that of any other error


@dataclass
class Tries:
    """What earlier tries at the same call found that it needs: autograd on fakes too, and code that takes plain numbers.

    `open_numbers` is whether numbers among the arguments are inputs of the graph, or a part of it; `one_or_two` whether it
    matters that two inputs are one tensor.
    """

    open_numbers: bool = False
    one_or_two: bool = False
    autograd: bool = False
    plain: set[CodeType] = field(default_factory=set)

    def learn(self, error: Exception) -> bool:
        """Whether another try can help: code that failed on a recorded number gets plain ones."""
        if not (NUMBER_KIND if isinstance(error, TypeError) else NUMBER).search(str(error)):
            return False
        frames = [frame for frame, _ in walk_tb(error.__traceback__) if is_user_code(frame)]
        new = next((f.f_code for f in reversed(frames) if f.f_code not in self.plain), None)
        if new is not None:
            self.plain.add(new)
        return new is not None

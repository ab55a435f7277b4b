"""The names of colorama, each of which is no colour: for plugins that import it where it is not installed."""

from __future__ import annotations

from typing import Any


class _Plain:
    def __getattr__(self, name: str) -> str:
        if name.isupper():
            return ""
        raise AttributeError(name)


Fore, Back, Style = _Plain(), _Plain(), _Plain()


def init(*args: Any, **options: Any) -> None:
    """Nothing, as nothing is coloured."""

"""Which line of a model's code changes something: found by running it once more, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .python_state import Place
from .user_code import is_user_code, line_of


def writer(run: Callable[[], Any], places: list[Place]) -> str:
    """File, line and text of the first line after which one of the places holds something else than before the run."""
    last: tuple[FrameType, int] | None = None
    found: tuple[FrameType, int] | None = None

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last, found
        if found is None and last is not None and any(place.changed() for place in places):
            found = last
        last = frame, frame.f_lineno
        return local

    def start(frame: FrameType, event: str, argument: Any) -> Any:
        return local(frame, event, argument) if is_user_code(frame) else None

    before = sys.gettrace()
    sys.settrace(start)
    try:
        run()
    finally:
        sys.settrace(before)
    if found is None:
        return ""
    where, text = line_of(*found)
    return f" ({where}: {text})"

"""The trigger word of captions: what a new subject or style is called in them."""

from __future__ import annotations

import re


def with_trigger(caption: str, trigger: str | None) -> str:
    """Return a caption with the trigger word before it: `ohwx, a photo`. One that has the word already stays as it is."""
    if trigger is None or _words(trigger).search(caption):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def replace_trigger(caption: str, trigger: str, word: str) -> str:
    """Return a caption with another word in the place of the trigger word."""
    return _words(trigger).sub(lambda _: word, caption)


def _words(trigger: str) -> re.Pattern[str]:
    """Return a pattern for a trigger that is no part of a longer word."""
    return re.compile(rf"(?<!\w){re.escape(trigger)}(?!\w)")

"""The exceptions a user can meet, and the nearest-name hint that their messages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class FxplugError(Exception):
    """What was given is wrong. A mistake inside fxplug is never one of these."""


class SpecError(FxplugError):
    """A pass or configuration that cannot be used: a wrong key, type, value, name or file.

    The text is `where: path: finding`; `path` is the way through the data (`rules[0].match`), `key` the
    key below it that is at fault. All but `where` stay readable, so that a caller who knows the file and
    line can say it again; `located` tells whether one did.
    """

    def __init__(
        self, finding: str, *, path: Sequence[str | int] = (), key: str | None = None, where: object = ""
    ) -> None:
        super().__init__(": ".join(part for part in (str(where), dotted(path), finding) if part))
        self.finding = finding
        self.path = tuple(path)
        self.key = key
        self.located = bool(str(where))


class TraceError(FxplugError):
    """A model that cannot be traced as it is."""


class GuardError(FxplugError):
    """A call that the traced graph does not hold for: Python would have taken another branch."""


class MatchError(FxplugError):
    """A rule found no place, or not as many as it expects."""


class ClashError(FxplugError):
    """Two rules want the same place, or a pass is applied a second time."""


class VerifyError(FxplugError):
    """A rewritten graph breaks a promise, such as being neutral when new."""


class TrainError(FxplugError):
    """A training run cannot start or go on."""


class ArtifactError(FxplugError):
    """A saved rewrite or adapter file that cannot be read, or does not fit."""


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """` (did you mean 'x'?)` for the name in `known` nearest to `word`, or an empty text."""
    names = {str(name).lower(): str(name) for name in known}
    near = get_close_matches(str(word).lower(), names, n=1)
    return f" (did you mean '{names[near[0]]}'?)" if near else ""


def dotted(path: Sequence[str | int]) -> str:
    """`("rules", 0, "match")` as `rules[0].match`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")

"""Answers of dry runs: kept as data beside the traces, and given again without torch while all that made them is as it was.

An answer is kept where nothing but the configuration, its passes, fxplug's own blocks and installed libraries made it. It
is given again to the same question about the same configuration, as it is after it was read, in the same folder, while what
`entries` looks at is the same, and each file that was read meanwhile. In doubt it is made anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import FxplugError
from ..files import entries, reading
from ..limits import DEFAULT
from ..spec.pass_file import open_pass
from ..spec.rules import is_target
from ..spec.run_config import Config, resolved
from .ending import at_once
from .verbs import read_config, rewritten, uncollected

if TYPE_CHECKING:
    from ..flow import Result

Answer = TypeVar("Answer", str, list[str])
LIBRARIES = ("fxplug", "torch", "timm", "diffusers")  # whose classes a pass may name
READING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")  # options of timm


def answered(
    subject: str,
    set: list[str] | None,
    question: list[str | bool],
    say: Callable[[Result], Answer],
    *,
    cache: bool,
    verify: bool | None = False,
) -> Answer:
    """What `say` makes of the dry run of a configuration: text, or texts. `question` tells it from what others make."""
    config = read_config(subject, set)
    kept = KeptAnswer(config, [*question, verify]) if cache else None
    if kept is not None and (found := kept.read()) is not None:
        return found  # type: ignore[no-any-return]
    with uncollected():
        with reading.noted() as files, entries.heard() as said:
            made = say(rewritten(config, dry_run=True, verify=verify, cache=cache))
        if not entries.users_modules():
            at_once()
            if kept is not None:
                kept.write(made, said, files)
    return made


class KeptAnswer:
    """The place of one answer, by what was asked about which configuration; one that is in doubt has none."""

    def __init__(self, config: Config, question: list[Any]) -> None:
        made_of = [question, _all_of(config)] if _only_data(config) else [object()]
        self.name = entries.name_of(made_of)
        self.made_with = entries.environment()  # libraries change variables when they are imported

    def read(self) -> Any:
        """The answer, after the warnings that were shown with it; None where there is none to be given."""
        if self.name is None or entries.users_modules():
            return None
        try:
            if (body := entries.read(self.name, self.made_with, DEFAULT.json)) is None:
                return None
        except entries.Stale as error:
            entries.not_used(error)
            return None
        answer, said = json.loads(body)
        entries.repeat(said)
        return answer

    def write(self, answer: Any, said: entries.Said, files: Mapping[str, os.stat_result]) -> None:
        """Keep an answer with the warnings that were shown, and the files that were read."""
        body = json.dumps([answer, said]).encode()
        if self.name is None or len(body) > DEFAULT.json // 2:
            return
        try:
            entries.write(self.name, self.made_with, body, files)
        except OSError as error:
            entries.not_kept(error)


def _only_data(config: Config) -> bool:
    """Whether no function and class of others makes the answer, and no file but those that are seen to be read."""
    model = config.model
    if model.kind == "call" or config.device not in ("cpu", "meta") or any(model.options.get(key) for key in READING):
        return False
    names = (next(iter(entry)) for entry in resolved(config)["passes"])
    if any(p.networks or p.loads or p.parallel for p in config.passes):
        return False
    if any(is_target(text) and text.partition(":")[0].partition(".")[0] not in LIBRARIES for text in _texts(_passes(config))):
        return False
    try:
        return not any(open_pass(name, base=config.base).maker for name in names)
    except FxplugError:  # its file went away meanwhile
        return False


def _passes(config: Config) -> list[dict[str, Any]]:
    return [asdict(p) for p in config.passes]


def _all_of(config: Config) -> list[Any]:
    """All that a configuration says, and where it is said: messages and paths in it depend on the folders."""
    target = config.base / config.model.target if isinstance(config.model.target, str) else None
    folder = sorted(os.listdir(target)) if config.model.kind == "diffusers" and target is not None and target.is_dir() else []
    python = [*map(str, sys.path), *sys.warnoptions, repr(sys.flags)]
    return [resolved(config), _passes(config), os.path.abspath(config.base), os.getcwd(), folder, python, str(config.where())]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for member in (*value, *value.values()):
            yield from _texts(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _texts(member)

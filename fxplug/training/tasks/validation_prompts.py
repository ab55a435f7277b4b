"""Prompts of one's own that samples are drawn of during a training, each with its seed, size and guidance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import DEFAULT, SpecError, prefix_path, quote
from ...core.reading import make_reporter, read_text, report_errors
from ...core.spec.yaml_source import describe_missing, read_yaml, validate
from ..task_section import MOST, PromptOptions
from .task import Batch

SAMPLES = 8  # the default of `samples`
# the options of a line in files of prompts of kohya's sd-scripts: `a cat --n blurry --w 512 --h 768 --d 42 --l 7.5 --s 28`
FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "l": "guidance", "s": "steps"}


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt, and what differs from the task's own: None where nothing does. `size` is height and width in pixels."""

    prompt: str
    negative: str | None = None
    seed: int | None = None
    size: tuple[int, int] | None = None
    guidance: float | None = None
    steps: int | None = None


def read_prompts(given: str | Sequence[Any] | None, base: Path) -> list[ValidationPrompt]:
    """Read the option `prompts`: a list, or the name of a file in the folder `base`; [] for None.

    A file that ends in .yaml, .yml or .json has the same list; one that ends in .txt a prompt in each line, with kohya's
    options behind it. Raises SpecError with the entry, or the line, at fault.
    """
    if given is None:
        return []
    if not isinstance(given, str):
        return [_read_entry(entry, number) for number, entry in enumerate(given)]
    path = base / Path(given).expanduser()
    raises = make_reporter(path, SpecError)
    with report_errors(raises):
        if not path.exists():
            raise raises(describe_missing(path))
    if path.suffix == ".txt":
        lines = enumerate(map(str.strip, read_text(path, DEFAULT.yaml, raises).splitlines()), 1)
        found = [_read_line(line, f"{path}:{number}") for number, line in lines if line and not line.startswith("#")]
    elif path.suffix in (".yaml", ".yml", ".json"):
        entries = read_yaml(path).data
        if not isinstance(entries, list):
            raise raises(f"must be a list of prompts, not {quote(entries)}")
        try:
            found = [_read_entry(entry, number) for number, entry in enumerate(entries)]
        except SpecError as error:
            raise raises(str(error)) from None
    else:
        raise raises("must end in .txt, with a prompt in each line, or in .yaml or .json, with a list of them")
    if not found or len(found) > MOST:
        raise raises(f"must have 1 to {MOST} prompts, and has {len(found)}")
    return found


def open_prompts(
    given: str | Sequence[Any] | None, samples: int | list[Any], base: Path
) -> tuple[list[ValidationPrompt], int | list[Any]]:
    """Read `prompts`, and return them with what is then in the place of `samples`. Raises SpecError for both."""
    with prefix_path("prompts"):
        prompts = read_prompts(given, base)
        if prompts and samples != SAMPLES:
            raise SpecError("replace 'samples': give one of the two")
    return prompts, [one.prompt for one in prompts] or samples


def _read_entry(entry: Any, number: int) -> ValidationPrompt:
    made = validate(PromptOptions, {"prompt": entry} if isinstance(entry, str) else entry, number)
    sides = made.size if isinstance(made.size, list) else [made.size, made.size]
    size = None if made.size is None else (int(sides[0]), int(sides[1]))
    return ValidationPrompt(made.prompt, made.negative, made.seed, size, made.guidance, made.steps)


def _read_line(line: str, where: str) -> ValidationPrompt:
    text, *options = re.split(r"(?:^|\s)--(?=\w+(?:\s|=|$))", line)
    entry: dict[str, Any] = {"prompt": text.strip()}
    for option in options:
        flag, _, value = option.partition("=" if "=" in option.split(None, 1)[0] else " ")
        if flag not in FLAGS:
            raise SpecError(f"no option '--{flag}'; there are {', '.join(f'--{one} ({name})' for one, name in FLAGS.items())}",
                            where=where)  # fmt: skip
        try:
            entry[FLAGS[flag]] = value.strip() if flag == "n" else float(value) if flag == "l" else int(value)
        except ValueError:
            raise SpecError(f"--{flag} must be a number, not {quote(value)}", where=where) from None
    height, width = entry.pop("height", None), entry.pop("width", None)
    if (height is None) != (width is None):
        raise SpecError("--w and --h must be given together", where=where)
    try:
        return _read_entry({**entry, **({} if height is None else {"size": [height, width]})}, 0)
    except SpecError as error:
        raise SpecError(": ".join(filter(None, [".".join(map(str, error.path[1:])), error.finding])), where=where) from None


def list_prompts(given: Batch) -> list[ValidationPrompt]:
    """Return the prompts of a batch of samples; those without options for a batch that has captions alone."""
    found: list[ValidationPrompt] = given.get("prompts") or [ValidationPrompt(str(text)) for text in given["caption"]]
    return found


def list_forms(prompts: Sequence[ValidationPrompt]) -> list[int]:
    """Return the places of the first prompt of each size: what a trial has to draw."""
    return [*{one.size: number for number, one in reversed([*enumerate(prompts)])}.values()][::-1]


def join_pictures(pictures: Sequence[Tensor]) -> Tensor:
    """Stack pictures [..., c, h, w] of several sizes: smaller ones stand in the middle of the largest's size, in black."""
    height, width = (max(picture.shape[side] for picture in pictures) for side in (-2, -1))
    made = []
    for picture in pictures:
        rows, columns = height - picture.shape[-2], width - picture.shape[-1]
        around = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        made.append(torch.nn.functional.pad(picture, around))
    return torch.stack(made)

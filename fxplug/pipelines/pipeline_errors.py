"""Errors while a pipeline runs: whether they are its own or ours, and which part of it they say is not there."""

from __future__ import annotations

import contextlib
import linecache
import re
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch

from ..core.errors import FxplugError, SpecError

OURS = str(Path(__file__).parents[1])
# what both call does not tell whose an error is, but for what is inside it of others
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
TEXTS = ("tokenizer", "text_encoder")  # as names of parts that encode texts begin
THEIRS = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.nn.__file__).parent))


def is_own_error(error: BaseException) -> bool:
    """Return whether an error that a pipeline's run ended in is a mistake of fxplug: none of its own code was called last.

    What is called by both, torch and Python's own library, does not count, but for models of `torch.nn`.
    """
    if isinstance(error, (FxplugError, MemoryError, torch.OutOfMemoryError)):
        return False
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        if _is_in(file, OURS):
            return True
        if not _is_in(file, *LIBRARIES) or _is_in(file, *THEIRS):
            return False  # of a library, of whoever wrote the pipeline, or of a graph
    return False


@contextlib.contextmanager
def catch_pipeline_errors() -> Iterator[None]:
    """Catch what a pipeline's run raises inside, and go on after it; a mistake of fxplug is raised."""
    try:
        yield
    except Exception as error:  # whatever a pipeline raises
        if is_own_error(error):
            raise


def find_lacking_parts(error: BaseException, components: Mapping[str, Any]) -> list[str]:
    """Find the parts of a pipeline that are None, and of which an error says that there is nothing.

    Their names stand where the error was raised, in what was evaluated, or where the pipeline called that.

    Args:
        error: What the pipeline raised.
        components: The parts of the pipeline by name.

    Returns:
        Their names; none where the error is about something else.
    """
    missing = [name for name, part in components.items() if part is None]
    if not missing or "NoneType" not in str(error) or error.__traceback__ is None:
        return []
    for frame, text in reversed(_list_steps(error.__traceback__)):
        if _is_in(frame.f_code.co_filename, OURS):
            break
        words = re.findall(r"\w+", text)
        # one of several in turn, as `tokenizer` of "tokenizer" and "tokenizer_2"
        own = [word for word in words if word in frame.f_locals and frame.f_locals[word] is None]
        if found := [name for name in missing if name in words or any(re.fullmatch(f"{word}(_\\d+)?", name) for word in own)]:
            return found
    return []


def explain_lacking_parts(pipe: Any, error: BaseException) -> SpecError | None:
    """Return the error for a call that needs a part which the pipeline lacks, as `find_lacking_parts`; None for another one."""
    lacking = find_lacking_parts(error, _get_parts(pipe))
    if not lacking:
        return None
    those, kind = " and ".join(lacking), type(pipe).__name__
    finding = f"{kind} has no {those}, which its call needs ({type(error).__name__}: {error})"
    return SpecError(f"{finding}: save the pipeline with {those}, which its index says is null", path=("model", "pipeline"))


def describe_lacking_texts(pipe: Any) -> str:
    """Describe, for the end of an error, which of the parts that encode texts a pipeline lacks: some it may do without."""
    lacking = [name for name, part in _get_parts(pipe).items() if part is None and name.startswith(TEXTS)]
    return f"; the pipeline has no {' and no '.join(lacking)}, which its call may need" if lacking else ""


def _get_parts(pipe: Any) -> Mapping[str, Any]:
    found = getattr(pipe, "components", None)
    return found if isinstance(found, Mapping) else {}


def _list_steps(trace: TracebackType) -> list[tuple[FrameType, str]]:
    """Return the frames of a traceback, each with the text of what it evaluated."""
    found, here = [], trace
    while here is not None:
        code = here.tb_frame.f_code
        first, last, begin, end = next(islice(code.co_positions(), here.tb_lasti // 2, None), (None,) * 4)
        text = linecache.getline(code.co_filename, here.tb_lineno)
        if first is not None and last is not None and begin is not None and end is not None:
            lines = [linecache.getline(code.co_filename, n) for n in range(first, last + 1)]
            lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")  # positions are of bytes
            lines[0] = lines[0].encode()[begin:].decode(errors="ignore")
            text = "".join(lines)
        found.append((here.tb_frame, text))
        here = here.tb_next  # type: ignore[assignment]
    return found


def _is_in(file: str, *folders: str) -> bool:
    return any(file.startswith(f"{folder}/") for folder in folders)

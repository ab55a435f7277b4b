"""Captions that are longer than the tokenizers of a pipeline take, which leave out the rest and say nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ...core.errors import quote
from ...pipelines.recorded_run import get_components

Tell = Callable[[str, int, int], object]  # the name of a tokenizer, how many tokens a text has, and how many of them are taken


class CutCaptions:
    """Warns of captions of which a tokenizer takes the beginning alone, once for each tokenizer."""

    def __init__(self, pipe: Any) -> None:
        """Take the pipeline that encodes the captions."""
        self.pipe = pipe
        self.said: set[str] = set()

    @contextlib.contextmanager
    def watch(self, caption: str) -> Iterator[None]:
        """Warn after the context, in which the pipeline encodes a caption, of what was left out of it."""
        found: dict[str, tuple[int, int]] = {}
        with contextlib.ExitStack() as stack:
            for name, tokenizer in _list_tokenizers(self.pipe).items():
                if name not in self.said:
                    stack.enter_context(_watch(name, tokenizer, lambda name, *counts: found.setdefault(name, counts)))
            yield
        for name, (count, limit) in found.items():
            self.said.add(name)
            finding = f"a caption has {count} tokens in {name}, which takes {limit}: the rest has no effect there"
            warnings.warn(f"{finding}, nor that of further captions: {quote(caption)}", stacklevel=3)


def _list_tokenizers(pipe: Any) -> dict[str, Any]:
    """Return the tokenizers of a pipeline by the names of its parts."""
    parts = {name: getattr(part, "tokenizer", part) for name, part in get_components(pipe).items()}  # of a processor
    return {name: part for name, part in parts.items() if hasattr(part, "model_max_length") and callable(part)}


@contextlib.contextmanager
def _watch(name: str, tokenizer: Any, tell: Tell) -> Iterator[None]:
    """Count the tokens of texts that are cut in calls of a tokenizer inside."""
    kind = type(tokenizer)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        text = args[0] if args else named.get("text")
        if named.get("truncation") not in (None, False, "do_not_truncate"):
            limit = named.get("max_length") or self.model_max_length
            special = named.get("add_special_tokens", True)
            for each in [text] if isinstance(text, str) else text if isinstance(text, (list, tuple)) else ():
                if isinstance(each, str):
                    count = len(kind.__call__(self, each, add_special_tokens=special, verbose=False)["input_ids"])
                    if count > limit:
                        tell(name, count, limit)
        return kind.__call__(self, *args, **named)

    # nothing plainer sees a call of an object: Python looks it up in the class
    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        tokenizer.__class__ = kind

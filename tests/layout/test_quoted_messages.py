"""What pages quote of errors, in tables with a column "what is printed": each is a message of the package, filled in."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from pathlib import Path

import pytest

import fxplug

ROOT = Path(__file__).parents[2]
COLLECTOR = runpy.run_path(str(ROOT / ".ci/messages.py"))
KINDS = {*fxplug.__all__, "AttributeError", "TypeError"}  # what a reader sees by name
SECTION = r"(?:train\.[\w.]+: )?"  # the key, which is put before what was raised
PAGES = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md") if "what is printed |" in page.read_text()]


def quoted(page):
    """The texts in the columns "what is printed" of a page, each as `SpecError: what it says`."""
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text("utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if "what is printed" in head:
            said = (row[head.index("what is printed")].replace(r"\|", "|") for row in rows)
            yield from (quote for text in said for quote in re.findall(r"`((?:\w+Error|CodeInGraph): [^`]+)`", text))


@functools.cache
def templates():
    """Each message as its class, which is empty where other code puts it behind its own, and a pattern; without those that say
    too little."""
    found = []
    for file in COLLECTOR["PACKAGE"].rglob("*.py"):
        for kind, text in COLLECTOR["messages"](ast.parse(file.read_text("utf-8"))):
            parts = re.split(r"(\{[^{}]*\})", text)
            if len(re.findall(r"[a-z]{2,}", "".join(parts[::2]))) >= 5 or "{did you mean ...?}" in parts:
                pattern = "".join(re.escape(part) if n % 2 == 0 else _gap(part) for n, part in enumerate(parts))
                own = kind if kind in KINDS else ""
                found.append((own, re.compile((SECTION if own else "(?:.*: )?") + pattern, re.DOTALL)))
    return found


def _gap(placeholder):
    return r"(?: \(did you mean '[^']+'\?\))?" if placeholder == "{did you mean ...?}" else ".*"


def is_printed(quote):
    """Whether a message of the package can read so; `...` in a quote is any text."""
    kind, _, text = quote.partition(": ")
    texts = (text, text.replace("...", "any"))
    return any(own in ("", kind) and pattern.fullmatch(each) for own, pattern in templates() for each in texts)


QUOTES = [pytest.param(quote, id=f"{page}: {quote[:60]}") for page in PAGES for quote in quoted(page)]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_that_a_page_quotes_is_one_of_the_package(quote):
    assert is_printed(quote)


@pytest.mark.parametrize("quote", [
    "SpecError: PipeFusion has no gradients: train the module that it was made from",
    "GuardError: PipeFusion computes no gradients: train the module that it was made from",
    "SpecError: split: no node 'flaten' (did you mean flatten)",
])  # fmt: skip
def test_other_words_and_other_classes_are_not(quote):
    assert not is_printed(quote)

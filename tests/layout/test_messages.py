"""Messages are plain English: the words of a habit that said nothing to a reader do not come back."""

import ast
import functools
import re
import runpy
from pathlib import Path

import pytest

COLLECTOR = runpy.run_path(str(Path(__file__).parents[2] / ".ci/messages.py"))
# each is a turn of phrase, and what it stood for
IDIOMS = {
    r"told": "reported, given",
    r"gone by": "used",
    r"hindered|hindrance|has no use for": "prevented, does not use",
    r"(stands?|lies?) (at|in|on|before|behind|beside|against|for|where|there|alone|twice|once|under)": "is",
    r"(does|do) not come|comes (by|of|from)": "did not reach, is from",
    r"anew": "again",
    r"no way '|one way only": "no method, one branch",
    r"a graph cannot say|has no form|no form for": "cannot be captured, is not supported",
    r"pretended": "simulated",
    r"left otherwise": "differs after the call",
    r"has a home|no home|has no place here": "is not supported",
    r"goes? with|do not go together|exclude each other": "requires, cannot be used together",
    r"(?<!there )is no (?!longer|such|single|other|more|shape)[a-z]": "is not a",
    r"and here is|not at hand|is not here": "not available",
}


@functools.cache
def texts():
    """Each message with its file."""
    return list(_texts())


def _texts():
    package = COLLECTOR["PACKAGE"]
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).as_posix() not in COLLECTOR["ELSEWHERE"]:
            for _, text in COLLECTOR["messages"](ast.parse(file.read_text("utf-8"))):
                yield f"{file.relative_to(package)}: " + re.sub(r"\{[^{}]*\}", "{}", text)


@pytest.mark.parametrize("idiom", IDIOMS, ids=list(IDIOMS.values()))
def test_no_message_has_an_idiom(idiom):
    found = [text for text in texts() if re.search(rf"\b(?:{idiom})", text)]
    assert found == [], IDIOMS[idiom]

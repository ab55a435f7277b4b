"""Messages are plain English: the words of a habit that said nothing to a reader do not come back."""

import ast
import functools
import re
from pathlib import Path

import pytest

import fxplug

ROOT = Path(fxplug.__file__).parent
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
    r"as ever|to the bit|in words,": "still, bit for bit, nothing",
    r"nobody knows|who you are|whoever|of which (nobody|nothing)": "unknown, a login",
    r"(samples|steps|bytes|us|TFLOP/s|batches|images) an? (batch|step|epoch|call|second|device|micro step)": "per",
    r"what trains|(put|taken) beside": "trained parameters, added",
    r"so many (steps|images|regions|samples|times|tests|files)": "how many, a number",
    r"(be|is|are|with|than|equals?) that of|in the place of": "the one of, instead of",
    r"is not for (a|the|this|many|runs?)": "cannot be used with",
    r"(which|here) is another one|another one here": "differs",
}


def texts(node):
    """Yield each text in the code below a node, docstrings left out, with `{}` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
            yield child.value
        yield from texts(child)


@functools.cache
def messages():
    """Return the texts of all files, each after its file's name."""
    trees = {file.relative_to(ROOT): ast.parse(file.read_text("utf-8")) for file in sorted(ROOT.rglob("*.py"))}
    return [f"{file}: {' '.join(text.split())}" for file, tree in trees.items() for text in texts(tree) if " " in text]


@pytest.mark.parametrize("idiom", IDIOMS, ids=list(IDIOMS.values()))
def test_no_message_has_an_idiom(idiom):
    found = [text for text in messages() if re.search(rf"\b(?:{idiom})", text)]
    assert found == [], IDIOMS[idiom]


def test_messages_are_seen_and_docstrings_are_not():
    code = '''def f(x):
    """A docstring lies beside."""
    raise SpecError(f"{x!r} is told {'for a reason'}: " + "do this")'''
    assert list(texts(ast.parse(code))) == ["{} is told {}: ", " is told ", "for a reason", ": ", "do this"]

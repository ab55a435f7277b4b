"""Write the page of all messages, from the source: `python .ci/messages.py FILE` (part of `make pages`)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fxplug"
HEAD = """# Messages

Written by `make pages` from the source: the text of each error, warning, note and progress line, by folder and file. What is
filled in is in braces; `{a | b}` is one of two texts. A name before the text is the class of the exception, or the function
that makes it. A text without a name is a note, a progress line, or a part of an error that other code puts together.

Not listed: texts of fewer than three words that are not beside a `raise`; texts that torch, pydantic or another library gives;
help texts of [verbs](verbs.md) and [keys](keys.md); the words of the pages that `fxplug report` writes.
"""
# they write other pages of the documentation
ELSEWHERE = ("core/spec/key_docs.py", "core/spec/schema.py", "core/cli/pages.py")
# calls whose texts are help, patterns or code
NO_MESSAGES = ("Option", "Argument", "Typer", "compile", "command", "Field", "search", "match", "sub", "execute", "getLogger")

# calls that only say how the value is shown
SHOWN = ("brief", "cut", "dotted", "list", "outline", "repr", "shown", "sorted", "str", "tuple")


def page() -> str:
    """The text of `messages.md`."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).as_posix() not in ELSEWHERE]
    parts = [HEAD]
    for folder, members in groupby(sorted(files, key=lambda f: (f.parent, f.name)), lambda f: f.parent):
        sections = [(file.name, list(messages(ast.parse(file.read_text("utf-8"))))) for file in members]
        if any(found for _, found in sections):
            parts.append(f"## {folder.relative_to(PACKAGE.parent).as_posix()}\n")
        parts += [f"### {name}\n\n" + "".join(f"- {line(*each)}\n" for each in found) for name, found in sections if found]
    return "\n".join(parts)


def line(kind: str, text: str) -> str:
    """One message in Markdown."""
    fence = "``" if "`" in text else "`"
    return f"{kind}{': ' if kind else ''}{fence}{text}{fence}"


def messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each text of a file with what raises it, in the order of the source and each once."""
    found = sorted(_texts(tree, ""), key=lambda each: each[0])
    yield from dict.fromkeys((kind, " ".join(text.split())) for _, kind, text in found)


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in NO_MESSAGES or name == "split" and isinstance(getattr(node.func, "value", None), ast.Constant):
            return
        kind = name if name.endswith("Error") else "warning" if name == "warn" else kind
    elif isinstance(node, ast.expr) and (text := template(node)) is not None:
        if kind and " " in text or len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^{}]*\}", "", text))) > 2 and " " in text:
            yield (node.lineno, node.col_offset), kind, text
        return
    skipped = {id(each) for name in ("decorator_list", "annotation", "returns") for each in _many(getattr(node, name, None))}
    for child in ast.iter_child_nodes(node):
        docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not docstring and id(child) not in skipped:
            yield from _texts(child, kind)


def _many(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def template(node: ast.AST) -> str | None:
    """The text that an expression makes, with braces around what is filled in; None of what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or "" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [template(side) for side in (node.left, node.right)]
        names = [filled(n) if text is None else text for n, text in zip((node.left, node.right), sides, strict=True)]
        return "".join(names) if any(text is not None for text in sides) else None
    return filled(node.value) if isinstance(node, ast.FormattedValue) else None


def filled(node: ast.expr) -> str:
    """What stands for a value that is filled in."""
    if isinstance(node, ast.IfExp):
        sides = [filled(side) if (text := template(side)) is None else text for side in (node.body, node.orelse)]
        return f"{{{' | '.join(side.strip('{}') if side.count('{') == 1 else side for side in sides)}}}"
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if name == "did_you_mean":
        return "{did you mean ...?}"
    if isinstance(node, ast.Call) and node.args and name in SHOWN:
        return filled(node.args[0])
    text = ast.unparse(node).removeprefix("self.")
    return f"{{{text if len(text) <= 40 else text[:37] + '...'}}}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")

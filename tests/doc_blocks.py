"""The code in pages of documentation, run from top to bottom as a reader would, in a folder with the checkout's own beside it.

    ```python                  is run, in one namespace for the page, and must print what a ```text or ```diff after it says
    ```console                 `$ fxplug ...` and `$ python ...` are run, and must print the lines below them
    ```yaml title="a.yaml"     is written to that file, as is any language with a title
    ```yaml                    is read as a configuration, a part of one, or a pass
    <!-- hidden: ... -->       Python that is run and not shown: it makes the small model that a page speaks of
    <!-- not run: reason -->   leaves out the block that follows; its Python is compiled
    <!-- fails: reason -->     says that the last command of the console that follows ends with an error; no other may
    ...                        in what is printed stands for any text
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_python
import yaml

import fxplug
from fxplug.__main__ import app

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r'^( *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^\1```$'
    r"|^<!-- (?P<note>hidden|not run|fails):\s(?P<text>.*?)-->$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "console", "yaml")
SHOWN = ("text", "diff")  # what the block before prints
READ = ("ini", "json", "toml", "bash", "")  # to read, unless it has a title
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHECKER, FLAGS = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """A piece of code: its language ("hidden" for what is not shown), first line, why it is not run or fails."""

    language: str
    code: str
    line: int
    title: str | None = None
    not_run: str | None = None
    fails: str | None = None
    prints: str | None = None


def blocks(text: str) -> list[Block]:
    """The blocks of a page in their order."""
    found: list[Block] = []
    notes: dict[str, str]
    end, notes = None, {}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["note"] in ("not run", "fails"):
            notes[match["note"]] = " ".join(match["text"].split())
            continue
        if match["note"]:
            found.append(Block("hidden", textwrap.dedent(match["text"]), line))
        elif match["language"] in SHOWN and found and end is not None and not text[end : match.start()].strip():
            found[-1].prints = match["code"]
        else:
            code = textwrap.dedent(match["code"])
            said = (notes.get(key) for key in ("not run", "fails"))
            found.append(Block(match["language"], code, line, match["title"], *said))
        end, notes = match.end(), {}
    return found


def run(page: Path) -> None:
    """Run all of a page in the working folder. Raises AssertionError with page and line for what fails."""
    for name in ("configs", "examples", "passes"):
        if not Path(name).exists():
            Path(name).symlink_to(ROOT / name)
    space: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page.read_text("utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        try:
            if block.not_run:
                compile(block.code if block.language == "python" else "", where, "exec")
                continue
            _run(block, space, where)
        except AssertionError:
            raise
        except BaseException as error:  # whatever the code of a page raises
            raise AssertionError(f"{where}: {type(error).__name__}: {error}\n{block.code}") from error


def _run(block: Block, space: dict[str, Any], where: str) -> None:
    if block.title:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.code, "utf-8")
        sys.modules.pop(Path(block.title).stem, None)  # of another page
    elif block.language in ("python", "hidden"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.code, where, "exec"), space)
        compare(block.prints or "", out.getvalue(), where, block.prints is not None)
    elif block.language == "console":
        *others, last = commands(block.code)
        for command, prints in (*others, last):
            printed = execute(command, where, 1 if block.fails and command == last[0] else 0)
            compare(prints, printed, f"{where}: {command}", bool(prints.strip()))
    elif block.language == "yaml":
        read(yaml.safe_load(block.code))
    else:
        assert block.language in (*READ, *SHOWN), f"{where}: a block of '{block.language}' is not run: say so with a reason"


def compare(expected: str, printed: str, where: str, said: bool) -> None:
    """Hold what was printed to what the page shows; a page that shows nothing leaves it open."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    expected = re.sub(r"^\.\.\.\n", "...", expected, flags=re.MULTILINE)  # progress, perhaps none
    assert not said or CHECKER.check_output(expected, plain, FLAGS), f"{where} prints\n{plain}\nand the page shows\n{expected}"


def commands(code: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, and the lines below it."""
    for part in re.split(r"^\$ ", code.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, prints = part.partition("\n")
        yield command, prints


def execute(command: str, where: str, code: int = 0) -> str:
    """What a command that ends with the exit code prints: of `fxplug` here, of `python` in a process."""
    words = shlex.split(command.partition("  #")[0])
    if words[0] == "fxplug":
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                app(words[1:], prog_name="fxplug")
                ended = 0
            except SystemExit as end:
                ended = end.code or 0
        assert ended == code, f"{where}: {command} ends with {ended}, not {code}\n{out.getvalue()}"
        return out.getvalue()
    assert words[0] == "python", f"{where}: only fxplug and python can be run here: say why '{words[0]}' is not"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([forked_python.python(), "-W", "ignore", *words[1:]], capture_output=True, text=True, env=environment)
    assert done.returncode == code, f"{where}: {command} ends with {done.returncode}, not {code}\n{done.stderr}"
    return done.stdout


def read(data: Any) -> None:
    """Read YAML as what it is a part of: a pass, or a configuration, whose passes are read with their parameters."""
    if isinstance(data, dict) and "rules" in data:
        fxplug.load_pass(data, name="page")
        return
    data = {"passes": data} if isinstance(data, list) else data
    fxplug.load_config({"model": "resnet18", **data})

"""Write the pages of docs/reference that the code itself says: `python .ci/reference.py FOLDER` (part of `make pages`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from fxplug.__main__ import app
from fxplug.config.schema import list_rows
from fxplug.config.schema import make_page as keys
from fxplug.core.spec.pass_file import list_shipped, open_pass
from fxplug.core.spec.rules import NUMERICS
from fxplug.serving.server.server_config import ServerConfig

VERBS = """# Verbs of the command line

Written by `make pages` from `fxplug VERB --help`.

`CONFIG` is a file or the name of a shipped configuration: `quickstart`, `vit_lora`, `sd15_meta`, or a recipe that
`fxplug recipes` lists. `DIR` is the folder of a saved rewrite. Results go to stdout, progress and errors to stderr. An
error is one message and exit code 1, a wrong call exit code 2; `--debug` shows the traceback. With `--json` a verb prints one
JSON value on stdout, and an error as one object on stderr: `error` (its class), `message`, and where known `where`, `key`,
`found`, `nearest`, `do`, `notes` and `log`. `fxplug --install-completion` completes verbs, options, configurations and passes
in your shell.
"""
PASSES = """# Shipped passes

Written by `make pages`. Each pass has a page with its parameters and the diff that it makes on a small model;
`fxplug passes NAME --page` prints it. How to write a pass: [guide](../guides/passes.md).

Numerics of a pass: {numerics}.

| pass | numerics | |
|---|---|---|
"""

SERVER = """# Keys of a server

Written by `make pages`: the configuration of [`fxplug serve`](../guides/serve.md).
"""


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    command: Any = typer.main.get_command(app)
    verbs = "\n".join(line for name in command.list_commands(None) for line in verb(name, command.get_command(None, name)))
    files = {name: open_pass(name).source.data for name in list_shipped("passes")}
    rows = [f"| [{name}](passes/{name}.md) | {data['numerics']} | {cell(data['about'])} |" for name, data in files.items()]
    passes = PASSES.replace("{numerics}", "; ".join(f"*{word}*, {text}" for word, text in NUMERICS.items()))
    first = {"verbs.md": f"{VERBS}\n{verbs}", "passes.md": passes + "\n".join(rows) + "\n"}
    return {**first, "keys.md": keys(), "server.md": server_keys()}


def server_keys() -> str:
    """The page of the keys of a server's configuration."""
    made = ServerConfig.model_json_schema()
    fields = {key: field.annotation for key, field in ServerConfig.model_fields.items()}
    sections = {key: kind for key, kind in fields.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    whole = made["properties"] | {key: {"default": {}} for key in sections}  # their defaults are below
    lines = list_rows(ServerConfig, "A server", whole)
    for key, section in sections.items():
        lines += list_rows(section, f"`{key}`", made["$defs"][section.__name__]["properties"])
    return "\n".join([SERVER, *lines[1:]]) + "\n"


def verb(path: str, command: Any, level: int = 2) -> Iterator[str]:
    """The section of a verb, and of the verbs below it."""
    usage = [name(p) if p.required else f"[{name(p)}]" for p in command.params if p.param_type_name == "argument"]
    help = inspect.cleandoc(command.help or "").replace("\f", "")
    yield f"{'#' * level} {path}\n\n{help}\n"
    if inner := getattr(command, "commands", None):
        for each in inner:
            yield from verb(f"{path} {each}", inner[each], level + 1)
        return
    yield f"    fxplug {' '.join([path, *usage])} [OPTIONS]\n"
    shown = [p for p in command.params if not p.hidden and "--debug" not in p.opts]
    rows = [f"| {written(p)} | {cell(p.help or '')} |" for p in shown]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def name(parameter: Any) -> str:
    """An argument as it is typed."""
    text = (parameter.metavar or parameter.name).upper()
    return text[1:-1] if text.startswith("[") else text  # usage puts it into brackets again


def written(parameter: Any) -> str:
    """How a parameter is typed."""
    if parameter.param_type_name == "argument":
        return f"`{name(parameter)}`"
    return ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])


def cell(text: str) -> str:
    """A text within a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for file, text in pages().items():
        Path(sys.argv[1], file).write_text(text, "utf-8")

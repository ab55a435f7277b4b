"""`fxplug push`: a saved rewrite put on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import Allow, Debug, show_progress


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The repository: user/name.")],
    base: Annotated[str | None, typer.Option("--base", help="The base model on the hub, for the model card.")] = None,
    license: Annotated[str | None, typer.Option("--license", help="The license, for the model card: apache-2.0.")] = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Push a saved rewrite to the Hugging Face Hub with a model card. Creates the repository if needed."""
    with show_progress("push"):
        commit = fxplug.push(folder, name, base, license, allow=allow or ())
    print(f"{name} is at {commit}")

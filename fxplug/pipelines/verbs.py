"""The verb `fxplug recipes`: configurations of trainings that ship, to be copied and changed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..core.cli.verbs import Debug
from ..core.errors import SpecError, did_you_mean
from ..core.spec.pass_file import recipes


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shell completions for a recipe: the names of shipped ones."""
    return [name for name in recipes() if name.startswith(incomplete)]


def show_recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The recipe to print; a list of all without.", autocompletion=complete_recipe),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the configurations of trainings that ship, or print one: `fxplug recipes sd15 > mine.yaml`."""
    known = recipes()
    if name is None:
        width = max(map(len, known), default=0)
        for each, path in known.items():
            print(f"{each:{width}}  {path.read_text('utf-8').partition(chr(10))[0].lstrip('# ')}")
    elif path_of := known.get(name.removeprefix("train/")):
        sys.stdout.write(path_of.read_text("utf-8"))
    else:
        raise SpecError(f"no recipe named '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}")

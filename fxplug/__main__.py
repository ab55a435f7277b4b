"""The command line: `fxplug`, whose verbs are those of the extensions."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .config.cli.torchrun import is_launched, run_on_all_ranks
from .config.cli.verbs import HELP, Debug, RootVerbs, print_version

app = typer.Typer(
    cls=RootVerbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Change a PyTorch model by rewriting its graph."""


MANY = {"--check", "measured", "--link=measured"}  # what `parallel` needs all processes for


def main() -> None:
    """Run the `fxplug` command."""
    if is_launched():
        verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        many = verb == "train" or (verb == "parallel" and bool(MANY & {*sys.argv}))
        run_on_all_ranks(lambda: app(prog_name="fxplug"), everywhere=many)
    app(prog_name="fxplug")


if __name__ == "__main__":
    main()

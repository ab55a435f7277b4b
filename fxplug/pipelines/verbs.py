"""The verb `fxplug recipes`: configurations of trainings that ship, and what a pipeline that has none does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config.cli.json_output import Json, print_json
from ..config.cli.verbs import Debug, show_progress
from ..core.errors import SpecError, did_you_mean
from ..core.spec.pass_file import list_recipes
from ..core.spec.yaml_source import parse_yaml, read_yaml

if TYPE_CHECKING:
    from .observation import Observation


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shell completions for a recipe: the names of shipped ones."""
    return [name for name in list_recipes() if name.startswith(incomplete)]


def show_recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The recipe to print, or a pipeline to inspect: a folder, a name on the hub or a checkpoint.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    part: Annotated[str | None, typer.Option("--part", help="Which denoiser (default: all that the pipeline calls).")] = None,
    call: Annotated[
        list[str] | None,
        typer.Option("--call", metavar="NAME=VALUE", help="An argument for the pipeline: num_frames=1. Repeatable."),
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="The image size: 512, or 768x512 (height x width).")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the shipped training configurations, or print one: `fxplug recipes sd15 > mine.yaml`.

    For a pipeline, print how it calls its denoiser, which the task `denoise` trains on, or why you cannot train it.
    """
    known = list_recipes()
    given = part is not None or bool(call) or size is not None
    found = None if name is None or given and Path(name).exists() else known.get(name.removeprefix("train/"))
    if given and (name is None or found):
        raise typer.BadParameter("--part, --call and --size need a pipeline: give its folder as NAME")
    if name is None and as_json:
        print_json({"recipes": [{"name": each, "about": _about(path), "file": path} for each, path in known.items()]})
    elif name is None:
        width = max(map(len, known), default=0)
        for each, path in known.items():
            print(f"{each:{width}}  {_about(path)}")
    elif found and as_json:
        config = read_yaml(found).data
        print_json({"name": name.removeprefix("train/"), "about": _about(found), "file": found, "config": config})
    elif found:
        sys.stdout.write(found.read_text("utf-8"))
    elif Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
        finding = f"'{name}' is a configuration, not a pipeline: train it with 'fxplug train {name}'"
        raise SpecError(f"{finding}, or inspect the pipeline that its 'model' names")
    elif "/" in name or Path(name).exists():
        arguments = dict(_argument(text) for text in call or [])
        rows = _observe_denoisers(name, part, arguments, _size(size))
        if as_json:
            made = [{"part": seen.part, "shape": seen.shape, "error": error, **seen.list_facts()} for seen, error in rows]
            print_json({"pipeline": name, "denoisers": made})
            return
        for seen, error in rows:
            worst = f"{error:.0e}".replace("e-0", "e-").replace("0e+00", "0")
            print(f"{seen.describe()}\nconfirmed on real steps ({worst})")
    else:
        raise SpecError(f"no recipe or folder named '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}")


def _about(path: Path) -> str:
    """Return what the first line of a recipe says of it."""
    return path.read_text("utf-8").partition("\n")[0].lstrip("# ")


def _argument(text: str) -> tuple[str, Any]:
    """Read `name=value`, a value in YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--call must look like name=value, for example num_frames=1, not '{text}'")
    return name, parse_yaml(value).data


def _size(text: str | None) -> tuple[int, int] | None:
    """Read a side, or height and width with an x between."""
    if text is None:
        return None
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise typer.BadParameter(f"--size must be a side in pixels, or height and width such as 768x512, not '{text}'")
    return int(sides[0]), int(sides[-1])


def _observe_denoisers(
    source: str, part: str | None, call: dict[str, Any], size: tuple[int, int] | None
) -> list[tuple[Observation, float]]:
    """Return what is observed of each denoiser of a pipeline, and its largest error on real steps. Raises SpecError, the reason
    of a refusal."""
    from .example_call import call_arguments
    from .observation import confirm, find_denoisers, observe
    from .opening import open_pipeline

    with show_progress("opening the pipeline"):
        pipe = open_pipeline(source)
    arguments = call_arguments(pipe, call, size)
    parts: list[str | None] = [part]
    if part is None:
        parts = [*find_denoisers(pipe, arguments)] or parts
    made = []
    for each in parts:
        with show_progress(f"observing {each or 'the pipeline'}"):
            found = observe(pipe, arguments, each)
            made.append((found, confirm(pipe, found)))
    return made

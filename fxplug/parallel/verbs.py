"""The verb `fxplug parallel`: the plan of a model, checked on pretended and on real processes, and what it will cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import Allow, Debug, Set, Subject, show_progress
from ..core.errors import SpecError, did_you_mean, quote
from .plan_options import AXES


def parallel(
    subject: Subject,
    ways: Annotated[
        str,
        typer.Option(
            "--ways",
            metavar="AXIS=N,...",
            help=f"Processes along each axis: {', '.join(AXES)}; auto picks the fastest by prediction.",
        ),
    ] = "",
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print the plan only; uses the meta device if possible.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare all values, on simulated and real processes, with one process.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder to save the parallel model in; with --predict, the plot.")
    ] = None,
    predict: Annotated[
        str, typer.Option("--predict", metavar="PIXELS,...", help="Predict the cost of each split at these resolutions.")
    ] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="N,...", help="With --predict: numbers of devices; with auto: one number.")
    ] = "2,4,8",
    link: Annotated[
        str, typer.Option("--link", help="With these two: nvlink, pcie, 100gbe, GB/s, or measured (under torchrun).")
    ] = "nvlink",
    speed: Annotated[float, typer.Option("--speed", help="With these two: TFLOP/s per device.")] = 300.0,
    at: Annotated[int, typer.Option("--at", help="With --predict: the resolution of the example inputs.")] = 0,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Split a model over processes: print the plan, check it, save the model. Also runs under torchrun."""
    if plan_only and (check or out):
        raise typer.BadParameter("--plan-only works without values: leave out --check and --out")
    given = {} if ways.strip() == "auto" else parse_degrees(ways)
    from . import commands  # which imports torch

    if predict:
        if ways or check or plan_only:
            raise typer.BadParameter("--predict compares all degrees: leave out --ways, --check and --plan-only")
        sizes = _numbers(predict, "--predict"), _numbers(devices, "--devices", 2)
        commands.print_predictions(subject, *sizes, link, speed, at, out, set)
        return
    if ways.strip() == "auto":
        given = commands.find_fastest_degrees(subject, _count(devices), link, speed, set, allow)
    if "patches" in given and "stages" not in given:
        raise SpecError("--ways patches=... needs stages: write stages=2,patches=4")
    module, plan, call, config = commands.plan_model(subject, given, plan_only, set, allow)
    print(getattr(plan, "listing", plan))  # a text, where there is no plan
    if plan_only:
        return
    if check or isinstance(plan, fxplug.Plan):
        with show_progress("check"):
            print(commands.check_plan(module, plan, call, on_processes=check))
    if out is not None:
        commands.save_in_first(module, out, config)
        print(f"saved in {out}")


def _count(devices: str) -> int:
    """Read the one number of processes of --devices, or that of torchrun if it started this one. Raises SpecError."""
    counts = [int(os.environ["WORLD_SIZE"])] if "TORCHELASTIC_RUN_ID" in os.environ else _numbers(devices, "--devices", 2)
    if len(counts) != 1:
        raise SpecError(f"--ways auto is for one number of processes, not {devices}: give --devices {counts[0]}")
    return counts[0]


def _numbers(text: str, name: str, least: int = 1) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in found):
        raise SpecError(f"{name} {quote(text)}: must be whole numbers, {least} or more, such as {least * 2},{least * 4}")
    return sorted({int(part) for part in found})


def parse_degrees(text: str) -> dict[str, int]:
    """Parse `ulysses=2,ring=2` as numbers. Raises SpecError."""
    found: dict[str, int] = {}
    here = f"--ways {quote(text)}: "
    for item in filter(None, text.split(",")):
        axis, _, number = (part.strip() for part in item.partition("="))
        if axis not in AXES:
            raise SpecError(f"{here}no axis {quote(axis)}{did_you_mean(axis, AXES)}; there are {', '.join(AXES)}")
        if axis in found:
            raise SpecError(f"{here}'{axis}' is given twice")
        if not number.isdecimal() or int(number) < 1:
            raise SpecError(f"{here}{axis} must be a whole number, 1 or more, not {quote(number)}")
        found[axis] = int(number)
    return found

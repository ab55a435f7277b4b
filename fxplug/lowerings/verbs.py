"""The verb `fxplug tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import (
    Allow,
    Debug,
    Set,
    Subject,
    load_saved,
    make_saved_call,
    read_config,
    run_rewrite,
    show_progress,
)


def tune(
    subject: Subject,
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure the compiled variants.")] = False,
    turns: Annotated[int, typer.Option("--turns", min=1, max=10_000, help="The number of measurements per variant.")] = 15,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Time the variants of each adapted layer on this device, and show the one that `lower` uses."""
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
        args, kwargs = make_saved_call(subject, module)
    else:
        result = run_rewrite(read_config(subject, set), verify=False)
        module = result.module
        args, kwargs = result.inputs
    with show_progress("measure"):
        done = fxplug.tune(module, args, kwargs, compiled=compiled, turns=turns)
    print(done.listing)

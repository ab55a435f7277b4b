"""The verb `fxplug train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import ConfigArg, Debug, Set, read_config, show_progress, show_user_logs


def train(
    config: ConfigArg,
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the run (default: out/NAME-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in --out.")] = False,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Resume from this checkpoint, or a run's newest.")
    ] = None,
    set: Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress.")] = False,
    debug: Debug = False,
) -> None:
    """Rewrite a model and train the added parameters. The sections `train` and `data` have the settings."""
    found = read_config(config, set)
    with show_user_logs():
        done = fxplug.train(found, out=out, name=Path(config).stem, resume=start or resume, quiet=quiet, progress=show_progress)
    last = f", loss {done.history[-1]['loss']:.4g}" if done.history else ""
    print(f"{len(done.history)} steps{last}")
    for key, value in done.metrics.items():
        print(f"{key} {value:.4g}")
    print(f"saved in {done.out}")
    if done.use:
        print(f"\n{done.use}")

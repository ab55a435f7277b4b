"""The verb `fxplug serve`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...config.cli.verbs import Debug, Set, show_progress
from .server_config import load_server_config


def serve(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a pipeline: a folder or a name on the hub.")],
    adapters: Annotated[str | None, typer.Option("--adapters", metavar="DIR", help="The folder of adapters.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="How many adapters the models hold at once.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="The port (default: 8000).")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Make a picture alone and two jointly, print the forms of calls, and end.")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Serve by replicas on the machines of a Ray cluster.")] = False,
    set: Set = None,
    debug: Debug = False,
) -> None:
    """Serve a pipeline over HTTP, with OpenAI's endpoints for pictures and any mixture of adapters in one batch.

    SIGTERM ends it after what it has accepted is finished.
    """
    given = {"adapters.folder": adapters, "adapters.slots": slots, "http.port": port}
    changes = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    found = load_server_config(config, [*(set or []), *changes])
    from .running import check_server, run_server

    if not check:
        raise typer.Exit(run_server(found, ray))
    with show_progress("making pictures"):
        rows = check_server(found)
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, sizes, state in rows:
        print(f"{name:{width}}  {state:14}  {sizes}")

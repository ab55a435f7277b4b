"""The verb `fxplug export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import Allow, Debug, load_saved, make_saved_call, show_progress
from ..core.errors import SpecError, did_you_mean
from .export_section import read_saved_export
from .tool_files import TO_TOOLS, ToolOptions, export_to_tool


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")],
    to: Annotated[str | None, typer.Option("--to", help=f"pt2 (default), aoti, onnx or a tool: {', '.join(TO_TOOLS)}.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write (default: DIR.pt2).")] = None,
    device: Annotated[str | None, typer.Option("--device", help="The device that compiled code runs on: cpu or cuda.")] = None,
    free: Annotated[str | None, typer.Option("--free", help="Which sizes are dynamic: all (default), batch or none.")] = None,
    opset: Annotated[int | None, typer.Option("--opset", help="With onnx: the opset version.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="For tools: a loaded adapter.")] = None,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="For tools: a pass without slots. Repeatable.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="For tools: skip what the format cannot store.")] = False,
    part: Annotated[str | None, typer.Option("--part", help="For tools: the part of a pipeline that the model is.")] = None,
    merge: Annotated[
        str | None, typer.Option("--merge", metavar="ink=0.8,film=0.3", help="For tools: the model, with these merged.")
    ] = None,
    first_names: Annotated[bool, typer.Option("--first-names", help="With safetensors: use the original names.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Export a saved rewrite with torch.export, AOTInductor or ONNX, or its adapters or model for another tool.

    Options default to the `export` section of the saved configuration.
    """
    if not folder.is_dir():
        raise SpecError(f"no folder '{folder}'")
    tools = ToolOptions(adapter, passes, partial, part, merge, first_names)
    if to in TO_TOOLS:
        export_to_tool(folder, to, out, tools, allow)
        return
    if (given := next((name for name, value in vars(tools).items() if value), None)) is not None:
        raise SpecError(f"--{given.replace('_', '-').replace('passes', 'pass')} is only for --to {', '.join(TO_TOOLS)}")
    from .exporter import FORMATS

    if to is not None and to not in FORMATS:
        known = (*FORMATS, *TO_TOOLS)
        raise SpecError(f"no export format '{to}'{did_you_mean(to, known)}; there are {', '.join(known)}")
    how = read_saved_export(folder, to=to, free=free, device=device)
    if opset is not None and how.to != "onnx":
        raise SpecError(f"--opset is for onnx, and this is an export to {how.to}")
    with show_progress("load"):
        module = load_saved(str(folder), None, allow, how.device)
        args, kwargs = make_saved_call(folder, module)
    with show_progress(f"export to {how.to}"):
        options = None if opset is None else {"opset": opset}
        path = out or folder.parent / f"{folder.name}.{how.to}"
        report = fxplug.export(module, path, args, kwargs, to=how.to, free=how.free, options=options)
    for name, dims in report.dynamic.items():
        print(f"{name}: {'dimensions ' + ', '.join(map(str, dims)) + ' are free' if dims else 'of fixed size'}")
    for note in report.notes:
        print(note)
    print(f"saved in {report.path}")

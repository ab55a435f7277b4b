"""The verb `fxplug convert`: configurations and checkpoints of other systems, and checkpoints for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import fxplug

from ..config.cli.verbs import Allow, Debug, load_saved
from ..config.saved_config import read_saved_config
from ..core.errors import SpecError, did_you_mean
from ..core.reading import report_errors
from ..core.writing import replace_file

SYSTEMS = ("hcp", "zhijian")
WEIGHTS = (".ckpt", ".safetensors", ".pt", ".pth", ".bin")


def convert(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="The system: hcp (HCP-Diffusion) or zhijian (ZhiJian).")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Its YAML file (plugin_unet, plugin_TE, lora_unet, merge or addins); a checkpoint of HCP-Diffusion; or "
            "the folder of a saved rewrite, to write a checkpoint.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The configuration or checkpoint to write.")] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="The saved rewrite to load the checkpoint into.")
    ] = None,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", metavar="NAME", help="The pass to read or write weights of. Repeatable.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Read the EMA weights of a checkpoint.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="The model, as in a configuration, or a .yaml with it.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Convert only unet or TE (default: both, if the file trains both).")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=SIZES", help="The shape of a plugin's input: cond=n,3,8*h,8*w. Repeatable."),
    ] = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Convert a configuration or checkpoint of another training system to fxplug, or a saved rewrite to its checkpoint."""
    if system not in SYSTEMS:
        raise SpecError(f"no system '{system}'{did_you_mean(system, SYSTEMS)}; there are {' and '.join(SYSTEMS)}")
    of_weights = system == "hcp" and file.suffix in WEIGHTS and not file.is_dir()
    folder = system == "hcp" and file.is_dir()
    _refuse_unused(
        {
            "--into": (into, of_weights and out is None, "a checkpoint that is read"),
            "--pass": (passes, folder or (of_weights and into is not None), "a saved rewrite"),
            "--ema": (ema, of_weights, "a checkpoint that is read"),
            "--allow": (allow, folder or (of_weights and into is not None), "a saved rewrite"),
            "--model": (model, not folder and into is None, "a configuration that is written"),
            "--input": (input, not folder and not of_weights, "a configuration of plugins"),
        }
    )
    if into is not None:
        _into(file, into, passes or [], ema, allow)
        return
    if out is None:
        more = ", or --into DIR: the saved rewrite that its weights go into" if of_weights else ""
        raise typer.BadParameter(f"give the file to write with --out, -o{more}")
    if folder:
        _checkpoint(file, out, passes or [], allow)
        return
    if system == "zhijian":
        from .zhijian.convert_file import convert as zhijian

        done = zhijian(file, model=model, out=out)
    elif of_weights:
        from .hcp.convert_file import convert_checkpoint

        done = convert_checkpoint(file, model=model, out=out, ema=ema)
    else:
        from .hcp import convert_file as hcp

        done = hcp.convert(file, model=model, part=part, inputs=dict(map(hcp.read_input, input or [])), out=out)
    with report_errors(lambda finding: SpecError(f"{out} {finding}"), "cannot be written"):
        _write(out, done.text)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"saved in {out}" if model else f"saved in {out}; its model is left to write")


def _refuse_unused(given: Mapping[str, tuple[Any, bool, str]]) -> None:
    for option, (value, used, what) in given.items():
        if value and not used:
            raise typer.BadParameter(f"{option} is only for {what}")


def _into(file: Path, folder: Path, passes: list[str], ema: bool, allow: list[str] | None) -> None:
    """Load the weights of a checkpoint into a saved rewrite. Raises SpecError or ArtifactError, with the folder unchanged."""
    _check_saved(folder)
    from .hcp.checkpoints import load_checkpoint

    module = load_saved(str(folder), None, allow)
    names = load_checkpoint(module, file, passes=passes, ema=ema)
    fxplug.save(module, folder, config=read_saved_config(folder))
    print(f"{len(names)} weights of {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}")
    print(f"saved in {folder}")


def _checkpoint(folder: Path, out: Path, passes: list[str], allow: list[str] | None) -> None:
    """Write the passes of a saved rewrite as a checkpoint of HCP-Diffusion."""
    _check_saved(folder)
    from .hcp.checkpoints import save_checkpoint

    names = save_checkpoint(load_saved(str(folder), None, allow), out, passes=passes)
    print(f"{len(names)} weights of {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}")
    print(f"saved in {out}")


def _check_saved(folder: Path) -> None:
    if not (folder / "manifest.json").is_file():
        inside = folder / "module"
        hint = f"; of a training run it is {inside}" if (inside / "manifest.json").is_file() else ""
        raise SpecError(f"'{folder}' is not a folder of a saved rewrite{hint}: fxplug rewrite CONFIG --out DIR writes one")


def _write(path: Path, text: str) -> None:
    """Write a file atomically; write directly to a pipe or other special file."""
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    with replace_file(path) as beside:
        beside.write_text(text, "utf-8")

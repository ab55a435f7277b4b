"""The verbs `fxplug adapters list | load | use | unload`, which change a saved rewrite with slots, and those about files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fxplug

from ..config.cli.json_output import Json, print_json
from ..config.cli.verbs import HELP, Allow, Debug, Set, Verbs, load_saved, read_config, show_progress
from ..config.run_config import load_config
from ..config.saved_config import read_saved_config
from ..core.errors import ArtifactError, SpecError
from ..core.writing import lock_current_folder

if TYPE_CHECKING:
    from ..core.ir.traced_module import TracedModule
    from .file_layouts import EditedFile

adapters = typer.Typer(
    cls=Verbs, no_args_is_help=True, context_settings=HELP,
    help="Load, use and unload adapters in a saved rewrite; inspect, resize, convert and merge adapter files.",
)  # fmt: skip
Saved = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")]
Named = Annotated[str, typer.Argument(metavar="NAME", help="The name of the adapter.")]
Source = Annotated[
    str, typer.Argument(metavar="FILE", help="The adapter: a file, a folder, or a repository on the hub: user/name.")
]
Adapter = Annotated[str | None, typer.Option("--adapter", help="Which adapter, if the file has several.")]
Part = Annotated[str | None, typer.Option("--part", help="The part of a pipeline that the model is.")]
Partial = Annotated[bool, typer.Option("--partial", help="Skip updates that the model or format cannot store.")]
Out = Annotated[Path, typer.Option("--out", help="The adapter file or folder to write.")]
Rank = Annotated[int | None, typer.Option("--rank", help="The rank, or the highest rank of a layer.")]
As = Annotated[str, typer.Option("--as", help="The format: peft, diffusers, kohya, comfy, lycoris or fxplug.")]
OtherAs = Annotated[str | None, typer.Option("--as", help="The format (default: as the first file).")]
Model = Annotated[str | None, typer.Option("--model", metavar="CONFIG_OR_DIR", help="The model that the adapter is for.")]
Family = Annotated[str | None, typer.Option("--family", help="The model by its family: sd1, sdxl, flux, ...")]


@adapters.command("list")
def list_adapters(folder: Saved, allow: Allow = None, as_json: Json = False, debug: Debug = False) -> None:
    """List the loaded adapters and their active weights."""
    with _changed(folder, allow, save=False) as module:
        held = module.adapters
        rows = held.active if isinstance(held.active, list) else [held.active]
        if as_json:
            tables = [{name: getattr(strength, "value", strength) for name, strength in row.items()} for row in rows]
            made = [{"name": name, "weights": [table.get(name, 0.0) for table in tables]} for name in held.names]
            for one in made:  # strengths by block
                if any(blocks := [getattr(row.get(one["name"]), "blocks", None) or {} for row in rows]):
                    one["blocks"] = blocks
            print_json({"slots": held.slots, "by_sample": len(rows) > 1, "adapters": made})
            return
        for name in held.names:
            weights = dict.fromkeys(f"{row.get(name, 0.0):g}" for row in rows)
            note = " by sample" if len(rows) > 1 else " (not in use)" if list(weights) == ["0"] else ""
            print(f"{name}  {', '.join(weights)}{note}")
        print(f"{len(held.names)} of {held.slots} slots are in use")


@adapters.command("load")
def load_adapter(
    folder: Saved,
    name: Named,
    source: Source,
    adapter: Adapter = None,
    part: Part = None,
    partial: Partial = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the adapter that has this name.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Load an adapter into a free slot of a saved rewrite. Call `adapters use` to activate it."""
    with _changed(folder, allow) as module:
        found = module.adapters.load(name, source, adapter=adapter, part=part, partial=partial, replace=replace)
    print(f"{name}: {len(found.placed)} layers")
    for other, entries in found.others.items():
        print(f"left out: {len(entries)} layers of {other}")
    if found.missing or found.mismatched:
        print(f"left out: {len(found.missing) + len(found.mismatched)} layers that the model does not have")


@adapters.command("use")
def use_adapters(
    folder: Saved,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME[=WEIGHT] ...]", help="The adapters to activate. Without any, deactivate all."),
    ] = None,
    by_sample: Annotated[bool, typer.Option("--by-sample", help="One adapter per sample of the batch; - is none.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Activate adapters of a saved rewrite, each with a weight: ink=0.8 film=0.3."""
    entries = [_weight(text) for text in names or []]
    with _changed(folder, allow) as module:
        module.adapters.use([dict([e]) if e[0] != "-" else None for e in entries] if by_sample else dict(entries))
    print(f"in use: {' '.join(names or []) or 'none'}")


@adapters.command("unload")
def unload_adapter(folder: Saved, name: Named, allow: Allow = None, debug: Debug = False) -> None:
    """Unload an adapter and free its slot."""
    with _changed(folder, allow) as module:
        module.adapters.unload(name)
    print(f"{name} is unloaded")


@adapters.command("inspect")
def inspect(
    file: Source,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG_OR_DIR]", help="The model to check against: a configuration or a saved rewrite."),
    ] = None,
    adapter: Adapter = None,
    part: Part = None,
    guess: Annotated[bool, typer.Option("--guess", help="Match numbered layers by shape and order.")] = False,
    set: Set = None,
    allow: Allow = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what an adapter file contains, which layers fit a model, and which pass stores them. Reads no weights.

    The exit code is 1 if nothing fits the model.
    """
    with _quiet_imports():
        found = fxplug.inspect_adapter(file, _model(model, set, allow), adapter=adapter, part=part, guess=guess)
    if as_json:
        print_json(found.describe())
    else:
        print(found)
    if model is not None and not found.is_placed:
        if as_json:
            raise ArtifactError(f"nothing of {file} fits {model}: {found.describe()['model']['why']}")
        raise typer.Exit(1)


def _model(subject: str | None, set_: list[str] | None, allow: list[str] | None) -> object:
    """A saved rewrite, or the model of a configuration or of a folder of diffusers without its weights; None for none."""
    if subject is None:
        return None
    if (Path(subject) / "manifest.json").exists():
        return load_saved(subject, set_, allow)
    from ..config.models.factory import build

    folder = Path(subject).is_dir()
    config = load_config({"model": str(Path(subject).absolute())}, set_ or []) if folder else read_config(subject, set_)
    with show_progress("build the model"):
        return build(config, device="meta")


@adapters.command("extract")
def extract_adapter(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The base checkpoint: a file or a model folder.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The fine-tuned checkpoint.")],
    out: Out,
    rank: Annotated[str, typer.Option("--rank", help="The rank, or the share of each difference to keep: 0.98.")] = "16",
    at: Annotated[str, typer.Option("--at", help="Which layers: a pattern, as `at` of a pass.")] = "**",
    as_: As = "kohya",
    part: Part = None,
    partial: Partial = False,
    debug: Debug = False,
) -> None:
    """Extract a LoRA from the difference of two checkpoints."""
    with show_progress("extract"):
        found = fxplug.extract(base, tuned, rank=_rank(rank), at=at)
    done = found.save(out, as_=as_, part=part, partial=partial, name=out.stem)
    for path, lacks in found.errors.items():
        print(f"{path}  error {lacks:.1%} of the difference")
    for path, why in (*found.left_out.items(), *done.left_out.items()):
        print(f"left out: '{path}' {why}")
    print(f"{len(done.layers)} layers, {found.same} more are equal\nsaved in {done.path}")


@adapters.command("resize")
def resize_adapter(
    file: Source,
    out: Out,
    rank: Rank = None,
    energy: Annotated[float | None, typer.Option("--energy", help="Keep this share of the squared values: 0.98.")] = None,
    ratio: Annotated[float | None, typer.Option("--ratio", help="Keep values above the largest divided by this.")] = None,
    cumulative: Annotated[float | None, typer.Option("--cumulative", help="Keep this share of the sum of values.")] = None,
    debug: Debug = False,
) -> None:
    """Lower the rank of an adapter, by the singular values of each update. Keys keep their names."""
    _print_edited(fxplug.resize_adapter(file, out, rank=rank, energy=energy, ratio=ratio, cumulative=cumulative))


@adapters.command("convert")
def convert_adapter(
    file: Source,
    out: Out,
    as_: As,
    model: Model = None,
    family: Family = None,
    part: Part = None,
    partial: Partial = False,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Convert an adapter to the format of another tool."""
    with _quiet_imports():
        found: Any = _model(model, set, allow)
        done = fxplug.convert_adapter(file, out, as_=as_, model=found, family=family, part=part, partial=partial, name=out.stem)
    _print_edited(done)


@adapters.command("merge")
def merge_adapters(
    files: Annotated[list[str], typer.Argument(metavar="FILE[=WEIGHT] ...", help="The adapters, each with its weight.")],
    out: Out,
    how: Annotated[str, typer.Option("--how", help="The method: cat, svd, linear, ties, dare_linear, kohya, ...")] = "cat",
    rank: Rank = None,
    density: Annotated[float | None, typer.Option("--density", help="For ties, dare and others: the share to keep.")] = None,
    sign: Annotated[str, typer.Option("--sign", help="For ties: elect signs by total or frequency.")] = "total",
    clamp: Annotated[float | None, typer.Option("--clamp", help="For svd: clamp tensors at this quantile.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="For dare: the random seed.")] = 0,
    as_: OtherAs = None,
    model: Model = None,
    family: Family = None,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Merge several adapters into one: ink.safetensors=0.8 film.safetensors=0.3."""
    pairs = [(text, 1.0) if Path(text).exists() else _weight(text, last=True) for text in files]
    options: dict[str, Any] = {"rank": rank, "density": density, "sign": sign, "clamp": clamp, "seed": seed}
    with _quiet_imports():
        found: Any = _model(model, set, allow)
        done = fxplug.merge_adapters(pairs, out, how=how, as_=as_, model=found, family=family, **options)
    _print_edited(done)


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Silence what diffusers' classes log, when they are imported, about libraries that no adapter file needs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _print_edited(done: EditedFile) -> None:
    for name, rank in done.ranks.items():
        print(f"{name}  rank {rank}, error {done.errors.get(name, 0.0):.1%}")
    for path, why in done.left_out.items():
        print(f"left out: '{path}' {why}")
    print(f"saved in {done.path}")


def _rank(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise SpecError(f"--rank must be a whole number, or a share such as 0.98, not '{text}'") from None


@contextmanager
def _changed(folder: Path, allow: list[str] | None, save: bool = True) -> Iterator[TracedModule]:
    """A saved rewrite with slots, saved again after it was changed; other commands that change it wait meanwhile."""
    if not folder.is_dir():
        raise SpecError(f"no folder '{folder}': fxplug rewrite CONFIG --out DIR writes one")
    with lock_current_folder(folder) if save else nullcontext():
        before = folder.stat()
        module = load_saved(str(folder), None, allow)
        fxplug.Adapters(module)  # which says so where there are no slots
        yield module
        if save:
            if not os.path.samestat(before, folder.stat()):  # where folders cannot be locked
                raise SpecError(f"'{folder}' was saved again by another process meanwhile: run this command again")
            fxplug.save(module, folder, config=read_saved_config(folder))


def _weight(text: str, last: bool = False) -> tuple[str, float]:
    name, _, weight = text.rpartition("=") if last and "=" in text else text.partition("=")
    try:
        return name, float(weight) if weight else 1.0
    except ValueError:
        raise SpecError(f"'{text}': the weight of an adapter must be a number, such as {name}=0.8") from None

"""Adapter files, written as the tools have them: PEFT, diffusers, kohya's, ComfyUI, LyCORIS, and fxplug's own."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..blocks.base import get_kind
from ..blocks.head import BEFORE
from ..core.errors import ArtifactError, SpecError, did_you_mean, format_fields, quote
from ..core.reading import report_errors
from ..core.weight_files import PICKLED, SAFE, save_file
from ..core.writing import replace_file, replace_folder
from . import formats
from .base_weights import describe_base
from .contents import AdapterContents, ModelLayer, list_layers, read_trained
from .file_metadata import describe_adapter, prefix_fields
from .formats import CONFIGURED, explain_refusal, find_part, make_tensors
from .loading import find_tensor, get_slotless_passes, is_table
from .own_files import OWN, make_description
from .saved_heads import BIAS, as_changes, get_trained_layers, list_changed_layers
from .tables import FORMATS, PARTS
from .updates import Entry
from .wrapped import convert_to_peft

SHOWN = 3  # so many layers are named in a message
# files of an adapter in a folder, in the formats that are written; the last two are those of earlier versions of the tools
WEIGHTS = tuple(row["file"] for row in FORMATS.values() if "file" in row)
REPLACED = ("adapter_config.json", *WEIGHTS, *(name.replace(".safetensors", ".bin") for name in WEIGHTS))
PACKED = "lora_adapter_metadata"  # where a file of diffusers has PEFT's configuration of each part


@dataclass(frozen=True)
class About:
    """What is known of the model that an adapter is for: its layers, the names of its classes, and its configuration.

    `named` are all that have a weight, norms too, where more than the layers are known; `parameters` the shapes of all its
    parameters, each module's in its order.
    """

    layers: Mapping[str, ModelLayer]
    classes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, ModelLayer] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    __repr__ = format_fields


@dataclass(frozen=True)
class Saved:
    """What was written: the place, the format, the layers, and what the format could not hold, by layer, with the reason."""

    path: Path
    as_: str
    layers: tuple[str, ...]
    left_out: Mapping[str, str]

    def __repr__(self) -> str:
        left = f"; left out: {list_skipped(self.left_out)}" if self.left_out else ""
        return f"Saved({str(self.path)!r}, {self.as_}, {len(self.layers)} layers{left})"


@dataclass(frozen=True)
class Content:
    """An adapter in a format: its tensors, the metadata of its file, and PEFT's configuration where the format has one."""

    tensors: dict[str, Tensor]
    about: dict[str, str]
    config: dict[str, Any]
    layers: tuple[str, ...]
    left_out: Mapping[str, str]

    __repr__ = format_fields


def describe_model(module: Any) -> About:
    """Return what a traced module records of the model it was traced from. Raises ArtifactError for a shard of a parallel
    module."""
    if parts := getattr(module, "meta", {}).get("parts"):
        raise ArtifactError(
            f"this process has only its shard of {len(parts)} weights, such as '{parts[0]}': gather them with whole_state, and "
            "write the module that parallelize gives without processes"
        )
    config = getattr(module, "config", None)
    known = config if isinstance(config, Mapping) else {}
    classes = tuple(getattr(module, "classes", ()) or (type(module).__name__,))
    added = {entry["name"] for entry in getattr(module, "meta", {}).get("passes", [])}
    rows = module.named_parameters(remove_duplicate=False)
    parameters = {name: tuple(p.shape) for name, p in rows if name.partition(".")[0] not in added}
    return About(list_layers(module), classes, known, list_layers(module, 1), parameters)


@dataclass(frozen=True)
class FileOptions:
    """What is written of an adapter beside its format, as in `save_adapter`."""

    name: str = ""
    part: str | None = None
    partial: bool = False
    dtype: torch.dtype | None = None
    metadata: Mapping[str, str] | None = None


def save_adapter(
    module: Any,
    path: str | os.PathLike[str],
    *,
    as_: str = "peft",
    passes: Sequence[str] | None = None,
    name: str = "",
    part: str | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
    about: Mapping[str, str] | None = None,
    overwrite: bool = True,
) -> Saved:
    """Write what passes without slots learned as an adapter file of another tool.

    A file that is there is replaced once the new one is whole, and so is the adapter in a folder: what else lies in that stays,
    as where `save` replaces an artifact. A folder that has files and no adapter is refused.

    Layers of the base that `fxplug.trainable` named are in the file, too: whole where a format has that (`modules_to_save` of
    PEFT), elsewhere as the difference to what they were then.

    "fxplug" holds passes of any kind, of blocks of your own too: what is no low-rank update is there under the names that it
    has in the module, with the passes as data beside it. `load_adapter` and `pass_for` read it.

    kohya's tools and ComfyUI have the first names of layers, of which one may be several layers here: their updates are joined
    without a loss.

    Args:
        module: The rewritten module.
        path: The file or folder to write.
        as_: "peft" (a folder with `adapter_model.safetensors` and `adapter_config.json`), "diffusers" (a folder with
            `pytorch_lora_weights.safetensors`, or a file where `path` ends so), or "kohya", "comfy", "lycoris", "fxplug" (a
            file).
        passes: Some of the module's passes without slots; None is all.
        name: The title in the metadata.
        part: The part of a pipeline that the model is ("unet", "transformer", "text_encoder", ...); None tells it by its class.
        partial: Whether what the format has no form for is left out, as the result says.
        dtype: The dtype of the tensors; None is the one that they have.
        about: Further metadata, text by name: fields of ModelSpec ("title", "author", "license", "trigger_phrase",
            "resolution", "date", ...), which get its prefix, and others as they are. A file has a date only if this has.
        overwrite: Whether an adapter that is there is replaced.

    Returns:
        The path, and what was left out.

    Raises:
        ArtifactError: The format has no form for an update, or the place cannot be written.
        SpecError: There is no such format or pass.
    """
    held = read_trained(module, passes, strict=as_ != "fxplug")
    if as_ == "fxplug" and not _is_low_rank(module, held, passes):
        return write(_by_name(module, passes, dtype, about), path, as_, overwrite)
    made = _content_of(module, held, as_, FileOptions(name, part, partial, dtype, about))
    return write(made, path, as_, overwrite)


def save_parts(
    modules: Mapping[str, Any], path: str | os.PathLike[str], passes: Mapping[str, Sequence[str]] | None = None
) -> Saved:
    """Write what passes in models of one pipeline learned as one file of diffusers', which `load_lora_weights` reads.

    `modules` has the models by their parts, `unet` and `text_encoder`, and `passes` the names of the passes of each, all of
    them where it is None. The digest in the file is that of the first one's base.
    Raises what `save_adapter` raises, for the first model of which something cannot be in the file.
    """
    tensors: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    layers: list[str] = []
    about: dict[str, str] = {}
    for part, module in modules.items():
        every = [entry["name"] for entry in module.meta.get("passes", [])]
        names = every if passes is None else passes[part]
        made = _content_of(module, read_trained(module, names), "diffusers", FileOptions(part=part))
        tensors |= made.tensors
        configs |= json.loads(made.about[PACKED])
        layers += made.layers if len(modules) == 1 else [f"{part}.{layer}" for layer in made.layers]
        about = about or made.about
    about = {**about, PACKED: json.dumps(configs, indent=2, sort_keys=True)}
    return write(Content(tensors, about, {}, tuple(layers), {}), path, "diffusers")


def _content_of(module: Any, held: AdapterContents, as_: str, options: FileOptions) -> Content:
    """Return the updates of a module in a tool's format."""
    there = functools.partial(find_tensor, module)
    return make_content(held, as_, describe_model(module), options, there=there, trained=get_trained_layers(module))


def _is_low_rank(module: Any, held: AdapterContents, passes: Sequence[str] | None) -> bool:
    """Return whether passes contain only updates of layers, which fit into blocks of their kind at any place and of any
    rank."""
    sites = [site for entry in get_slotless_passes(module, passes).values() for site in entry["sites"] if site["block"]]
    if held.left_out or held.heads or not held.entries:
        return False
    if any(entry.method in ("whole", "gate") or (entry.param != "weight" and not entry.method) for entry in held.entries):
        return False
    kinds = {(get_kind(module.get_submodule(site["block"])), site["path"].partition("@")[0]) for site in sites}
    return all(kind and kind.neutral and not (kind.is_decomposed and is_table(module, path)) for kind, path in kinds)


def _by_name(
    module: Any, passes: Sequence[str] | None, dtype: torch.dtype | None, metadata: Mapping[str, str] | None
) -> Content:
    """Return everything in passes under its names in the module, with the trained parameters of the base, and the passes as
    data."""
    describe_model(module)
    records = get_slotless_passes(module, passes)
    whole = get_trained_layers(module)
    state = module.state_dict(keep_vars=True)
    tensors = {key: value for key, value in state.items() if key.partition(".")[0] in records} | whole
    if (empty := next((key for key, value in tensors.items() if value.is_meta), None)) is not None:
        raise ArtifactError(f"'{empty}' is on the meta device and has no values")
    made = {key: value if dtype is None or not value.is_floating_point() else value.to(dtype) for key, value in tensors.items()}
    layers = dict.fromkeys(site["path"] for entry in records.values() for site in entry["sites"] if site["block"])
    about = {"format": "pt", OWN: make_description(list(records.values()), list(whole)), **prefix_fields(metadata)}
    return Content(prepare_tensors(made), about, {}, (*layers, *whole), {})


def list_skipped(left: Mapping[str, str], number: int = SHOWN) -> str:
    """Return what was left out as text, the first few by name."""
    some = [f"'{path}' {why}" for path, why in list(left.items())[:number]]
    return "; ".join([*some, *([f"and {len(left) - number} more"] if len(left) > number else [])])


def make_content(
    held: AdapterContents,
    as_: str,
    model: About,
    options: FileOptions | None = None,
    *,
    there: Callable[[str], Tensor | None] = lambda name: None,
    trained: Collection[str] = (),
) -> Content:
    """Return the updates in a tool's format; see `save`. Nothing is written.

    `there` returns the parameters of the model, which PEFT's files store whole if they are changed whole; `trained` are the
    trained parameters of the base, whose values differ from the base's.
    """
    if as_ not in FORMATS:
        raise SpecError(f"no adapter format '{as_}'{did_you_mean(as_, FORMATS)}; there are {', '.join(FORMATS)}")
    options = options or FileOptions()
    dtype, part = options.dtype, find_part(model.classes) if options.part is None else options.part
    if part not in PARTS:
        raise SpecError(f"no part '{part}' of a pipeline{did_you_mean(part, PARTS)}; there are {', '.join(PARTS)}")
    if part == "text_encoder_2" and as_ in ("kohya", "comfy") and "T5" in next(iter(model.classes), ""):
        part = "text_encoder_3"  # as they call Flux's, where SD 3 has CLIP's second one before it
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SpecError(f"dtype must be a floating point dtype, such as torch.float16, not {quote(dtype)}")
    said = prefix_fields(options.metadata)
    left = dict(held.left_out)
    if held.heads and as_ != "peft":
        left |= dict.fromkeys(held.heads, f"is a whole parameter of a new layer, which {as_} cannot represent")
    entries, changes = [], []
    with_biases = formats.join_biases if as_ in CONFIGURED else formats.split_biases
    held_entries = held.entries if as_ in ("peft", "fxplug") else as_changes(held.entries, as_ in CONFIGURED)
    given = held.entries if as_ == "fxplug" else with_biases(held_entries)
    single = formats.find_lone_biases(given, as_)
    if as_ == "peft":
        given, more = convert_to_peft(given, model.parameters, model.layers)
        left |= more
    for entry in given:
        layer = model.layers.get(entry.path)
        if as_ == "peft" and (entry.method == "whole" or (entry.method == "diff" and entry.param in ("weight", "bias"))):
            changes.append(entry)
        elif why := single.get(entry.key(entry.path), "") or explain_refusal(entry, as_, layer):
            left[entry.key(entry.path)] = why
        else:
            one = entry if as_ == "fxplug" else entry.as_one_group()
            entries.append(_in_dtype(one.with_scale_in_factor(dtype) if as_ == "diffusers" else one, dtype))
    if as_ in CONFIGURED:
        left |= formats.find_unlike([(entry.path, entry) for entry in entries], model.layers)
        entries = [entry for entry in entries if entry.path not in left]
    heads, more = list_changed_layers(changes, entries, there)
    heads, left = {**held.heads, **heads}, left | more
    around = tuple(f"{entry.path}." for entry in entries if "target" in entry.options)
    if inside := [key for key in heads if around and key.startswith(around)]:
        left |= dict.fromkeys(inside, "is a whole parameter in a module whose own parameters have updates, which PEFT wraps")
        heads = {key: value for key, value in heads.items() if key not in left}
    if as_ == "fxplug":
        rows = [(entry.path, entry) for entry in entries]
    else:
        rows, more = formats.name_layers(sorted(entries, key=lambda e: e.method), as_, {**model.named, **model.layers}, part)
        left |= more
    if not rows:
        why = list_skipped(left or dict.fromkeys(heads, "is a whole layer, and PEFT needs another layer with an update beside "
                                                        "it"))
        raise ArtifactError(f"nothing of this adapter can be written as {as_}: {why or 'it has no layers'}")
    if left and not options.partial:
        of = len({*left, *(entry.key(entry.path) for entry in given)})
        way = "partial=True (--partial) leaves them out"
        raise ArtifactError(f"{as_} cannot represent {len(left)} of {of} layers: {list_skipped(left)}; {way}")
    kept = tuple(entry.key(entry.path) for entry in (*entries, *changes) if entry.key(entry.path) not in left)
    tensors: dict[str, Tensor] = {}
    biased = any("bias" in entry.kind for _, entry in rows)
    for key, entry in rows:
        known = model.layers.get(entry.path) if entry.param == "weight" or entry.method else None
        layer = known or ModelLayer("", (1,) if entry.method else tuple(entry.sizes()[1]))
        tensors |= make_tensors(as_, key, entry, layer, biased)
    if as_ == "peft":
        floats = {key: value for key, value in heads.items() if dtype is not None and value.is_floating_point()}
        tensors |= {f"{BEFORE}{key}": value.to(dtype) if key in floats else value for key, value in heads.items()}
    tensors = prepare_tensors(tensors)
    made: dict[str, Any] = {}
    if as_ in CONFIGURED:
        made = formats.make_config([(entry.path, entry) for _, entry in rows], model.layers)
    if heads and as_ == "peft":
        saved = {key.rpartition(".")[0] for key in heads if not key.endswith(BIAS)}
        biases = any(key.endswith(BIAS) for key in heads)
        made |= {"modules_to_save": sorted(saved) or None, "bias": "lora_only" if biases else "none"}
    paths = (entry.path if entry.method else entry.key(entry.path) for entry in entries)
    base = describe_base((path for path in paths if not {path, f"{path}.weight"} & {*trained}), there)
    described_as = describe_adapter(as_, rows, options.name, model.layers, next(iter(model.classes), ""), model.config)
    about = {"format": "pt", **described_as, **base, **said}
    if as_ == "diffusers":
        packed = {f"{part}.{key}": value for key, value in made.items()}
        about[PACKED] = json.dumps(packed, indent=2, sort_keys=True)
    return Content(tensors, about, made if as_ == "peft" else {}, kept, left)


def write(made: Content, path: str | os.PathLike[str], as_: str, overwrite: bool = True) -> Saved:
    """Put an adapter in its place: a folder for PEFT and diffusers, or a file for the others and where the name says so.

    Raises ArtifactError where that cannot be written, where something stands that would be lost, and unless `overwrite` where
    an adapter stands.
    """
    target = Path(path)

    def raises(finding: str) -> ArtifactError:
        return ArtifactError(f"{target} {finding}")

    with report_errors(raises, "cannot be written"):
        no_folder = (*SAFE, *PICKLED) if as_ == "peft" else PICKLED
        if "file" in FORMATS[as_] and target.suffix in no_folder and not target.is_dir():
            other = "as_='diffusers', 'comfy' or 'kohya' for one file" if as_ == "peft" else "a name that ends in .safetensors"
            raise raises(f"ends as a file does, and an adapter of {as_} is a folder: give the name of a folder, or {other}")
        is_folder = "file" in FORMATS[as_] and (as_ == "peft" or target.suffix != ".safetensors")
        if not is_folder and target.suffix != ".safetensors":
            target = target / f"{target.name or 'adapter'}.safetensors" if target.is_dir() else Path(f"{target}.safetensors")
        if is_folder:
            check_replaceable(target, raises, overwrite)
            with replace_folder(target, raises, own=lambda folder: check_replaceable(folder, raises, overwrite)) as work:
                save_file(made.tensors, work / FORMATS[as_]["file"], made.about)
                if made.config:
                    text = json.dumps(made.config, indent=2, sort_keys=True) + "\n"
                    (work / "adapter_config.json").write_text(text, "utf-8")
        else:
            if not overwrite and os.path.lexists(target):
                raise raises("exists: overwrite=True replaces it")
            with replace_file(target, raises) as file:
                save_file(made.tensors, file, made.about)
    return Saved(target, as_, made.layers, made.left_out)


def check_replaceable(target: Path, raises: Callable[[str], ArtifactError], overwrite: bool = True) -> list[str]:
    """Return the names of an earlier adapter's files in a folder, which a new one replaces. Raises where there are others
    alone, and unless `overwrite` where there are any."""
    if not os.path.lexists(target):
        return []
    if target.is_symlink() or not target.is_dir():
        raise raises("exists and is not a folder: give another path")
    found = os.listdir(target)
    if found and not overwrite:
        raise raises("exists: overwrite=True replaces the adapter in it")
    own = [name for name in found if name in REPLACED and (target / name).is_file()]
    if found and not own:
        raise raises(f"has files and no adapter (none is named {' or '.join(REPLACED[:3])}): save to another folder")
    return own


def prepare_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file takes them: on the CPU, each in memory of its own. Raises ArtifactError where one is not finite."""
    if (odd := next((key for key, value in tensors.items() if not value.float().isfinite().all()), None)) is not None:
        raise ArtifactError(f"'{odd}' has numbers that are not finite (NaN or infinity)")
    return {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}


def _in_dtype(entry: Entry, dtype: torch.dtype | None) -> Entry:
    if dtype is None:
        return entry
    made = {name: value.to(dtype) for name, value in entry.tensors.items()}
    odd = next((name for name, value in made.items() if not value.float().isfinite().all()), None)
    if odd is not None:
        raise ArtifactError(f"'{entry.path}': its {odd} has numbers out of range for {dtype}: write it in another dtype")
    return Entry(**{**vars(entry), "tensors": made})

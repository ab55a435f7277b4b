"""A rewritten model as a checkpoint of the base model's own: the passes merged into its weights, under its own names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..adapters.formats import find_part
from ..adapters.layer_names import SWAPPED, map_first_names
from ..adapters.slots import Adapters
from ..adapters.writing import describe_model
from ..config.models.state_dict import convert_to_diffusers
from ..core.errors import FxplugError, SpecError, did_you_mean, format_fields, quote
from ..core.ir.traced_module import TracedModule
from ..core.locks import with_read_lock
from ..core.reading import report_errors
from ..core.weight_files import save_file, separate
from ..core.writing import check_new, replace_file, replace_folder
from ..lowerings.lowering import undo_lowering
from ..lowerings.merging.fold import is_mark
from ..lowerings.merging.fold import merge as fold

FORMATS = ("diffusers", "timm", "safetensors")
STEM = "diffusion_pytorch_model"
SHOWN = 3  # so many keys are named in a message


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written: the place, its files, how many tensors and bytes, and the passes that are merged into them."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    size: int
    passes: tuple[str, ...]

    __repr__ = format_fields

    def __str__(self) -> str:
        merged = f", with {', '.join(self.passes)} merged" if self.passes else ""
        return f"{self.tensors} tensors of {self.size / 1e6:.1f} MB in {', '.join(self.files)}{merged}"


def save_checkpoint(
    module: TracedModule,
    path: str | os.PathLike[str],
    *,
    to: str = "diffusers",
    merge: Mapping[str, float] | None = None,
    first: bool = False,
    largest: int = 10 * 10**9,
) -> WrittenCheckpoint:
    """Write the model that a rewrite began with, its passes merged into the weights, as its own library reads it.

    The module stays as it is. Nothing is left at the place where the call fails, nor where memory ends.

    Args:
        module: The rewritten module.
        path: The file or new folder to write.
        to: "diffusers" (a folder with `config.json` and `diffusion_pytorch_model.safetensors`, for `Model.from_pretrained`),
            "timm" (a file for `timm.create_model(name, checkpoint_path=...)`) or "safetensors" (a file with the base model's
            own names).
        merge: Names of adapters in slots, and of passes without slots, with how much of each is merged (of a pass 1, all of
            it); what it does not name stays out. None is all that is there, and of adapters what is in use.
        first: With "safetensors", the names of the first code base, below `model.diffusion_model.` for a UNet, as single-file
            checkpoints have them.
        largest: The most bytes of one file of "diffusers"; more are written in shards with an index.

    Returns:
        The files, and what was merged.

    Raises:
        SpecError: A name is not here, a strength is no finite number, or a pass is no function of weights.
        FxplugError: The base is no model of that library, weights have no values, layers have no first name, or the place is
            taken or cannot be written.
    """
    target = Path(path)

    def raises(finding: str) -> FxplugError:
        return FxplugError(f"{target} {finding}")

    if to not in FORMATS:
        raise FxplugError(f"no checkpoint format '{to}'{did_you_mean(to, FORMATS)}; there are {', '.join(FORMATS)}")
    if first and to != "safetensors":
        raise FxplugError(f"first=True is only for a single file, and {to} has its own names: use to='safetensors'")
    if not isinstance(largest, int) or isinstance(largest, bool) or largest < 1:
        raise FxplugError(f"the largest size of a file must be a whole number of bytes, not {quote(largest)}")
    with report_errors(raises, "cannot be written"):
        if to == "diffusers":
            check_new(target, raises)
        elif target.suffix != ".safetensors":
            target = target / "model.safetensors" if target.is_dir() else Path(f"{target}.safetensors")
    if not isinstance(module, TracedModule):
        raise FxplugError(f"save_checkpoint takes a traced module, not a {type(module).__name__}")
    module = undo_lowering(module)
    kind = next(iter(describe_model(module).classes), "")
    config = _diffusers_config(module, kind) if to == "diffusers" else None
    if to == "timm":
        import timm

        if not hasattr(timm.models, kind):
            finding = f"the base of this rewrite is a {kind}, which is not a model class of timm: write it to safetensors"
            raise FxplugError(finding)
    state, passes = merged_state(module, merge)
    if config is not None:
        _check_keys(state, config[1], kind)
    if first:
        state = _first(module, state)
    with report_errors(raises, "cannot be written"):
        if config is not None:
            with replace_folder(target, raises) as work:
                (work / "config.json").write_text(config[0], "utf-8")
                _write_shards(state, work, largest)
                files = tuple(sorted(os.listdir(work)))
        else:
            with replace_file(target, raises) as file:
                save_file(state, file, {"format": "pt"})
            files = (target.name,)
    return WrittenCheckpoint(target, files, len(state), sum(t.nbytes for t in state.values()), passes)


@with_read_lock
def merged_state(
    module: TracedModule, merge: Mapping[str, float] | None = None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the base model's state with passes merged into it, on the CPU, and their names; see `save_checkpoint`."""
    applied = {entry["name"]: entry for entry in module.meta.get("passes", [])}
    made, names = module, tuple(name for name, entry in applied.items() if not is_mark(module, entry))
    if merge is None and names:
        made = fold(module)
    elif merge is not None:
        slotted = [name for name, entry in applied.items() if entry.get("slots")]
        chosen = {name: value for name, value in merge.items() if name not in applied}
        if chosen and not slotted:
            name, known = next(iter(chosen)), ", ".join(applied) or "none"
            raise SpecError(f"no pass '{name}' is applied here{did_you_mean(name, applied)}; there is {known}")
        for name, value in merge.items():
            if name in applied and (name in slotted or isinstance(value, bool) or value != 1):
                whole = f"can only be merged in full, not by {value!r}: {name}=1"
                raise SpecError(
                    f"the pass '{name}' {'has slots: give the names of adapters in them' if name in slotted else whole}"
                )
        if slotted:
            Adapters(module).strengths(chosen)  # which says what is wrong
        passes = [*(slotted if chosen else ()), *(name for name in merge if name in applied)]
        made = fold(module, passes, chosen or None) if passes else module
        names = tuple(merge)
    own = tuple(f"{name}." for name in applied)
    before = {key for key in module.state_dict() if not key.startswith(own)}
    state = {key: value.detach() for key, value in made.state_dict().items() if not key.startswith(own)}
    if new := sorted(state.keys() - before):
        raise SpecError(f"merged, the model would have {len(new)} tensors that the original does not have: '{new[0]}'")
    for key, value in state.items():
        if not value.is_meta and value.is_floating_point() and not value.isfinite().all():
            old = module.state_dict()[key]
            if old is not value and old.isfinite().all():
                raise FxplugError(f"merged, '{key}' has numbers out of range for {value.dtype}: use smaller strengths")
    if empty := [key for key, value in state.items() if value.is_meta]:
        raise FxplugError(f"'{empty[0]}' is on the meta device and has no values: load the module on another device")
    storages: set[int] = set()
    return {key: separate(value, storages) for key, value in state.items()}, names


# --- libraries


def _diffusers_config(module: TracedModule, kind: str) -> tuple[str, dict[str, Tensor]]:
    """Return the text of `config.json`, and the state that diffusers makes of it, without values."""
    import diffusers

    cls = getattr(diffusers, kind, None)
    config = getattr(module, "config", None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)) or not isinstance(config, Mapping):
        raise FxplugError(
            f"the base of this rewrite is a {kind}, which is not a model class of diffusers: write it to safetensors"
        )
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        with torch.device("meta"):
            model = cls.from_config(given)  # type: ignore[attr-defined]
    except Exception as error:  # a constructor of diffusers
        raise FxplugError(
            f"diffusers cannot build a {kind} from this configuration: {type(error).__name__}: {error}"
        ) from error
    return model.to_json_string(), model.state_dict()


def _check_keys(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], kind: str) -> None:
    """Raise FxplugError if the state does not match that of the library's model."""
    odd = [key for key in (*state, *wanted) if key not in wanted or key not in state or state[key].shape != wanted[key].shape]
    if odd:
        some = ", ".join(f"'{key}'" for key in odd[:SHOWN])
        raise FxplugError(f"{len(odd)} tensors differ from those of diffusers' {kind}: {some}")


def _write_shards(state: dict[str, Tensor], folder: Path, largest: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{STEM}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=largest)
    for name, keys in split.filename_to_tensors.items():
        save_file({key: state[key] for key in keys}, folder / name, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{STEM}.safetensors.index.json").write_text(text, "utf-8")


# --- the first names


def _first(module: TracedModule, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state under the names of the original code base. Raises FxplugError for weights without such a name."""
    layers = dict.fromkeys(key.rpartition(".")[0] for key in state)
    start = "model.diffusion_model." if find_part(module.classes) == "unet" else ""
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, paths in map_first_names(layers).items():
        for end in ("weight", "bias"):
            keys = [f"{path.removesuffix(SWAPPED)}.{end}" for path in paths]
            if not all(key in state for key in keys):
                continue
            pairs = zip(keys, paths, strict=True)
            parts = [state[key].roll(len(state[key]) // 2, 0) if path.endswith(SWAPPED) else state[key] for key, path in pairs]
            end = "scale" if name.endswith(("query_norm", "key_norm")) else end  # as the code of Flux has it
            made[f"{start}{name}.{end}"] = torch.cat(parts) if len(parts) > 1 else parts[0]
            used.update(keys)
    if left := [key for key in state if key not in used]:
        some = ", ".join(f"'{key}'" for key in left[:SHOWN])
        raise FxplugError(f"{len(left)} of {len(state)} tensors have no known name of the original format: {some}")
    kind = next(iter(module.classes), "this model")
    try:
        back = convert_to_diffusers(module, {key: value.to("meta") for key, value in made.items()}, "the file")
    except SpecError as error:
        raise FxplugError(f"diffusers could not read {kind} in the names of its original format: {error.finding}") from error
    if {key: value.shape for key, value in back.items()} != {key: value.shape for key, value in state.items()}:
        raise FxplugError(f"diffusers could not read {kind} in the names of its original format: it has no converter for them")
    return made

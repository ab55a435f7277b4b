"""HCP-Diffusion's plugin files (`plugin_unet:`, `lora_unet:`) as a configuration of fxplug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ...core.errors import SpecError, did_you_mean, find_nearest
from ...core.spec.yaml_source import Source, quote_yaml
from ..configuration import PLACEHOLDER, Conversion, build_on_meta, dump_configuration, make_model_sections, rebase_path
from .builtin_plugins import make_lora_pass
from .checkpoint_files import find_alpha, list_weights, read_sections
from .config_files import References, read_files
from .entries import PLACE_KEYS, read_plugins
from .hosts import PARTS, Host
from .merge_section import MergeSection, is_merging, read_merge
from .patch_sections import join_patches
from .train_section import convert_layers, convert_training

# what HCP-Diffusion's trainer, or what draws with it, reads from the same file, and a graph has nothing of
TRAINER = {
    *("_base_", "exp_dir", "mixed_precision", "allow_tf32", "seed", "ckpt_type", "vis_info", "train", "logger", "model"),
    *("pretrained_model", "prompt", "neg_prompt", "emb_dir", "N_repeats", "clip_skip", "clip_final_norm", "bs", "num", "dtype"),
    *("encoder_attention_mask", "amp", "fp16", "condition", "ex_input", "save", "save_model", "offload", "vae_optimize"),
    *("interface", "infer_args", "new_components", "out_dir"),
    *("previewer", "tokenizer_pt", "data", "data_class", "unet", "text_encoder", "hydra"),
}
READ = {"_base_", "train", "data", "seed", "mixed_precision"}  # see train_section
ALIKE = 0.85  # a key whose letters are so alike to those of a section is a mistake in its name


def convert(
    file: str | Path,
    *,
    model: str | None = None,
    part: str | None = None,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path | None = None,
) -> Conversion:
    """Convert the plugins that a file of HCP-Diffusion puts on one model (`part`: unet or TE) to passes.

    Without `part` it is the UNet, and if the file says how they train, those of the text encoder are passes of the same run.
    `model` is the value of `model:` in a configuration, or a configuration of fxplug (.yaml) whose model and inputs are used;
    with it every layer is looked up, so that a layer that matches nothing is an error now and not when the result is used.
    `inputs` has shapes for the inputs of plugins in `feed_input_data` (sizes or names, such as [n, 3, "8*h", "8*w"]). `out` is
    the file for the text, as paths in it are relative to that file. Imports the plugin classes. Raises SpecError.
    """
    if part is not None and part not in PARTS:
        raise SpecError(f"no part '{part}'{did_you_mean(part, PARTS)}; there are {', '.join(PARTS)}")
    notes, told = list[str](), list[str]()
    source = read_files(Path(file), notes)
    more = convert_training(source, told) if part != "TE" and isinstance(source.data, Mapping) else {}
    both = part is None and "train" in more
    part = part or "unet"
    sections = _sections(source, part, notes, both)
    folder = Path(out).parent if out else Path.cwd()
    head = make_model_sections(model, folder)
    host = Host(build_on_meta(head, folder) if model else None, dict(inputs or {}), part)
    passes = _passes(source, part, sections, host, notes)
    merge = read_merge(source, part, host, notes)
    passes = join_patches([*passes, *merge.passes], host)
    _check_inputs(host)
    head = merge.head(head, make_model_sections(model, Path.cwd()), notes)
    notes += told
    task = more.get("train", {}).get("task", {}).get("denoise", {})
    encoder = Host(None, {}, "TE", alone=False)
    beside = join_patches(_passes(source, "TE", sections, encoder, notes), encoder) if both else []
    if beside:
        task["text"] = {task["text"]: {"passes": beside}}
    if part == "unet":
        convert_layers(source, more, notes)
        if not passes and not beside and not merge.parts and not more.get("train", {}).get("trainable"):
            raise source.error("\n".join(["has no plugins, and its section 'unet' cannot be translated:", *notes]))
    if any("hcp/half_lora" in entry for entry in passes) and "train_guidance" not in task:
        notes.append("a branch is for half of a batch: {denoise: {train_guidance: SCALE}} trains each sample in both halves")
    data = more.get("data", {})
    for key in {"images", "conditions"} & data.keys():
        folders = data[key] if isinstance(data[key], list) else [data[key]]
        found = [rebase_path(one, Path.cwd(), folder) for one in folders]
        data[key] = found if isinstance(data[key], list) else found[0]
    return Conversion(_text(Path(file), part, head, passes, notes, model is None, more), notes)


def convert_checkpoint(
    file: str | Path, *, model: str | None = None, out: str | Path | None = None, ema: bool = False
) -> Conversion:
    """Convert a checkpoint of HCP-Diffusion to a configuration that loads it: its trained layers replace the model's weights,
    and its low-rank updates are a pass, with their trained strength.

    Arguments are those of `convert`; `ema` takes the averages. Raises ArtifactError for a file that cannot be read, SpecError
    for plugins' weights, as the file does not name the plugins.
    """
    notes: list[str] = []
    sections = read_sections(file, ema)
    weights = list_weights("lora", sections.get("lora", {}), file)
    if "plugin" in sections:
        raise SpecError(f"{file} has weights of plugins: give the saved rewrite with these plugins, --into DIR")
    merge = MergeSection([{"file": str(file), "alpha": 1.0, **({"ema": True} if ema else {})}] if sections.get("base") else [])
    if weights:
        given: dict[str, Any] = {"name": "lora", "file": str(file), "alpha": find_alpha(weights, notes)}
        merge.passes = [{"hcp/checkpoint": {**given, **({"ema": True} if ema else {})}}]
    sections = make_model_sections(model, Path(out).parent if out else Path.cwd())
    head = merge.head(sections, make_model_sections(model, Path.cwd()), notes)
    return Conversion(_text(Path(file), "weights", head, merge.passes, notes, model is None), notes)


def read_input(text: str) -> tuple[str, list[Any]]:
    """Parse `cond=n,3,8*h,8*w` as a name and its sizes. Raises SpecError."""
    name, equals, sizes = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"'{text}' is not an input: write NAME=SIZES, as in cond=n,3,8*h,8*w")
    parts = [part.strip() for part in sizes.split(",") if part.strip()]
    return name, [int(part) if part.isdigit() else part for part in parts]


def _passes(source: Source, part: str, sections: Mapping[str, Any], host: Host, notes: list[str]) -> list[dict[str, Any]]:
    """Return the passes of the two sections of a part."""
    plugins, loras = PARTS[part]
    passes = read_plugins(source, (plugins,), sections[plugins], host, notes)
    for index, entry in enumerate(sections[loras] or []):
        with source.inside(loras, index):
            passes.append(make_lora_pass(f"lora_block_{index}", entry, host, notes))
    return passes


def _sections(source: Source, part: str, notes: list[str], both: bool) -> dict[str, Any]:
    """Return the two sections of a part, or those of both parts, with their references resolved.

    Sections that are left out are added to `notes`.
    """
    data = source.data
    if not isinstance(data, Mapping):
        raise source.error(f"must be a mapping with '{PARTS[part][0]}', not {quote_yaml(data)}")
    _note_skipped_keys(source, part, notes)
    name = next(name for name in PARTS if name != part)
    other = [key for key in PARTS[name] if data.get(key)]
    if both and data.get("merge") and is_merging(data, name):
        notes.append(f"left out, because a run merges into the UNet alone: merge, of {name} (convert again with --part {name})")
    elif other and not both:
        notes.append(
            f"left out, because a configuration is for one model: {', '.join(other)} (convert again with --part {name})"
        )
    trains = part == "unet" and data.get("unet")
    if not any(data.get(key) for key in PARTS[part]) and not is_merging(data, part) and not trains and not (both and other):
        other += ["merge"] * is_merging(data, name)
        given = ", ".join(str(key) for key in data if data[key])
        hint = f"; there is {' and '.join(other)}: --part {name}" if other else f"; it has {given}"
        hint += "".join(f"\n  {note}" for note in notes if note.startswith("_base_"))
        raise source.error(f"has neither {' nor '.join(map(repr, PARTS[part]))}, so there is nothing to convert{hint}")
    references = References(source)
    wanted = [PARTS[key] for key in (PARTS if both else (part,))]
    found = {key: references.value(key) if data.get(key) else None for pair in wanted for key in pair}
    for _, loras in wanted:
        if not isinstance(found[loras] or [], list):
            raise source.error(f"must be a list, not {quote_yaml(data[loras])}", loras)
    return found


def _note_skipped_keys(source: Source, part: str, notes: list[str]) -> None:
    """Note the keys that are no sections of plugins. Raises SpecError for one that looks like such a section."""
    sections = [key for pair in PARTS.values() for key in pair]
    others = [key for key in source.data if key not in (*sections, *TRAINER, "merge")]
    for key in others:
        near = find_nearest(key, sections)
        alike = SequenceMatcher(None, key.lower(), near.lower()).ratio() > ALIKE
        if alike or _names_layers(source.data[key]):
            meant = f" (did you mean '{near}'?)" if near else f"; it names layers, as {', '.join(sections)} do"
            raise source.error(f"unknown key '{key}'{meant}", key=key)
    read = READ | {"unet"} if part == "unet" else READ
    left = [key for key in source.data if key in TRAINER - read and source.data[key] is not None]
    if left:
        notes.append(f"left out, because they are for training or sampling, not plugins: {', '.join(left)}")
    if others:
        notes.append(f"left out, because HCP-Diffusion has no such keys: {', '.join(others)}")
    if source.data.get("text_encoder"):
        notes.append(
            "text_encoder: trains layers of the model itself: name them in the task of a run (text: {clip: {trainable}})"
        )


def _names_layers(value: Any) -> bool:
    """Return whether a value looks like a section of plugins."""
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(isinstance(entry, Mapping) and any(key in entry for key in PLACE_KEYS) for entry in entries)


def _check_inputs(host: Host) -> None:
    unused = [name for name in host.inputs if name not in host.used and not host.binds(name)]
    if unused:
        raise SpecError(
            f"input '{unused[0]}' is not used by any plugin{did_you_mean(unused[0], host.used)}, and none of its sizes is a "
            "name that another input uses"
        )


def _text(
    file: Path,
    part: str,
    head: Mapping[str, Any],
    passes: list[dict[str, Any]],
    notes: list[str],
    unnamed: bool,
    more: Mapping[str, Any] | None = None,
) -> str:
    lines = [f"What is in {file.name} ({part}) as a configuration, by `fxplug convert hcp`."]
    lines += [f"Note: {note}" for note in notes]
    if unnamed:
        lines.append(f"{PLACEHOLDER}: write the model that the plugins go into, and its example `inputs` if it needs some.")
    more = {key: value for key, value in (more or {}).items() if key not in head}
    return dump_configuration(lines, {**head, "passes": passes, **more}, (list, dict))

"""How HCP-Diffusion trains, the sections `train:` and `data:` of its configurations, as those of fxplug."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.errors import SpecError, quote
from ...core.spec.yaml_source import Source
from .config_files import References
from .hosts import RATE, make_patterns, read_number, take_key
from .layer_patterns import read_paths

EVAL = re.compile(r'\$\{(?:hcp\.eval|times):\s*["\']?\s*(.*?)\s*["\']?\s*\}')  # its resolvers, as far as files use them
PRODUCT = re.compile(r"\d+(?:\s*[*,]\s*\d+)*")
SCHEDULERS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "no": "fp32"}
# what each section says that has no counterpart, told by a note; keys that are null or empty count as not there
TRAIN = ("train_steps", "train_epochs", "gradient_accumulation_steps", "workers", "max_grad_norm", "save_step", "loss",
         "optimizer", "scheduler")  # fmt: skip
QUIET = ("cfg_scale", "set_grads_to_none", "optimizer_pt", "scheduler_pt", "scale_lr_pt", "resume")
DATA = {"batch_size", "source", "bucket", "cache_latents", "img_root", "prompt_template", "caption_file", "word_names",
        "text_transforms", "cond_dir", "cond_root"}  # fmt: skip
DEFAULTS = {"bg_color": [255, 255, 255], "loss_weight": 1.0, "repeat": 1, "att_mask_encode": False}  # as they are here


def convert_training(source: Source, notes: list[str]) -> dict[str, Any]:
    """Return the sections `train` and `data`, and `seed`, of a configuration of HCP-Diffusion; none if it has none of them.

    Settings without a counterpart here, or with another meaning, are added to `notes`. Raises SpecError for invalid values.
    """
    reader = _TrainerReferences(source)
    said, model, sets = (reader.section(key) for key in ("train", "model", "data"))
    unread = [key for key, read in (("train", _has_known_keys(said)), ("data", _folders(sets))) if reader.top(key) and not read]
    if unread:
        notes.append(f"left out, because they are for training or sampling, not plugins: {', '.join(unread)}")
    if not _has_known_keys(said) and not _folders(sets):
        return {}
    place = model.get("pretrained_model_name_or_path") or "REPLACE_ME"
    denoise: dict[str, Any] = {"vae": f"{place}/vae", "text": str(place), "scheduler": f"{place}/scheduler"}
    if (scale := _guidance(said)) is None:
        notes.append(
            f"cfg_scale {quote(said['cfg_scale'])} changes with the time, and train_guidance is one number: the sections train "
            "and data are left out"
        )
        return {}
    if scale != 1:
        denoise["train_guidance"] = scale
        notes.append("each sample is in the batch twice, with its own caption and with one text for all (denoise: negative)")
    train: dict[str, Any] = {"task": {"denoise": denoise}}
    train |= _length(said) | _loop(said, denoise, notes)
    train |= _schedule(said.get("scheduler"), train.get("steps"), notes)
    if model.get("ema"):
        decay = model["ema"].get("decay_max") if isinstance(model["ema"], Mapping) else model["ema"]
        train |= {"ema": decay} if isinstance(decay, float) and 0 < decay < 1 else {}
        notes.append("ema: the decay is constant here; in HCP-Diffusion it grows with the steps")
    if model.get("gradient_checkpointing"):
        train["checkpointing"] = True
    if (precision := PRECISIONS.get(str(reader.top("mixed_precision")))) is not None:
        train["precision"] = precision
    data = _data(sets, train, notes)
    if isinstance(said.get("workers"), int):
        data["workers"] = said["workers"]
    if said.get("scale_lr"):
        notes.append("scale_lr multiplies each lr by the samples of a step: write the resulting lr")
    _note_unread_keys("train", said, (*TRAIN, *QUIET, "scale_lr"), notes)
    seed = reader.top("seed")
    head = {"seed": seed} if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 else {}
    return {**head, "train": train, **({"data": data} if data.get("images") else {})}


def convert_layers(source: Source, more: dict[str, Any], notes: list[str]) -> None:
    """Convert the layers of the model that the section `unet` trains to `trainable` and `lr` of the section train in `more`.

    Raises SpecError for an entry that cannot be read.
    """
    entries = References(source).value("unet") if isinstance(source.data.get("unet"), list) else []
    found, rates = list[str](), set[float]()
    for index, entry in enumerate(entries):
        with source.inside("unet", index):
            if not isinstance(entry, Mapping):
                raise SpecError(f"must be a mapping with 'layers', not {quote(entry)}")
            layers = read_paths(take_key(dict(entry), "layers"), "layers")
            rates.add(read_number(entry.get("lr", RATE), ("lr",), least=0.0))
            found += [pattern or "**" for pattern in make_patterns(layers)]
    if "train" in more and len(rates) == 1:
        more["train"] |= {"trainable": list(dict.fromkeys(found)), "lr": rates.pop()}
    elif source.data.get("unet"):
        several = f"; there are several lr, {', '.join(map(str, sorted(rates)))}, and train.lr is one" if len(rates) > 1 else ""
        notes.append(f"unet: trains layers of the model itself; here a run's train.trainable names those{several}")


def _guidance(said: Mapping[str, Any]) -> float | None:
    """Return the scale of DreamArtist's training, 1.0 without; None for one that changes with the time, as in "1.0-3.0:cos"."""
    low, dash, high = str(said.get("cfg_scale") or 1.0).partition(":")[0].partition("-")
    return read_number(_number(low), ("train", "cfg_scale")) if not dash or _number(low) == _number(high) else None


def _has_known_keys(said: Mapping[str, Any]) -> bool:
    """Return whether a section `train` has any key that is supported."""
    return any(said.get(key) is not None for key in TRAIN)


def _folders(sets: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the data sets that have folders of images, by name."""
    found = [(name, one) for name, one in sets.items() if isinstance(one, Mapping) and isinstance(one.get("source"), Mapping)]
    return [(n, one) for n, one in found if any(isinstance(e, Mapping) and e.get("img_root") for e in one["source"].values())]


class _TrainerReferences(References):
    """Products that its resolvers make are numbers; what calls other resolvers is None, as nothing here reads those keys."""

    def text(self, text: str, path: tuple[str | int, ...], asked: tuple[tuple[str | int, ...], ...]) -> Any:
        try:
            if (call := EVAL.fullmatch(text.strip())) is None:
                return super().text(text, path, asked)
            found = PRODUCT.fullmatch(str(super().text(call[1], path, asked)))
            return math.prod(map(int, re.findall(r"\d+", found[0]))) if found else None
        except SpecError:
            return None

    def top(self, key: str) -> Any:
        return self.value(key) if key in self.source.data else None

    def section(self, key: str) -> dict[str, Any]:
        found = self.top(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.source.error(f"must be a mapping, not {quote(found)}", key)
        return dict(found or {})


def _length(said: Mapping[str, Any]) -> dict[str, Any]:
    steps, epochs = (said.get(key) for key in ("train_steps", "train_epochs"))
    if isinstance(epochs, int) and not isinstance(steps, int):
        return {"epochs": max(epochs, 1)}
    return {"steps": max(steps, 1) if isinstance(steps, int) else 1000}


def _loop(said: Mapping[str, Any], denoise: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return accumulation, clipping, checkpoints, optimizer and loss."""
    made: dict[str, Any] = {}
    for theirs, ours in (("gradient_accumulation_steps", "accumulate"), ("max_grad_norm", "clip")):
        value = said.get(theirs)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            made[ours] = value
    if isinstance(said.get("save_step"), int):
        made["save"] = {"every": max(said["save_step"], 0)}
    optimizer = said.get("optimizer")
    if isinstance(optimizer, Mapping) and optimizer.get("_target_"):
        given = {key: _number(value) for key, value in optimizer.items() if not key.startswith("_") and key != "type"}
        made |= {"weight_decay": given.pop("weight_decay")} if "weight_decay" in given else {}
        given.pop("lr", None)  # of which there is one for each group, as there
        name = str(optimizer["_target_"])
        name = name.removeprefix("torch.optim.") if name.startswith("torch.optim.") else ":".join(name.rsplit(".", 1))
        made["optimizer"] = {name: given} if given else name
    loss = said.get("loss")
    if isinstance(loss, Mapping):
        if loss.get("type") == "v":
            denoise["prediction"] = "v_prediction"
        elif loss.get("type") not in (None, "eps"):
            notes.append(f"train.loss: type: {quote(loss['type'])} is not supported")
        criterion = loss.get("criterion")
        target = str(criterion.get("_target_")).rpartition(".")[2] if isinstance(criterion, Mapping) else "MSELoss"
        if isinstance(criterion, Mapping) and target == "MinSNRLoss":
            denoise["snr_gamma"] = _number(criterion.get("gamma", 1.0))
        elif target != "MSELoss":
            notes.append(f"train.loss: criterion: {target} is not supported; the loss is the squared error")
    return made


def _note_unread_keys(name: str, section: Mapping[str, Any], read: Iterable[str], notes: list[str]) -> None:
    """Note the keys of a section that are not read, except those whose value is the default here."""
    left = [key for key in section.keys() - set(read) if not key.startswith("_") and section[key] not in (None, "", {}, [])]
    if left := sorted(key for key in left if section[key] != DEFAULTS.get(key, ...)):
        notes.append(f"{name}: {', '.join(left)}: not supported")


def _schedule(scheduler: Any, steps: Any, notes: list[str]) -> dict[str, Any]:
    """Return the learning-rate scheduler of a run of so many steps; for `one_cycle` torch's own class."""
    if not isinstance(scheduler, Mapping):
        return {}
    name, warmup, length = (scheduler.get(key) for key in ("name", "num_warmup_steps", "num_training_steps"))
    if name == "one_cycle":
        given = dict(scheduler.get("scheduler_kwargs") or {})
        if isinstance(length, int) and length > 0:
            given |= {"total_steps": length} | ({"pct_start": warmup / length} if isinstance(warmup, int) else {})
        return {"scheduler": {"OneCycleLR": given} if given else "OneCycleLR"}
    if (target := str(scheduler.get("_target_"))).startswith("torch.optim.lr_scheduler."):
        given = {key: _number(value) for key, value in scheduler.items() if not key.startswith("_")}
        return {"scheduler": {target.rpartition(".")[2]: given}}
    if (course := SCHEDULERS.get(str(name))) is None:
        notes.append(f"the scheduler {quote(name or target)} is not supported: the learning rate is constant")
        return {}
    if name in ("linear", "cosine") and isinstance(length, int) and steps not in (None, length):
        notes.append(f"the scheduler {name} ends with the run, after {steps} steps; in HCP-Diffusion after {length}")
    left = [key for key, value in (scheduler.get("scheduler_kwargs") or {}).items() if value is not None]
    if warmup is not None and not isinstance(warmup, int):
        left.append(f"num_warmup_steps: {quote(warmup)}")
    if left:
        notes.append(f"the scheduler {name}: {', '.join(left)}: not supported")
    warmed = isinstance(warmup, int) and warmup > 0 and name != "constant"
    return {"scheduler": {course: {"warmup": warmup}} if warmed else course}


def _data(sets: Mapping[str, Any], train: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the first data set: its folders, batch and buckets; the others are listed in a note."""
    kept = dict(_folders(sets))
    if not kept:
        return {}
    name, one = next(iter(kept.items()))
    if isinstance(one.get("batch_size"), int) and one["batch_size"] > 0:
        train["batch"] = one["batch_size"]
    sources = [entry for entry in one["source"].values() if isinstance(entry, Mapping) and entry.get("img_root")]
    folders = [str(entry["img_root"]) for entry in sources]
    made: dict[str, Any] = {"images": folders[0] if len(folders) == 1 else folders, "captions": "optional"}
    conditions = [entry.get("cond_dir") or entry.get("cond_root") for entry in sources]
    if conditions[0] and len(set(conditions)) == 1:
        made["conditions"] = str(conditions[0])
    elif any(conditions):
        notes.append(
            f"data.{name}: the condition images are in several folders, and only one is supported: data.conditions is left out"
        )
    for entry in (one, *sources):
        _note_unread_keys(f"data.{name}", entry, DATA, notes)
    bucket = one.get("bucket")
    if isinstance(bucket, Mapping):
        area, side = bucket.get("target_area"), bucket.get("target_size")
        if isinstance(area, int) and area > 0:
            made |= {"size": round(math.sqrt(area)), "buckets": True}
        elif isinstance(side, (int, list)):
            made["size"] = side
        elif ".SizeBucket" not in str(bucket.get("_target_")):
            notes.append(f"data.{name}.bucket is not converted: write the size of the images (data.size)")
    if any(entry.get("prompt_template") or entry.get("word_names") or entry.get("text_transforms") for entry in sources):
        notes.append(
            "prompt templates, their text_transforms and learned words are not converted: captions must be beside the images "
            "(data.captions)"
        )
    if any(entry.get("caption_file") for entry in sources):
        notes.append("caption_file: write the captions beside the images, or a metadata.jsonl")
    if len(kept) > 1:
        others = ", ".join(other for other in kept if other != name)
        notes.append(f"data has several sets, and only {name} is converted: left out {others}, and the loss_weight of each")
    return made


def _number(value: Any) -> Any:
    """Convert text to a number, as YAML 1.1 reads `1e-3` as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value

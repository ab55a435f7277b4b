"""ZhiJian's configuration files (`addins:`, `reuse_keys:`) as a configuration of fxplug."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import SpecError
from ...core.spec.yaml_source import Source, quote_yaml, read_yaml
from ..configuration import PLACEHOLDER, Conversion, build_on_meta, dump_configuration, make_model_sections
from .imports import import_class
from .line import parse
from .lists import AddinEntry, read_entry
from .reuse import ADDIN, model_config, reuse_keys

if TYPE_CHECKING:
    from torch import nn

MODULES = "zhijian.models.addin.module"
# ZhiJian's settings of a run: what a configuration calls them, and what they are on its command line
TRAINING = {"max_epoch": ("epochs", 30), "batch_size": ("batch", 128), "lr": ("lr", 0.01), "wd": ("weight_decay", 1e-5)}
FIXED = {"task": "classify", "mode": "eval"}
COURSE = {"optimizer": "adam", "mom": 0.9, "lr_scheduler": "cosine", "eta_min": 0, "step_size": None, "gamma": None}
READ = ("addins", "config_blitz", "reuse_keys", "reuse_keys_blitz")


def convert(file: str | Path, *, model: str | None = None, out: str | Path | None = None) -> Conversion:
    """Convert a configuration of ZhiJian to one of fxplug: its add-ins are a `blitz` pass, its `reuse_keys` are `trainable`.

    `model` is the value of `model:` in a configuration, or a configuration of fxplug (.yaml) whose model is used; with it the
    add-ins' `model_config` is read off the model. Imports the add-ins' modules, from `zhijian/models/addin/module` below a
    folder of PYTHONPATH. `out` is the file for the text. Raises SpecError.
    """
    source = read_yaml(Path(file))
    if not isinstance(source.data, Mapping) or not any(key in source.data for key in READ):
        raise source.error(f"has none of {', '.join(READ)}, so there is nothing to convert")
    notes: list[str] = []
    folder = Path(out).parent if out else Path.cwd()
    head = {key: value for key, value in make_model_sections(model, folder).items() if key != "train"}
    built = build_on_meta(head, folder) if model else None
    named, lines = _lines(source)
    used: set[str] = set(READ)
    addins = {}
    for name in named:
        with source.inside("addins"):
            addins[name] = _addin(name, source.data, built, used)
    trainable, trains = _trainable(source, built, notes)
    entry = {"line": lines, "addin": addins, **({} if trains else {"train": False})}
    run = {name: source.data.get(key, default) for key, (name, default) in TRAINING.items()}
    course = {key: source.data.get(key, default) for key, default in COURSE.items()}
    with source.inside():
        chosen = {"optimizer": _optimizer(course), "scheduler": _scheduler(course)}
    train = {**FIXED, **chosen, **run, "trainable": trainable}
    config = {**head, "passes": [{"blitz": entry}] if lines else [], "train": train}
    used.update(TRAINING, COURSE)
    left = [str(key) for key in source.data if key not in used]
    if left:
        notes.append(f"left out, because no add-in reads it: {', '.join(left)}")
    if model is None and lines:
        notes.append(f"{PLACEHOLDER} marks a value that depends on the model: convert with --model, or write it")
    comments = [f"{Path(file).name} of ZhiJian, by `fxplug convert zhijian`.", *(f"Note: {note}" for note in notes)]
    return Conversion(dump_configuration(comments, config, (Mapping,)), notes)


def _optimizer(course: Mapping[str, Any]) -> Any:
    """Return the optimizer that ZhiJian makes of its settings."""
    name = course["optimizer"]
    if name not in ("adam", "adamw", "sgd"):
        raise SpecError(f"ZhiJian has no optimizer {quote_yaml(name)}; it has adam, adamw, sgd", path=("optimizer",))
    return {"sgd": {"momentum": course["mom"], "nesterov": True}} if name == "sgd" else name


def _scheduler(course: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler that ZhiJian makes of its settings, which it steps once an epoch."""
    name, gamma, size = course["lr_scheduler"], course["gamma"], course["step_size"]
    if name == "cosine":
        floor = course["eta_min"]
        return {"CosineAnnealingLR": {"per": "epoch", "eta_min": floor}} if floor else {"cosine": {"per": "epoch"}}
    if name not in ("step", "multistep"):
        why = "is stepped without a loss there, which torch refuses" if name == "plateau" else "is not a scheduler of ZhiJian's"
        raise SpecError(f"{quote_yaml(name)} {why}: use cosine, step or multistep", path=("lr_scheduler",))
    try:
        steps = (
            {"milestones": [int(part) for part in str(size).split(",")]} if name == "multistep" else {"step_size": int(size)}
        )
    except (TypeError, ValueError):
        wanted = "a number of epochs" if name == "step" else "epochs with commas between them"
        raise SpecError(f"must be {wanted}, not {quote_yaml(size)}", path=("step_size",)) from None
    if not isinstance(gamma, (int, float)):
        raise SpecError(f"must be a number, not {quote_yaml(gamma)}", path=("gamma",))
    return {"StepLR" if name == "step" else "MultiStepLR": {"per": "epoch", **steps, "gamma": gamma}}


def _lines(source: Source) -> tuple[list[str], list[Any]]:
    """Return the classes of the add-ins, and the entries and lines as written in the file."""
    addins, text = source.data.get("addins") or [], source.data.get("config_blitz")
    if not isinstance(addins, list) or not all(isinstance(entry, Mapping) for entry in addins):
        raise source.error(f"must be a list of add-ins, not {quote_yaml(addins)}", "addins")
    entries: list[AddinEntry] = []
    for index, given in enumerate(addins):
        with source.inside("addins", index):
            entries.append(read_entry(given, ()))
    read = parse(text) if text and not entries else []
    names = dict.fromkeys([*(entry.addin for entry in entries), *(line.addin for line in read)])
    return list(names), [*map(dict, addins), *(line.text for line in read)]


def _addin(name: str, settings: Mapping[str, Any], model: nn.Module | None, used: set[str]) -> dict[str, Any]:
    """Return the class of an add-in with its options: the defaults of its module's parser, and the values in the file."""
    module = f"{MODULES}.{name.lower()}"
    import_class(f"{module}:{name}")
    parser = argparse.ArgumentParser()
    with contextlib.suppress(SpecError):  # it has no settings
        import_class(f"{module}:prepare_specific_addin_parser")(parser)
    config = vars(parser.parse_args([]))
    config.update({key: settings[key] for key in config if key in settings})
    used.update(config)
    found = PLACEHOLDER if model is None else model_config(model)
    return {"use": f"{module}:{name}", "options": {"config": config, "model_config": found}}


def _trainable(source: Source, model: nn.Module | None, notes: list[str]) -> tuple[list[str], bool]:
    """Return the patterns of base parameters that train, and whether the add-ins do."""
    listed, text = source.data.get("reuse_keys"), source.data.get("reuse_keys_blitz")
    keys: list[Any] | None = [*(listed or [])] if listed is not None or text else None
    if keys is None:
        return ["**"], True
    with source.inside("reuse_keys"):
        found = reuse_keys(keys, model) if keys else []
    words = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    found += reuse_keys(text, model) if words else []
    if not keys and not words:
        notes.append("reuse_keys is empty, which freezes everything in ZhiJian")
    elif model is None:
        notes.append("remove names of modules without parameters from trainable (fc_norm where it is Identity)")
    return found, ADDIN in keys or [ADDIN] in keys or ADDIN in words

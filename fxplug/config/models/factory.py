"""A configuration to a model with its weights, and the example inputs it is traced with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import FxplugError, SpecError, did_you_mean
from ...core.extensions import need_hook
from ...core.reading import read_json
from ...core.spec.pass_file import check_known, get_arguments, import_target
from ..model_section import CHECKPOINTS, ModelSpec, WeightsSpec
from ..run_config import Config
from .state_dict import State, _assign, _on_meta, load_weights, read_weights

# what makes a model where it is called, on meta for one; what it needs of its library is imported before that, which on meta
# takes a third longer
Make = Callable[[], nn.Module]


def build(config: Config, *, device: str | None = None) -> nn.Module:
    """Build the model of a configuration with its weights, on its device, in its dtype and mode.

    `device` overrides the configuration's. On `meta` nothing takes memory: of weight files only names and shapes are read, and
    they must fit all the same. Raises SpecError for an unknown name, options that the model refuses, and weights that do not
    fit.
    """
    with config.located():
        return _build(config, device)


def _build(config: Config, device: str | None) -> nn.Module:
    if config.model.kind == "pipeline":
        module: nn.Module = need_hook("pipeline_model", "pipelines")(config, device=device).module
        return module
    target = find_device(config, device)
    on = torch.device("meta") if target.type == "meta" else torch.device("cpu")
    try:
        make = {"timm": _timm, "diffusers": _diffusers, "call": _call}[config.model.kind](config)
        with on, _without_draws(config):
            model = make()
    except FxplugError:
        raise
    except Exception as error:  # the model's constructor, anybody's
        finding = f"{_name(config.model)} cannot be built: {type(error).__name__}: {error}"
        raise SpecError(finding, path=("model",)) from error
    if not isinstance(model, nn.Module):
        raise SpecError(f"{_name(config.model)} gave a {type(model).__name__}, not an nn.Module", path=("model",))
    if config.weights is not None:
        load_weights(model, config.weights, config.base)
    elif config.model.kind == "diffusers" and isinstance(config.model.target, str):
        _load_folder(model, config.base / config.model.target)
    if config.dtype is not None:
        model = model.to(getattr(torch, config.dtype))
    return model.to(target).train(config.mode == "train")


def _without_draws(config: Config) -> AbstractContextManager[None]:
    """Skip the weight initialisation of a model of diffusers, by its own context manager, if all weights come from files."""
    target = config.model.target
    own = isinstance(target, str) and (target.endswith(CHECKPOINTS) or (config.base / target).is_dir())
    if config.model.kind != "diffusers" or not (own or config.weights is not None):
        return nullcontext()
    from diffusers.models.modeling_utils import no_init_weights

    return no_init_weights()  # type: ignore[no-any-return]


def find_device(config: Config, device: str | None = None) -> torch.device:
    """Return the device of a run. Raises SpecError if there is no such device."""
    text = device or config.device
    where = config.where("device")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise SpecError(f"no device '{text}': write cpu, cuda, cuda:1 or meta, for "
                        "example", path=("device",), where=where) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"'{text}' is not available: this machine has "
                        f"{torch.cuda.device_count()} CUDA devices", path=("device",), where=where)
    return found


def _name(spec: ModelSpec) -> str:
    text = spec.target if isinstance(spec.target, str) else spec.target["_class_name"]
    options = ", ".join(f"{key}={value!r}" for key, value in spec.options.items())
    return f"{text}({options})" if options else text


def _library(spec: ModelSpec) -> Any:
    """Import the library of a model. Raises SpecError with the cause if that fails."""
    try:
        return importlib.import_module(spec.kind)
    except Exception as error:  # of whatever it imports itself
        cause = f"{type(error).__name__}: {str(error).strip() or 'without a text'}"
        what_to_do = f"repair it, or what it imports: pip install --force-reinstall {spec.kind}"
        finding = f"importing {spec.kind} failed: {cause}; {what_to_do}"
        raise SpecError(finding, path=("model",)) from error


def _timm(config: Config) -> Make:
    spec = config.model
    timm = _library(spec)
    name = str(spec.target)
    if not timm.is_model(name):
        finding = f"timm has no model '{name}'{did_you_mean(name.partition('.')[0], timm.list_models())}"
        raise SpecError(finding, path=("model",))
    return partial(timm.create_model, name, **spec.options)


def _call(config: Config) -> Make:
    spec = config.model

    def make() -> Any:
        made: Any = import_target(str(spec.target), config.where("model"))
        if not callable(made):
            raise SpecError(f"'{spec.target}' is not a function or class", path=("model", "call"))
        return made(**spec.options)

    return make


def _diffusers(config: Config) -> Make:
    """Return the factory of a diffusers model of the class in its configuration, with new weights."""
    spec, base = config.model, config.base
    diffusers = _library(spec)
    read = spec.target if isinstance(spec.target, dict) else _diffusers_config(base / spec.target, spec)
    name = str(read.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        known = [n for n in dir(diffusers) if n.endswith(("Model", "2D", "3D")) or "Autoencoder" in n]
        finding = f"diffusers has no model class '{name}'{did_you_mean(name, known)}"
        raise SpecError(finding, path=("model",))
    given = [*spec.options, *(key for key in read if isinstance(spec.target, dict) and not key.startswith("_"))]
    check_known(given, get_arguments(kind).names, f"{name} has no option", path=("model",))
    return partial(kind.from_config, {**read, **spec.options})  # type: ignore[attr-defined]


def _diffusers_config(path: Path, spec: ModelSpec) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if file.name.endswith(CHECKPOINTS):
        file = _cached_config(file, spec)
    if not file.is_file():
        parts = sorted(p.parent.name for p in path.glob("*/config.json"))
        either = f"name one of its models, {', '.join(parts)}, or write '{{pipeline: {spec.target}}}'"
        hint = f": it is the folder of a pipeline; {either}" if parts else ""
        raise SpecError(f"'{spec.target}' has no config.json{hint}", path=("model",))
    read = read_json(file, lambda finding: SpecError(f"'{file}' {finding}", path=("model",)))
    if not isinstance(read, dict) or "_class_name" not in read:
        raise SpecError(f"'{file}' has no '_class_name', which says which diffusers class it configures", path=("model",))
    return read


def _cached_config(file: Path, spec: ModelSpec) -> Path:
    """Return the configuration of a checkpoint's denoiser, as diffusers identifies it, from the hub's cache. Raises
    SpecError."""
    from diffusers.loaders.single_file_utils import fetch_diffusers_config
    from huggingface_hub import try_to_load_from_cache

    try:
        state = read_weights(file, meta=True)
    except SpecError as error:
        raise SpecError(error.finding, path=("model",)) from error
    known = fetch_diffusers_config(state)
    repo, is_one = known["pretrained_model_name_or_path"], True
    if "stable-diffusion-v1" in repo:  # what diffusers takes any other file for
        is_one = any(key.startswith("model.diffusion_model.input_blocks.") for key in state)
    parts = [part for part in (known.get("subfolder"), "transformer", "unet") if part]
    for part in parts if is_one else ():
        if isinstance(found := try_to_load_from_cache(repo, f"{part}/config.json"), str):
            return Path(found)
    which = f" (it looks like one of {repo}, which is not in the hub's cache here)" if is_one else ""
    finding = (
        f"'{spec.target}' is a file of weights without the model's configuration beside it{which}: give the model's "
        "config.json or its folder as 'model', and this file as 'weights'"
    )
    raise SpecError(finding, path=("model",))


def _load_folder(model: nn.Module, folder: Path) -> None:
    """Load the weights in a diffusers folder or checkpoint; none for a .json alone."""
    if folder.name.endswith(CHECKPOINTS) and folder.is_file():
        load_weights(model, WeightsSpec(file=folder.name), folder.parent, part="model")
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    whole = [f for f in files if f.stem == "diffusion_pytorch_model"] or [f for f in files if "-of-" in f.stem] or files
    shards = {f.stem.partition("-0")[0] for f in whole}
    if not whole:
        finding = (
            f"no .safetensors file in '{folder.name}': give 'weights', or give its config.json as 'model' to start from new "
            "weights"
        )
        raise SpecError(finding, path=("model",))
    if len(shards) > 1:
        finding = f"several files of weights in '{folder.name}': {', '.join(f.name for f in whole)}; name one in 'weights'"
        raise SpecError(finding, path=("model",))
    state: State = {}
    for file in whole:
        state.update(read_weights(file, _on_meta(model)))
    _assign(model, state, f"'{folder.name}'")

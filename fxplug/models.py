"""A configuration to a model with its weights, and the example inputs it is traced with."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import onnxfiles, weightfiles
from .config import Config, resolved
from .errors import FxplugError, SpecError, did_you_mean, nearest
from .limits import DEFAULT, Limits
from .module import TracedModule
from .paths import select
from .reading import read_json
from .sections import SUFFIXES, InputSpec, ModelSpec, TensorSpec, Value, WeightsSpec
from .spec import import_target

SHOWN = 4  # so many keys of each kind are listed when weights do not fit
WRAPPERS = ("state_dict", "model")  # a checkpoint often has its weights under one of these, beside other things
State = dict[str, torch.Tensor]


def build(config: Config, *, device: str | None = None) -> nn.Module:
    """The model of a configuration with its weights, on its device, in its dtype and mode.

    `device` takes the place of the configuration's. On `meta` nothing takes memory: of weight files only names
    and shapes are read, and they must fit all the same. Raises SpecError for an unknown name, options that the
    model refuses, and weights that do not fit.
    """
    spec = config.model
    target = torch_device(config, device)
    on = torch.device("meta") if target.type == "meta" else torch.device("cpu")
    try:
        with on:
            model = {"timm": _timm, "diffusers": _diffusers, "call": _call}[spec.kind](spec, config.base)
    except FxplugError:
        raise
    except Exception as error:  # the model's constructor, anybody's
        finding = f"{_name(spec)} cannot be made: {type(error).__name__}: {error}"
        raise SpecError(finding, path=("model",), where=spec.where) from error
    if not isinstance(model, nn.Module):
        raise SpecError(f"{_name(spec)} gave a {type(model).__name__}, no nn.Module", path=("model",), where=spec.where)
    if spec.kind == "diffusers" and isinstance(spec.target, str):
        _load_folder(model, config.base / spec.target, config)
    if config.weights is not None:
        load_weights(model, config.weights)
    if config.dtype is not None:
        model = model.to(getattr(torch, config.dtype))
    return model.to(target).train(config.mode == "train")


def torch_device(config: Config, device: str | None = None) -> torch.device:
    """The device of a run. SpecError when there is no such device here."""
    text = device or config.device
    where = config.where("device")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise SpecError(f"no device '{text}'; cpu, cuda, cuda:1 or meta, for example", path=("device",), where=where) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"'{text}' is not here: {torch.cuda.device_count()} CUDA devices", path=("device",), where=where)
    return found


def _name(spec: ModelSpec) -> str:
    text = spec.target if isinstance(spec.target, str) else spec.target["_class_name"]
    options = ", ".join(f"{key}={value!r}" for key, value in spec.options.items())
    return f"{text}({options})" if options else text


def _timm(spec: ModelSpec, base: Path) -> nn.Module:
    import timm

    name = str(spec.target)
    if not timm.is_model(name):
        finding = f"timm has no model '{name}'{did_you_mean(name.partition('.')[0], timm.list_models())}"
        raise SpecError(finding, path=("model",), where=spec.where)
    model: nn.Module = timm.create_model(name, **spec.options)
    return model


def _call(spec: ModelSpec, base: Path) -> Any:
    made: Any = import_target(str(spec.target), spec.where)
    if not callable(made):
        raise SpecError(f"'{spec.target}' is not a function or class", path=("model", "call"), where=spec.where)
    return made(**spec.options)


def _diffusers(spec: ModelSpec, base: Path) -> nn.Module:
    """A diffusers model of the class that its configuration names, with new weights."""
    import diffusers

    read = spec.target if isinstance(spec.target, dict) else _diffusers_config(base / spec.target, spec)
    name = str(read.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        known = [n for n in dir(diffusers) if n.endswith(("Model", "2D", "3D")) or "Autoencoder" in n]
        finding = f"diffusers has no model class '{name}'{did_you_mean(name, known)}"
        raise SpecError(finding, path=("model",), where=spec.where)
    known = [n for n in inspect.signature(kind).parameters if n != "kwargs"]
    given = [*spec.options, *(key for key in read if isinstance(spec.target, dict) and not key.startswith("_"))]
    for key in given:
        if key not in known:
            finding = f"{name} has no option '{key}'{did_you_mean(key, known)}"
            raise SpecError(finding, path=("model",), where=spec.where)
    model: nn.Module = kind.from_config({**read, **spec.options})  # type: ignore[attr-defined]
    return model


def _diffusers_config(path: Path, spec: ModelSpec) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        parts = sorted(p.parent.name for p in path.glob("*/config.json"))
        hint = f"; a pipeline's folder: name one of its models, {', '.join(parts)}" if parts else ""
        raise SpecError(f"'{spec.target}' has no config.json{hint}", path=("model",), where=spec.where)
    read = read_json(file, lambda finding: SpecError(f"'{file}' {finding}", path=("model",), where=spec.where))
    if not isinstance(read, dict) or "_class_name" not in read:
        raise SpecError(f"'{file}' names no '_class_name'", path=("model",), where=spec.where)
    return read


def _load_folder(model: nn.Module, folder: Path, config: Config) -> None:
    """The weights that lie in a diffusers folder; none when the configuration gives others, or on a bare .json."""
    if config.weights is not None or not folder.is_dir():
        return
    where = config.model.where
    files = sorted(folder.glob("*.safetensors"))
    whole = [f for f in files if f.stem == "diffusion_pytorch_model"] or [f for f in files if "-of-" in f.stem] or files
    shards = {f.stem.partition("-0")[0] for f in whole}
    if not whole:
        finding = f"no .safetensors in '{folder.name}'; give 'weights', or its config.json as the model for new weights"
        raise SpecError(finding, path=("model",), where=where)
    if len(shards) > 1:
        finding = f"several weights in '{folder.name}': {', '.join(f.name for f in whole)}; name one in 'weights'"
        raise SpecError(finding, path=("model",), where=where)
    state: State = {}
    for file in whole:
        state.update(read_weights(file, _on_meta(model)))
    _assign(model, state, f"'{folder.name}'", WeightsSpec(where=where))


# --- weights


def load_weights(model: nn.Module, spec: WeightsSpec) -> None:
    """Read a weight file into a model. SpecError, with the first keys and shapes, when the two do not fit."""
    file = spec.find()
    try:
        state = read_weights(file, _on_meta(model))
    except SpecError as error:
        raise SpecError(error.finding, path=("weights",), where=spec.where) from error
    state = _without_ignored(state, spec)
    if spec.order:
        state = _in_order(model, state, file.name, spec)
    elif spec.keys:
        state = _renamed(model, state, spec)
    _assign(model, state, f"'{file.name}'", spec)


def read_weights(file: Path, meta: bool = False, limits: Limits = DEFAULT) -> State:
    """The tensors of a file by name: safetensors, a pickle that holds nothing but weights, or ONNX.

    With `meta` they are meta tensors of the same shapes. Nothing in the file is run, and it is read within `limits`. Raises
    SpecError.
    """
    def raises(finding: str) -> SpecError:
        return SpecError(f"'{file.name}' {finding}")

    if file.suffix == ".onnx":
        return onnxfiles.read(file, raises, meta=meta, limits=limits)
    if file.suffix not in SUFFIXES:
        raise raises(f"is none of {', '.join(SUFFIXES)}")
    return _unwrapped(weightfiles.read(file, raises=raises, meta=meta, limits=limits)[0], file.name)


def _unwrapped(read: Any, name: str) -> State:
    """The mapping of names to tensors inside a checkpoint, without the `module.` of a parallel run."""
    for key in WRAPPERS:
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            read = read[key]
    if not isinstance(read, Mapping):
        raise SpecError(f"'{name}' holds a {type(read).__name__}, not tensors by name")
    other = [f"{key} ({type(value).__name__})" for key, value in read.items() if not isinstance(value, torch.Tensor)]
    if other or not read:
        found = f", but {', '.join(other[:SHOWN])}" if other else ": it is empty"
        raise SpecError(f"'{name}' does not hold tensors by name only{found}")
    prefix = "module." if all(str(key).startswith("module.") for key in read) else ""
    return {str(key).removeprefix(prefix): value for key, value in read.items()}


def _without_ignored(state: State, spec: WeightsSpec) -> State:
    for pattern in spec.ignore:
        dropped = select(pattern, state)
        if not dropped:
            hint = did_you_mean(pattern, state)
            raise SpecError(f"'{pattern}' is no key of the file{hint}", path=("weights", "ignore"), where=spec.where)
        state = {key: value for key, value in state.items() if key not in dropped}
    return state


def _in_order(model: nn.Module, state: State, name: str, spec: WeightsSpec) -> State:
    """The tensors of a file under the model's keys, one after the other; all shapes must agree."""
    wanted = model.state_dict()
    for index, (ours, theirs) in enumerate(itertools.zip_longest(wanted, state)):
        if ours is None or theirs is None or wanted[ours].shape != state[theirs].shape:
            finding = (
                f"'{name}' has not the model's tensors in their order ({len(state)} there, {len(wanted)} here); the "
                f"first to differ is number {index}: {_with_shape(theirs, state)} there, {_with_shape(ours, wanted)} here"
            )
            raise SpecError(finding, path=("weights", "order"), where=spec.where)
    return dict(zip(wanted, state.values(), strict=True))


def _with_shape(key: str | None, state: Mapping[str, torch.Tensor]) -> str:
    return "none" if key is None else f"{key} {list(state[key].shape)}"


def _renamed(model: nn.Module, state: State, spec: WeightsSpec) -> State:
    """The file's tensors under the keys that `keys` gives them; tensors of a list are joined."""
    wanted = model.state_dict()
    out: State = {}
    used: set[str] = set()
    for pattern, names in spec.keys.items():
        matched = select(pattern, wanted)
        if not matched:
            hint = did_you_mean(pattern, wanted)
            raise SpecError(f"'{pattern}' is no key of the model{hint}", path=("weights", "keys"), where=spec.where)
        for key, caught in matched.items():
            parts = [_filled(name, caught) for name in ([names] if isinstance(names, str) else names)]
            for part in parts:
                if part not in state:
                    finding = f"'{part}', wanted for '{key}', is no key of the file{did_you_mean(part, state)}"
                    raise SpecError(finding, path=("weights", "keys"), where=spec.where)
            used.update(parts)
            out[key] = _joined(key, [state[part] for part in parts], wanted[key], spec)
    return {**out, **{key: value for key, value in state.items() if key not in used}}


def _filled(text: str, caught: Mapping[str, str]) -> str:
    for name, value in caught.items():
        text = text.replace("{" + name + "}", value)
    return text


def _joined(key: str, parts: list[torch.Tensor], like: torch.Tensor, spec: WeightsSpec) -> torch.Tensor:
    """The parts put together along the one dimension in which they give the shape that the model has."""
    if len(parts) == 1:
        return parts[0]
    shapes = [list(part.shape) for part in parts]
    for dim in range(like.dim()):
        same = all(part.dim() == like.dim() for part in parts)
        rest = [[n for d, n in enumerate(shape) if d != dim] for shape in (*shapes, list(like.shape))]
        if same and all(r == rest[0] for r in rest) and sum(s[dim] for s in shapes) == like.shape[dim]:
            return torch.cat(parts, dim)
    finding = f"tensors of {', '.join(map(str, shapes))} cannot be joined to the {list(like.shape)} of '{key}'"
    raise SpecError(finding, path=("weights", "keys"), where=spec.where)


def _assign(model: nn.Module, state: State, name: str, spec: WeightsSpec) -> None:
    """Copy a state into the model; every key must have its home and every home its key."""
    wanted = model.state_dict(keep_vars=True)
    present = {id(wanted[key]) for key in state if key in wanted}  # of tied weights a file may hold one
    missing = [k for k in wanted if k not in state and id(wanted[k]) not in present and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in wanted]
    wrong = [k for k in state if k in wanted and state[k].shape != wanted[k].shape]
    if missing or unexpected or wrong:
        counts = f"{len(missing)} keys missing, {len(unexpected)} unexpected, {len(wrong)} of another shape"
        lines = [f"{name} does not fit {type(model).__name__}: {counts}"]
        lines += _listed("missing", missing, wanted, "there is", unexpected, state)
        lines += _listed("unexpected", unexpected, state, "wanted is", missing, wanted)
        lines += [f"  another shape: {_with_shape(k, state)}, the model has {list(wanted[k].shape)}" for k in wrong[:SHOWN]]
        raise SpecError("\n".join(lines), path=("weights",), where=spec.where)
    model.load_state_dict(state, strict=False)


def _listed(
    what: str, keys: list[str], own: Mapping[str, torch.Tensor], near: str, pool: list[str], others: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    for key in keys[:SHOWN]:
        hit = nearest(key, pool)
        hint = f" ({near} {_with_shape(hit, others)})" if hit else ""
        yield f"  {what}: {_with_shape(key, own)}{hint}"
    if len(keys) > SHOWN:
        yield f"  {what}: ... {len(keys) - SHOWN} more"


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


# --- example inputs


def example_inputs(
    config: Config, model: nn.Module, *, device: str | None = None, later: Collection[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for one call of the model, as `inputs` says; random numbers come from the run's seed.

    Without `inputs` a timm model gets an image of the size it was made for; another model's parameters are named
    in the SpecError. `later` names inputs that passes will add: they are left out.
    """
    parameters = inspect.signature(model.forward).parameters
    given = {name: spec for name, spec in config.inputs.items() if name not in later or name in parameters}
    specs = given or _default_inputs(config, model)
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in specs:
        if name not in parameters and not free:
            hint = f"{did_you_mean(name, parameters)}; it takes {', '.join(parameters)}"
            finding = f"{type(model).__name__} takes no input '{name}'{hint}"
            raise SpecError(finding, path=("inputs",), where=config.where("inputs", name))
    for name, parameter in parameters.items():
        if _is_required(parameter) and name not in specs:
            finding = _wanted_inputs(f"misses the input '{name}'", model)
            raise SpecError(finding, path=("inputs",), where=config.where("inputs"))
    kwargs = _Filler(config, torch_device(config, device)).mapping(specs)
    return (), kwargs


def added_inputs(config: Config, module: TracedModule, *, device: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example values for the inputs that passes added, and what `inputs` would say to have them.

    Each is as `inputs` says, else random, of the shape it was given in the graph; one with a default is left to that.
    """
    said: dict[str, Any] = {}
    specs: dict[str, InputSpec] = {}
    for node in (n for n in module.graph.nodes if n.op == "placeholder" and "pass" in n.meta):
        name = str(node.target)
        if name in config.inputs:
            specs[name] = config.inputs[name]
        elif node.args[0] is None and "shape" in node.meta:
            shape, dtype = node.meta["shape"], str(node.meta["dtype"]).removeprefix("torch.")
            said[name] = {"shape": list(shape), "dtype": dtype}
            specs[name] = TensorSpec(tuple(shape), dtype)
    return _Filler(config, torch_device(config, device)).mapping(specs), said


def default_inputs(config: Config, model: nn.Module) -> dict[str, Any]:
    """The `inputs` section as it could have been written: what is there, or the image of a timm model."""
    if config.inputs:
        given: dict[str, Any] = resolved(config)["inputs"]
        return given
    return {name: list(spec.shape) for name, spec in _default_inputs(config, model).items()}


def _default_inputs(config: Config, model: nn.Module) -> dict[str, TensorSpec]:
    if config.model.kind != "timm":
        raise SpecError(_wanted_inputs("needs example inputs", model), path=("inputs",), where=config.where("model"))
    options = config.model.options
    shape = list(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    shape[0] = options.get("in_chans", shape[0])
    size = options.get("img_size", shape[1:])
    shape[1:] = [size, size] if isinstance(size, int) else size
    name = next(iter(inspect.signature(model.forward).parameters))
    batch = 2 if config.mode == "train" else 1  # batch normalisation in training needs two
    return {name: TensorSpec((batch, *shape))}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def _wanted_inputs(finding: str, model: nn.Module) -> str:
    """What the forward of a model takes, and how that is written."""
    parameters = inspect.signature(model.forward).parameters.values()
    lines = [f"    {p.name}: [1, 3, 64, 64]" for p in parameters if _is_required(p)]
    takes = ", ".join(str(p).partition(":")[0].partition(" =")[0] for p in parameters)
    return (
        f"{type(model).__name__} {finding}: a shape for each tensor\n  forward({takes})\n  for example\n  inputs:\n"
        + "\n".join(lines)
        + "\n  whole numbers: {shape: [1, 77], dtype: int64, high: 1000}"
    )


class _Filler:
    """Turns input specs into tensors on a device; the same seed gives the same numbers."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.dtype = getattr(torch, config.dtype or "float32")
        self.generator = torch.Generator().manual_seed(config.seed)

    def mapping(self, specs: Mapping[str, InputSpec]) -> dict[str, Any]:
        return {name: self.value(spec) for name, spec in specs.items()}

    def value(self, spec: InputSpec) -> Any:
        if isinstance(spec, TensorSpec):
            return self.tensor(spec)
        if isinstance(spec, Value):
            return spec.value
        if isinstance(spec, Mapping):
            return self.mapping(spec)
        return [self.value(item) for item in spec]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype) if spec.dtype else self.dtype
        if self.device.type == "meta":
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        numbers = not (dtype.is_floating_point or dtype.is_complex) or spec.low is not None or spec.high is not None
        if spec.fill is not None:
            made = torch.full(spec.shape, spec.fill, dtype=dtype)
        elif numbers:  # without a bound 0 and 1, which are in range wherever indices are meant
            low = spec.low or 0
            high = spec.high if spec.high is not None else low + 2
            made = torch.randint(low, high, spec.shape, generator=self.generator).to(dtype)
        else:
            made = torch.randn(spec.shape, generator=self.generator, dtype=torch.float32).to(dtype)
        return made.to(self.device)

"""The example inputs that a model is traced with: those that a configuration says, or those that follow from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import SpecError
from ...core.extensions import need_hook
from ...core.ir.traced_module import TracedModule
from ...core.spec.pass_file import check_known, get_arguments
from ..model_section import Constant, InputSpec, Tensor
from ..run_config import Config, resolve
from .built_model import BuiltModel, describe_inputs
from .factory import build, find_device


def build_with_inputs(config: Config, *, device: str | None = None, later: Collection[str] = ()) -> BuiltModel:
    """Build the model of a configuration and an example call of it, with `device` and `later` as in `make_inputs`.

    The call of a model in a pipeline is the first that the pipeline makes, with `inputs` in the places of what they name.
    """
    if config.model.kind == "pipeline":
        with config.located():
            built: BuiltModel = need_hook("pipeline_model", "pipelines")(config, device=device)
        named = {name: spec for name, spec in config.inputs.items() if name not in later}
        for one in (built, *built.beside.values()) if named else ():
            bound = inspect.signature(one.module.forward).bind(*one.inputs[0], **one.inputs[1])
            _check_names(config, one.module, named)
            bound.arguments.update(_Filler(config, find_device(config)).mapping(named))
            one.inputs = bound.args, bound.kwargs
        return built
    model = build(config, device=device)
    return BuiltModel(model, make_inputs(config, model, device=device, later=later))


def make_inputs(
    config: Config, model: nn.Module, *, device: str | None = None, later: Collection[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for one call of the model, from `inputs`; random numbers come from the run's seed.

    Without `inputs` a timm model gets an image of the size it was made for; another model's parameters are named in the
    SpecError. `later` names inputs that passes will add: they are left out.
    """
    found = get_arguments(model.forward)
    given = {name: spec for name, spec in config.inputs.items() if name not in later or name in found.names}
    specs = given or _default_inputs(config, model)
    _check_names(config, model, specs)
    for name in found.required:
        if name not in specs:
            finding = _wanted_inputs(f"misses the input '{name}'", model)
            raise SpecError(finding, path=("inputs",), where=config.where("inputs"))
    kwargs = _Filler(config, find_device(config, device)).mapping(specs)
    return (), kwargs


def _check_names(config: Config, model: nn.Module, names: Iterable[str]) -> None:
    """Raise SpecError for an input that the model does not take."""
    found = get_arguments(model.forward)
    for name in () if found.free else names:
        says, where = f"{type(model).__name__} takes no input", config.where("inputs", name)
        check_known([name], found.names, says, path=("inputs",), where=where)


def make_added_inputs(
    config: Config, module: TracedModule, *, device: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example values for the inputs that passes added, and their `inputs` section.

    Each is as `inputs` says, else random, of its shape in the graph; one with a default is left out.
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
            specs[name] = Tensor(shape=tuple(shape), dtype=dtype)  # type: ignore[arg-type]
    return _Filler(config, find_device(config, device)).mapping(specs), said


def fill_inputs(config: Config, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Return the `inputs` section in full: as written, or the image of a timm model, or what a pipeline's call gave."""
    if config.model.kind == "pipeline":
        return describe_inputs(model, *call)
    if config.inputs:
        given: dict[str, Any] = resolve(config)["inputs"]
        return given
    return {name: list(spec.shape) for name, spec in _default_inputs(config, model).items()}


def _default_inputs(config: Config, model: nn.Module) -> dict[str, Tensor]:
    if config.model.kind != "timm":
        raise SpecError(_wanted_inputs("needs example inputs: a shape "
                                       "for each tensor", model), path=("inputs",), where=config.where("model"))
    options = config.model.options
    shape = list(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    shape[0] = options.get("in_chans", shape[0])
    size = options.get("img_size", shape[1:])
    shape[1:] = [size, size] if isinstance(size, int) else size
    name = get_arguments(model.forward).names[0]
    batch = 2 if config.mode == "train" else 1  # batch normalisation in training needs two
    return {name: Tensor(shape=(batch, *shape))}


def _wanted_inputs(finding: str, model: nn.Module) -> str:
    """Return the message that lists the forward's parameters, and an example of `inputs`."""
    parameters = inspect.signature(model.forward).parameters.values()
    lines = [f"    {p.name}: [1, 3, 64, 64]" for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    takes = ", ".join(str(p).partition(":")[0].partition(" =")[0] for p in parameters)
    return (
        f"{type(model).__name__} {finding}: give a shape for each tensor\n  forward({takes})\n  for example\n  inputs:\n"
        + "\n".join(lines)
        + "\n  whole numbers: {shape: [1, 77], dtype: int64, high: 1000}"
    )


class _Filler:
    """Turns input specs into tensors on a device; the same seed gives the same numbers."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype = getattr(torch, config.dtype or "float32")
        self.generator = torch.Generator().manual_seed(config.seed)

    def mapping(self, specs: Mapping[str, InputSpec]) -> dict[str, Any]:
        """Return the value of each input. Raises SpecError for one that torch cannot make, such as a size beyond 64 bits."""
        made = {}
        for name, spec in specs.items():
            try:
                made[name] = self.value(spec)
            except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
                says = (str(error).strip().splitlines() or [type(error).__name__])[0]
                where = self.config.where("inputs", name)
                raise SpecError(f"this input cannot be made: {says}", path=("inputs", name), where=where) from error
        return made

    def value(self, spec: InputSpec) -> Any:
        if isinstance(spec, Tensor):
            return self.tensor(spec)
        if isinstance(spec, Constant):
            return spec.value
        if isinstance(spec, Mapping):
            return {name: self.value(item) for name, item in spec.items()}
        return [self.value(item) for item in spec]

    def tensor(self, spec: Tensor) -> torch.Tensor:
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

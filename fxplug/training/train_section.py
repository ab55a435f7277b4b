"""What a configuration says about a training run: its sections `train` and `data`. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer, ValidationInfo, field_validator, model_validator

from ..config.sections import ConfigSection
from ..core.errors import SpecError, prefix_path
from ..core.spec.pass_file import check_known
from ..core.spec.yaml_source import (
    Section,
    Text,
    check_finite,
    convert_error,
    declare,
    make_validator,
    quote_yaml,
    validate,
)
from .task_section import (
    LONGEST_SIDE,
    SCHEDULES,
    TASKS,
    ClassifyOptions,
    DenoiseOptions,
    PipelineTextOptions,
    PromptOptions,
    ScheduleOptions,
    TextOptions,
)

Stop = Literal["stop", "continue"]
MOST_FRAMES = 10_000  # of a video
MOST_PIXELS = 2**28  # of an image: 3 GiB as floats of three colours


class Use(NamedTuple):
    """Something chosen by name or import path, with keyword arguments: `adamw`, or `{adamw: {betas: [0.9, 0.99]}}`."""

    name: str
    options: dict[str, Any]


def read_use(value: Any) -> Use:
    """Read a `Use` from text or from a mapping of one name to its options. Raises SpecError for anything else."""
    if isinstance(value, Use):
        return value
    if isinstance(value, str) and value:
        return Use(value, {})
    if not isinstance(value, Mapping) or len(value) != 1:
        found = f"{len(value)} keys" if isinstance(value, Mapping) else quote_yaml(value)
        raise SpecError(f"must be a name, or one name with its options below it, not {found}")
    ((name, options),) = value.items()
    if options is not None and not isinstance(options, Mapping):
        raise SpecError(f"must be a mapping of options, not {quote_yaml(options)}", path=(str(name),))
    return Use(str(name), dict(options or {}))


def format_use(use: Use | None) -> Any:
    """Return a `Use` in the form of a configuration."""
    return use and ({use.name: use.options} if use.options else use.name)


def _texts(value: Any) -> str | list[str]:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise SpecError(f"must be text or a list of text, not {quote_yaml(value)}")
    if not value or "" in value and isinstance(value, list):
        raise SpecError(f"must not be empty, nor have an empty text: {value!r}")
    return value


def _patterns(value: Any) -> bool | list[str]:
    if isinstance(value, bool):
        return value
    read = _texts(value)
    return [read] if isinstance(read, str) else list(read)


def _size(value: Any) -> int | tuple[int, int] | None:
    sides = value if isinstance(value, (list, tuple)) else [value]
    whole = all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= LONGEST_SIDE for side in sides)
    if value is not None and not (whole and len(sides) == (2 if isinstance(value, (list, tuple)) else 1)):
        raise SpecError(f"must be a side in pixels or [height, width], 1 to {LONGEST_SIDE} each, not {quote_yaml(value)}")
    if value is not None and (pixels := sides[0] * sides[-1]) > MOST_PIXELS:
        raise SpecError(f"must have at most {MOST_PIXELS} pixels, height times width, not {pixels}")
    return (sides[0], sides[1]) if isinstance(value, (list, tuple)) else value


def _cache(value: Any) -> str | Literal[False] | None:
    if not (value is None or value is False or (isinstance(value, str) and value)):
        raise SpecError(f"must be a folder, or false for none, not {quote_yaml(value)}")
    return value


def _colour(value: Any) -> tuple[int, int, int]:
    """Read a colour: a name of HTML's, `#rrggbb`, or [red, green, blue]. Raises SpecError."""
    from PIL import ImageColor

    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return ImageColor.getrgb(value)[:3]
    whole = isinstance(value, (list, tuple)) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not whole or len(value) != 3 or not all(0 <= v <= 255 for v in value):
        raise SpecError(f"must be a colour, such as white, '#ffffff' or [255, 255, 255], not {quote_yaml(value)}")
    return tuple(value)


One = Annotated[Use, make_validator(read_use, str | dict[str, Any]), PlainSerializer(format_use)]
Texts = Annotated[str | list[str], make_validator(_texts, str | list[str])]
Patterns = Annotated[bool | list[str], make_validator(_patterns, bool | str | list[str])]
Colour = Annotated[tuple[int, int, int], make_validator(_colour, str | list[int])]
Cache = Annotated[str | Literal[False] | None, make_validator(_cache, str | Literal[False] | None)]
Size = Annotated[int | tuple[int, int] | None, make_validator(_size, int | list[int] | None)]


class Save(Section):
    """Checkpoints: one every so many `every` steps (0: only at the end), of which the last `keep` stay."""

    every: int = declare(500, "steps between checkpoints; 0: only at the end", 100, ge=0)
    keep: int = declare(2, "how many checkpoints are kept", 3, ge=1)
    on_full_disk: Stop = declare("stop", "whether the run stops when a checkpoint does not fit on the disk", "continue")


class Log(Section):
    """TensorBoard events every so many steps, and sample grids (0: only at the end). log.jsonl has every step anyway."""

    every: int = declare(1, "steps between TensorBoard events; log.jsonl has every step", 10, ge=1)
    tensorboard: bool = declare(True, "whether there are TensorBoard events", False)
    samples: int = declare(0, "steps between pictures; 0: only at the end", 500, ge=0)


class Test(Section):
    """How many epochs apart the tests are (0: only at the end), after how many without a better result the run ends, and
    whether `module/` is what tested best."""

    every: int = declare(0, "epochs between tests; 0: only at the end", 1, ge=0)
    patience: int | None = declare(None, "the run ends after this many tests without a better result; null: never", 3, ge=1)
    best: bool = declare(
        False, "whether `module/` is the model of the best test, by the task's metric or the lowest loss", True
    )


class Parallel(Section):
    """How many processes share each sample: along its tokens by heads (Ulysses), and around a ring."""

    ulysses: int = declare(1, "processes that share a sample's tokens and its heads", 2, ge=1)
    ring: int = declare(1, "processes that pass keys and values around", 2, ge=1)


class GroupRates(Section):
    """The rates of the parameters that a pattern of `groups` names."""

    lr: float | None = declare(None, "their learning rate; null: as in their pass", 1e-3, ge=0)
    lr_ratio: float | None = declare(None, "their learning rate as a multiple of their pass's", 16.0, gt=0, le=1e6)
    weight_decay: float | None = declare(None, "their weight decay; null: as in their pass", 0.01, ge=0)

    @model_validator(mode="after")
    def _check_rates(self) -> GroupRates:
        given = [key for key in type(self).model_fields if getattr(self, key) is not None]
        if not given:
            raise convert_error(SpecError("has no effect: give 'lr', 'lr_ratio' or 'weight_decay'"))
        if self.lr is not None and self.lr_ratio is not None:
            raise convert_error(SpecError("give either 'lr' or 'lr_ratio', not both", path=("lr_ratio",)))
        return self


ADAPTER_NAME = r"^\w[\w .+-]*$"  # it is the name of a folder, too
NAME_BYTES = 128  # of an adapter's name in a slot
# what an adapter has that the section `train` has not
OF_ADAPTER = ("name", "data", "passes", "rank", "alpha", "dropout", "seed")


class TrainedAdapter(Section):
    """One of the adapters that a run trains at once: what it has of its own. What it does not say is that of the run."""

    name: str = declare(..., "its name; its folder is `adapter/NAME`", "ink", pattern=ADAPTER_NAME, max_length=64)
    data: str | dict[str, Any] | None = declare(
        None, "its samples: what differs from the section `data`, or the path alone", {"images": "ink/"}
    )
    passes: list[Text] | None = declare(None, "the passes that it trains, by name; null: all that train", ["ia3"])
    rank: int | None = declare(None, "its rank, at most the rank of the slots; null: as in the pass", 16, ge=1)
    alpha: float | None = declare(None, "its alpha; null: as in the pass", 8, gt=0)
    dropout: float | None = declare(None, "its dropout; null: as in the pass", 0.1, ge=0, lt=1)
    seed: int | None = declare(None, "the seed of its weights, samples and noise; null: the seed of the run", 1, ge=0)
    steps: int | None = declare(None, "how many steps; or `epochs`", 1000, ge=1)
    epochs: int | None = declare(None, "how often it uses all its samples; or `steps`", 10, ge=1)
    batch: int = declare(8, "its samples per micro-step", 2, ge=1)
    accumulate: int = declare(1, "its micro-steps per optimizer step", 4, ge=1)
    lr: float = declare(1e-4, "its learning rate", 3e-4, ge=0)
    weight_decay: float = declare(0.0, "its weight decay", 0.01, ge=0)
    groups: dict[Text, GroupRates] = declare({}, "rates of some of its parameters", {"**.up": {"lr_ratio": 16.0}})
    optimizer: One = declare(Use("adamw", {}), "its optimizer", {"sgd": {"momentum": 0.9}})
    scheduler: One | None = declare(None, "its schedule", {"cosine": {"warmup": 100}})
    clip: float | None = declare(None, "the largest norm of its gradient", 1.0, gt=0)
    ema: float | None = declare(None, "the decay of its averaged weights", 0.999, gt=0, lt=1)


class Train(Section):
    """The `train` section. `batch` is samples per process and micro step; `accumulate` micro steps are one step.

    With `parallel` the processes that share samples count as one.
    """

    task: One = declare(..., "`denoise`, `classify`, or your own `package.module:Class`, with options below it", "classify")
    steps: int | None = declare(None, "optimizer steps; or give `epochs`", 1000, ge=1)
    epochs: int | None = declare(None, "how often all samples are used; or give `steps`", 10, ge=1)
    batch: int = declare(8, "samples per process and micro-step", 16, ge=1)
    accumulate: int = declare(1, "micro-steps per optimizer step", 4, ge=1)
    lr: float = declare(1e-4, "the learning rate of passes without their own; 1 with `prodigy`", 3e-4, ge=0)
    weight_decay: float = declare(0.0, "the weight decay of passes without their own", 0.01, ge=0)
    groups: dict[Text, GroupRates] = declare(
        {}, "rates of the parameters that a pattern names; the last matching pattern counts", {"**.up": {"lr_ratio": 16.0}}
    )
    optimizer: One = declare(
        Use("adamw", {}),
        "a name in torch.optim, `adamw8bit`, `prodigy`, `schedule_free`, or an import path, with options",
        {"adamw": {"betas": [0.9, 0.99]}},
    )
    scheduler: One | None = declare(
        None,
        "`constant`, `linear`, `cosine`, a name in torch.optim.lr_scheduler, or an import path; null is constant",
        {"cosine": {"warmup": 100}},
    )
    clip: float | None = declare(None, "the largest norm of the gradient; null does not clip", 1.0, gt=0)
    precision: Literal["fp32", "fp16", "bf16"] = declare(
        "fp32",
        "`fp32` (a model in half precision keeps its dtype), `bf16`, or `fp16` with loss scaling; you train float32",
        "bf16",
    )
    fuse: Literal[True, False, "auto", "stock", "fused", "blas", "triton"] = declare(
        True,
        "computes a linear layer and its LoRA in one operation, in a form chosen by size or the named one; equal to rounding",
        "fused",
    )
    compile: Literal[True, False, "regions"] = declare(
        False, "`true` compiles the whole as one graph, `regions` each kind of repeated region once", "regions"
    )
    checkpointing: Patterns = declare(
        False, "repeated regions compute activations again in the backward pass; or patterns", ["blocks.*"]
    )
    blocks_to_swap: int = declare(
        0, "how many repeated regions keep frozen weights on the host until they compute", 12, ge=0
    )
    shard: Patterns = declare(False, "FSDP2 of repeated regions, or of those that these patterns match, base included", True)
    parallel: Parallel | None = declare(None, "how many processes share each sample", {"ulysses": 2})
    mode: Literal["train", "eval"] = declare(
        "train", "`eval`: the base computes as in evaluation, without dropout, and only what was added trains", "eval"
    )
    adapters: list[TrainedAdapter] = declare(
        [], "adapters that train at once in the slots of the passes, each as in a run of its own",
        [{"name": "ink", "data": {"images": "ink/"}, "rank": 8, "steps": 1500}],
    )  # fmt: skip
    in_turn: bool | None = declare(
        None, "whether each of the `adapters` takes its step alone, in turn; null decides by their kinds and sizes", True
    )
    trainable: list[Text] = declare([], "patterns of base parameters that train too; `**` is all of it", ["head"])
    assistant: Text | None = declare(
        None, "an adapter file that is active in training steps only, frozen, and never saved", "undistilled.safetensors"
    )
    ema: float | None = declare(None, "the decay of averaged weights; null keeps none", 0.999, gt=0, lt=1)
    plugins: list[One] = declare([], "classes of plugins, `package.module.Class`, with options", ["my_plugins.Watch"])
    on_plugin_error: Stop = declare("stop", "whether the run stops when a plugin raises", "continue")
    save: Save = declare(Save(), "when checkpoints are written", {"every": 100, "keep": 3})
    log: Log = declare(Log(), "what to log, and how often", {"every": 10})
    test: Test = declare(Test(), "when the test data are evaluated", {"every": 1})

    @model_validator(mode="before")
    @classmethod
    def _rate_of_prodigy(cls, value: Any) -> Any:
        """Prodigy estimates the rate, and multiplies it by `lr`: 1, where that is not given (arXiv 2306.06101)."""
        with contextlib.suppress(SpecError):  # which the field's own validator raises again
            if isinstance(value, Mapping) and "lr" not in value and read_use(value.get("optimizer")).name.lower() == "prodigy":
                return {**value, "lr": 1.0}
        return value

    @field_validator("task", "optimizer", "scheduler")
    @classmethod
    def _options(cls, value: Use | None, info: ValidationInfo) -> Use | None:
        if value is not None:
            try:
                _check_options(str(info.field_name), value)
            except SpecError as error:
                raise convert_error(error) from None
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.in_turn is not None and not self.adapters:
            raise convert_error(SpecError("has no effect without 'adapters'", path=("in_turn",)))
        own = bool(self.adapters) and all(one.steps or one.epochs for one in self.adapters)
        if (self.steps is None) == (self.epochs is None) and not (own and self.steps is None):
            found = "neither" if self.steps is None else "both"
            raise convert_error(SpecError(f"needs one of 'steps' and 'epochs'; found {found}"))
        for index, one in enumerate(self.adapters):
            if one.name in (names := [other.name for other in self.adapters[:index]]):
                finding = f"'{one.name}' is the name of adapter {names.index(one.name) + 1} already: each has one of its own"
                raise convert_error(SpecError(finding, path=("adapters", index, "name")))
            if (size := len(one.name.encode())) > NAME_BYTES:
                finding = f"has {size} bytes as UTF-8, and a slot keeps {NAME_BYTES}: give it a shorter name"
                raise convert_error(SpecError(finding, path=("adapters", index, "name")))
            if one.steps is not None and one.epochs is not None:
                finding = "needs one of 'steps' and 'epochs' at most; found both"
                raise convert_error(SpecError(finding, path=("adapters", index)))
        return self


def _check_options(key: str, use: Use) -> None:
    """SpecError for options that what is chosen for a key does not take, or that would be ignored."""
    with prefix_path(use.name):
        check_finite(use.options, infinite=":" in use.name)  # which a class of one's own may take
        shipped = {"task": TASKS, "scheduler": SCHEDULES}.get(key, {}).get(use.name)
        if shipped is not None:
            check_known(use.options, list(shipped.model_fields), f"{use.name} has no option")
            validate(shipped, use.options)
        elif key == "scheduler" and use.options.get("per", "step") not in ("step", "epoch"):
            raise SpecError(f"must be step or epoch, not {quote_yaml(use.options['per'])}", path=("per",))
        for option in ("lr", "weight_decay") if key == "optimizer" else ():
            if option in use.options:
                finding = f"has no effect, as each group of parameters has its own: set train.{option}, or {option} of a pass"
                raise SpecError(finding, path=(option,))


class Buckets(Section):
    """Aspect-ratio buckets: sides are multiples of `step` between `min` and `max`, areas about that of `size`."""

    step: int = declare(64, "sides are multiples of this, in pixels", 32, ge=1, le=LONGEST_SIDE)
    min: int | None = declare(None, "the shortest side, pixels; null: half of `size`", 256, ge=1, le=LONGEST_SIDE)
    max: int | None = declare(None, "the longest side, pixels; null: twice `size`", 1024, ge=1, le=LONGEST_SIDE)


KINDS = ("images", "videos", "classes", "dataset", "call")
# of which kinds of data a setting is, where it is not of all
OF_KINDS = {
    "split": ("dataset",), "columns": ("dataset", "call"), "captions": ("images", "videos", "dataset", "call"),
    "repeats": ("images", "videos"), "conditions": ("images", "classes", "dataset", "call"), "frames": ("videos",),
    "fps": ("videos",), "trigger": ("images", "videos", "dataset", "call"), "masks": ("images", "classes"),
}  # fmt: skip


class Data(Section):
    """The `data` section: one of `images`, `videos`, `classes`, `dataset` and `call` says where samples come from."""

    images: Texts | None = declare(
        None, "a folder of images with captions, a list of folders, a .json list of files, a .toml of kohya's", "photos/"
    )
    videos: Text | None = declare(
        None, "a folder of videos with captions: video files, animated pictures, folders of frames", "clips/"
    )
    classes: Text | None = declare(None, "a folder with a folder for each class", "pets/train")
    dataset: Text | None = declare(None, "a Hugging Face data set on disk", "datasets/pets")
    call: One | None = declare(None, "a torch Dataset by import path, with options", {"my_data:Pets": {"side": 64}})
    split: Text | None = declare(None, "the part of a `dataset`", "train")
    columns: dict[str, str] = declare({}, "the names of the columns of a `dataset`", {"image": "img", "label": "breed"})
    captions: Literal["required", "optional", "filename", "none"] = declare(
        "required", "whether images have captions: `required`, `optional`, `filename` (the name is it) or `none`", "optional"
    )
    trigger: Text | None = declare(None, "a word that is put before each caption that does not have it", "ohwx")
    repeats: Literal["none", "folders"] = declare(
        "none", "`folders`: `10_dog` is a folder whose images count ten times", "folders"
    )
    conditions: One | None = declare(None, "the folder of condition images, or a function that makes one of an image", "edges/")
    masks: Text | None = declare(
        None, "the folder of masks that weight the loss: white counts, black does not", "masks/"
    )
    channels: Literal[1, 3] = declare(3, "colours of an image", 1)
    background: Colour = declare((255, 255, 255), "the colour behind transparent pixels", "black")
    frames: int | None = declare(None, "how many frames of a video are taken, from its start", 17, ge=1, le=MOST_FRAMES)
    fps: float | None = declare(None, "frames taken per second of video; null: all", 16, gt=0, le=1000)
    size: Size = declare(None, "a side in pixels, or [height, width]; null takes images as they are", 224)
    buckets: Buckets | None = declare(None, "aspect-ratio buckets; true has the defaults", {"step": 32})
    crop: Literal["center", "random"] = declare("center", "where an image is cut to size", "random")
    flip: bool = declare(False, "mirror every second image", True)
    cache: Cache = declare(
        None, "the folder that caches latents and encoded captions; null: below the user's cache folder; false: none", "cache"
    )
    workers: int = declare(0, "processes that load images, at most 64; 0: the run itself", 4, ge=0, le=64)
    shuffle: bool = declare(True, "whether the samples of an epoch come in random order", False)
    max_corrupt: int = declare(
        10, "how many unreadable images are named and replaced; one more ends the run", 0, ge=0
    )
    test: Data | None = declare(None, "the test data: a path, or what differs from the training data", "pets/test")
    prior: Data | None = declare(
        None,
        "prior-preservation images of the class, as many per batch: a path, or settings that differ from the training data",
        "dogs/",
    )
    prior_weight: float = declare(1.0, "the weight of the loss of `prior`", 0.5, gt=0, le=1e4)

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, value: Any) -> Any:
        """Test data and prior images have the settings of the training data that they do not give themselves; `buckets: true`
        has the defaults."""
        if not isinstance(value, Mapping):
            return value
        buckets = value.get("buckets")
        value = {**value, "buckets": {} if buckets is True else None if buckets is False else buckets}
        kinds = [kind for kind in KINDS if value.get(kind) is not None]
        still = {"shuffle": False, "flip": False, "crop": "center"}
        for name, further, changed in (("test", ["shuffle"], still), ("prior", ["trigger"], {})):
            part = value.get(name)
            if isinstance(part, str) and len(kinds) == 1:
                part = {kinds[0]: part}
            if isinstance(part, Mapping):
                own = ["test", "prior", "prior_weight", "split", "masks", *further]
                if ":" not in str(value.get("conditions")):  # a folder, no function
                    own.append("conditions")
                inherits = name == "test" and not any(kind in part for kind in KINDS)
                source = {kind: value[kind] for kind in kinds} if inherits else {}
                taken = [kind for kind in KINDS if kind in {**source, **part}]
                own += [key for key, of in OF_KINDS.items() if not set(of).intersection(taken)]
                kept = {k: v for k, v in value.items() if k not in (*KINDS, *own)}
                value[name] = {**source, **kept, **changed, **part}
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Data:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            found = " and ".join(f"'{kind}'" for kind in kinds) or "none"
            raise convert_error(SpecError(f"needs one of {', '.join(map(repr, KINDS))}; found {found}"))
        for key, of in OF_KINDS.items():
            if kinds[0] not in of and getattr(self, key) != Data.model_fields[key].default:
                finding = f"has no effect with '{kinds[0]}': it is for {' and '.join(map(repr, of))}"
                raise convert_error(SpecError(finding, path=(key,)))
        self._check_prior()
        if self.trigger is not None and self.captions == "none":
            raise convert_error(SpecError("has no effect with 'captions: none'", path=("trigger",)))
        if self.videos is not None and self.frames is None:
            finding = "needs a number: how many frames of each video are taken"
            raise convert_error(SpecError(finding, path=("frames",)))
        if self.crop == "random" and self.size is None and self.call is None:
            raise convert_error(SpecError("has no effect without 'size': images stay as they are", path=("crop",)))
        if self.crop == "random" and self.cache:
            finding = "gives an image another crop in each epoch, but a cache holds one: set 'cache: false', or"
            raise convert_error(SpecError(f"{finding} 'crop: center'", path=("crop",)))
        return self

    def _check_prior(self) -> None:
        """Raise for settings of the prior images that would have no effect."""
        found: tuple[str, tuple[str, ...]] | None = None
        if self.prior is None and self.prior_weight != Data.model_fields["prior_weight"].default:
            found = ("has no effect without 'prior'", ("prior_weight",))
        elif self.test is not None and self.test.prior is not None:
            found = ("has no effect: tests have no prior images", ("test", "prior"))
        elif self.prior is not None:
            inner = next((key for key in ("test", "prior", "trigger") if getattr(self.prior, key) is not None), None)
            shared = ("size", "buckets", "channels", "workers", "max_corrupt")
            other = next((key for key in shared if getattr(self.prior, key) != getattr(self, key)), None)
            if self.prior.classes is not None:
                found = ("must be images with captions, and these have classes", ("prior",))
            elif inner is not None:
                found = ("has no effect: prior images have none", ("prior", inner))
            elif other is not None:
                found = ("has no effect: prior images use the setting of the images; leave it out", ("prior", other))
        if found is not None:
            raise convert_error(SpecError(found[0], path=found[1]))


TRAIN = ConfigSection(
    Train | None,
    declare(None, "how the passes are trained, for `fxplug train`", {"task": "classify", "epochs": 2}),
    {
        Train: "`train`",
        Save: "`train.save`",
        Log: "`train.log`",
        GroupRates: "`train.groups`, below a pattern",
        Test: "`train.test`",
        TrainedAdapter: "`train.adapters`, each of them",
        Parallel: "`train.parallel`",
        ScheduleOptions: "`train.scheduler`, below `constant`, `linear` or `cosine`",
        ClassifyOptions: "`train.task`, below `classify`",
        DenoiseOptions: "`train.task`, below `denoise`",
        TextOptions: "`train.task.denoise.text`, below a folder",
        PipelineTextOptions: "`train.task.denoise.text`, below a text encoder of a pipeline",
        PromptOptions: "`train.task.denoise.prompts`, a prompt",
    },
    {(Train, "task"): TASKS, (Train, "scheduler"): SCHEDULES},
)
DATA = ConfigSection(
    Data | None,
    declare(None, "what they are trained on", {"classes": "photos/"}),
    {Data: "`data`", Buckets: "`data.buckets`"},
)

"""What a configuration says about a training run and an export: its `train`, `data` and `export` sections."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer, ValidationInfo, field_validator, model_validator

from ..errors import SpecError, below
from .pass_file import check_known
from .task_section import SCHEDULES, TASKS
from .yaml_source import Section, Text, check_finite, checked, located, setting, shown, validate

Stop = Literal["stop", "continue"]
LONGEST_SIDE = 65536  # of an image, pixels
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
        found = f"{len(value)} keys" if isinstance(value, Mapping) else shown(value)
        raise SpecError(f"must be a name, or one name with its options below it, not {found}")
    ((name, options),) = value.items()
    if options is not None and not isinstance(options, Mapping):
        raise SpecError(f"must be a mapping of options, not {shown(options)}", path=(str(name),))
    return Use(str(name), dict(options or {}))


def written(use: Use | None) -> Any:
    """Return a `Use` in the form of a configuration."""
    return use and ({use.name: use.options} if use.options else use.name)


def _texts(value: Any) -> str | list[str]:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise SpecError(f"must be text or a list of text, not {shown(value)}")
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
        raise SpecError(f"must be a side in pixels or [height, width], 1 to {LONGEST_SIDE} each, not {shown(value)}")
    if value is not None and (pixels := sides[0] * sides[-1]) > MOST_PIXELS:
        raise SpecError(f"must have at most {MOST_PIXELS} pixels, height times width, not {pixels}")
    return (sides[0], sides[1]) if isinstance(value, (list, tuple)) else value


def _cache(value: Any) -> str | Literal[False] | None:
    if not (value is None or value is False or (isinstance(value, str) and value)):
        raise SpecError(f"must be a folder, or false for none, not {shown(value)}")
    return value


def _colour(value: Any) -> tuple[int, int, int]:
    """Read a colour: a name of HTML's, `#rrggbb`, or [red, green, blue]. Raises SpecError."""
    from PIL import ImageColor

    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return ImageColor.getrgb(value)[:3]
    whole = isinstance(value, (list, tuple)) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not whole or len(value) != 3 or not all(0 <= v <= 255 for v in value):
        raise SpecError(f"must be a colour, such as white, '#ffffff' or [255, 255, 255], not {shown(value)}")
    return tuple(value)


One = Annotated[Use, checked(read_use, str | dict[str, Any]), PlainSerializer(written)]
Texts = Annotated[str | list[str], checked(_texts, str | list[str])]
Patterns = Annotated[bool | list[str], checked(_patterns, bool | str | list[str])]
Colour = Annotated[tuple[int, int, int], checked(_colour, str | list[int])]
Cache = Annotated[str | Literal[False] | None, checked(_cache, str | Literal[False] | None)]
Size = Annotated[int | tuple[int, int] | None, checked(_size, int | list[int] | None)]


class Save(Section):
    """Checkpoints: one every so many `every` steps (0: only at the end), of which the last `keep` stay."""

    every: int = setting(500, "steps from one checkpoint to the next; 0: only at the end", 100, ge=0)
    keep: int = setting(2, "how many checkpoints stay", 3, ge=1)
    on_full_disk: Stop = setting("stop", "whether the run stops when a checkpoint does not fit on the disk", "continue")


class Log(Section):
    """TensorBoard events every so many steps, and sample grids (0: only at the end). log.jsonl has every step anyway."""

    every: int = setting(1, "steps from one TensorBoard event to the next; log.jsonl has every step", 10, ge=1)
    tensorboard: bool = setting(True, "whether there are TensorBoard events", False)
    samples: int = setting(0, "steps from one picture to the next; 0: only at the end", 500, ge=0)


class Test(Section):
    """How many epochs apart the tests are (0: only at the end), after how many without a better result the run ends, and
    whether `module/` is what tested best."""

    every: int = setting(0, "epochs from one test to the next; 0: only at the end", 1, ge=0)
    patience: int | None = setting(None, "after how many tests without a better result the run ends; null: never", 3, ge=1)
    best: bool = setting(
        False, "whether `module/` is of the best test, by the task's metric or the lowest loss, not of the last step", True
    )


class Parallel(Section):
    """How many processes share each sample: along its tokens by heads (Ulysses), and around a ring."""

    ulysses: int = setting(1, "processes that share a sample's tokens and its heads", 2, ge=1)
    ring: int = setting(1, "processes around which keys and values go", 2, ge=1)


class GroupRates(Section):
    """The rates of the parameters that a pattern of `groups` names."""

    lr: float | None = setting(None, "their learning rate; null is that of their pass", 1e-3, ge=0)
    lr_ratio: float | None = setting(None, "so many times the learning rate of their pass", 16.0, gt=0, le=1e6)
    weight_decay: float | None = setting(None, "their weight decay; null is that of their pass", 0.01, ge=0)

    @model_validator(mode="after")
    def _check_rates(self) -> GroupRates:
        given = [key for key in type(self).model_fields if getattr(self, key) is not None]
        if not given:
            raise located(SpecError("has no effect: give 'lr', 'lr_ratio' or 'weight_decay'"))
        if self.lr is not None and self.lr_ratio is not None:
            raise located(SpecError("give either 'lr' or 'lr_ratio', not both", path=("lr_ratio",)))
        return self


class Train(Section):
    """The `train` section. `batch` is samples per process and micro step; `accumulate` micro steps are one step.

    With `parallel` the processes that share samples count as one.
    """

    task: One = setting(..., "`denoise`, `classify`, or `package.module:Class` of one's own, with options below it", "classify")
    steps: int | None = setting(None, "how many steps; or give `epochs`", 1000, ge=1)
    epochs: int | None = setting(None, "how many times all samples; or give `steps`", 10, ge=1)
    batch: int = setting(8, "samples of a process and micro step", 16, ge=1)
    accumulate: int = setting(1, "micro steps of a step", 4, ge=1)
    lr: float = setting(1e-4, "the learning rate, where a pass has none of its own; 1 with `prodigy`", 3e-4, ge=0)
    weight_decay: float = setting(0.0, "the weight decay, where a pass has none of its own", 0.01, ge=0)
    groups: dict[Text, GroupRates] = setting(
        {}, "rates of the parameters that a pattern names; of several patterns the last one", {"**.up": {"lr_ratio": 16.0}}
    )
    optimizer: One = setting(
        Use("adamw", {}),
        "a name in torch.optim, `adamw8bit`, `prodigy`, `schedule_free`, or an import path, with options",
        {"adamw": {"betas": [0.9, 0.99]}},
    )
    scheduler: One | None = setting(
        None,
        "`constant`, `linear`, `cosine`, a name in torch.optim.lr_scheduler, or an import path; null is constant",
        {"cosine": {"warmup": 100}},
    )
    clip: float | None = setting(None, "the largest norm of the gradient; null does not clip", 1.0, gt=0)
    precision: Literal["fp32", "fp16", "bf16"] = setting(
        "fp32",
        "`fp32` (of a model in half precision its dtype), `bf16`, or `fp16` with loss scaling; what trains is float32",
        "bf16",
    )
    fuse: Literal[True, False, "auto", "stock", "fused", "blas", "triton"] = setting(
        True,
        "linear layers and their LoRA in the form of a rule for their sizes, or in one for all; equal to rounding",
        "fused",
    )
    compile: Literal[True, False, "regions"] = setting(
        False, "torch.compile of the whole as one graph; regions: of repeated regions, each kind of them once", "regions"
    )
    checkpointing: Patterns = setting(
        False, "repeated regions compute activations again in the backward pass; or patterns", ["blocks.*"]
    )
    shard: Patterns = setting(False, "FSDP2 of repeated regions, or of those of these patterns, frozen base included", True)
    parallel: Parallel | None = setting(None, "how many processes share each sample", {"ulysses": 2})
    mode: Literal["train", "eval"] = setting(
        "train", "`eval`: the base computes as in evaluation, without dropout, and only what was added trains", "eval"
    )
    trainable: list[Text] = setting([], "patterns of base parameters that train too; `**` is all of it", ["head"])
    assistant: Text | None = setting(
        None, "an adapter file that is on, frozen, in training steps alone, and in nothing saved", "undistilled.safetensors"
    )
    ema: float | None = setting(None, "the decay of averaged weights; null keeps none", 0.999, gt=0, lt=1)
    plugins: list[One] = setting([], "classes of plugins, `package.module.Class`, with options", ["my_plugins.Watch"])
    on_plugin_error: Stop = setting("stop", "whether the run stops when a plugin raises", "continue")
    save: Save = setting(Save(), "when checkpoints are written", {"every": 100, "keep": 3})
    log: Log = setting(Log(), "what is logged how often", {"every": 10})
    test: Test = setting(Test(), "when the test data are evaluated", {"every": 1})

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
                raise located(error) from None
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise located(SpecError(f"needs one of 'steps' and 'epochs'; found {found}"))
        return self


def _check_options(key: str, use: Use) -> None:
    """SpecError for options that what is chosen for a key does not take, or that would be ignored."""
    with below(use.name):
        check_finite(use.options, infinite=":" in use.name)  # which a class of one's own may take
        shipped = {"task": TASKS, "scheduler": SCHEDULES}.get(key, {}).get(use.name)
        if shipped is not None:
            check_known(use.options, list(shipped.model_fields), f"{use.name} has no option")
            validate(shipped, use.options)
        elif key == "scheduler" and use.options.get("per", "step") not in ("step", "epoch"):
            raise SpecError(f"must be step or epoch, not {shown(use.options['per'])}", path=("per",))
        for option in ("lr", "weight_decay") if key == "optimizer" else ():
            if option in use.options:
                finding = f"has no effect, because each group of parameters has its own: set train.{option}, or that of a pass"
                raise SpecError(finding, path=(option,))


class Buckets(Section):
    """Aspect-ratio buckets: sides are multiples of `step` between `min` and `max`, areas about that of `size`."""

    step: int = setting(64, "sides are multiples of it, pixels", 32, ge=1, le=LONGEST_SIDE)
    min: int | None = setting(None, "the shortest side, pixels; null: half of `size`", 256, ge=1, le=LONGEST_SIDE)
    max: int | None = setting(None, "the longest side, pixels; null: twice `size`", 1024, ge=1, le=LONGEST_SIDE)


class Export(Section):
    """The `export` section: what `fxplug export` does with the saved rewrite where its call does not say."""

    to: Literal["pt2", "aoti", "onnx"] = setting(
        "pt2", "a program of torch.export's, compiled ahead of time, or for onnxruntime", "aoti"
    )
    free: Literal["all", "batch", "none"] = setting("all", "which sizes stay free", "batch")
    device: Text | None = setting(None, "where compiled code will run; null: where it is exported", "cuda")


KINDS = ("images", "videos", "classes", "dataset", "call")
# of which kinds of data a setting is, where it is not of all
OF_KINDS = {
    "split": ("dataset",), "columns": ("dataset", "call"), "captions": ("images", "videos", "dataset", "call"),
    "repeats": ("images", "videos"), "conditions": ("images", "classes", "dataset", "call"), "frames": ("videos",),
    "fps": ("videos",), "trigger": ("images", "videos", "dataset", "call"), "masks": ("images", "classes"),
}  # fmt: skip


class Data(Section):
    """The `data` section: one of `images`, `videos`, `classes`, `dataset` and `call` says where samples come from."""

    images: Texts | None = setting(
        None, "a folder of images with captions, a list of folders, a .json list of files, a .toml of kohya's", "photos/"
    )
    videos: Text | None = setting(
        None, "a folder of videos with captions: video files, animated pictures, folders of frames", "clips/"
    )
    classes: Text | None = setting(None, "a folder with a folder for each class", "pets/train")
    dataset: Text | None = setting(None, "a Hugging Face data set on disk", "datasets/pets")
    call: One | None = setting(None, "a torch Dataset by import path, with options", {"my_data:Pets": {"side": 64}})
    split: Text | None = setting(None, "the part of a `dataset`", "train")
    columns: dict[str, str] = setting({}, "what the columns of a `dataset` are called", {"image": "img", "label": "breed"})
    captions: Literal["required", "optional", "filename", "none"] = setting(
        "required", "whether images have captions: `required`, `optional`, `filename` (the name is it) or `none`", "optional"
    )
    trigger: Text | None = setting(None, "a word that is put before each caption that does not have it", "ohwx")
    repeats: Literal["none", "folders"] = setting(
        "none", "`folders`: `10_dog` is a folder whose images count ten times", "folders"
    )
    conditions: One | None = setting(None, "the folder of condition images, or a function that makes one of an image", "edges/")
    masks: Text | None = setting(
        None, "the folder of masks, by which the loss is weighted: what is white counts, what is black does not", "masks/"
    )
    channels: Literal[1, 3] = setting(3, "colours of an image", 1)
    background: Colour = setting((255, 255, 255), "the colour behind transparent pixels", "black")
    frames: int | None = setting(None, "how many frames of a video are taken, from its start", 17, ge=1, le=MOST_FRAMES)
    fps: float | None = setting(None, "frames that are taken of a second of video; null: all", 16, gt=0, le=1000)
    size: Size = setting(None, "a side in pixels, or [height, width]; null takes images as they are", 224)
    buckets: Buckets | None = setting(None, "aspect-ratio buckets; true has the defaults", {"step": 32})
    crop: Literal["center", "random"] = setting("center", "where an image is cut to size", "random")
    flip: bool = setting(False, "mirror every second image", True)
    cache: Cache = setting(
        None, "the folder that caches latents and encoded captions; null: below the user's cache folder; false: none", "cache"
    )
    workers: int = setting(0, "processes that load images, at most 64; 0: the run itself", 4, ge=0, le=64)
    shuffle: bool = setting(True, "whether the samples of an epoch come in random order", False)
    max_corrupt: int = setting(
        10, "so many images that cannot be read are named, counted and replaced; one more ends the run", 0, ge=0
    )
    test: Data | None = setting(None, "the test data: a path, or what differs from the training data", "pets/test")
    prior: Data | None = setting(
        None,
        "images of the class of what is learnt, as many in each batch: a path, or what differs from the training data",
        "dogs/",
    )
    prior_weight: float = setting(1.0, "the weight of the loss of `prior`", 0.5, gt=0, le=1e4)

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
            raise located(SpecError(f"needs one of {', '.join(map(repr, KINDS))}; found {found}"))
        for key, of in OF_KINDS.items():
            if kinds[0] not in of and getattr(self, key) != Data.model_fields[key].default:
                finding = f"has no effect with '{kinds[0]}': it is for {' and '.join(map(repr, of))}"
                raise located(SpecError(finding, path=(key,)))
        self._check_prior()
        if self.trigger is not None and self.captions == "none":
            raise located(SpecError("has no effect with 'captions: none'", path=("trigger",)))
        if self.videos is not None and self.frames is None:
            finding = "needs a number: how many frames of each video are taken"
            raise located(SpecError(finding, path=("frames",)))
        if self.crop == "random" and self.size is None and self.call is None:
            raise located(SpecError("has no effect without 'size': images stay as they are", path=("crop",)))
        if self.crop == "random" and self.cache:
            finding = "gives an image another crop in each epoch, and a cache has one of each: set 'cache: false', or"
            raise located(SpecError(f"{finding} 'crop: center'", path=("crop",)))
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
                found = ("has no effect: prior images have that of the images, so leave it out", ("prior", other))
        if found is not None:
            raise located(SpecError(found[0], path=found[1]))

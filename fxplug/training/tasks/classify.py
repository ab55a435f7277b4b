"""The task of image classifiers: cross entropy on labels, timm's augmentations and mixing, Acc@1 and Acc@5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import timm
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ...core.errors import SpecError, did_you_mean, quote
from ...core.spec.pass_file import check_known, get_arguments
from ...core.spec.yaml_source import check_number, validate
from ..import_paths import construct, import_function
from ..random_draws import Draws, preserve_random_state
from ..task_section import ClassifyOptions
from ..train_section import Use, read_use
from .model_call import ModuleCall, check_labels, get_images, list_inputs
from .task import Batch, Task, TaskInfo, Totals

CHOICES = {
    "interpolation": ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"),
    "crop_mode": ("center", "squash", "border"),
}
TRIED = 32  # pixels of the image that a transform is tried on
PREPROCESS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


class Classify(Task):
    """Learns the label of each image.

    smoothing: of the labels (arXiv 1512.00567). mixup, cutmix: their alphas, 0 for none (arXiv 1710.09412, 1905.04899); with
    both each batch takes one of them. augment: auto for timm's defaults, none, or options of timm's create_transform.
    preprocess: the name of a timm model whose mean, std, interpolation and crop are taken, or these as a mapping; the model's
    own without it. criterion: instead of cross entropy a function (outputs [b, k], labels), a class of such, an import path
    or {path: options}; labels are int64 [b], or float32 [b, k] where they are mixed.
    """

    best: ClassVar[str | None] = "acc1"

    def __init__(
        self,
        smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        augment: str | Mapping[str, Any] = "auto",
        preprocess: str | Mapping[str, Any] | None = None,
        criterion: Any = None,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        given = {"smoothing": smoothing, "mixup": mixup, "cutmix": cutmix, "augment": augment, "preprocess": preprocess}
        validate(ClassifyOptions, {**given, "criterion": criterion, "call": call})
        self.smoothing, self.mixup, self.cutmix = smoothing, mixup, cutmix
        self.augment, self.preprocess = _augmentation(augment), _preprocessing(preprocess)
        self.criterion = _criterion(criterion)
        if self.criterion is not None and smoothing:
            raise SpecError("is an option of cross entropy: with a 'criterion', set it there", path=("smoothing",))
        self.mapping = call

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        if info.trigger is not None:
            raise SpecError("has no effect: the task classify reads no captions", path=("data", "trigger"))
        inputs = list_inputs(module)
        image = next((name for name, i in inputs.items() if not i.fixed), None)
        if image is None:
            raise SpecError("the model has no inputs")
        mapping = self.mapping if self.mapping is not None else {image: "image"}
        self.call = ModuleCall(mapping, inputs, ("image", "label", "condition"))
        shape, self.info = inputs[image].shape, info
        self.channels = shape[1] if shape is not None and len(shape) == 4 else 3
        self.settings = _settings(info.timm, getattr(module, "pretrained_cfg", None), self.channels, self.preprocess)
        self._try_transform(tuple(side or TRIED for side in info.size))

    def check_batch(self, size: int) -> None:
        if (self.mixup or self.cutmix) and size % 2:
            raise SpecError(f"mixup and cutmix need an even batch size, not {size}", path=("train", "batch"))

    def _try_transform(self, size: tuple[int, ...]) -> None:
        """Raise SpecError for options that timm's transform accepts but fails with on its first image."""
        image = Image.new("RGB", (TRIED, TRIED), (90, 120, 150))
        for train, key in ((False, "preprocess"), (True, "augment")):
            try:
                with preserve_random_state():
                    found = self.transform(train)(image, (size[0], size[1]))
            except Exception as error:  # timm's, of what it was given
                text = f"timm's create_transform fails with these options: {type(error).__name__}: {error}"
                raise SpecError(text, path=(key,)) from error
            if not isinstance(found, Tensor) or not found.isfinite().all():
                raise SpecError("with these options timm's create_transform gives values that are not finite", path=(key,))

    def transform(self, train: bool) -> Callable[[Any, tuple[int, int]], Tensor]:
        options = {**self.settings, **(self.augment if train else {})}
        return Transform(options, self.channels, train)

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor:
        image, label = get_images(batch), self._labels(batch)
        part = None
        if self.mixup or self.cutmix:
            image, part = self._mixed(image, draw)
        outputs = self._outputs(module, {**batch, "image": image}).float()
        check_labels(batch, outputs.shape[1], self.info.classes, "outputs")
        if part is not None:
            own = F.one_hot(label, outputs.shape[1]).float()
            label = own * part + own[torch.arange(len(own)) ^ 1] * (1 - part)
        return self._compared(outputs, label, self.smoothing)

    @torch.no_grad()
    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Return totals of Acc@1 and Acc@5 in percent (with fewer classes the largest possible k), and of the mean
        criterion."""
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        for batch in batches:
            label = self._labels(batch)
            outputs = self._outputs(module, batch).float()
            check_labels(batch, outputs.shape[1], None, "outputs")  # other data than those with the classes
            hits = outputs.topk(min(5, outputs.shape[1])).indices == label[:, None]
            loss = self._compared(outputs, label) * len(label)
            sums += torch.stack([100 * hits[:, 0].sum(), 100 * hits.sum(), loss]).double().cpu()
            count += len(label)
        return {name: (float(total), count) for name, total in zip(("acc1", "acc5", "loss"), sums, strict=True)}

    def _labels(self, batch: Batch) -> Tensor:
        if "label" not in batch:
            raise SpecError(f"the data has no labels; it has {', '.join(batch)}", path=("data",))
        label: Tensor = batch["label"]
        if label.dim() != 1 or label.is_floating_point():
            raise SpecError(f"a label must be a whole number, not {label.dtype} {list(label.shape[1:])}", path=("data",))
        return label

    def _outputs(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = self.call(module, batch)
        if outputs.dim() != 2:
            raise SpecError(f"the model returns {list(outputs.shape)}, and a classifier must return [batch, classes]")
        return outputs

    def _compared(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        if self.criterion is None:
            return F.cross_entropy(outputs, labels, label_smoothing=smoothing)
        loss: Tensor = self.criterion(outputs, labels)
        return loss.mean()

    def _mixed(self, image: Tensor, draw: Draws) -> tuple[Tensor, Tensor]:
        """Return images mixed by timm, and each one's weight of itself [b, 1].

        Rows 0 and 1 are mixed, 2 and 3 and so on: neighbours stay together when a batch is divided among processes.
        """
        self.check_batch(len(image))
        rows = torch.arange(len(image), device=image.device)
        order = torch.cat([rows[0::2], rows[1::2].flip(0)])  # timm mixes first with last
        mixup = timm.data.Mixup(self.mixup, self.cutmix, label_smoothing=0.0, num_classes=len(image))
        with preserve_random_state():
            np.random.seed(int(torch.randint(2**32, (), generator=draw.once())))
            images, shares = mixup(image[order], rows)  # as if each row were a class of its own
        return images[order.argsort()], shares.diagonal()[:, None]


class Transform:
    """timm's transform of a PIL image to a float32 tensor [c, h, w] of the wanted size; it can be sent to other processes."""

    def __init__(self, options: Mapping[str, Any], channels: int, train: bool) -> None:
        self.options, self.channels, self.train = dict(options), channels, train
        self.made: dict[tuple[int, int], Any] = {}

    def __call__(self, image: Image.Image, size: tuple[int, int]) -> Tensor:
        if size not in self.made:
            shape = (self.channels, *size)
            self.made[size] = timm.data.create_transform(shape, is_training=self.train, **self.options)
        tensor: Tensor = self.made[size](image.convert("L" if self.channels == 1 else "RGB"))
        return tensor


def _settings(name: str | None, own: Any, channels: int, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return mean, std, interpolation and crop: those given, else of the timm model, else of images in [-1, 1]."""
    if isinstance(given, str):
        name, given = given, {}
    found = timm.get_pretrained_cfg(name) if name else None
    if name and found is None:
        hint = did_you_mean(name.partition(".")[0], timm.list_models())
        raise SpecError(f"timm has no model '{name}'{hint}", path=("preprocess",))
    known = found.to_dict() if found is not None else own
    if not isinstance(known, Mapping):
        known = {"mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
    made = timm.data.resolve_data_config({"in_chans": 3}, pretrained_cfg=dict(known))
    settings = {key: made[key] for key in PREPROCESS} | dict(given or {})  # timm takes a 0 for nothing given
    for key in ("mean", "std"):
        values = tuple(settings[key])
        if len(values) not in (1, channels) and channels != 1:
            raise SpecError(f"has {len(values)} numbers, and the model has {channels} input channels", path=("preprocess", key))
        # a model made for one channel sees the mean of the three
        settings[key] = (sum(values) / len(values),) * channels if len(values) != channels else values
    return settings


def _augmentation(given: Any) -> dict[str, Any]:
    if given in ("auto", "none"):
        return {} if given == "auto" else {"no_aug": True}
    if not isinstance(given, Mapping):
        raise SpecError(f"must be auto, none, or options of timm's create_transform, not {quote(given)}", path=("augment",))
    parameters = get_arguments(timm.data.create_transform).names
    known = parameters[parameters.index("no_aug") : parameters.index("tf_preprocessing")]
    ours = [name for name in known if name not in PREPROCESS or name == "interpolation"]
    check_known(given, ours, "create_transform has no option", path=("augment",))
    return dict(given)


def _preprocessing(given: Any) -> str | dict[str, Any] | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise SpecError(f"must be the name of a timm model or a mapping, not {quote(given)}", path=("preprocess",))
    check_known(given, PREPROCESS, "no option", path=("preprocess",))
    read = dict(given)
    for key in ("mean", "std"):
        if key in read:
            values = read[key] if isinstance(read[key], (list, tuple)) else [read[key]]
            if not values:
                raise SpecError("must be a number, or one for each channel, not an empty list", path=("preprocess", key))
            for value in values:
                check_number(value, "preprocess", key, above=-math.inf if key == "mean" else 0)
            read[key] = tuple(map(float, values))
    if "crop_pct" in read:
        check_number(read["crop_pct"], "preprocess", "crop_pct", above=0, most=2)
    for key, choices in CHOICES.items():
        if key in read and read[key] not in choices:
            finding = f"must be one of {', '.join(choices)}, not {quote(read[key])}{did_you_mean(read[key], choices)}"
            raise SpecError(finding, path=("preprocess", key))
    return read


def _criterion(given: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    if isinstance(given, type):
        return construct(given, Use(given.__name__, {}), ("criterion",))  # type: ignore[no-any-return]
    return import_function(read_use(given), ("criterion",), given=2)  # type: ignore[no-any-return]

"""Inputs that passes have added to the denoiser of a pipeline, as ControlNet adds `cond`: they get the pictures of the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...core.errors import SpecError
from ..image_encoding import check_still_readable
from .model_call import list_condition_inputs, list_inputs
from .pipeline_encoders import Size
from .task import Batch


class AddedInputs:
    """The pictures that a rewritten denoiser takes beside what its pipeline gives it: those of `data.conditions`.

    `names` are the inputs; there are none for a module whose passes take no pictures.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Find the inputs.

        Args:
            module: The rewritten denoiser.
            device: Where batches are.

        Raises:
            SpecError: A pass needs an input that the data of a pipeline does not have.
        """
        inputs = list_inputs(module)
        self.device, self.names = device, tuple(list_condition_inputs(inputs))
        self.inputs = {name: inputs[name] for name in self.names}
        for name, each in inputs.items():
            if each.added and each.required and name not in self.names:
                finding = f"a pass has added the input '{name}' to the denoiser, and nothing in a pipeline's data is for it"
                raise SpecError(f"{finding}: 'conditions' has pictures for inputs called 'cond'", path=("passes",))

    def check(self, example: Batch) -> None:
        """Check that the data has the pictures, with the channels that the passes take.

        Args:
            example: A batch of the data; empty where there is none.

        Raises:
            SpecError: It has none, or others.
        """
        for name, given in self.inputs.items():
            if "condition" not in example:
                finding = f"a pass has added the input '{name}' to the denoiser, a picture for each sample: set 'conditions' in"
                hint = "the section data, a folder with pictures of the same names, or a function that makes them"
                raise SpecError(f"{finding} {hint}", path=("data", "conditions"))
            picture = example["condition"][0]
            found = picture.shape[0] if isinstance(picture, Tensor) else picture.read().shape[0]
            if given.shape is not None and len(given.shape) == 4 and found != given.shape[1]:
                finding = f"the pictures of 'conditions' have {found} channels, and the input '{name}' of the pass takes "
                raise SpecError(f"{finding}{given.shape[1]}: give the pass channels: {found}", path=("data", "conditions"))

    def of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the pictures of a batch, by the name of the input.

        Args:
            batch: The batch, with `condition` decoded or not.

        Returns:
            Float [b, c, h, w] in [0, 1], cropped and mirrored as the sample's own picture; nothing where no pass takes any.

        Raises:
            TrainError: A picture's file cannot be read any more.
        """
        if not self.names:
            return {}
        pictures = batch["condition"]
        if not isinstance(pictures, Tensor):
            with check_still_readable():
                pictures = torch.stack([picture.read() for picture in pictures])
        return {name: pictures.to(self.device, each.dtype) for name, each in self.inputs.items()}

    def example(self, count: int, size: Size) -> dict[str, Tensor]:
        """Return black pictures of a size, [count, c, h, w], by the name of the input."""
        found = {}
        for name, each in self.inputs.items():
            channels = each.shape[1] if each.shape is not None and len(each.shape) == 4 else 3
            found[name] = torch.zeros(count, channels, *size[-2:], device=self.device, dtype=each.dtype)
        return found


def take_samples(added: dict[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the pictures of some samples of a batch, by the name of the input."""
    return {name: value[list(rows)] for name, value in added.items()}

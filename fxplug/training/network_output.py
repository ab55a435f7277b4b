"""A network that a pass has trained beside the denoiser of a pipeline, as diffusers has it: a ControlNetModel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ArtifactError, format_fields, get_first_line
from ..core.ir.traced_module import TracedModule
from ..core.reading import read_json
from ..core.spec.rules import is_target
from ..pipelines.recorded_run import get_components
from .tasks.pipeline_denoise import PipelineDenoise

KIND = "ControlNetModel"  # whose form is written: of other networks diffusers' pipelines know more than the weights


@dataclass(frozen=True)
class TrainedNetwork:
    """A ControlNet in a module that is trained: `prefix` is what its weights' names begin with, `use` and `options` what
    it was made of, `guess_mode` that of its pass."""

    prefix: str
    use: Any
    options: dict[str, Any]
    guess_mode: bool

    __repr__ = format_fields

    @property
    def folder(self) -> Path | None:
        """Folder that its configuration is read from; None where a function made it."""
        named = isinstance(self.use, (str, Path)) and not is_target(str(self.use))
        return (Path(self.use).parent if Path(self.use).name == "config.json" else Path(self.use)) if named else None


def find_network(module: TracedModule) -> TrainedNetwork | None:
    """Find the ControlNet that is all that a module trains.

    Args:
        module: The rewritten module.

    Returns:
        The network; None where something else trains, or a network that diffusers does not have as a ControlNetModel.
    """
    trains = _list_training(module)
    found = (network for network in _list_networks(module) if all(name.startswith(network.prefix) for name in trains))
    return next(found, None) if trains else None


def find_frozen_network(module: TracedModule) -> TrainedNetwork | None:
    """Find the ControlNet that stays as it is while passes beside it train.

    Args:
        module: The rewritten module.

    Returns:
        The network; None where there is none, or where there are several.
    """
    trains = _list_training(module)
    found = [network for network in _list_networks(module) if not any(name.startswith(network.prefix) for name in trains)]
    return found[0] if len(found) == 1 else None


def _list_training(module: TracedModule) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _list_networks(module: TracedModule) -> Iterator[TrainedNetwork]:
    for entry in module.meta.get("passes", []):
        known = (entry.get("rules") or {}).get("networks") or {}  # none of a network that was given as a module
        for name in entry.get("networks") or ():
            spec = known.get(name) or {}
            prefix = f"{entry['name']}.{name}."
            kinds = getattr(module.get_submodule(prefix[:-1]), "classes", ())
            if kinds and kinds[0] == KIND:
                guess = bool((entry.get("params") or {}).get("guess_mode"))
                yield TrainedNetwork(prefix, spec.get("use"), dict(spec.get("options") or {}), guess)


def make_network_model(module: TracedModule, network: TrainedNetwork, task: PipelineDenoise) -> Any:
    """Make the ControlNetModel of a trained network, on its weights.

    Args:
        module: The module that has it.
        network: What `find_network` or `find_frozen_network` gave.
        task: The task, whose pipeline has the denoiser that it was made for.

    Returns:
        The model of diffusers.

    Raises:
        ArtifactError: It cannot be made again: a function of somebody's own made it, or one that is given as a module.
    """
    from diffusers import ControlNetModel

    weights = {name.removeprefix(network.prefix): value for name, value in module.state_dict().items()
               if name.startswith(network.prefix)}  # fmt: skip
    try:
        with torch.device("meta"):
            if network.use == f"diffusers:{KIND}.from_unet":
                options = {**network.options, "load_weights_from_unet": False}
                made = ControlNetModel.from_unet(get_components(task.pipe)[task.part], **options)
            elif network.folder is not None:
                made = ControlNetModel.from_config(read_json(network.folder / "config.json"))
            else:
                raise ArtifactError(f"the configuration of the {KIND} is unknown, because it was passed as a module")
        made.load_state_dict(weights, assign=True)
    except ArtifactError:
        raise
    except Exception as error:  # of diffusers, about a configuration or weights that do not fit
        raise ArtifactError(f"the {KIND} cannot be made again: {type(error).__name__}: {get_first_line(error)}") from error
    return made.eval()


def make_controlled_pipeline(task: PipelineDenoise, network: Any) -> Any:
    """Make the pipeline of diffusers that calls a ControlNetModel in each step, of the models of a run's pipeline."""
    from diffusers import AutoPipelineForText2Image

    return AutoPipelineForText2Image.from_pipe(task.pipe, controlnet=network)

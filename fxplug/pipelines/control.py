"""A UNet and its ControlNet, one or several, as one graph in the pipeline that calls them one after the other.

What stands at the place of the network gives the pipeline no corrections, but the tensors that the network was called with. The
pipeline hands these to the UNet, in whose graph the network is: every option of the pipeline means what it meant, to the bit.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.artifacts.artifact import load
from ..core.errors import ArtifactError, GuardError, SpecError, TraceError
from ..core.ir.traced_module import TracedModule
from ..core.reading import open_regular_file

META = "control"  # of a graph with networks: the settings of each
FILE = "control.json"
DOWN, MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
ALWAYS = ("sample", "timestep", "encoder_hidden_states")
ADDED = ("text_embeds", "time_ids")
LIMIT = 1 << 20  # bytes of a file of settings


# --- the one model


class _Controlled(nn.Module):
    """Goes before the class of a UNet: the UNet with the network as its child `controlnet`."""

    controlnet: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the UNet's forward, with the arguments of its network passed in place of the corrections."""
        handed, mark = kwargs.pop(DOWN, None), kwargs.pop(MIDDLE, None)
        if handed is None:
            return super().forward(*args, **kwargs)
        if mark is None or mark.dim() > 2:
            raise GuardError(
                "the ControlNet is in this graph already, so its residuals cannot be passed: set pipe.controlnet = "
                "controlnet_of(unet)"
            )
        halves = mark.shape[0] == 2
        if halves:  # with `guess_mode` and guidance a pipeline puts zeros for the samples without words before each correction
            handed = [tensor[tensor.shape[0] // 2 :] for tensor in handed]
        down, middle = self.controlnet(**self._call(handed), guess_mode=mark.dim() == 2, return_dict=False)
        if halves:
            down = [torch.cat([torch.zeros_like(each), each]) for each in down]
            middle = torch.cat([torch.zeros_like(middle), middle])
        return super().forward(*args, **{**kwargs, DOWN: down, MIDDLE: middle})

    def _call(self, handed: list[torch.Tensor]) -> dict[str, Any]:
        """Return the network's call from the list that `_hand` made."""
        nets = getattr(self.controlnet, "nets", None)
        count = 1 if nets is None else len(nets)
        (sample, time, words), pictures, scales = handed[:3], handed[3 : 3 + count], handed[3 + count : 3 + 2 * count]
        scales, added = [scale[0] for scale in scales], handed[3 + 2 * count :]
        call: dict[str, Any] = dict(zip(ALWAYS, (sample, time[0] if time.shape[0] == 1 else time, words), strict=True))
        each = (pictures[0], scales[0]) if nets is None else (pictures, scales)
        call["controlnet_cond"], call["conditioning_scale"] = each
        return {**call, "added_cond_kwargs": dict(zip(ADDED, added, strict=True))} if added else call


def _hand(call: dict[str, Any], several: bool) -> list[torch.Tensor]:
    """Return the call of a network as tensors that have a first dimension: numbers are float64 tensors of one element."""
    pictures, scales = call["controlnet_cond"], call["conditioning_scale"]
    if not several:
        pictures, scales = [pictures], [scales]
    added = call.get("added_cond_kwargs") or {}
    numbers = [torch.as_tensor(scale, dtype=torch.float64).reshape(1) for scale in scales]
    time = torch.as_tensor(call["timestep"])
    more = [added[name] for name in ADDED] if added else []
    return [call["sample"], time.reshape(-1), call["encoder_hidden_states"], *pictures, *numbers, *more]


def join(unet: nn.Module, network: nn.Module) -> nn.Module:
    """Join a UNet of diffusers and its network into one model, on their own children and weights. Raises TraceError."""
    if isinstance(unet, TracedModule) or isinstance(network, TracedModule):
        raise TraceError("join: the UNet or its ControlNet is traced already: trace those of diffusers, then apply passes")
    read_settings(network)
    kind = type(unet)
    signature = inspect.signature(kind.forward)
    if not {DOWN, MIDDLE} <= signature.parameters.keys():
        raise TraceError(f"join: {kind.__name__} takes no residuals of a ControlNet")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Controlled.forward(self, *args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    cls = type(kind.__name__, (_Controlled, kind), {"__module__": __name__, "forward": forward})
    model: nn.Module = object.__new__(cls)
    model.__dict__.update(vars(unet))
    model.__dict__["_modules"] = {**unet._modules, "controlnet": network}
    return model


# --- what stands for the network


def read_settings(network: nn.Module) -> dict[str, Any]:
    """Return whether there are several networks, and the settings of each. Raises TraceError for what is no ControlNet."""
    from diffusers import ControlNetModel, MultiControlNetModel

    nets: list[Any] = list(network.nets) if isinstance(network, MultiControlNetModel) else [network]
    if not nets or not all(isinstance(net, ControlNetModel) for net in nets):
        raise TraceError(f"join takes one or several ControlNetModels of diffusers, not {type(network).__name__}")
    return {"several": isinstance(network, MultiControlNetModel), "configs": [dict(net.config) for net in nets]}


class SettingsProxy(nn.Module):
    """Goes before the class of a network: has its settings and no weights."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's call as a list, and a tensor whose shape encodes `guess_mode`."""
        call = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        known = {*ALWAYS, "controlnet_cond", "conditioning_scale", "added_cond_kwargs", "guess_mode", "return_dict"}
        if odd := [name for name, value in call.items() if name not in known and value is not None]:
            raise GuardError(f"'{odd[0]}' is not an input of the ControlNet in the UNet's graph: trace without join to use it")
        guess = bool(call.get("guess_mode"))
        sample = call["sample"]
        return _hand(call, hasattr(self, "nets")), torch.ones((1, 1) if guess else 1, dtype=sample.dtype, device=sample.device)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the settings alone: the weights are saved with the UNet."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = {"several": hasattr(self, "nets"), "configs": [dict(net.config) for net in getattr(self, "nets", [self])]}
        (Path(folder) / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def controlnet_of(module: TracedModule) -> Any:
    """Make a stub for `pipe.controlnet` of diffusers while the network is in the graph of its UNet.

    It has no weights, and hands the UNet what the network is called with.

    Args:
        module: The graph that `trace_pipeline(pipe, ..., join=True)` gives, or what was made of it.

    Returns:
        A module of the class that the pipeline asks for (ControlNetModel or MultiControlNetModel).

    Raises:
        SpecError: The graph has no ControlNet.
    """
    found = module.meta.get(META)
    if found is None:
        own = [entry["name"] for entry in module.meta.get("passes", []) if entry.get("inputs")]
        bound = "has its own inputs: bind them, and use the plain pipeline"
        way = f"the one of the pass '{own[0]}' {bound}" if own else "it has none"
        make = "trace_pipeline(pipe, ..., join=True) makes one"
        raise SpecError(f"controlnet_of: the graph has no ControlNet of a pipeline ({way}); {make}")
    return make_stub(found["several"], found["configs"], module.dtype, module.device)


def make_stub(several: bool, configs: list[Any], dtype: torch.dtype, device: Any) -> Any:
    """Make the stub of `controlnet_of` from its settings."""
    from diffusers import ControlNetModel, MultiControlNetModel

    nets = [_bare(ControlNetModel, dtype, device) for _ in configs]
    for net, config in zip(nets, configs, strict=True):
        net.register_to_config(**{k: v for k, v in config.items() if not k.startswith("_")})
    if not several:
        return nets[0]
    made = _bare(MultiControlNetModel, dtype, device)
    made.nets = nn.ModuleList(nets)
    return made


def _bare(kind: Any, dtype: torch.dtype, device: Any) -> Any:
    """Return a module of such a class with a single empty tensor, which follows the pipeline's device and dtype."""
    made: Any = object.__new__(type(TracedModule.__name__, (SettingsProxy, kind), {"__module__": __name__.partition(".")[0]}))
    nn.Module.__init__(made)
    made.register_buffer("where", torch.empty(0, dtype=dtype, device=device), persistent=False)
    return made.eval()


def load_part(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a part of a saved pipeline: an artifact, or the stub of a ControlNet. Raises ArtifactError."""
    file = Path(folder) / FILE
    if not file.is_file():
        return load(folder, **options)
    with open_regular_file(file, LIMIT) as stream:
        try:
            found = json.loads(stream.read())
            return make_stub(bool(found["several"]), list(found["configs"]), torch.float32, "cpu")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{file} has no settings for ControlNets: {error}") from None

"""What HCP-Diffusion's `merge:` does when it loads: checkpoints mixed into a model, and low-rank updates with a strength.

    parameter = base_model_alpha * parameter + alpha * part        one part after the other
    layer     = layer + (alpha / rank) * up @ down                 all updates together

as in its `HCPModelLoader` (hcpdiff/utils/cfg_net_tools.py). The alpha that an update was trained with plays no part there.
Paths of files are those of the working folder, as in its configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ...blocks.lora import HalfLora, Lora
from ...config.models.factory import build
from ...config.run_config import load_config
from ...core.errors import ArtifactError, SpecError, did_you_mean, prefix_path, quote
from ...core.spec.rules import COMMON, Match, Pass, Rule
from ...core.spec.yaml_source import Section, make_validator, validate
from .builtin_plugins import read_half
from .checkpoint_files import State, list_weights, read_sections, select_names
from .hosts import Number
from .sample_plugins import make_checkpoint

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site

SAMPLE = "fxplug.compat.hcp.sample_plugins:make_checkpoint"  # what the page of the pass shows
class UpdateSection(Section):
    """What stands below `hcp/checkpoint:` beside the keys of all passes."""

    file: str = Field(min_length=1, description="the path of a file")
    alpha: Number = 1.0
    layers: Any = "all"
    mask: Annotated[Any, make_validator(read_half)] = None
    ema: bool = False
    alpha_auto_scale: bool = True


class MixedCheckpoint(Section):
    """A checkpoint that is mixed into a model."""

    file: str = Field(min_length=1, description="the path of a file")
    alpha: Number = Field(description="the strength of the part, a number")
    base: Number = 0.0
    layers: Any = "all"
    ema: bool = False


class TrainedLora(nn.Module):
    """Makes the low-rank updates of a file: a `Lora` for each layer, or a `HalfLora`, with the file's weights."""

    @classmethod
    def at(
        cls, site: Site, weights: Mapping[str, State], file: str, alpha: float = 1.0, alpha_auto_scale: bool = True,
        half: Any = None,
    ) -> Lora | HalfLora:  # fmt: skip
        """Make the block of a layer; `weights` has, for every path, down.weight (rank, in, *kernel), up.weight (out, rank, *1)
        and up.bias. down.weight (rank, in, *kernel), up.weight (out, rank, *1) and up.bias.

        Raises SpecError for weights of another shape than the layer takes.
        """
        path = site.path.partition("@")[0]
        own = {name: value for name, value in weights[path].items() if name != "scale"}
        made: Any = Lora.at(
            site, rank=own["down.weight"].shape[0], alpha=alpha, alpha_auto_scale=alpha_auto_scale, bias="up.bias" in own
        )
        held = dict(made.named_parameters())
        for name, value in own.items():
            if held[name].shape != value.shape:
                wanted, there = list(held[name].shape), list(value.shape)
                raise SpecError(f"{file}: {name} is {there}, and this layer needs {wanted}: the file is for another model")
        with torch.no_grad():
            for name, value in own.items():
                held[name].copy_(value)
        made.neutral = False  # it has learnt something
        if half is None:
            return made  # type: ignore[no-any-return]
        found = HalfLora(made, half)
        found.neutral = False  # type: ignore[misc]
        return found


def checkpoint_pass(given: Any) -> Pass:
    """Make a pass of the mapping below `hcp/checkpoint:`: the low-rank updates of a file, with their weights.

    Raises SpecError whose path is below the entry, also for a file.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping with 'file', not {quote(given)}")
    common = {key: value for key, value in given.items() if key in COMMON}
    params = {key: value for key, value in given.items() if key not in COMMON}
    own = validate(UpdateSection, params)
    sections = _sections(own.file, own.ema)
    with prefix_path("file"):
        weights = list_weights("lora", sections.get("lora", {}), own.file)
    chosen = select_names(list(weights), own.layers, own.file)
    if not weights:
        raise SpecError(f"{own.file} has no low-rank updates; it has {', '.join(sections)}", path=("file",))
    for path in chosen:
        for name in ("down.weight", "up.weight"):
            if name not in weights[path]:
                raise SpecError(f"{own.file} lacks the {name.partition('.')[0]} half of '{path}'", path=("file",))
    about = f"The low-rank updates in {own.file}."
    options = {"weights": {path: weights[path] for path in chosen}, "file": own.file, "half": own.mask, "alpha": own.alpha}
    options["alpha_auto_scale"] = own.alpha_auto_scale
    rule = Rule(Match(path=chosen), TrainedLora, args=["x", "y"], options=options)
    return Pass(rules=[rule], about=about, params=params, **{"name": "checkpoint", **common})


def merged(model: Any, parts: Sequence[Mapping[str, Any]], weights: Any = None) -> nn.Module:
    """Build a model with the `base` weights of checkpoints mixed in; a converted configuration calls it as its `model`.

    `model` and `weights` are the values of these keys in a configuration, with paths in the working folder. Each of `parts` has
    `file`, `alpha`, `base` (the share of the earlier value, by default 0), and `layers`. Mixed in float32. On the meta device
    names and shapes alone are compared. Raises SpecError.
    """
    on = str(torch.empty(0).device)
    built = build(load_config({"model": model, "weights": weights}, base=Path.cwd()), device="meta" if on == "meta" else None)
    state = built.state_dict(keep_vars=True)
    read = [validate(MixedCheckpoint, part) for part in parts]
    mixed = [(part, _part(part, state, number)) for number, part in enumerate(read)]
    with torch.no_grad():
        for part, values in mixed:
            for name, value in values.items():
                own = state[name]
                if own.is_floating_point() and not own.is_meta:
                    own.copy_(part.base * own.float() + part.alpha * value.float())
    return built


def _part(part: MixedCheckpoint, state: Mapping[str, Tensor], number: int) -> State:
    """Return the chosen weights of one part. Raises SpecError if they are of another model."""
    file, sections = part.file, _sections(part.file, part.ema)
    if "base" not in sections:
        raise SpecError(f"part {number + 1}: {file} has no weights of a model ('base'); it has {', '.join(sections)}")
    found = sections["base"]
    found = {name: found[name] for name in select_names(list(found), part.layers, file)}
    lost = [name for name in found if name not in state]
    if lost:
        text = f"part {number + 1}: {len(lost)} of {len(found)} weights in {file} are not in this model: '{lost[0]}'"
        raise SpecError(text + did_you_mean(lost[0], state))
    for name, value in found.items():
        if value.shape != state[name].shape:
            there, wanted = list(value.shape), list(state[name].shape)
            raise SpecError(
                f"part {number + 1}: '{name}' is {there} in {file}, and {wanted} here: the file is for another model"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise SpecError(f"part {number + 1}: '{name}' in {file} has values that are not finite")
    return found


def _sections(file: str, ema: bool) -> dict[str, State]:
    try:
        return make_checkpoint() if file == SAMPLE else read_sections(file, ema)
    except ArtifactError as error:
        here = "" if Path(file).exists() else "; paths of a merge are relative to the working folder"
        raise SpecError(f"{error}{here}", path=("file",)) from None

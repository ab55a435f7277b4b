"""What all entries of HCP-Diffusion's files share: the model that they are for, names, layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch import nn

from ...core.errors import SpecError, did_you_mean
from ...core.spec.addresses import make_identifier, select
from ...core.spec.yaml_source import make_validator, quote_yaml
from .layer_patterns import LayerPattern, find_places

PARTS = {"unet": ("plugin_unet", "lora_unet"), "TE": ("plugin_TE", "lora_text_encoder")}  # a model: its two sections
RATE = 1e-5  # HCP-Diffusion's learning rate for a plugin that has none
OPTIONS = ("_target_", "_partial_", "lr", "train")
SYMBOL = re.compile(r"[A-Za-z_]\w*")


class Host:
    """The model that plugins go into, when it is known, and the shapes of their inputs.

    The text encoder of a run is not `alone`: its model is not known, and nothing feeds its plugins.
    """

    def __init__(self, model: nn.Module | None, inputs: dict[str, Sequence[Any]], part: str, *, alone: bool = True) -> None:
        self.model = model
        self.inputs = inputs
        self.part = part
        self.asks = "give the model (--model)" if alone else "convert the text encoder alone (--part TE --model MODEL)"
        self.fed = alone
        self.used: set[str] = set()
        self.modules = dict(model.named_modules()) if model is not None else {}
        self.classes = {path: type(m).__name__ for path, m in self.modules.items()}

    def places(self, layers: Sequence[LayerPattern]) -> list[LayerPattern] | None:
        """Return the selected layers, or None if that cannot be known without the model."""
        if self.model is not None:
            return find_places(layers, self.classes)
        if any(layer.regex or layer.kind for layer in layers):
            return None
        return find_places(layers, dict.fromkeys((layer.path for layer in layers), ""))

    def symbols(self, name: str) -> set[str]:
        """Return the names of sizes in the shape of an input."""
        return {s for size in self.inputs[name] for s in SYMBOL.findall(str(size))}

    def binds(self, name: str) -> bool:
        """Return whether an input has a named size that an input of a plugin uses."""
        wanted = {s for used in self.used for s in self.symbols(used)}
        return bool(self.symbols(name) & wanted)


def read_common(name: str, entry: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the keys that every pass has, from an entry: `name`, `lr`, and `train` if it is set."""
    rate = entry.get("lr", RATE)
    rate = None if rate is None else read_number(rate, ("lr",), least=0.0)
    common: dict[str, Any] = {"name": make_pass_name(name, notes), "lr": rate}
    if "train" in entry:
        common["train"] = entry["train"]
    return common


def read_number(value: Any, path: tuple[str | int, ...], least: float = -math.inf, below: float = math.inf) -> float:
    """Return a number of a file. Raises SpecError, with `path`, for a value that is no finite number or out of bounds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise SpecError(f"must be a number, not {quote_yaml(value)}", path=path)
    if not least <= value < below:
        bounds = f"{least:g} or more" + (f" and below {below:g}" if below < math.inf else "")
        raise SpecError(f"must be {bounds}, not {quote_yaml(value)}", path=path)
    return float(value)


Number = Annotated[float, make_validator(lambda value: read_number(value, ()))]


def take_key(given: dict[str, Any], key: str) -> Any:
    """Remove and return a key of an entry. Raises SpecError if it is missing."""
    if key not in given:
        raise SpecError(f"missing key '{key}'{did_you_mean(key, given)}")
    return given.pop(key)


def make_patterns(layers: Sequence[LayerPattern]) -> list[str]:
    """Return path patterns; if an expression matches the empty path, the model itself is added, as HCP-Diffusion does."""
    found: dict[str, None] = {}
    for layer in layers:
        if layer.regex and select(f"re:{layer.path}", [""]):
            found[""] = None
        found[layer.pattern] = None
    return list(found)


def make_pass_name(name: str, notes: list[str]) -> str:
    """Return a plugin's name as the name of a pass, a Python identifier."""
    new = make_identifier(name)
    if new != name:
        notes.append(f"plugin '{name}' is renamed to {new}, because names may only have letters, digits and '_'")
    return new

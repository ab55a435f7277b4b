"""The modules that passes put in, a file a method. A pass names them `fxplug.blocks:Lora`, whichever file they are in."""

from importlib import import_module
from typing import Any

_FILES = {
    "base": ["Block", "Gates", "Table"],
    "bitfit": ["Delta"],
    "bottleneck": ["Adapter"],
    "control": ["Add", "Gate"],
    "dora": ["Dora"],
    "freeu": ["FreeU"],
    "half_lora": ["HalfLora"],
    "head": ["Head"],
    "image_attention": ["ImageAttention", "as_tokens"],
    "loha": ["Loha"],
    "lokr": ["Lokr"],
    "lora": ["Lora"],
    "lora_weight": ["LoraWeight"],
    "orthogonal": ["Boft", "Oft"],
    "prompts": ["Drop", "Prompt"],
    "replace": ["Replace"],
    "scale": ["Scale"],
    "skip": ["Skip"],
    "ssf": ["Ssf"],
    "step_marks": ["Gauge", "Join", "Keep", "Mark"],
    "token_merging": ["Merge", "Unmerge"],
    "vera": ["Projections", "Vera"],
    "weight_norms": ["SpectralNorm", "WeightNorm"],
    "weight_update": ["Update"],
    "windowed_attention": ["Attend", "Half", "Window"],
}
_FILE = {name: file for file, names in _FILES.items() for name in names}
__all__ = sorted(_FILE)


def __getattr__(name: str) -> Any:  # so that the file of a block is imported when it is used
    if name not in _FILE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f".{_FILE[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

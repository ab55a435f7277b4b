"""The modules that passes put in, a file for each kind. A pass names them `fxplug.blocks:Lora`, whichever file they are in."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.extensions import list_block_packages

if TYPE_CHECKING:
    from .base import UpdateKind

_FILES = {
    "base": ["Block", "Gates", "Table"],
    "bottleneck": ["Adapter"],
    "control": ["Add", "Gate"],
    "freeu": ["FreeU"],
    "gathered": ["GatheredDora", "GatheredLora"],
    "head": ["Head"],
    "image_attention": ["ImageAttention", "as_tokens"],
    "loha": ["Loha"],
    "lokr": ["Lokr"],
    "lora": ["HalfLora", "Lora"],
    "lora_weight": ["Dora", "LoraWeight"],
    "orthogonal": ["Boft", "Oft"],
    "prompts": ["Drop", "Prompt"],
    "regions": ["RegionGates", "RegionTable"],
    "replace": ["Replace"],
    "scale": ["Scale", "Ssf"],
    "skip": ["Skip"],
    "step_marks": ["Gauge", "Join", "Keep", "Mark"],
    "token_merging": ["Merge", "Unmerge"],
    "vera": ["Projections", "Vera"],
    "weight_norms": ["SpectralNorm", "WeightNorm"],
    "weight_update": ["Delta", "Update"],
    "windowed_attention": ["Attend", "Half", "Window"],
}
_FILE = {name: file for file, names in _FILES.items() for name in names}
__all__ = sorted(_FILE)


def __getattr__(name: str) -> Any:  # so that the file of a block is imported when it is used
    if name not in _FILE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f".{_FILE[name]}", __name__), name)
    return value


def list_update_kinds() -> "dict[str, UpdateKind]":
    """Give the kinds of updates of blocks here, in extensions' packages, and elsewhere once imported, by `make_kind_key`."""
    return _with_all_imported()


@cache
def _with_all_imported() -> "dict[str, UpdateKind]":
    base, *_ = [import_module(f".{file}", __name__) for file in _FILES]
    for package in list_block_packages():
        import_module(package)
    found: dict[str, UpdateKind] = base.UPDATE_KINDS
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

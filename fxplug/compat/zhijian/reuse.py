"""What ZhiJian's configurations say of the base model: `reuse_keys` as `trainable`, and what add-ins ask of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...core.errors import SpecError, did_you_mean
from ...core.spec.addresses import select
from .line import parse_path
from .lists import make_pattern

ADDIN = "addin"  # what ZhiJian calls its add-ins in the model


def reuse_keys(keys: str | Sequence[Sequence[str | int]] | None, model: nn.Module | None = None) -> list[str]:
    """Convert ZhiJian's `reuse_keys` (`"addin,blocks[10:12],head"`, or `[[addin], [blocks, 11]]`) to a trainer's `trainable`.

    None is all of the base, as in ZhiJian. `addin` is left out: what passes add trains by default, unless they say `train:
    false`. With a model, or a trace of it, names without parameters (an `fc_norm` that is nn.Identity) are left out as well.
    Raises SpecError, also for names that the model does not have.
    """
    if keys is None:
        return ["**"]
    if isinstance(keys, str):
        found = [parse_path(part) for part in keys.split(",") if part.strip()]
    else:
        found = [make_pattern([key] if isinstance(key, str) else key) for key in keys]
    named = [pattern for pattern in found if pattern != ADDIN]
    return named if model is None else [pattern for pattern in named if _has_parameters(pattern, model)]


def _has_parameters(pattern: str, model: nn.Module) -> bool:
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen = [*select(pattern, [name for name in modules if name]), *select(pattern, parameters)]
    if not chosen:
        raise SpecError(f"'{pattern}' matches no module of the model{did_you_mean(pattern, modules)}", path=("reuse_keys",))
    return any(f"{name}.".startswith(f"{one}.") for one in chosen for name in parameters)


def model_config(model: nn.Module) -> dict[str, Any]:
    """Return the values that ZhiJian's add-ins read of a timm ViT: `hidden_size`, `patches_size`, `transformer_num_layers` and,
    for VQT, `num_heads`, `head_dim` and `head_output`, as far as the model has them."""
    found: dict[str, Any] = {}
    read: Any = model
    if isinstance(width := getattr(read, "embed_dim", getattr(read, "num_features", None)), int):
        found["hidden_size"] = width
    if (patches := getattr(getattr(read, "patch_embed", None), "patch_size", None)) is not None:
        found["patches_size"] = list(patches)
    if isinstance(blocks := getattr(read, "blocks", None), nn.Sequential):
        found["transformer_num_layers"] = len(blocks)
        attention = getattr(blocks[0], "attn", None)
        found.update({name: getattr(attention, name) for name in ("num_heads", "head_dim") if hasattr(attention, name)})
    if isinstance(classes := getattr(read, "num_classes", None), int):
        found["head_output"] = classes
    return found

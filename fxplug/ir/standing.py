"""The class that a traced module answers for, and the methods by which pipelines reach its slots."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecError, shown

if TYPE_CHECKING:
    from .traced_module import TracedModule

ASKED = "diffusers.models.modeling_utils", "ModelMixin"  # whose methods a pipeline calls, and saves and loads by
KEPT = "_stands_for"


def answered(module: TracedModule) -> type:
    """What `isinstance` takes a module for: its class, and where pipelines of diffusers are at hand the class of its model, or
    the base of all that such a pipeline calls, saves and gives adapters. Attributes are those of the module all the same.
    """
    own = type(module)
    asked = getattr(sys.modules.get(ASKED[0]), ASKED[1], None)
    if asked is None or "classes" not in module.__dict__ or issubclass(own, asked):  # without, it is being made
        return own
    known: type | None = module.__dict__.get(KEPT)
    if known is None or known.__bases__[0] is not own:
        known = module.__dict__[KEPT] = _made(own, _kind(module, asked))
    return known


def _made(own: type, kind: type) -> type:
    made = type(own.__name__, (own,), {"__module__": own.__module__})
    with contextlib.suppress(TypeError):  # their bases stand in other orders
        made.__bases__ = (own, kind)  # now, so that a library does not prepare a class of its own
    return made


def _kind(module: TracedModule, asked: type) -> type:
    """The class of the model, as far as its library is loaded: nothing is imported for a name out of a file."""
    origin = module.__dict__.get("_origin")
    if isinstance(origin, type):
        return origin if issubclass(origin, asked) else asked
    library = f"{ASKED[0].partition('.')[0]}."
    todo = [asked]
    while todo:
        each = todo.pop()
        if each.__name__ == module.classes[0] and each.__module__.startswith(library):
            return each
        todo += each.__subclasses__()
    return asked


def become(module: TracedModule, cls: type) -> None:
    """Give a module another class. What was made of the class that it answers for is made of its own."""
    known = module.__dict__.pop(KEPT, None)
    if known is not None and known in cls.__bases__:
        cls.__bases__ = tuple(type(module) if base is known else base for base in cls.__bases__)
    object.__dict__["__class__"].__set__(module, cls)


# --- methods that pipelines call


def method(module: TracedModule, name: str) -> Any:
    """What a module does when a pipeline calls it by this name; None for a name that it does nothing by."""
    if name == "peft_config":
        return {each: {} for each in module.adapters.names} or None if _has_slots(module) else None
    if name in CALLS and _has_slots(module):
        return functools.partial(CALLS[name], module)
    if name in SWITCHES and not any(hasattr(block, "slots") for block in module.modules()):
        return _nothing
    return None


def _has_slots(module: TracedModule) -> bool:
    return getattr(module, "adapters", None) is not None


def _nothing(*_: Any, **__: Any) -> None:
    """A switch of adapters where there are none, as pipelines call it on each of their models."""


def _load(
    module: TracedModule,
    source: Any,
    prefix: str | None = "transformer",
    hotswap: bool = False,
    *,
    adapter_name: str | None = None,
    network_alphas: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    """diffusers' `load_lora_adapter`: into a slot, and in use. Layers under another prefix than `prefix` are for others."""
    if isinstance(source, Mapping):
        alphas = {key: torch.tensor(float(value)) for key, value in (network_alphas or {}).items()}
        alphas = {key if key.endswith(".alpha") else f"{key}.alpha": value for key, value in alphas.items()}
        source = {key: value for key, value in (*source.items(), *alphas.items()) if _below(key, prefix) is not None}
        source = {str(_below(key, prefix)): value for key, value in source.items()}
        metadata = {str(_below(key, prefix)): value for key, value in (metadata or {}).items() if _below(key, prefix)}
        if not source:
            warnings.warn(f"no layers with the prefix '{prefix}' are in what was given", stacklevel=4)
            return
    names = module.adapters.names
    name = adapter_name or next(each for each in (f"default_{n}" for n in count(len(names))) if each not in names)
    module.adapters.load(name, source, config=metadata or None, replace=hotswap)
    module.adapters.use(name)


def _below(key: str, prefix: str | None) -> str | None:
    if prefix is None:
        return key
    return key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else None


def _load_text(module: TracedModule, *, adapter_name: str, adapter_state_dict: Any, peft_config: Any, **_: Any) -> None:
    """transformers' `load_adapter`, as a pipeline of diffusers calls it."""
    config = peft_config.to_dict() if hasattr(peft_config, "to_dict") else peft_config
    given = None if adapter_name == "default_0" else adapter_name  # diffusers' name where it counts no layers of PEFT
    _load(module, adapter_state_dict, None, adapter_name=given, metadata=config)


def _set(module: TracedModule, names: str | list[str], weights: Any = None) -> None:
    names = [names] if isinstance(names, str) else list(names)
    values = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(names)
    if odd := [value for value in values if value is not None and not isinstance(value, (int, float))]:
        raise SpecError(
            f"set_adapters: {shown(odd[0])} is no number: slots have one strength for all layers; apply a pass with another "
            "name to the layers that shall have another"
        )
    known = module.adapters.names
    pairs = zip(names, values, strict=True)
    module.adapters.use({name: 1.0 if value is None else value for name, value in pairs if name in known})


def _delete(module: TracedModule, names: str | list[str]) -> None:
    for name in [names] if isinstance(names, str) else names:
        if name in module.adapters.names:
            module.adapters.unload(name)


def _unload(module: TracedModule) -> None:
    _delete(module, module.adapters.names)


def _disable(module: TracedModule) -> None:
    if module.adapters.active:
        module.__dict__["_unused"] = module.adapters.active
        module.adapters.use(None)


def _enable(module: TracedModule) -> None:
    if (before := module.__dict__.pop("_unused", None)) is not None and not module.adapters.active:
        module.adapters.use(before)


def _active(module: TracedModule) -> list[str]:
    active = module.adapters.active
    return list(active if isinstance(active, dict) else dict.fromkeys(name for row in active for name in row))


CALLS: dict[str, Callable[..., Any]] = {
    "load_lora_adapter": _load,
    "load_adapter": _load_text,
    "set_adapters": _set,
    "set_adapter": _set,
    "delete_adapters": _delete,
    "unload_lora": _unload,
    "disable_lora": _disable,
    "disable_adapters": _disable,
    "enable_lora": _enable,
    "enable_adapters": _enable,
    "active_adapters": _active,
}
SWITCHES = {"set_adapters", "delete_adapters", "unload_lora", "disable_lora", "enable_lora"}

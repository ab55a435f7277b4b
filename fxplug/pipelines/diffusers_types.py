"""Traced modules as parts of a diffusers pipeline: of a class that the pipeline knows, with the methods that it calls."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters.strengths import Strength
from ..core.artifacts.artifact import save
from ..core.capture.retracer import with_retracer
from ..core.errors import SpecError, TraceError, did_you_mean, quote
from ..core.ir import context_managers
from ..core.ir.containers import Container
from ..core.ir.entry_checks import get_signature
from ..core.ir.traced_module import TracedModule
from ..core.ir.variants import LIMIT, Variants, as_kind
from .control import load_part

_SLOTS = "a pass with slots, load_pass('lora', slots=4), and then "
# what does the work of a method of a model, by its name; pipelines call them
INSTEAD = {
    "enable_freeu": "the pass 'freeu' does that: apply(module, load_pass('freeu'))",
    "disable_freeu": "keep the module without the pass 'freeu'",
    "load_lora_adapter": f"{_SLOTS}module.adapters.load(name, file)",
    "add_adapter": f"{_SLOTS}module.adapters.load(name, file)",
    "load_attn_procs": f"{_SLOTS}module.adapters.load(name, file)",
    "set_adapters": f"{_SLOTS}module.adapters.use({{name: strength}})",
    "set_adapter": f"{_SLOTS}module.adapters.use(name)",
    "delete_adapters": f"{_SLOTS}module.adapters.unload(name)",
    "unload_lora": f"{_SLOTS}module.adapters.unload(name)",
    "fuse_lora": "fxplug.lower(module, merge=True)",
    "unfuse_lora": "keep the module that was lowered",
    "save_lora_adapter": "module.adapters.save, or fxplug.save_adapter",
    "enable_group_offload": "diffusers.hooks.apply_group_offloading(module, ...)",
    "enable_layerwise_casting": "diffusers.hooks.apply_layerwise_casting(module, ...)",
    "generate": "generate with the model, which has the loop; save_checkpoint writes the weights of passes for it",
}
_ATTENTION = (
    "attention is part of the graph, and no processor of it can be read or set any more: set processors, fuse projections and "
    "load IP-Adapters on the model before tracing, and use pipelines that change none while they run (PAG and SAG do)"
)
_GUIDER = (
    "it hooks layers of the denoiser while the pipeline runs, and the code of these is in the graph of a traced one: use a "
    "guider that changes no model, such as ClassifierFreeGuidance, or leave the pipeline as it is"
)
# what reads or sets attention processors. It is an error also where somebody asks whether it is there, and goes on without it
PROCESSORS = {
    "attn_processors": _ATTENTION,
    "set_attn_processor": _ATTENTION,
    "set_default_attn_processor": _ATTENTION,
    "fuse_qkv_projections": _ATTENTION,
    "unfuse_qkv_projections": _ATTENTION,
    "set_attention_backend": _ATTENTION,
    "_load_ip_adapter_weights": _ATTENTION,
    "set_use_memory_efficient_attention_xformers": _ATTENTION,
    "enable_xformers_memory_efficient_attention": _ATTENTION,
}
# arguments of diffusers' models in which "scale" is the strength of LoRA that PEFT has put in
SCALED = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


class PipelinePart(Variants):
    """A traced module that takes the place of its model in a pipeline of diffusers.

    `isinstance` says that it is of its model's class, which has no say beside that: attributes and methods are those of a
    traced module. What a pipeline calls to load, choose and save adapters is done in the slots of its passes.
    """

    _model_class: type = nn.Module  # the model's, where diffusers has it

    def save_pretrained(self, folder: str | os.PathLike[str], **_: Any) -> None:
        """Save the part like `fxplug.save`, under the name that pipelines of diffusers call. Raises ArtifactError."""
        save(self, folder)

    def __getattr__(self, name: str) -> Any:
        if name in PROCESSORS:
            check_processors(self, name)
        try:
            found = super().__getattr__(name)
            if isinstance(found, Container) and not torch.compiler.is_compiling():
                _give_methods(found, self._model_class)
            return found
        except AttributeError:
            if name == "_keep_in_fp32_modules" and (origin := self.__dict__.get("_origin")) is not None:
                return getattr(origin, name, None)  # which diffusers looks up for the model's `dtype`
            if name.startswith("_"):
                raise
            if (found := _method(self, name)) is not None:
                return found
            if name not in INSTEAD:
                raise
        raise AttributeError(
            f"'{name}' is a method of {self.classes[0]}, which a traced graph does not have: {INSTEAD[name]}"
        )

    def add_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
        """Add a variant as any module with variants does. Raises TraceError for a LoRA scale that no pass would use."""
        if name := _unseen_scale(self.meta.get("passes"), get_signature(self).bind(*args, **kwargs).arguments):
            raise TraceError(
                f"'scale' in {name} is the strength of LoRA layers of another library, which passes do not use: "
                f"{INSTEAD['set_adapters']}"
            )
        return super().add_variant(args, kwargs)


def check_processors(module: TracedModule, name: str) -> None:
    """Raise SpecError if the class of a traced model has this attribute for its attention processors."""
    if any(name in vars(kind) for kind in type(module).__mro__):
        raise SpecError(f"'{name}' of the traced {module.classes[0]}: {PROCESSORS[name]}")


def check_pipeline(pipe: Any) -> None:
    """Raise SpecError for a pipeline whose call reads or sets attention processors, as those of PAG and SAG do, or with a
    guider that hooks layers.
    """
    for kind in (type(pipe), *_kinds_of_blocks(pipe)):
        _check_call(kind)
    for name, part in getattr(pipe, "components", {}).items():
        code = getattr(getattr(type(part), "prepare_models", None), "__code__", None)
        if code is not None and any("hook" in used for used in code.co_names):
            raise SpecError(f"'{name}' of the {type(pipe).__name__} is a {type(part).__name__}: {_GUIDER}")


def _kinds_of_blocks(pipe: Any) -> Iterator[type]:
    """Yield the classes of the blocks of a modular pipeline."""
    todo = [getattr(pipe, "_blocks", None)]
    while todo:
        block = todo.pop()
        if block is not None:
            yield type(block)
            todo += getattr(block, "sub_blocks", {}).values()


def _check_call(kind: type) -> None:
    """Raise SpecError for a class whose call reads or sets attention processors."""
    todo, seen = ["__call__"], set[str]()
    while todo:
        name = todo.pop()
        function: Any = getattr(kind, name, None)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if name in seen or code is None:
            continue
        seen.add(name)
        found = next((each for each in ("attn_processors", "set_attn_processor") if each in code.co_names), None)
        if found is not None:
            raise SpecError(
                f"{kind.__name__}.{name} uses '{found}' of its models while it runs, and in a traced model attention is "
                "part of the graph: use the pipeline without it (of PAG and SAG the plain one), or leave this one as it is"
            )
        todo += code.co_names


def pipeline_part(gm: TracedModule, model: nn.Module | None = None, limit: int = LIMIT) -> PipelinePart:
    """Make a traced module a part of a diffusers pipeline: `pipe.unet = fxplug.pipeline_part(gm, unet)`.

    It is on the same weights and of its model's class to `isinstance`, and the pipeline's methods for adapters,
    `save_pretrained` and `from_pretrained` work with it. `trace_pipeline` and `load_pipeline` give such parts.

    Args:
        gm: The traced module.
        model: The model that it was traced from: with it the part answers other forms of call as well, as `fxplug.variants`
            says.
        limit: How many further graphs there may be.

    Returns:
        The part.

    Raises:
        SpecError: As `variants`.
    """
    if not isinstance(gm, TracedModule):
        raise SpecError(f"pipeline_part takes a traced module, not {quote(gm, 80)}: fxplug.trace makes one")
    kind = _class_of(gm)
    part = as_kind(_part_class(kind), gm)
    if contexts := context_managers.list_context_managers(kind):  # what earlier versions have saved does not know them
        part.meta.setdefault(context_managers.NAMES, contexts)
    return part if model is None or not limit else with_retracer(part, model, limit)


def from_pretrained(
    folder: str | os.PathLike[str], dtype: Any = None, torch_dtype: Any = None, subfolder: str | None = "", **options: Any
) -> Any:
    """Load a saved part as `fxplug.load` does, then cast it to `dtype`, of which `torch_dtype` is another name: the call with
    which pipelines of diffusers load parts, modular ones with the `subfolder`, and with a `variant` and a `revision` that are
    None.

    Raises ArtifactError.
    """
    options = {key: value for key, value in options.items() if value is not None or key not in ("variant", "revision")}
    found = load_part(Path(folder, subfolder or ""), **options)
    part = pipeline_part(found) if isinstance(found, TracedModule) else found
    return part if dtype is None and torch_dtype is None else part.to(dtype or torch_dtype)


# diffusers takes the class from the names in a saved pipeline, ["fxplug", "TracedModule"], and calls this of it; before that
# it looks for `fxplug.ModelMixin`, as in every library of parts, to see that it is a model
TracedModule.from_pretrained = staticmethod(from_pretrained)  # type: ignore[attr-defined]
ModelMixin = TracedModule


# --- the class


def _class_of(gm: TracedModule) -> type:
    """Return the class of the model if diffusers has it, else the base of all classes that its pipelines call and save."""
    import diffusers

    base: type = diffusers.ModelMixin
    if isinstance(gm._origin, type):
        return gm._origin if issubclass(gm._origin, base) else base
    todo = [base]
    while todo:  # of those that are imported: nothing is for a name out of a file
        each = todo.pop()
        if each.__name__ == gm.classes[0] and each.__module__.startswith("diffusers."):
            return each
        todo += each.__subclasses__()
    return base


class _Hidden:
    """An attribute that a module is without, so that `__getattr__` is asked."""

    def __get__(self, module: Any, cls: Any = None) -> Any:
        raise AttributeError("hidden")


@functools.cache
def _part_class(kind: type) -> type[PipelinePart]:
    """Return the class of parts for a model of this class, whose own attributes are hidden by those of nn.Module."""
    hidden = {name: _Hidden() for name in dir(kind) if not name.startswith("__")}
    shown = {name: value for name, value in vars(nn.Module).items() if name not in ("__dict__", "__weakref__")}
    cover = type("Module", (nn.Module,), {**hidden, **shown})
    own = {"__module__": "fxplug", "_model_class": kind}
    made: type[PipelinePart] = type(TracedModule.__name__, (PipelinePart, cover, kind), own)
    return made


@functools.cache
def _list_layer_methods(model: type[Any], name: str) -> Mapping[str, Any]:
    """Return the methods of a layer's class in the file of a model's: some pipelines call those, as for positions.

    They read plain attributes, which a traced module keeps.
    """
    kind = vars(import_module(model.__module__)).get(name)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind.__module__ != model.__module__:
        return {}
    return {each: value for each, value in vars(kind).items() if inspect.isfunction(value) and not hasattr(Container, each)}


def _give_methods(layer: Container, model: type) -> None:
    """Give a layer of a part the methods of the model's own layer."""
    kind = type(layer)
    methods = _list_layer_methods(model, kind.__name__)
    if methods and vars(kind).keys().isdisjoint(methods):
        # Nothing plainer works: attributes of a layer are what its graph reads and what is saved, so methods are its class's
        layer.__class__ = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


# --- methods that pipelines call


def _method(module: PipelinePart, name: str) -> Any:
    """Return the method that a pipeline calls by this name; None for other names."""
    if name == "peft_config":
        return {each: {} for each in module.adapters.names} or None if _has_slots(module) else None
    if name in CALLS and _has_slots(module):
        return functools.partial(CALLS[name], module)
    if name in SWITCHES and not any(hasattr(block, "slots") for block in module.modules()):
        return _nothing
    return None


def _has_slots(module: PipelinePart) -> bool:
    return getattr(module, "adapters", None) is not None


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing in place of a switch of adapters, which pipelines call on each of their models."""


def _load(
    module: PipelinePart,
    source: Any,
    prefix: str | None = "transformer",
    hotswap: bool = False,
    *,
    adapter_name: str | None = None,
    network_alphas: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    """Load an adapter into a slot and activate it, as diffusers' `load_lora_adapter`. Layers under another prefix are
    ignored."""
    if isinstance(source, Mapping):
        alphas = {key: torch.tensor(float(value)) for key, value in (network_alphas or {}).items()}
        alphas = {key if key.endswith(".alpha") else f"{key}.alpha": value for key, value in alphas.items()}
        source = {key: value for key, value in (*source.items(), *alphas.items()) if _below(key, prefix) is not None}
        source = {str(_below(key, prefix)): value for key, value in source.items()}
        metadata = {str(_below(key, prefix)): value for key, value in (metadata or {}).items() if _below(key, prefix)}
        if not source:
            warnings.warn(f"there are no layers with the prefix '{prefix}'", stacklevel=4)
            return
    names = module.adapters.names
    name = adapter_name or next(each for each in (f"default_{n}" for n in count(len(names))) if each not in names)
    module.adapters.load(name, source, config=metadata or None, replace=hotswap)
    module.adapters.use(name)


def _below(key: str, prefix: str | None) -> str | None:
    if prefix is None:
        return key
    return key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else None


def _load_text(module: PipelinePart, *, adapter_name: str, adapter_state_dict: Any, peft_config: Any, **_: Any) -> None:
    """Load an adapter as transformers' `load_adapter`, the way a pipeline of diffusers calls it."""
    config = peft_config.to_dict() if hasattr(peft_config, "to_dict") else peft_config
    given = None if adapter_name == "default_0" else adapter_name  # diffusers' name where it counts no layers of PEFT
    _load(module, adapter_state_dict, None, adapter_name=given, metadata=config)


def _set(module: PipelinePart, names: str | list[str], weights: Any = None) -> None:
    names = [names] if isinstance(names, str) else list(names)
    values = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(names)
    known = module.adapters.names
    pairs = zip(names, values, strict=True)
    made = {name: _read_strength(module, 1.0 if value is None else value) for name, value in pairs if name in known}
    module.adapters.use(made)


def _read_strength(module: PipelinePart, value: Any) -> Any:
    """Return a number as it is, and diffusers' dictionary of blocks as the strength that it gives to each layer."""
    if not isinstance(value, Mapping):
        if not isinstance(value, (int, float)):
            raise SpecError(f"set_adapters: {quote(value)} is neither a number nor a dictionary of blocks")
        return value
    scales = _expand_blocks(module, value) if hasattr(module, "down_blocks") and hasattr(module, "up_blocks") else dict(value)
    if odd := [scale for scale in scales.values() if not isinstance(scale, (int, float))]:
        raise SpecError(f"set_adapters: {quote(odd[0])} is not a number: parts of layers' names have one each")
    made = {}
    for banks in module.adapters.banks.values():
        for path in dict.fromkeys(bank.path for bank in banks):
            parts = path.split(".")
            part = f"{parts[0]}.{parts[1]}.attentions.{parts[3]}" if len(parts) > 3 else ""
            made[path] = next((scale for name, scale in scales.items() if name in path), scales.get(part, 1.0))
    return Strength(1.0, {path: float(scale) for path, scale in made.items() if scale != 1})


def _expand_blocks(module: PipelinePart, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scales of a UNet's attentions from diffusers' dictionary of down, mid and up, each one number, or numbers by
    block, or lists of them by attention. Raises SpecError for a block that there is not, and for a list of another length."""
    scales: dict[str, Any] = {}
    if (unknown := next((key for key in given if key not in ("down", "mid", "up")), None)) is not None:
        raise SpecError(f"set_adapters: no part '{unknown}' of a UNet{did_you_mean(unknown, ['down', 'mid', 'up'])}")
    middle = given.get("mid", 1.0)
    scales["mid_block.attentions.0"] = middle[0] if isinstance(middle, list) and len(middle) == 1 else middle
    for side in ("down", "up"):
        blocks = {f"block_{i}": (i, block) for i, block in enumerate(getattr(module, f"{side}_blocks"))}
        blocks = {key: (i, len(block.attentions)) for key, (i, block) in blocks.items() if hasattr(block, "attentions")}
        own = given.get(side, 1.0)
        own = own if isinstance(own, Mapping) else dict.fromkeys(blocks, own)
        if (unknown := next((key for key in own if key not in blocks), None)) is not None:
            near = f"{did_you_mean(unknown, blocks)}; there are {', '.join(blocks)}"
            raise SpecError(f"set_adapters: '{side}' has no {unknown} with attentions{near}")
        for key, (i, most) in blocks.items():
            value = own.get(key, 1.0)
            values = list(value) * (most if len(value) == 1 else 1) if isinstance(value, list) else [value] * most
            if len(values) != most:
                raise SpecError(f"set_adapters: {side}.{key} has {most} attentions, and {len(values)} scales are given")
            scales |= {f"{side}_blocks.{i}.attentions.{j}": each for j, each in enumerate(values)}
    return scales


def _delete(module: PipelinePart, names: str | list[str]) -> None:
    for name in [names] if isinstance(names, str) else names:
        if name in module.adapters.names:
            module.adapters.unload(name)


def _unload(module: PipelinePart) -> None:
    _delete(module, module.adapters.names)


def _disable(module: PipelinePart) -> None:
    if module.adapters.active:
        module.__dict__["_disabled"] = module.adapters.active
        module.adapters.use(None)


def _enable(module: PipelinePart) -> None:
    if (before := module.__dict__.pop("_disabled", None)) is not None and not module.adapters.active:
        module.adapters.use(before)


def _active(module: PipelinePart) -> list[str]:
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


def _unseen_scale(passes: Any, call: Mapping[str, Any]) -> str:
    """Return the argument whose LoRA scale would reach none of the applied passes, or ""."""
    if not passes:
        return ""
    return next((name for name in SCALED if isinstance(call.get(name), dict) and call[name].get("scale", 1.0) != 1.0), "")

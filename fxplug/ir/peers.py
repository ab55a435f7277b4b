"""What other libraries' methods are here: data for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SLOTS = "a pass with slots, load_pass('lora', slots=4), and then "
# by the name of a method of a model; pipelines call them
METHODS = {
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
    "save_pretrained": "fxplug.save(module, folder); fxplug.save_pipeline for the pipeline that holds it",
    "from_pretrained": "fxplug.load(folder)",
    "generate": "generate with the model, which has the loop; weights of passes reach it by save_checkpoint",
    "set_attn_processor": "set it on the model before tracing",
}
# arguments of diffusers' models in which "scale" is the strength of LoRA that PEFT has put in
SCALED = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def instead(name: str) -> str:
    """What does the work of a method, in words; an empty text for a method that is not known."""
    return METHODS.get(name, "")


def unseen_scale(passes: Any, call: Mapping[str, Any]) -> str:
    """The argument with a strength that would reach none of the passes that were applied, or an empty text."""
    if not passes:
        return ""
    return next((name for name in SCALED if isinstance(call.get(name), dict) and call[name].get("scale", 1.0) != 1.0), "")

"""The names that the first code bases of Stable Diffusion and Flux gave the layers that diffusers names otherwise.

Most adapter files that people share have those names. What is here is told from the graph alone: no model is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SWAPPED = "~"  # the two halves of the outputs change places

RESNET = {
    "in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
    "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
}  # fmt: skip
UNET = {
    "time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in", "out.0": "conv_norm_out", "out.2": "conv_out",
}  # fmt: skip
# a layer whose outputs are those of several layers, one after the other, names them all
FLUX = {
    "double_blocks.{i}.img_attn.qkv": "transformer_blocks.{i}.attn. to_q to_k to_v",
    "double_blocks.{i}.txt_attn.qkv": "transformer_blocks.{i}.attn. add_q_proj add_k_proj add_v_proj",
    "double_blocks.{i}.img_attn.proj": "transformer_blocks.{i}.attn. to_out.0",
    "double_blocks.{i}.txt_attn.proj": "transformer_blocks.{i}.attn. to_add_out",
    "double_blocks.{i}.img_mlp.0": "transformer_blocks.{i}.ff. net.0.proj",
    "double_blocks.{i}.img_mlp.2": "transformer_blocks.{i}.ff. net.2",
    "double_blocks.{i}.txt_mlp.0": "transformer_blocks.{i}.ff_context. net.0.proj",
    "double_blocks.{i}.txt_mlp.2": "transformer_blocks.{i}.ff_context. net.2",
    "double_blocks.{i}.img_mod.lin": "transformer_blocks.{i}. norm1.linear",
    "double_blocks.{i}.txt_mod.lin": "transformer_blocks.{i}. norm1_context.linear",
    "single_blocks.{i}.linear1": "single_transformer_blocks.{i}. attn.to_q attn.to_k attn.to_v proj_mlp",
    "single_blocks.{i}.linear2": "single_transformer_blocks.{i}. proj_out",
    "single_blocks.{i}.modulation.lin": "single_transformer_blocks.{i}. norm.linear",
    "img_in": " x_embedder",
    "txt_in": " context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder. linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder. linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder. linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder. linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder. linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder. linear_2",
    "final_layer.linear": " proj_out",
    "final_layer.adaLN_modulation.1": " norm_out.linear~",
}


def first_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The layers of a graph by their first names, empty for a graph of another kind.

    Several layers are those whose outputs, in this order, were one layer's; a path that ends in `~` has the two halves of its
    outputs the other way round.
    """
    known = dict.fromkeys(layers)
    if any(path.startswith("down_blocks.0.resnets.") for path in known):
        return {name: (path,) for name, path in _unet(known).items()}
    return _flux(known) if any(path.startswith("single_transformer_blocks.0.") for path in known) else {}


def _unet(layers: Mapping[str, None]) -> dict[str, str]:
    """Stable Diffusion's UNet, whose blocks are counted through all levels."""
    owners = {}  # a module of the graph -> its first name
    count: dict[str, dict[int, set[int]]] = {"down": {}, "up": {}}
    for path in layers:
        if found := re.match(r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.", path):
            count[found[1]].setdefault(int(found[2]), set()).add(int(found[3]))
    number = 1
    for level in sorted(count["down"]):
        for n in sorted(count["down"][level]):
            owners[f"down_blocks.{level}.resnets.{n}"] = f"input_blocks.{number}.0"
            owners[f"down_blocks.{level}.attentions.{n}"] = f"input_blocks.{number}.1"
            number += 1
        owners[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
        number += 1
    number = 0
    for level in sorted(count["up"]):
        attends = any(path.startswith(f"up_blocks.{level}.attentions.") for path in layers)
        for n in sorted(count["up"][level]):
            owners[f"up_blocks.{level}.resnets.{n}"] = f"output_blocks.{number}.0"
            owners[f"up_blocks.{level}.attentions.{n}"] = f"output_blocks.{number}.1"
            number += 1
        owners[f"up_blocks.{level}.upsamplers.0"] = f"output_blocks.{number - 1}.{1 + attends}"
    owners |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    owners |= {"mid_block.resnets.1": "middle_block.2"}
    resnet = {new: old for old, new in RESNET.items()}
    names = {old: new for old, new in UNET.items() if new in layers}
    for path in layers:
        parts = path.split(".")
        for n in range(len(parts), 1, -1):
            owner, inner = ".".join(parts[:n]), ".".join(parts[n:])
            if owner in owners:
                inner = resnet.get(inner, inner) if ".resnets." in owner else inner
                names[".".join(filter(None, [owners[owner], inner]))] = path
                break
    return names


def _flux(layers: Mapping[str, None]) -> dict[str, tuple[str, ...]]:
    """Flux, whose attention computes query, key and value (and a single block's MLP) in one layer."""
    numbers = {found[1] for path in layers if (found := re.match(r"(?:single_)?transformer_blocks\.(\d+)\.", path))}
    names = {}
    for old, new in FLUX.items():
        for i in sorted(numbers, key=int) if "{i}" in old else [""]:
            owner, *inner = new.replace("{i}", i).split(" ")
            paths = tuple(owner + name for name in inner)
            if all(path.removesuffix(SWAPPED) in layers for path in paths):
                names[old.replace("{i}", i)] = paths
    return names


def new_name(layer: str) -> str:
    """`X.processor.to_q` as `X.to_q`: what diffusers' attention processors called their LoRAs is the layer they change."""
    owner, _, last = layer.removesuffix("_lora").rpartition(".")
    if owner.rpartition(".")[2] == "self_attn":  # a text encoder's
        last = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}.get(last, last)
    last = {"to_out": "to_out.0"}.get(last, last)
    return f"{owner.removesuffix('.processor')}.{last}" if owner else last

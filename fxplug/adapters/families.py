"""The names that other code bases give the layers which diffusers names otherwise: a table for each family of models, as data.

A row says what a layer is called in the family's own code, and which layer of the graph that is. `{i}` is a number, the same
on both sides, `{last}` the highest there is; `{*}` is whatever follows. Several names in brackets are layers whose outputs, in
this order, are those of the one; `~` at the end says that the two halves of the outputs have changed places. A family is told
from the graph alone, by layers (`has`) that no other family's graph has. The tables hold facts from diffusers' loaders
(`lora_conversion_utils`, `single_file_utils`, version 0.42) and from the models' own repositories, which they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# double blocks of Flux's kind, and the heads around them
_QKV = "[attn.to_q attn.to_k attn.to_v]"
_ADDED = "[attn.add_q_proj attn.add_k_proj attn.add_v_proj]"
_DOUBLE = {
    "double_blocks.{i}.img_attn.qkv": f"transformer_blocks.{{i}}.{_QKV}",
    "double_blocks.{i}.txt_attn.qkv": f"transformer_blocks.{{i}}.{_ADDED}",
    "double_blocks.{i}.img_attn.proj": "transformer_blocks.{i}.attn.to_out.0",
    "double_blocks.{i}.txt_attn.proj": "transformer_blocks.{i}.attn.to_add_out",
}
_FLUX = {
    **_DOUBLE,
    "double_blocks.{i}.img_mlp.0": "transformer_blocks.{i}.ff.net.0.proj",
    "double_blocks.{i}.img_mlp.2": "transformer_blocks.{i}.ff.net.2",
    "double_blocks.{i}.txt_mlp.0": "transformer_blocks.{i}.ff_context.net.0.proj",
    "double_blocks.{i}.txt_mlp.2": "transformer_blocks.{i}.ff_context.net.2",
    "double_blocks.{i}.img_mod.lin": "transformer_blocks.{i}.norm1.linear",
    "double_blocks.{i}.txt_mod.lin": "transformer_blocks.{i}.norm1_context.linear",
    "single_blocks.{i}.linear1": "single_transformer_blocks.{i}.[attn.to_q attn.to_k attn.to_v proj_mlp]",
    "single_blocks.{i}.linear2": "single_transformer_blocks.{i}.proj_out",
    "single_blocks.{i}.modulation.lin": "single_transformer_blocks.{i}.norm.linear",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear~",
}
# x-flux by XLabs: LoRAs are named by the attention processors that hold them
_XLABS = {
    "double_blocks.{i}.processor.qkv_lora1": f"transformer_blocks.{{i}}.{_QKV}",
    "double_blocks.{i}.processor.qkv_lora2": f"transformer_blocks.{{i}}.{_ADDED}",
    "double_blocks.{i}.processor.proj_lora1": "transformer_blocks.{i}.attn.to_out.0",
    "double_blocks.{i}.processor.proj_lora2": "transformer_blocks.{i}.attn.to_add_out",
    "single_blocks.{i}.processor.qkv_lora": f"single_transformer_blocks.{{i}}.{_QKV}",
    "single_blocks.{i}.processor.proj_lora": "single_transformer_blocks.{i}.proj_out",
}
# the model standards of the Open Model Initiative, as OneTrainer wrote files until July 2026: rows of one layer by number
_SPLIT = {
    **{f"double_blocks.{{i}}.{of}_attn{dot}qkv.{n}": f"transformer_blocks.{{i}}.attn.{to}"
       for dot in "._" for of, names in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")))
       for n, to in enumerate(names)},
    **{f"single_blocks.{{i}}.linear1.{n}": f"single_transformer_blocks.{{i}}.{to}"
       for n, to in enumerate(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))},
}
# DiffSynth-Studio: diffsynth/utils/state_dict_converters/flux_dit.py
_DIFFSYNTH = {
    **{f"blocks.{{i}}.{old}": f"transformer_blocks.{{i}}.{new}" for old, new in {
        "attn.a_to_qkv": _QKV, "attn.b_to_qkv": _ADDED, "attn.a_to_out": "attn.to_out.0", "attn.b_to_out": "attn.to_add_out",
        "ff_a.0": "ff.net.0.proj", "ff_a.2": "ff.net.2", "ff_b.0": "ff_context.net.0.proj", "ff_b.2": "ff_context.net.2",
        "norm1_a.linear": "norm1.linear", "norm1_b.linear": "norm1_context.linear",
    }.items()},
    "single_blocks.{i}.to_qkv_mlp": "single_transformer_blocks.{i}.[attn.to_q attn.to_k attn.to_v proj_mlp]",
    "single_blocks.{i}.proj_out": "single_transformer_blocks.{i}.proj_out",
    "single_blocks.{i}.norm.linear": "single_transformer_blocks.{i}.norm.linear",
    "time_embedder.timestep_embedder.0": "time_text_embed.timestep_embedder.linear_1",
    "time_embedder.timestep_embedder.2": "time_text_embed.timestep_embedder.linear_2",
    "guidance_embedder.timestep_embedder.0": "time_text_embed.guidance_embedder.linear_1",
    "guidance_embedder.timestep_embedder.2": "time_text_embed.guidance_embedder.linear_2",
    "pooled_text_embedder.0": "time_text_embed.text_embedder.linear_1",
    "pooled_text_embedder.2": "time_text_embed.text_embedder.linear_2",
    "final_norm_out.linear": "norm_out.linear~",
    "final_proj_out": "proj_out",
}
_OTHERS_OF_FLUX = {**_XLABS, **_SPLIT, **_DIFFSYNTH, "img_in.proj": "x_embedder"}


def _hunyuan(time: str) -> dict[str, str]:
    """The names of Tencent's code for one of the Hunyuan models, whose steps and guidance are embedded in `time`."""
    return {
        **{f"double_blocks.{{i}}.{old}": f"transformer_blocks.{{i}}.{new}" for old, new in {
            "img_attn_qkv": _QKV, "txt_attn_qkv": _ADDED, "img_attn_proj": "attn.to_out.0", "txt_attn_proj": "attn.to_add_out",
            "img_mlp.fc1": "ff.net.0.proj", "img_mlp.fc2": "ff.net.2", "img_mod.linear": "norm1.linear",
            "txt_mlp.fc1": "ff_context.net.0.proj", "txt_mlp.fc2": "ff_context.net.2", "txt_mod.linear": "norm1_context.linear",
        }.items()},
        "single_blocks.{i}.linear1": "single_transformer_blocks.{i}.[attn.to_q attn.to_k attn.to_v proj_mlp]",
        "single_blocks.{i}.linear2": "single_transformer_blocks.{i}.proj_out",
        "single_blocks.{i}.modulation.linear": "single_transformer_blocks.{i}.norm.linear",
        **{f"txt_in.individual_token_refiner.blocks.{{i}}.{old}": f"context_embedder.token_refiner.refiner_blocks.{{i}}.{new}"
           for old, new in {
               "self_attn_qkv": _QKV, "self_attn_proj": "attn.to_out.0", "mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2",
               "adaLN_modulation.1": "norm_out.linear",
           }.items()},
        "txt_in.input_embedder": "context_embedder.proj_in",
        "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        "img_in.proj": "x_embedder.proj",
        "time_in.mlp.0": f"{time}.timestep_embedder.linear_1",
        "time_in.mlp.2": f"{time}.timestep_embedder.linear_2",
        "time_r_in.mlp.0": f"{time}.timestep_embedder_r.linear_1",
        "time_r_in.mlp.2": f"{time}.timestep_embedder_r.linear_2",
        "guidance_in.mlp.0": f"{time}.guidance_embedder.linear_1",
        "guidance_in.mlp.2": f"{time}.guidance_embedder.linear_2",
        "vector_in.in_layer": f"{time}.text_embedder.linear_1",
        "vector_in.out_layer": f"{time}.text_embedder.linear_2",
        **{f"byt5_in.fc{n}": f"context_embedder_2.linear_{n}" for n in (1, 2, 3)},
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        "cond_type_embedding": "cond_type_embed",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear~",
    }


# how ComfyUI renames these (comfy/supported_models.py, process_unet_state_dict), in this order
_COMFY = {
    "txt_in.t_embedder.mlp.0.": "txt_in.t_embedder.in_layer.", "txt_in.t_embedder.mlp.2.": "txt_in.t_embedder.out_layer.",
    "txt_in.c_embedder.linear_1.": "txt_in.c_embedder.in_layer.", "txt_in.c_embedder.linear_2.": "txt_in.c_embedder.out_layer.",
    "_mod.linear.": "_mod.lin.", "_attn_qkv.": "_attn.qkv.", "mlp.fc1.": "mlp.0.", "mlp.fc2.": "mlp.2.",
    "_attn_proj.": "_attn.proj.", ".modulation.linear.": ".modulation.lin.", "_in.mlp.2.": "_in.out_layer.",
    "_in.mlp.0.": "_in.in_layer.",
}  # fmt: skip


def _others_of_hunyuan(time: str) -> dict[str, str]:
    """What other tools call these layers: ComfyUI, OMI's standards, and the code of 1.5 and of 2.1 in parts."""
    made: dict[str, str] = {}
    for old, new in _hunyuan(time).items():
        name = f"{old}."
        for theirs, comfys in _COMFY.items():
            name = name.replace(theirs, comfys)
        made[name.removesuffix(".")] = new
    for old, new in _SPLIT.items():
        name, _, n = old.rpartition(".")
        own = ("q", "k", "v", "mlp")[int(n)]
        made[f"{name.removesuffix('qkv')}{own}" if "attn" in name else f"{name}_{own}"] = new
    made |= {old.replace("mlp.fc1", "mlp.fc0"): new for old, new in _hunyuan(time).items()}
    theirs, ours = "txt_in.individual_token_refiner.blocks", "context_embedder.token_refiner.refiner_blocks"
    made |= {f"{theirs}.{{i}}.self_attn_qkv.{n}": f"{ours}.{{i}}.attn.to_{q}" for n, q in enumerate("qkv")}
    steps = "context_embedder.time_text_embed.timestep_embedder"
    made |= {f"txt_in.t_embedder.linear_{n}": f"{steps}.linear_{n}" for n in (1, 2)}
    return {**made, **_SPLIT, "single_blocks.{i}.linear2.fc": "single_transformer_blocks.{i}.proj_out"}


_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_COSMOS = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "output_proj": "to_out.0"}
_GATED = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "wo": "to_out.0", "gate": "to_gate"}
_CROSSED = {  # PixArt's blocks, and Sana's
    "blocks.{i}.attn.qkv": "transformer_blocks.{i}.attn1.[to_q to_k to_v]",
    "blocks.{i}.attn.proj": "transformer_blocks.{i}.attn1.to_out.0",
    "blocks.{i}.cross_attn.q_linear": "transformer_blocks.{i}.attn2.to_q",
    "blocks.{i}.cross_attn.kv_linear": "transformer_blocks.{i}.attn2.[to_k to_v]",
    "blocks.{i}.cross_attn.proj": "transformer_blocks.{i}.attn2.to_out.0",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "final_layer.linear": "proj_out",
}


@dataclass(frozen=True)
class Family:
    """How one family of models names its layers: `has` are layers by which its graph is known, `names` the table.

    `also` are names of other tools, which are read and not written.
    """

    name: str
    has: tuple[str, ...]
    names: dict[str, str]
    also: dict[str, str] = field(default_factory=dict)


FAMILIES = (
    Family("Flux", ("single_transformer_blocks.{i}.norm.linear", "x_embedder", "norm_out.linear", "context_embedder"),
           _FLUX, _OTHERS_OF_FLUX),
    Family("Chroma", ("distilled_guidance_layer.in_proj", "single_transformer_blocks.{i}.proj_mlp"), {
        **_FLUX,
        "distilled_guidance_layer.layers.{i}.in_layer": "distilled_guidance_layer.layers.{i}.linear_1",
        "distilled_guidance_layer.layers.{i}.out_layer": "distilled_guidance_layer.layers.{i}.linear_2",
    }, _OTHERS_OF_FLUX),
    Family("Flux 2", ("single_transformer_blocks.{i}.attn.to_qkv_mlp_proj", "double_stream_modulation_img.linear"), {
        **_DOUBLE,
        "double_blocks.{i}.img_mlp.0": "transformer_blocks.{i}.ff.linear_in",
        "double_blocks.{i}.img_mlp.2": "transformer_blocks.{i}.ff.linear_out",
        "double_blocks.{i}.txt_mlp.0": "transformer_blocks.{i}.ff_context.linear_in",
        "double_blocks.{i}.txt_mlp.2": "transformer_blocks.{i}.ff_context.linear_out",
        "single_blocks.{i}.linear1": "single_transformer_blocks.{i}.attn.to_qkv_mlp_proj",
        "single_blocks.{i}.linear2": "single_transformer_blocks.{i}.attn.to_out",
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear~",
    }, {"sformer_blocks.{i}.{*}": "transformer_blocks.{i}.{*}"}),
    Family("Flux 3", ("mode_blocks.image.{i}.attn.to_q", "early_stream_modulations.image.linear"), {
        **{f"{old}.{name}": f"{new}.{{i}}.{to}"
           for old, new in (("content_mode_blocks.image.{i}", "mode_blocks.image"),
                            ("content_mode_blocks.image_cond.{i}", "mode_blocks.image_cond"),
                            ("txt_mode_blocks.{i}", "txt_mode_blocks"), ("single_blocks.{i}", "single_transformer_blocks"))
           for name, to in (("q_proj", "attn.to_q"), ("k_proj", "attn.to_k"), ("v_proj", "attn.to_v"),
                            ("attn_out", "attn.to_out.0"), ("mlp_in", "ff.linear_in"), ("mlp_out", "ff.linear_out"))},
        **{f"{owner}.{of}.lin": f"{owner}.{of}.linear" for owner in ("early_stream_modulations", "single_stream_modulations")
           for of in ("image", "image_cond", "txt")},
        "emb_in.{*}": "x_embedders.{*}",
        "txt_in": "context_embedder",
        "time_in.in_layer": "timestep_embedder.linear_1",
        "time_in.out_layer": "timestep_embedder.linear_2",
        "ref_time_in.in_layer": "target_timestep_embedder.linear_1",
        "ref_time_in.out_layer": "target_timestep_embedder.linear_2",
        "final_layer.image.linear": "proj_out",
        "final_layer.image.adaLN_modulation.1": "norm_out.linear~",
    }),
    Family("SD3", ("time_text_embed.text_embedder.linear_1", "pos_embed.proj", "transformer_blocks.{i}.attn.add_q_proj"), {
        **{f"joint_blocks.{{i}}.{old}": f"transformer_blocks.{{i}}.{new}" for old, new in {
            "x_block.attn.qkv": _QKV, "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn2.qkv": "attn2.[to_q to_k to_v]", "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.mlp.fc1": "ff.net.0.proj", "x_block.mlp.fc2": "ff.net.2", "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.qkv": _ADDED, "context_block.attn.proj": "attn.to_add_out",
            "context_block.mlp.fc1": "ff_context.net.0.proj", "context_block.mlp.fc2": "ff_context.net.2",
            "context_block.adaLN_modulation.1": "norm1_context.linear",
        }.items()},
        # the last block's is AdaLayerNormContinuous, which has scale before shift
        "joint_blocks.{last}.context_block.adaLN_modulation.1": "transformer_blocks.{last}.norm1_context.linear~",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear~",
    }),
    Family("AuraFlow", ("joint_transformer_blocks.{i}.attn.add_q_proj", "time_step_proj.linear_1"), {
        **{f"double_layers.{{i}}.{old}": f"joint_transformer_blocks.{{i}}.{new}" for old, new in {
            "attn.w2q": "attn.to_q", "attn.w2k": "attn.to_k", "attn.w2v": "attn.to_v", "attn.w2o": "attn.to_out.0",
            "attn.w1q": "attn.add_q_proj", "attn.w1k": "attn.add_k_proj", "attn.w1v": "attn.add_v_proj",
            "attn.w1o": "attn.to_add_out", "modX.1": "norm1.linear", "modC.1": "norm1_context.linear",
            "mlpX.c_fc1": "ff.linear_1", "mlpX.c_fc2": "ff.linear_2", "mlpX.c_proj": "ff.out_projection",
            "mlpC.c_fc1": "ff_context.linear_1", "mlpC.c_fc2": "ff_context.linear_2",
            "mlpC.c_proj": "ff_context.out_projection",
        }.items()},
        **{f"single_layers.{{i}}.{old}": f"single_transformer_blocks.{{i}}.{new}" for old, new in {
            "attn.w1q": "attn.to_q", "attn.w1k": "attn.to_k", "attn.w1v": "attn.to_v", "attn.w1o": "attn.to_out.0",
            "modCX.1": "norm1.linear", "mlp.c_fc1": "ff.linear_1", "mlp.c_fc2": "ff.linear_2",
            "mlp.c_proj": "ff.out_projection",
        }.items()},
        "t_embedder.mlp.0": "time_step_proj.linear_1",
        "t_embedder.mlp.2": "time_step_proj.linear_2",
        "cond_seq_linear": "context_embedder",
        "init_x_linear": "pos_embed.proj",
        "final_linear": "proj_out",
        "modF.1": "norm_out.linear~",
    }),
    Family("Lumina 2", ("time_caption_embed.timestep_embedder.linear_1", "noise_refiner.{i}.attn.to_q"), {
        **{f"{owner}.{{i}}.{old}": f"{owner}.{{i}}.{new}" for owner in ("layers", "noise_refiner", "context_refiner")
           for old, new in {
               "attention.qkv": _QKV, "attention.out": "attn.to_out.0", "feed_forward.w1": "feed_forward.linear_1",
               "feed_forward.w2": "feed_forward.linear_2", "feed_forward.w3": "feed_forward.linear_3",
               "adaLN_modulation.1": "norm1.linear",
           }.items()},
        "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
        "cap_embedder.{*}": "time_caption_embed.caption_embedder.{*}",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1",
        "final_layer.linear": "norm_out.linear_2",
    }),
    Family("Z-Image", ("all_x_embedder.2-1", "layers.{i}.attention.to_q"), {
        **{f"{owner}.{{i}}.attention.{old}": f"{owner}.{{i}}.attention.{new}"
           for owner in ("layers", "noise_refiner", "context_refiner")
           for old, new in (("qkv", "[to_q to_k to_v]"), ("out", "to_out.0"))},
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.{*}": "all_final_layer.2-1.{*}",
    }),
    Family("Ideogram 4", ("llm_cond_proj", "layers.{i}.attention.to_q", "embed_image_indicator"), {
        "layers.{i}.attention.qkv": "layers.{i}.attention.[to_q to_k to_v]",
        "layers.{i}.attention.o": "layers.{i}.attention.to_out.0",
    }),
    Family("Wan", ("condition_embedder.time_proj", "blocks.{i}.attn1.to_q", "blocks.{i}.ffn.net.0.proj"), {
        **{f"{owner}.{{i}}.{old}": f"{owner}.{{i}}.{new}" for owner in ("blocks", "vace_blocks") for old, new in {
            **{f"self_attn.{q}": f"attn1.{to}" for q, to in _ATTENTION.items()},
            **{f"cross_attn.{q}": f"attn2.{to}" for q, to in _ATTENTION.items()},
            "cross_attn.k_img": "attn2.add_k_proj", "cross_attn.v_img": "attn2.add_v_proj",
            "self_attn.norm_q": "attn1.norm_q", "self_attn.norm_k": "attn1.norm_k", "cross_attn.norm_q": "attn2.norm_q",
            "cross_attn.norm_k": "attn2.norm_k", "cross_attn.norm_k_img": "attn2.norm_added_k", "norm3": "norm2",
            "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2", "before_proj": "proj_in", "after_proj": "proj_out",
        }.items()},
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "head.head": "proj_out",
    }),
    Family("Wan Animate 2", ("time_projection.1", "blocks.{i}.self_attn.to_q", "head.head"), {
        **{f"blocks.{{i}}.{attn}.{old}": f"blocks.{{i}}.{attn}.{new}" for attn in ("self_attn", "cross_attn")
           for old, new in {**_ATTENTION, "k_img": "add_k_proj", "v_img": "add_v_proj"}.items()},
    }),
    *(Family(name, (f"{time}.timestep_embedder.linear_1", "context_embedder.token_refiner.refiner_blocks.{i}.attn.to_q"),
             _hunyuan(time), _others_of_hunyuan(time))
      for name, time in (("HunyuanVideo", "time_text_embed"), ("HunyuanVideo 1.5", "time_embed"),
                         ("HunyuanImage", "time_guidance_embed"))),
    Family("LTX", ("time_embed.emb.timestep_embedder.linear_1", "transformer_blocks.{i}.ff.net.0.proj", "proj_in"), {
        "patchify_proj": "proj_in",
        "audio_patchify_proj": "audio_proj_in",
        "adaln_single.{*}": "time_embed.{*}",
        "audio_adaln_single.{*}": "audio_time_embed.{*}",
        "prompt_adaln_single.{*}": "prompt_adaln.{*}",
        "audio_prompt_adaln_single.{*}": "audio_prompt_adaln.{*}",
        "av_ca_video_scale_shift_adaln_single.{*}": "av_cross_attn_video_scale_shift.{*}",
        "av_ca_audio_scale_shift_adaln_single.{*}": "av_cross_attn_audio_scale_shift.{*}",
        "av_ca_a2v_gate_adaln_single.{*}": "av_cross_attn_video_a2v_gate.{*}",
        "av_ca_v2a_gate_adaln_single.{*}": "av_cross_attn_audio_v2a_gate.{*}",
    }),
    Family("Mochi", ("time_embed.pooler.to_kv", "transformer_blocks.{i}.attn1.add_q_proj"), {
        **{f"blocks.{{i}}.{old}": f"transformer_blocks.{{i}}.{new}" for old, new in {
            "attn.qkv_x": "attn1.[to_q to_k to_v]", "attn.qkv_y": "attn1.[add_q_proj add_k_proj add_v_proj]",
            "attn.proj_x": "attn1.to_out.0", "attn.proj_y": "attn1.to_add_out", "mod_x": "norm1.linear",
            "mod_y": "norm1_context.linear", "mlp_x.w1": "ff.net.0.proj~", "mlp_x.w2": "ff.net.2",
            "mlp_y.w1": "ff_context.net.0.proj~", "mlp_y.w2": "ff_context.net.2",
        }.items()},
        "blocks.{last}.mod_y": "transformer_blocks.{last}.norm1_context.linear_1",
        "x_embedder.proj": "patch_embed.proj",
        "t_embedder.mlp.0": "time_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_embed.timestep_embedder.linear_2",
        "t5_y_embedder.{*}": "time_embed.pooler.{*}",
        "t5_yproj": "time_embed.caption_proj",
        "final_layer.mod": "norm_out.linear~",
        "final_layer.linear": "proj_out",
    }),
    Family("Cosmos", ("time_embed.t_embedder.linear_1", "transformer_blocks.{i}.norm1.linear_1"), {
        **{f"blocks.{{i}}.{old}": f"transformer_blocks.{{i}}.{new}" for old, new in {
            **{f"self_attn.{q}": f"attn1.{to}" for q, to in _COSMOS.items()},
            **{f"cross_attn.{q}": f"attn2.{to}" for q, to in _COSMOS.items()},
            **{f"adaln_modulation_{of}.{n}": f"norm{k}.linear_{n}"
               for k, of in enumerate(("self_attn", "cross_attn", "mlp"), 1) for n in (1, 2)},
            "mlp.layer1": "ff.net.0.proj", "mlp.layer2": "ff.net.2",
        }.items()},
        "t_embedder.1.{*}": "time_embed.t_embedder.{*}",
        "x_embedder.proj.1": "patch_embed.proj",
        "final_layer.adaln_modulation.1": "norm_out.linear_1",
        "final_layer.adaln_modulation.2": "norm_out.linear_2",
        "final_layer.linear": "proj_out",
    }),
    Family("Sana", ("patch_embed.proj", "transformer_blocks.{i}.ff.conv_inverted", "caption_projection.linear_1"), {
        **_CROSSED,
        "blocks.{i}.mlp.inverted_conv.conv": "transformer_blocks.{i}.ff.conv_inverted",
        "blocks.{i}.mlp.depth_conv.conv": "transformer_blocks.{i}.ff.conv_depth",
        "blocks.{i}.mlp.point_conv.conv": "transformer_blocks.{i}.ff.conv_point",
        "x_embedder.proj": "patch_embed.proj",
        "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
        "t_block.1": "time_embed.linear",
    }),
    Family("PixArt", ("pos_embed.proj", "adaln_single.emb.timestep_embedder.linear_1", "transformer_blocks.{i}.attn2.to_q"), {
        **_CROSSED,
        "blocks.{i}.mlp.fc1": "transformer_blocks.{i}.ff.net.0.proj",
        "blocks.{i}.mlp.fc2": "transformer_blocks.{i}.ff.net.2",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
        "t_block.1": "adaln_single.linear",
    }),
    Family("Krea 2", ("text_fusion.projector", "transformer_blocks.{i}.attn.to_gate"), {
        **{f"{old}.attn.{q}": f"{new}.attn.{to}" for q, to in _GATED.items()
           for old, new in (("blocks.{i}", "transformer_blocks.{i}"),
                            ("txtfusion.layerwise_blocks.{i}", "text_fusion.layerwise_blocks.{i}"),
                            ("txtfusion.refiner_blocks.{i}", "text_fusion.refiner_blocks.{i}"))},
        "blocks.{i}.mlp.{*}": "transformer_blocks.{i}.ff.{*}",
        "txtfusion.layerwise_blocks.{i}.mlp.{*}": "text_fusion.layerwise_blocks.{i}.ff.{*}",
        "txtfusion.refiner_blocks.{i}.mlp.{*}": "text_fusion.refiner_blocks.{i}.ff.{*}",
        "txtfusion.projector": "text_fusion.projector",
        "first": "img_in",
        "last.linear": "final_layer.linear",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
    }),
    Family("QwenImage 2.1", ("txt_in.in_layer", "transformer_blocks.{i}.img_mlp.gate_layer"), {
        "transformer_blocks.{i}.img_mlp.gate_up": "transformer_blocks.{i}.img_mlp.[gate_layer proj]",
    }),
    Family("ACE-Step", ("layers.{i}.cross_attn.to_q", "time_embed_r.time_proj"), {
        f"layers.{{i}}.{attn}.{old}": f"layers.{{i}}.{attn}.{new}" for attn in ("self_attn", "cross_attn")
        for old, new in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("o_proj", "to_out.0"))
    }),
    Family("MiniMax-H3", ("token_refiner.refiner_blocks.{i}.attn.to_q", "transformer_blocks.{i}.adaln_proj.linear"), {
        **{f"{old}.{{i}}.{name}": f"{new}.{{i}}.{to}"
           for old, new in (("blocks", "transformer_blocks"), ("token_refiner.blocks", "token_refiner.refiner_blocks"))
           for name, to in (("attn.qkv_proj", _QKV), ("attn.out_proj", "attn.to_out.0"), ("mlp.fc1", "ff.net.0.proj~"),
                            ("mlp.fc2", "ff.net.2"), ("adaln_proj.linear", "adaln_proj.linear"))},
        "video_patch_proj": "proj_in",
        "audio_patch_proj": "audio_proj_in",
        "condition_proj": "context_embedder",
        "time_embedder.proj_in": "time_embedder.linear_1",
        "time_embedder.proj_out": "time_embedder.linear_2",
        "final_layer.adaln_proj.linear": "norm_out.linear",
        "final_layer.video_out": "proj_out",
        "final_layer.audio_out": "audio_proj_out",
    }),
)  # fmt: skip

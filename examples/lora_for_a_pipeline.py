"""Trains LoRA on the UNet of a pipeline's folder, with photographs and their captions, and draws with it in that pipeline.

    python examples/lora_for_a_pipeline.py path/to/stable-diffusion path/to/photographs out/mine
"""

import sys

from diffusers import DiffusionPipeline

import fxplug

folder, photographs, out = sys.argv[1:4]
run = fxplug.train(
    {
        "model": {"diffusers": f"{folder}/unet"},
        "inputs": {
            "sample": [2, 4, 64, 64],
            "timestep": {"shape": [2], "dtype": "int64", "high": 1000},
            "encoder_hidden_states": [2, 77, 768],
        },
        "passes": [{"lora": {"at": "**.attn?.{to_q,to_k,to_v,to_out.0}", "rank": 8}}],
        "train": {
            "task": {"denoise": {"scheduler": f"{folder}/scheduler", "vae": f"{folder}/vae", "text": folder, "samples": 2}},
            "steps": 500,
            "batch": 4,
            "lr": 1e-4,
        },
        "data": {"images": photographs, "size": 512},
    },
    set=sys.argv[4:],
    out=out,
)
print(run.use)

pipe = DiffusionPipeline.from_pretrained(folder)
pipe.load_lora_weights(f"{out}/adapter")
pipe("a photograph", num_inference_steps=20).images[0].save(f"{out}/picture.png")

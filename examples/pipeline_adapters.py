"""PEFT's files in the slots of a UNet and its text encoder: loaded, mixed and switched by the pipeline's own methods."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "tiny"))
from tiny import lora, pipeline  # noqa: E402

import fxplug  # noqa: E402

SD, LAYERS = "StableDiffusionPipeline", {"unet": ["to_q", "to_v"], "text_encoder": ["q_proj", "v_proj"]}
files = {name: lora(pipeline(SD), name, seed, **LAYERS) for seed, name in enumerate(("ink", "film"))}
theirs, pipe = pipeline(SD), pipeline(SD)


def draw(pipe):
    """The picture, from the same noise each time."""
    return pipe("a cat", num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(7)).images


for part, model in fxplug.trace_pipeline(pipe, "a cat", num_inference_steps=1).items():
    setattr(pipe, part, fxplug.apply(model, fxplug.load_pass("lora", at=LAYERS[part], rank=4, slots=2)))

for each in (theirs, pipe):  # from here on as ever
    for name, file in files.items():
        each.load_lora_weights(file, adapter_name=name)
for names, weights in (("ink", 1.0), (["ink", "film"], [0.8, 0.3]), ("film", {"unet": 0.5, "text_encoder": 1.0})):
    for each in (theirs, pipe):
        each.set_adapters(names, weights)
    print(f"{names} at {weights}: {(draw(theirs) - draw(pipe)).abs().max():.0e} away from diffusers with PEFT")

pipe.unet.adapters.use(["ink", "film"])  # what diffusers does not have: an adapter for each sample, guidance doubles them
print("one without and one with words:", tuple(draw(pipe).shape))
pipe.unload_lora_weights()
print("unloaded, the base again:", torch.equal(draw(pipe), draw(pipeline(SD))))

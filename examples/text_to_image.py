"""SD, SDXL, SD3 and Flux with a LoRA in a slot: any strength, any size and one compilation, in the pipelines themselves."""

import sys
from pathlib import Path

import torch
from torch._dynamo.testing import CompileCounter

sys.path.insert(0, str(Path(__file__).resolve().parent / "tiny"))
from tiny import lora, pipeline, prompt  # noqa: E402

import fxplug  # noqa: E402


def draw(pipe, side=64):
    """The picture, from the same noise each time."""
    more = {"num_inference_steps": 2, "output_type": "pt", "generator": torch.Generator().manual_seed(7)}
    return pipe(**prompt(pipe), height=side, width=side, **more).images


LAYERS = ["to_q", "to_k", "to_v"]
for name in ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline"):
    part = "unet" if hasattr(pipeline(name), "unet") else "transformer"
    file, theirs, pipe = lora(pipeline(name), name, **{part: LAYERS}), pipeline(name), pipeline(name)

    call = {**prompt(pipe), "height": 64, "width": 64, "num_inference_steps": 1, "output_type": "pt"}
    model = fxplug.trace_pipeline(pipe, parts=part, **call)[part]
    setattr(pipe, part, fxplug.apply(model, fxplug.load_pass("lora", at=LAYERS, rank=4, slots=2)))

    for each in (theirs, pipe):  # from here on as ever
        each.load_lora_weights(file, adapter_name="ink")
    away = 0.0
    for strength, side in ((1.0, 64), (0.3, 64), (0.3, 96)):
        for each in (theirs, pipe):
            each.set_adapters("ink", strength)
        away = max(away, (draw(theirs, side) - draw(pipe, side)).abs().max().item())
    print(f"{name}: two strengths, two sizes, {away:.0e} away from diffusers with PEFT")

    if part == "transformer":
        counter = CompileCounter()  # torch.compile(model) with inductor, if the time is there
        model = getattr(pipe, part)
        setattr(pipe, part, torch.compile(model, fullgraph=True, backend=counter))
        for strength in (0.9, 0.1):
            model.adapters.use({"ink": strength})
            draw(pipe)
        print(f"  graphs that were compiled for two more strengths: {counter.frame_count}")

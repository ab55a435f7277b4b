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


def with_fxplug(pipe, file):
    """The files are read for what layers they have, and the models traced by one short call."""
    fxplug.rewrite_pipeline(pipe, adapters={"ink": file}, **prompt(pipe), height=64, width=64, num_inference_steps=1)
    pipe.set_adapters("ink", 0.3)
    return draw(pipe, 64), draw(pipe, 96)


def with_diffusers(pipe, file):
    """Wraps each layer in a module of PEFT."""
    pipe.load_lora_weights(file, adapter_name="ink")
    pipe.set_adapters("ink", 0.3)
    return draw(pipe, 64), draw(pipe, 96)


def check():
    """Compares the two."""
    for name in ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline"):
        part = "unet" if hasattr(pipeline(name), "unet") else "transformer"
        file, pipe, theirs = lora(pipeline(name), name, **{part: ["to_q", "to_k", "to_v"]}), pipeline(name), pipeline(name)
        away = max((a - b).abs().max() for a, b in zip(with_fxplug(pipe, file), with_diffusers(theirs, file), strict=True))
        print(f"{name}: two sizes, {away:.0e} away from diffusers with PEFT")

        if part == "transformer":
            counter = CompileCounter()  # torch.compile(model) with inductor, if the time is there
            model = getattr(pipe, part)
            setattr(pipe, part, torch.compile(model, fullgraph=True, backend=counter))
            for strength in (0.9, 0.1):
                model.adapters.use({"ink": strength})
                draw(pipe)
            print(f"  graphs that were compiled for two more strengths: {counter.frame_count}")


if __name__ == "__main__":
    check()

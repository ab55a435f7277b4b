"""PEFT's files in the slots of a UNet and its text encoder: loaded, mixed and switched by the pipeline's own methods."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "tiny"))
from tiny import lora, pipeline  # noqa: E402

import fxplug  # noqa: E402


def draw(pipe):
    """The picture, from the same noise each time."""
    return pipe("a cat", num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(7)).images


def with_fxplug(pipe, ink, film):
    """Each model that a file has layers for gets slots of the ranks that are there."""
    fxplug.rewrite_pipeline(pipe, adapters={"ink": ink, "film": film}, prompt="a cat", num_inference_steps=1)
    pipe.set_adapters(["ink", "film"], [0.8, 0.3])
    return draw(pipe)


def with_diffusers(pipe, ink, film):
    """Wraps each layer in a module of PEFT."""
    pipe.load_lora_weights(ink, adapter_name="ink")
    pipe.load_lora_weights(film, adapter_name="film")
    pipe.set_adapters(["ink", "film"], [0.8, 0.3])
    return draw(pipe)


def check():
    """Compares the two, also after other choices; then what one of them has not."""
    layers = {"unet": ["to_q", "to_v"], "text_encoder": ["q_proj", "v_proj"]}
    pipe, theirs, plain = (pipeline("StableDiffusionPipeline") for _ in range(3))
    files = [lora(pipeline("StableDiffusionPipeline"), name, seed, **layers) for seed, name in enumerate(("ink", "film"))]
    print(f"both, {(with_fxplug(pipe, *files) - with_diffusers(theirs, *files)).abs().max():.0e} away from diffusers with PEFT")
    for names, weights in (("ink", 1.0), ("film", {"unet": 0.5, "text_encoder": 1.0})):
        for each in (theirs, pipe):
            each.set_adapters(names, weights)
        print(f"{names} at {weights}: {(draw(theirs) - draw(pipe)).abs().max():.0e} away from diffusers with PEFT")

    pipe.unet.adapters.use(["ink", "film"])  # what diffusers does not have: an adapter for each sample, guidance doubles them
    print("one without and one with words:", tuple(draw(pipe).shape))
    pipe.unload_lora_weights()
    print("unloaded, the base again:", torch.equal(draw(pipe), draw(plain)))


if __name__ == "__main__":
    check()

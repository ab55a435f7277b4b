"""A ControlNet pipeline, unchanged, whose UNet and two ControlNets are one graph with LoRA in all three."""

import copy
import sys
from pathlib import Path

import torch
from diffusers import ControlNetModel, MultiControlNetModel

sys.path.insert(0, str(Path(__file__).resolve().parent / "tiny"))
from tiny import FOLDER, pipeline, unet  # noqa: E402

import fxplug  # noqa: E402

IMAGES = [torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


def draw(pipe, **options):
    """The picture, from the same noise each time."""
    more = {"num_inference_steps": 3, "output_type": "pt", "generator": torch.Generator().manual_seed(7)}
    return pipe("a cat", image=IMAGES, **more, **options).images


def with_fxplug(pipe, backend):
    """UNet and nets are one graph, and one program."""
    fxplug.rewrite_pipeline(pipe, join=True, prompt="a cat", image=IMAGES, num_inference_steps=1)
    pipe.unet.compile(backend=backend)
    return draw(pipe)


def with_diffusers(pipe, backend):
    """Three models, each compiled by itself."""
    pipe.unet.compile(backend=backend)
    pipe.controlnet.compile(backend=backend)
    return draw(pipe)


def check():
    """Compares the two, with all that such a pipeline takes; then LoRA in the graph, and the pipeline saved."""
    torch.manual_seed(0)
    nets = [ControlNetModel.from_unet(unet(), conditioning_embedding_out_channels=(8, 8, 16, 16)) for _ in range(2)]
    for parameter in [p for net in nets for p in net.parameters() if not p.any()]:
        torch.nn.init.normal_(parameter, std=0.1)  # as trained ones
    several = MultiControlNetModel(nets)
    pipe, theirs = (pipeline("StableDiffusionControlNetPipeline", controlnet=copy.deepcopy(several)) for _ in range(2))
    print("compiled: equal to diffusers' three models:", with_fxplug(pipe, "eager").equal(with_diffusers(theirs, "eager")))
    for options in ({"controlnet_conditioning_scale": [0.8, 0.2]}, {"guess_mode": True}, {"control_guidance_end": [0.5, 1.0]}):
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        print(f"{said}: torch.equal to diffusers' three models: {torch.equal(draw(pipe, **options), draw(theirs, **options))}")

    pipe.unet = fxplug.apply(pipe.unet, fxplug.load_pass("lora", at=["to_q", "to_v"], rank=4))
    nets = [site["path"].startswith("controlnet.") for site in pipe.unet.meta["passes"][0]["sites"]]
    print(f"LoRA at {nets.count(False)} places of the UNet and {nets.count(True)} of the ControlNets")
    pipe.save_pretrained(FOLDER / "pipe")
    again = type(pipe).from_pretrained(FOLDER / "pipe")
    print("saved and loaded as a pipeline:", torch.equal(draw(again), draw(pipe)))


if __name__ == "__main__":
    check()

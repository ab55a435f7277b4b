"""Adapters in slots, at run time: one graph draws garments with a LoRA for some samples of a batch and without for others.

The UNet and the LoRA are those of examples/fashion: eight classes of Fashion-MNIST, and two that only the LoRA knows.
`--quick` draws one of each in four steps.
"""

import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file

import fxplug

HERE = Path(__file__).resolve().parent / "fashion"
sys.path.insert(0, str(HERE))  # the configurations name what lies beside them
from garments import CLASSES  # noqa: E402
from judge import recognised  # noqa: E402
from parts import meaning  # noqa: E402

EACH, STEPS = (1, 4) if "--quick" in sys.argv else (4, 20)
captions = [name for name in CLASSES for _ in range(EACH)]
unet = fxplug.rewrite(fxplug.load_config(HERE / "lora.yaml", ["passes.0.lora.slots=2"])).module.eval()
classifier = fxplug.rewrite(HERE / "classifier.yaml").module.eval()
classifier.load_state_dict(load_file(HERE / "classifier.safetensors"), strict=False)


@torch.no_grad()
def drawn(module: torch.nn.Module, title: str) -> torch.Tensor:
    """Images [n, 1, 28, 28] in [0, 1], always from the same noise, with classifier-free guidance; says how good they are."""
    (scheduler := FlowMatchEulerDiscreteScheduler()).set_timesteps(STEPS)
    x = torch.randn(len(captions), 4, 14, 14, generator=torch.Generator().manual_seed(0))
    words = torch.cat([meaning(captions), torch.zeros(len(captions), 2, 64)])
    for t in scheduler.timesteps:
        given, none = module(torch.cat([x, x]), t.expand(2 * len(x)), words, return_dict=False)[0].chunk(2)
        x = scheduler.step(none + 2.5 * (given - none), t, x).prev_sample
    images = (torch.nn.functional.pixel_shuffle(x, 2).clamp(-1, 1) + 1) / 2
    shares = list(recognised(classifier, images, captions).values())
    print(f"{title:24} recognised of the old classes {sum(shares[:8]) / 8:6.1%}, of the new {sum(shares[8:]) / 2:6.1%}")
    return images


drawn(unet, "no adapter")
found = unet.adapters.load("boots", HERE / "lora.safetensors")
print(f"{len(found.placed)} layers are in a slot: {unet.adapters}")
# one entry for each sample; guidance has every sample twice, with words and without
by_sample = ["boots" if caption in CLASSES[8:] else None for caption in captions * 2]
for title, what in (("half of it", {"boots": 0.5}), ("where it is needed", by_sample), ("for all", "boots")):
    unet.adapters.use(what)
    images = drawn(unet, title)
live = fxplug.lower(unet, merge="live")
print(f"merged live and packed, {(drawn(live, 'for all, merged live') - images).abs().max():.0e} away")
live.adapters.use(None)
drawn(live, "merged live, none")

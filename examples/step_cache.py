"""Step caches in a Stable Diffusion pipeline: most steps take the UNet's deep half from an earlier one.

The pass marks where the UNet may be cut; a StepCache is the UNet as two graphs, a full one that also gives what it keeps and
a shallow one that takes it, and a policy that says which runs. A tiny pipeline with random weights stands for the real one.
"""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

import fxplug
from fxplug.step_cache.cache import Every, StepCache

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=8,
    norm_num_groups=8,
)
vae = AutoencoderKL(block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4)
scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
pipe = StableDiffusionPipeline(vae, None, None, unet.eval(), scheduler, None, None, requires_safety_checker=False)
pipe.set_progress_bar_config(disable=True)


def picture(steps: int = 9) -> torch.Tensor:
    prompt, none = torch.ones(1, 7, 32), torch.zeros(1, 7, 32)
    seed = torch.Generator().manual_seed(1)
    return pipe(
        prompt_embeds=prompt, negative_prompt_embeds=none, num_inference_steps=steps, generator=seed, output_type="pt"
    ).images


before = picture()
example = {
    "sample": torch.randn(2, 4, 16, 16),
    "timestep": torch.tensor(5),
    "encoder_hidden_states": torch.randn(2, 7, 32),
    "return_dict": False,
}
marked = fxplug.apply(fxplug.trace(unet, kwargs=example), fxplug.load_pass("deepcache"))
for interval in (1, 3):
    cache = pipe.unet = StepCache(marked, Every(interval))  # cache.compile() compiles each of its graphs as a whole
    print(cache.extra_repr())
    away = (picture() - before).abs().mean() / before.std()
    print(f"  {cache.counts['full']} steps in full, {cache.counts['shallow']} shallow; picture {away:.4f} away")

shallow = cache.shallow  # an ordinary traced module: what it takes is one more input
print("inputs of a shallow step:", ", ".join(n.target for n in shallow.graph.nodes if n.op == "placeholder"))

"""A rewritten UNet takes its place inside a Stable Diffusion pipeline.

A tiny pipeline with random weights stands for the real one: nothing is downloaded, and no text encoder is needed
because the prompt's embedding is given.
"""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

import fxplug

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


def picture() -> torch.Tensor:
    prompt, none = torch.ones(1, 7, 32), torch.zeros(1, 7, 32)
    seed = torch.Generator().manual_seed(1)
    return pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=none,
        num_inference_steps=3,
        generator=seed,
        output_type="pt",
    ).images


before = picture()
example = {
    "sample": torch.randn(2, 4, 16, 16),
    "timestep": torch.tensor(5),
    "encoder_hidden_states": torch.randn(2, 7, 32),
    "return_dict": False,  # as the pipeline calls it: what is no tensor becomes a part of the graph
}
gm = fxplug.trace(unet, kwargs=example)
lora = fxplug.load_pass("lora", at="re:.*attn[12].to_(q|k|v|out.0)$", rank=4)
pipe.unet = fxplug.apply(gm, lora)
print(f"LoRA on {len(fxplug.find(gm, lora))} projections")
print("same picture while LoRA is new:", torch.equal(before, picture()))

for up in (m.up for name, m in pipe.unet.named_modules() if name.endswith(".Lora")):
    torch.nn.init.normal_(up.weight, std=0.1)
print("same picture once its weights are not zero:", torch.equal(before, picture()))

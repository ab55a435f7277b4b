"""The garments' UNet as a pipeline of diffusers: names of garments in, pictures out, with any of its schedulers for flows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, SchedulerMixin, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from parts import SpaceToDepth, meaning
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent

class FashionPipeline(DiffusionPipeline):
    """Draws garments of 28 by 28 pixels."""

    model_cpu_offload_seq = "unet->vae"
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012 (diffusers' name)

    def __init__(self, unet: UNet2DConditionModel, vae: SpaceToDepth, scheduler: SchedulerMixin) -> None:
        super().__init__()
        self.register_modules(unet=unet, vae=vae, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(vae_scale_factor=2)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        num_inference_steps: int = 20,
        guidance_scale: float = 2.5,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict[str, Any]] | None = None,
    ) -> Any:
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        words = meaning(prompts).repeat_interleave(num_images_per_prompt, 0).to(self.unet.device, self.unet.dtype)
        if guides := guidance_scale > 1:
            words = torch.cat([words, torch.zeros_like(words)])
        if latents is None:
            size = len(prompts) * num_images_per_prompt, 4, 14, 14
            latents = randn_tensor(size, generator, self.unet.device, self.unet.dtype)
        self.scheduler.set_timesteps(num_inference_steps, device=self.unet.device)
        for n, t in enumerate(self.progress_bar(self.scheduler.timesteps)):
            x = torch.cat([latents, latents]) if guides else latents
            if hasattr(self.scheduler, "scale_model_input"):
                x = self.scheduler.scale_model_input(x, t)
            flow = self.unet(x, t.expand(len(x)).to(x.dtype), words, return_dict=False)[0]
            if guides:
                given, none = flow.chunk(2)
                flow = none + guidance_scale * (given - none)
            latents = self.scheduler.step(flow, t, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                latents = callback_on_step_end(self, n, t, {"latents": latents}).get("latents", latents)
        images = latents
        if output_type != "latent":
            images = self.image_processor.postprocess(self.vae.decode(latents).clamp(-1, 1), output_type)
        return ImagePipelineOutput(images) if return_dict else (images,)


def load_pipeline() -> FashionPipeline:
    """The pipeline with the weights that lie here, in float32."""
    unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(HERE / "unet" / "config.json"))
    unet.load_state_dict({name: value.float() for name, value in load_file(HERE / "base.safetensors").items()})
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=1.0)
    pipe = FashionPipeline(unet.eval(), SpaceToDepth(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe

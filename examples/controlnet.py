"""A UNet and its ControlNet as one graph: any strength, any part of the schedule, one compilation."""

import torch
from diffusers import UNet2DConditionModel
from torch._dynamo.testing import CompileCounter

import fxplug

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(32, 64),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=4,
    norm_num_groups=8,
).eval()
noise, text, picture = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32), torch.rand(1, 3, 128, 128)
call = {"sample": noise, "timestep": torch.tensor(500), "encoder_hidden_states": text, "return_dict": False}
gm = fxplug.trace(unet, kwargs=call)

# a trained one:   fxplug.load_pass("controlnet", network="folder/of/a/controlnet")
new = fxplug.apply(gm, fxplug.load_pass("controlnet"))
print(f"{len(new.meta['passes'][0]['sites'])} places, new inputs {', '.join(new.meta['passes'][0]['inputs'])}")


def away(strength: float = 1.0, start: float = 0.0, end: float = 1.0) -> float:
    """How far the output is from the UNet's own. Tensors, all of them: Python numbers would compile again for each value."""
    knobs = {"strength": torch.tensor(strength), "start": torch.tensor(start), "end": torch.tensor(end)}
    with torch.no_grad():
        out = compiled(**call, cond=picture, **knobs)[0]
        return (out - unet(**call)[0]).abs().mean().item()


counter = CompileCounter()
compiled = torch.compile(new, fullgraph=True, backend=counter)
print(f"new, of the host's own weights:  {away():.4f} away from the UNet")
for name, parameter in new.named_parameters():
    if name.startswith("controlnet.cn.controlnet_"):  # zero when new: training would move them
        torch.nn.init.normal_(parameter, std=0.1)
for strength in (0.0, 0.5, 1.0):
    print(f"strength {strength}:  {away(strength=strength):.4f}")
print(f"only in the last third of the schedule, now half way:  {away(start=0.67):.4f}")
print(f"graphs that were compiled: {counter.frame_count}")

"""LoRA, a second LoRA at half its strength and FreeU on one UNet, compiled; then the first LoRA is exchanged."""

import sys
import warnings
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

import fxplug

torch.manual_seed(0)
SIZES = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": 32,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
         "attention_head_dim": 4}  # fmt: skip
WEIGHTS = UNet2DConditionModel(**SIZES).state_dict()
CALL = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor(7), "encoder_hidden_states": torch.randn(2, 5, 32)}
FREEU = {"s1": 0.9, "s2": 0.2, "b1": 1.4, "b2": 1.6}


def base() -> UNet2DConditionModel:
    model = UNet2DConditionModel(**SIZES).eval()
    model.load_state_dict(WEIGHTS)
    return model


def files(out: Path) -> list[Path]:
    """Three adapters as diffusers saves them."""
    out.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("ink", "film", "pencil")):
        torch.manual_seed(seed)
        unet = base()
        unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        save_file(get_peft_model_state_dict(unet), out / f"{name}.safetensors")
    return [out / f"{name}.safetensors" for name in ("ink", "film", "pencil")]


@torch.no_grad()
def with_fxplug(ink: Path, film: Path, pencil: Path) -> list[Tensor]:
    gm = fxplug.trace(base(), (), CALL)
    unet = fxplug.apply(gm, fxplug.pass_for([ink, film], gm), fxplug.load_pass("freeu", **FREEU))
    unet.adapters.load("ink", ink)
    unet.adapters.load("film", film)
    unet.adapters.use({"ink": 1.0, "film": 0.5})
    compiled = torch.compile(unet, backend="eager")
    first = compiled(**CALL).sample
    unet.adapters.load("ink", pencil, replace=True)
    return [first, compiled(**CALL).sample]


@torch.no_grad()
def with_diffusers(ink: Path, film: Path, pencil: Path) -> list[Tensor]:
    unet = base()
    unet.load_lora_adapter(ink, prefix=None, adapter_name="ink")
    unet.load_lora_adapter(film, prefix=None, adapter_name="film")
    unet.set_adapters(["ink", "film"], [1.0, 0.5])
    unet.enable_freeu(**FREEU)
    compiled = torch.compile(unet, backend="eager")
    first = compiled(**CALL).sample
    unet.delete_adapters("ink")
    unet.load_lora_adapter(pencil, prefix=None, adapter_name="ink")
    unet.set_adapters(["ink", "film"], [1.0, 0.5])
    return [first, torch.compile(unet, backend="eager")(**CALL).sample]


def check(out: Path) -> None:
    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # said of each further adapter
    for ours, theirs in zip(with_fxplug(*files(out)), with_diffusers(*files(out)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    print("the same as diffusers' to 1e-5, before the exchange and after it")


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/interactions"))

"""A model with LoRA as a program of torch.export, and its weights as timm reads them."""

import sys
from pathlib import Path

import timm
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import fxplug

torch.manual_seed(0)
WEIGHTS = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64).state_dict()
IMAGES = torch.randn(2, 3, 64, 64)


def base() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64)
    model.load_state_dict(WEIGHTS)
    return model.eval()


def as_trained(model: nn.Module) -> nn.Module:
    """Some weights for the adapter, as if it had been trained."""
    torch.manual_seed(1)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0].replace("base_model.model.", "")):
        if "lora" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def with_fxplug(out: Path) -> None:
    model = as_trained(fxplug.apply(fxplug.trace(base(), (IMAGES,)), fxplug.load_pass("lora", at="qkv", rank=4, alpha=4)))
    fxplug.export(model, out / "model.pt2", (IMAGES,))
    fxplug.save_checkpoint(model, out / "model.safetensors", to="timm")


def with_peft(out: Path) -> None:
    model = as_trained(get_peft_model(base(), LoraConfig(r=4, lora_alpha=4, target_modules=["qkv"])))
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(model.base_model.model, (IMAGES,), dynamic_shapes=({0: batch},)), out / "model.pt2")
    merged = model.merge_and_unload()
    save_file(merged.state_dict(), out / "model.safetensors")


def check(out: Path) -> None:
    for name, way in (("fxplug", with_fxplug), ("peft", with_peft)):
        (folder := out / name).mkdir(parents=True)
        way(folder)
        program, plain = torch.export.load(folder / "model.pt2").module(), base()
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        more = torch.cat([IMAGES, IMAGES])
        torch.testing.assert_close(program(more), plain(more), rtol=0, atol=1e-4)
        print(f"{name}: the program, for another batch too, is what timm gives with the merged weights")


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/exports"))

"""Fine-tune a timm model for other classes: LoRA on the attention, a new last layer, one file that both sides read."""

import sys
from pathlib import Path
from typing import Any

import timm
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import fxplug

torch.manual_seed(0)
BASE = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64).state_dict()
IMAGES, LABELS = torch.randn(8, 3, 64, 64), torch.randint(37, (8,))


def base(classes: int = 1000) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64, num_classes=classes)
    model.load_state_dict({k: v for k, v in BASE.items() if v.shape == model.state_dict()[k].shape}, strict=False)
    return model.eval()


def train(model: nn.Module, parameters: Any) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(3):
        nn.functional.cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_fxplug(out: Path) -> nn.Module:
    gm = fxplug.trace(base(), (IMAGES,))
    model = fxplug.apply(gm, fxplug.load_pass("lora", at="attn.{qkv,proj}", rank=8), fxplug.load_pass("head", classes=37))
    train(model, fxplug.trainable(model))
    fxplug.save_adapter(model, out)
    return model


def with_peft(out: Path) -> nn.Module:
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["attn.qkv", "attn.proj"], modules_to_save=["head"])
    model = get_peft_model(base(classes=37), config)
    train(model, [p for p in model.parameters() if p.requires_grad])
    model.save_pretrained(out)
    return model


def check(out: Path) -> None:
    ours, theirs = with_fxplug(out / "ours").eval(), with_peft(out / "theirs").eval()
    by_peft = PeftModel.from_pretrained(base(classes=37), out / "ours").eval()
    torch.testing.assert_close(by_peft(IMAGES), ours(IMAGES), rtol=0, atol=1e-5)
    print("what fxplug trained gives the same in PEFT")
    gm = fxplug.apply(fxplug.trace(base(), (IMAGES,)), fxplug.load_pass("head", weights=out / "theirs"))
    by_us = fxplug.apply(gm, fxplug.pass_for(out / "theirs", gm, slots=0))
    fxplug.load_adapter(by_us, out / "theirs")
    torch.testing.assert_close(by_us(IMAGES), theirs(IMAGES), rtol=0, atol=1e-5)
    print("what PEFT trained gives the same in fxplug")


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/new_head"))

"""A block of one's own behind every MLP of a timm model, trained, saved, and loaded where timm is not installed."""

import sys
from pathlib import Path

import timm
import torch
from token_mixer import TokenMixer
from torch import nn

import fxplug

torch.manual_seed(0)
MODEL = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64).eval()
IMAGES = torch.randn(2, 3, 64, 64)


def train(model: nn.Module, parameters: object) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        model(IMAGES).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_fxplug(out: Path) -> nn.Module:
    rule = fxplug.Rule(fxplug.Match(path="blocks.*.mlp"), use=TokenMixer, args=["y"])
    model = fxplug.apply(fxplug.trace(MODEL, (IMAGES,)), fxplug.Pass("mixer", rules=[rule]))
    train(model, fxplug.trainable(model))
    fxplug.save(model, out)
    return fxplug.load(out, allow=[TokenMixer.__module__])


def with_torch(out: Path) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64).eval()
    model.load_state_dict(MODEL.state_dict())
    model.requires_grad_(False)
    for block in model.blocks:
        mixer = TokenMixer(block.mlp.fc2.out_features)
        block.mlp = nn.Sequential(block.mlp, mixer)  # the names of all weights below it change
    train(model, [p for p in model.parameters() if p.requires_grad])
    out.mkdir(parents=True)
    torch.save({k: v for k, v in model.state_dict().items() if "share" in k}, out / "mixer.pt")
    again = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64).eval()
    again.load_state_dict(MODEL.state_dict())
    for block in again.blocks:
        block.mlp = nn.Sequential(block.mlp, TokenMixer(block.mlp.fc2.out_features))
    again.load_state_dict(torch.load(out / "mixer.pt", weights_only=True), strict=False)
    return again


def check(out: Path) -> None:
    print("torch.equal to the one by hand:", torch.equal(with_fxplug(out / "ours")(IMAGES), with_torch(out / "theirs")(IMAGES)))


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/own_block"))

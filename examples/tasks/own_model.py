"""LoRA on a model of one's own, trained, and merged into a model without it."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import fxplug


class Mixer(nn.Module):
    """An MLP-Mixer of three blocks, which no library has."""

    def __init__(self, tokens: int = 16, width: int = 32) -> None:
        super().__init__()
        self.over_tokens = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(3))
        self.over_width = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for tokens, width in zip(self.over_tokens, self.over_width, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2).relu()
            x = x + width(x).relu()
        return self.head(x.mean(1))


torch.manual_seed(0)
WEIGHTS, X = Mixer().state_dict(), torch.randn(8, 16, 32)


def base() -> Mixer:
    model = Mixer()
    model.load_state_dict(WEIGHTS)
    return model


def train(model: nn.Module, parameters: object) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_fxplug(out: Path) -> nn.Module:
    gm = fxplug.trace(base(), (X,))
    model = fxplug.apply(gm, fxplug.load_pass("lora", at=["over_tokens.*", "over_width.*"], rank=4, alpha=8))
    train(model, fxplug.trainable(model))
    return fxplug.merge(model)


def with_peft(out: Path) -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=r"over_(tokens|width)\.\d+")
    model = get_peft_model(base(), config)
    train(model, [p for p in model.parameters() if p.requires_grad])
    return model.merge_and_unload()


@torch.no_grad()
def moved(model: nn.Module) -> Tensor:
    """How far the results are from those before the training."""
    return (model(X) - base()(X)).norm()


def check(out: Path) -> None:
    torch.manual_seed(1)
    ours = with_fxplug(out)
    torch.manual_seed(1)
    theirs = with_peft(out)
    plain = base()
    plain.load_state_dict(ours.state_dict())
    print("merged weights are the model's own:", torch.equal(plain(X), ours(X)))
    print("moved as far as PEFT's:", f"{moved(ours) / moved(theirs):.1f} times")


if __name__ == "__main__":
    check(Path(sys.argv[1] if sys.argv[1:] else "out/own_model"))

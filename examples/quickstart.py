"""The second half of `make demo`: the saved rewrite and the original model look at the same photographs.

python examples/quickstart.py [FOLDER]      after: fxplug rewrite quickstart --out out/quickstart
"""

import sys

import torch
from skimage import data
from torchvision.transforms import v2

import fxplug

folder = sys.argv[1] if len(sys.argv) > 1 else "out/quickstart"
rewritten = fxplug.load(folder)
assert "timm" not in sys.modules, "a saved rewrite loads without the library its model came from"
print(f"{folder}: loaded without timm")

from timm.data import ImageNetInfo  # noqa: E402 (only now, for the original model and the names of the classes)

from fxplug.config.flow import read_saved_diff  # noqa: E402
from fxplug.config.models.factory import build  # noqa: E402
from fxplug.config.run_config import load_config  # noqa: E402

original = build(load_config("quickstart"))
prepare = v2.Compose(
    [
        v2.ToImage(),
        v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(224),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ]
)
names = ImageNetInfo()


def top5(logits: torch.Tensor) -> list[str]:
    scores, classes = logits.softmax(-1).topk(5)
    labels = (names.index_to_description(int(c)).partition(",")[0] for c in classes)
    return [f"{score:6.1%}  {label}" for score, label in zip(scores.tolist(), labels, strict=True)]


for photo in ("chelsea", "coffee", "rocket"):
    image = prepare(getattr(data, photo)())[None]
    with torch.no_grad():
        before, after = original(image)[0], rewritten(image)[0]
    print(f"\n{photo:10}{'original':34}rewritten")
    for left, right in zip(top5(before), top5(after), strict=True):
        print(f"{'':10}{left:34}{right}")
    print(f"{'':10}torch.equal: {torch.equal(before, after)}")
    assert torch.equal(before, after)

changes = read_saved_diff(folder, rewritten).splitlines()
more, fewer = (sum(line[0] == sign for line in changes) for sign in "+-")
print(f"\nwhat the rewrite changed: {more - fewer} lines put in, {fewer} that read them now; the first of them:")
print("\n".join(changes[:7]))

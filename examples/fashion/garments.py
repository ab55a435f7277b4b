"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 70,000 grey garments of 28 by 28 pixels, and their edges."""

from __future__ import annotations

import gzip
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
CACHE = Path("out/fashion/data")


class FashionMnist(Dataset):
    """The images of some classes, each with its label (of all ten) and the name of its class as caption."""

    def __init__(
        self, train: bool = True, classes: Sequence[str] | Mapping[str, int] = CLASSES, folder: str | None = None
    ) -> None:
        """`classes` may say how many images each has, the first ones. ValueError for a class that there is not."""
        unknown = set(classes) - set(CLASSES)
        if unknown:
            raise ValueError(f"no class {', '.join(sorted(unknown))}; there are {', '.join(CLASSES)}")
        images, labels = read(str(find(folder)), train)
        counts = classes if isinstance(classes, Mapping) else dict.fromkeys(classes)
        kept = np.sort(np.concatenate([np.flatnonzero(labels == CLASSES.index(name))[:n] for name, n in counts.items()]))
        self.images, self.labels, self.classes = images[kept], labels[kept], CLASSES

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Any]:
        label = int(self.labels[i])
        return {"image": Image.fromarray(self.images[i]), "label": label, "caption": CLASSES[label]}


@lru_cache
def read(folder: str, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 28, 28] and labels uint8 [n] of the training or test part."""
    part = "train" if train else "t10k"
    return idx(Path(folder) / f"{part}-images-idx3-ubyte.gz"), idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz")


def idx(file: Path) -> np.ndarray:
    """The array in an idx file: two zeros, 8 for bytes, the number of dimensions, each as a big-endian int32, the bytes."""
    raw = gzip.decompress(file.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{file}: no idx file of bytes; it begins with {raw[:4]!r}")
    shape = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def find(folder: str | None = None) -> Path:
    """The folder of the four files: the one given here or in FASHION_MNIST, the installed package's, or a fetched copy of it.

    FileNotFoundError says what to do where there is none.
    """
    given = folder or os.environ.get("FASHION_MNIST")
    if given:
        if not (Path(given) / "train-images-idx3-ubyte.gz").is_file():
            raise FileNotFoundError(f"{given} has no train-images-idx3-ubyte.gz: it is not the folder of Fashion-MNIST's files")
        return Path(given)
    places = [INSTALLED, CACHE / INSTALLED.relative_to("/")]
    if not any(map(Path.is_dir, places)):
        _fetch(CACHE)
    return next(place for place in places if place.is_dir())


def _fetch(cache: Path) -> None:
    """Debian's package, unpacked into a folder; nothing is installed."""
    cache.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=cache, check=True, capture_output=True, text=True)
        (package,) = cache.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=cache, check=True, capture_output=True, text=True)
        package.unlink()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise FileNotFoundError(
            f"Fashion-MNIST is not here, and fetching Debian's {PACKAGE} failed: {said[-1] if said else type(error).__name__}\n"
            f"  install it (apt-get install {PACKAGE}; 'apt-get update' first where apt does not know it), or set\n"
            "  FASHION_MNIST to a folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k-... files"
        ) from None


def outline(images: np.ndarray, threshold: float = 0.15) -> np.ndarray:
    """The edges bool [..., h, w] of images in [0, 1]: where the Sobel gradient, of at most 0.7, is above the threshold."""
    x = np.pad(images.astype(np.float32), [(0, 0)] * (images.ndim - 2) + [(1, 1), (1, 1)])
    across, down = x[..., 2:] - x[..., :-2], x[..., 2:, :] - x[..., :-2, :]
    across = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    return np.hypot(across, down) / 8 > threshold


def edges(image: Image.Image) -> Image.Image:
    """The condition image that a ControlNet follows: white edges on black."""
    return Image.fromarray(outline(np.asarray(image.convert("L")) / 255).astype(np.uint8) * 255)


def conditions(classes: Sequence[str], each: int) -> tuple[Tensor, list[str], Tensor]:
    """The first test images of some classes, class by class: images [n, 1, 28, 28] in [0, 1], captions, edges likewise."""
    found = FashionMnist(train=False, classes=dict.fromkeys(classes, each))
    order = np.argsort(found.labels, kind="stable")
    real = torch.from_numpy(found.images[order] / np.float32(255))[:, None]
    captions = [CLASSES[label] for label in found.labels[order]]
    return real, captions, torch.from_numpy(outline(real.numpy()).astype(np.float32))

"""Runs with latents from a cache: the same to the bit as without, and nothing is decoded or encoded twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fxplug
from fxplug.config.run_config import check_settings
from fxplug.core.errors import TrainError
from fxplug.training.data import image_files
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.encoded_cache import EncodedCache
from fxplug.training.image_encoding import encode_batch, encode_images
from fxplug.training.train_section import Data


def folder(top: Path, count=6):
    for path in (top, top.parent / "edges"):
        path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        size = (20 + 4 * (i % 3), 28 - 3 * (i % 2), 3)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(top / f"{i}.png")
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(top.parent / "edges" / f"{i}.png")
        (top / f"{i}.txt").write_text(f"picture {i}")
    return top


def loader(top, batch=2, *, rank=0, world=1, train=True, **given):
    spec = check_settings(Data, {"images": ".", "size": 16, "flip": True, "buckets": {"step": 8}, **given}, "data")
    return Loader(open_items(spec, top), spec, batch, rank=rank, world=world, train=train)


class Vae:
    """A VAE that counts its calls, and gives a distribution as diffusers' do."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = diffusers.AutoencoderKL(
            block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
            latent_channels=2, norm_num_groups=4,
        ).eval()  # fmt: skip
        self.calls = 0

    @torch.no_grad()
    def __call__(self, pixels):
        assert pixels.shape[0] == 1
        self.calls += 1
        found = self.module.encode(pixels).latent_dist
        return {"mean": found.mean[0], "std": found.std[0]}


class Denoising(fxplug.Task):
    """What a latent diffusion task does with a batch, with a cache or without."""

    def __init__(self, vae, cache):
        self.vae, self.cache = vae, cache

    def loss(self, module, batch, draw):
        rows = encode_batch(batch, self.cache, self.vae)
        mean, std = (torch.stack([row[key] for row in rows]) for key in ("mean", "std"))
        x = mean + std * draw.like(mean)
        noise = draw.like(x)
        return (module(x + noise) - noise).square().mean()


def run(top, cache, steps=8, **given):
    """The losses and weights of a run."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1))
    gm = fxplug.trace(module, (torch.randn(2, 2, 16, 16),))
    vae, data = Vae(), loader(top, **given)
    lazy = encode_images(data, cache, vae, quiet=True)
    assert lazy == (cache is not None)
    made = vae.calls
    trainer = fxplug.Trainer(gm, Denoising(vae, cache), data, steps=steps, trainable=["**"], lr=1e-2, quiet=True)
    history = trainer.fit()
    return [record["loss"] for record in history], [p.detach().clone() for p in gm.parameters()], made, vae.calls


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_a_cache_is_equal_to_one_without(tmp_path, workers, monkeypatch):
    folder(tmp_path / "data")
    losses, weights, _, without = run(tmp_path / "data", None, workers=workers)
    first = run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"), workers=workers)
    assert without >= 16 and first[2] == first[3] == 12  # each picture and its mirror image, before the first step
    monkeypatch.setattr(image_files.Image.Image, "load", None)  # nothing is decoded any more
    second = run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"), workers=workers)
    assert second[2] == second[3] == 0
    for found in (first, second):
        assert found[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(found[1], weights, strict=True))


def test_a_run_goes_on_where_the_cache_cannot_be_written_or_is_damaged(tmp_path):
    folder(tmp_path / "data")
    losses = run(tmp_path / "data", None)[0]
    (tmp_path / "file").write_text("")
    said: list[str] = []
    assert run(tmp_path / "data", EncodedCache(tmp_path / "file", "vae", said.append, memory=0))[0] == losses
    assert len(said) == 1 and "cannot be written" in said[0]
    run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"))
    for i, path in enumerate(sorted((tmp_path / "cache").rglob("*.safetensors"))):
        path.write_bytes(path.read_bytes()[: -1 - i]) if i % 2 else path.unlink()
    said = []
    found = run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae", said.append))
    assert found[0] == losses and found[2] == 6 and len(said) == 1 and "is written again" in said[0]
    assert run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"))[3] == 0


def test_a_changed_picture_is_encoded_anew(tmp_path):
    folder(tmp_path / "data")
    run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"))
    shutil.copy(tmp_path / "edges" / "0.png", tmp_path / "data" / "0.png")
    losses = run(tmp_path / "data", None)[0]
    found = run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"))
    assert found[0] == losses and found[2] == 2
    (tmp_path / "data" / "0.png").rename(tmp_path / "data" / "renamed.png")
    (tmp_path / "data" / "0.txt").rename(tmp_path / "data" / "renamed.txt")
    assert run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"))[2] == 0  # it is the same picture
    assert run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"), size=24)[2] == 12
    assert run(tmp_path / "data", EncodedCache(tmp_path / "cache", "vae"), flip=False)[2] == 0


def test_processes_encode_a_part_each(tmp_path):
    folder(tmp_path / "data", 7)
    counts = []
    for rank in range(3):
        vae = Vae()
        encode_images(loader(tmp_path / "data", 1, rank=rank, world=3, flip=False), EncodedCache(tmp_path / "c", "v"), vae)
        counts.append(vae.calls)
    assert sum(counts) == 7 and min(counts) > 0


def test_each_sample_is_seen_once_and_others_may_want_pixels(tmp_path):
    folder(tmp_path / "data")
    cache, seen = EncodedCache(tmp_path / "c", "v"), []
    data = loader(tmp_path / "data", conditions="../edges", flip=False)
    encode_images(data, cache, Vae(), each=seen.append, others=lambda item: item["caption"] != "picture 3")
    assert sorted(batch["caption"][0] for batch in seen) == [f"picture {i}" for i in range(6)]
    decoded = {}
    for batch in data.epoch(0):
        for image, edge, name in zip(batch["image"], batch["condition"], batch["caption"], strict=True):
            decoded[name] = (image.pixels is not None, edge.pixels is not None)
            assert edge.read().min() >= 0 and edge.read().shape == image.read().shape
    assert {name for name, found in decoded.items() if found == (True, True)} == {"picture 3"}
    assert {found for name, found in decoded.items() if name != "picture 3"} == {(False, False)}


def test_unreadable_pictures_are_counted_while_the_cache_is_filled(tmp_path):
    folder(tmp_path / "data")
    (tmp_path / "data" / "2.png").write_bytes((tmp_path / "data" / "2.png").read_bytes()[:200])
    losses = run(tmp_path / "data", None)[0]
    assert run(tmp_path / "data", EncodedCache(tmp_path / "c", "v"))[0] == losses
    data = loader(tmp_path / "data", max_corrupt=0)
    with pytest.raises(TrainError, match=r"'max_corrupt' is 0: 2\.png"):
        encode_images(data, EncodedCache(tmp_path / "d", "v"), Vae())


def test_a_picture_that_goes_during_the_run_is_named(tmp_path):
    folder(tmp_path / "data", 2)
    data, cache = loader(tmp_path / "data", 1, buckets=None), EncodedCache(tmp_path / "c", "v", memory=0)
    encode_images(data, cache, Vae())
    batch = next(data.epoch(0))
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "data" / batch["name"][0]).unlink()
    with pytest.raises(TrainError, match=r"\.png cannot be read any more: no such file"):
        encode_batch(batch, cache, Vae())


def test_a_batch_is_encoded_whether_it_has_pixels_or_not(tmp_path):
    folder(tmp_path / "data", 3)
    data, cache, vae = loader(tmp_path / "data", 1, flip=False, buckets=None), EncodedCache(tmp_path / "c", "v"), Vae()
    encode_images(data, cache, vae)
    first = data.first(3)  # of which the loader gives pixels always
    assert isinstance(first["image"], torch.Tensor)
    lazy = {int(batch["index"]): batch for batch in data.epoch(0)}
    for row, value in enumerate(encode_batch(first, cache, vae)):
        for given in (cache, None):
            (found,) = encode_batch(lazy[row], given, vae)
            assert all(torch.equal(found[key], value[key]) for key in ("mean", "std"))


def test_what_processes_compare_of_a_sample_is_not_whether_it_was_decoded(tmp_path):
    folder(tmp_path / "data", 1)
    data = loader(tmp_path / "data", 1, buckets=None)
    data.skip_decoding = bool
    one = next(data.epoch(0))["image"][0]
    assert one.pixels is None and repr(one) == repr(one.decoded()) and one.decoded().pixels is not None


def test_loaders_that_a_cache_cannot_serve_stay_as_they_are(tmp_path):
    folder(tmp_path / "data")
    cache = EncodedCache(tmp_path / "c", "v")
    for data in (loader(tmp_path / "data", crop="random"), [1, 2]):
        assert not encode_images(data, cache, Vae())
    assert not encode_images(loader(tmp_path / "data"), None, Vae())
    assert isinstance(next(loader(tmp_path / "data").epoch(0))["image"], torch.Tensor)


def test_nothing_is_printed_when_quiet_or_away_from_a_terminal(tmp_path, capfd):
    folder(tmp_path / "data", 3)
    for quiet in (True, False):
        encode_images(loader(tmp_path / "data", 1), EncodedCache(tmp_path / str(quiet), "v"), Vae(), quiet=quiet)
    assert capfd.readouterr() == ("", "")

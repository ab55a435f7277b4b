"""Runs on stock pipelines with a cache of latents and conditions: the same to the bit, and nothing is encoded twice."""

from __future__ import annotations

import numpy as np
import pytest
import runs
import tiny_pipelines as tiny
import torch
from PIL import Image
from test_pipeline_denoise import PICTURED, SIZE, inpainting, kontext, pix2pix, rewritten
from torch import nn

import fxplug
from fxplug.config.run_config import check_settings
from fxplug.core.errors import TrainError
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.encoded_cache import EncodedCache
from fxplug.training.model_digest import digest_models
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.pipeline_encoders import Encoders
from fxplug.training.tasks.task import TaskInfo
from fxplug.training.train_section import Data

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of some schedulers


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The runs of this file have what is traced and seen of a tiny pipeline in common."""
    with runs.sharing():
        yield


def picture(path, seed):
    """Write a picture of random colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(path)


def pictures(top, count=4, **folders):
    """A folder of pictures with captions, and further ones beside it."""
    for number in range(count):
        picture(top / "data" / f"{number}.png", number)
        (top / "data" / f"{number}.txt").write_text(f"a {('red', 'blue')[number % 2]} ball")
        for place, folder in enumerate(folders):
            picture(top / folder / f"{number}.png", 100 * (place + 1) + number)
    return top / "data"


def videos(top, count=2, frames=5):
    """A folder of videos, which are folders of frames."""
    for number in range(count):
        for frame in range(frames):
            picture(top / "data" / f"v{number}" / f"{frame}.png", 10 * number + frame)
        (top / "data" / f"v{number}.txt").write_text(f"a ball {number}")
    return top / "data"


def loader(top, batch=2, train=True, **given):
    where = {} if "videos" in given else {"images": "."}
    spec = check_settings(Data, {**where, "size": SIZE[0], **given}, "data")
    return Loader(open_items(spec, top), spec, batch, train=train)


class Counted:
    """Counts the calls of the models of a pipeline that encode."""

    def __init__(self, pipe):
        self.vae = self.text = 0
        encode = pipe.vae.encode

        def counted(*args, **named):
            self.vae += 1
            return encode(*args, **named)

        pipe.vae.encode = counted
        pipe.text_encoder.register_forward_pre_hook(self._count_text)

    def _count_text(self, *_):
        self.text += 1


def run(top, cache, make=lambda: tiny.make("sd15"), call=(), example=(), dropout=0.3, frames=None, **given):
    """The losses and the trained weights of a run, and the calls of VAE and text encoder in its `fit`."""
    torch.manual_seed(0)
    pipe = make()
    if frames is None:
        module = rewritten(pipe, dict(call), **dict(example))
    else:
        module, given = rewritten(pipe, {"num_frames": frames}), {"videos": ".", "frames": frames, **given}
    caches = {}
    if cache is not None:
        caches = {"store": EncodedCache(cache, "conditions"), "latents": lambda vae: EncodedCache(cache, digest_models(vae))}
    task = PipelineDenoise(pipe, dict(call), samples=0, dropout=dropout, **caches)
    trainer = fxplug.Trainer(module, task, loader(top, **given), steps=4, batch=2, lr=1e-2, quiet=True)
    counted = Counted(pipe)
    losses = [record["loss"] for record in trainer.fit()]
    weights = [p.detach().clone() for p in module.parameters() if p.requires_grad]
    return losses, weights, counted, trainer


def check_equal(first, second):
    assert first[0] == second[0]
    assert first[1] and all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


COLOURS = Image.new("RGB", SIZE, "red")
KINDS = {
    "captions": ({}, {}, {"flip": True}),
    "own size": ({"make": lambda: tiny.make("sdxl")}, {}, {}),
    "condition": ({"make": kontext, "call": PICTURED["kontext"][1], "example": {"image": COLOURS}}, {"edges": 1},
                  {"conditions": "../edges", "flip": True}),
    "mask": ({"make": inpainting, "example": {"image": COLOURS, "mask_image": COLOURS.convert("L")}}, {"edges": 1},
             {"conditions": "../edges", "masks": "../edges"}),
    "workers": ({}, {}, {"workers": 1}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_a_cache_is_equal_to_one_without_and_the_next_encodes_nothing(kind, tmp_path):
    made, folders, given = KINDS[kind]
    top = pictures(tmp_path, **folders)
    without, first, second = (run(top, cache, **made, **given) for cache in (None, tmp_path / "cache", tmp_path / "cache"))
    check_equal(first, without)
    check_equal(second, without)
    assert len(set(without[0])) == 4 and without[2].vae >= 8
    assert first[2].vae >= 4 and first[2].text >= 1
    assert (second[2].vae, second[2].text) == (0, 0)


def test_all_is_encoded_before_the_first_step(tmp_path):
    top = pictures(tmp_path)
    seen = []

    class Watched(PipelineDenoise):
        def loss(self, *args):
            seen.append((counted.vae, counted.text))
            return super().loss(*args)

    pipe = tiny.make("sd15")
    task = Watched(pipe, {}, samples=0, dropout=0.1, store=EncodedCache(tmp_path / "c", "t"),
                   latents=lambda vae: EncodedCache(tmp_path / "c", digest_models(vae)))  # fmt: skip
    counted = Counted(pipe)
    tests = loader(top, train=False)
    settings = {"steps": 2, "batch": 2, "quiet": True}
    trainer = fxplug.Trainer(rewritten(pipe, {}), task, loader(top, flip=True), tests, **settings)
    seen.clear()
    trainer.fit()
    assert len(seen) == 2 and seen[0] == seen[1] == (counted.vae, counted.text)


@pytest.mark.slow
def test_a_changed_picture_is_encoded_anew(tmp_path):
    top = pictures(tmp_path)
    run(top, tmp_path / "cache")
    picture(top / "0.png", 50)
    found = run(top, tmp_path / "cache")
    check_equal(found, run(top, None))
    assert (found[2].vae, found[2].text) == (1, 0)


@pytest.mark.slow
def test_a_changed_condition_is_encoded_anew(tmp_path):
    top, made = pictures(tmp_path, edges=1), {**KINDS["condition"][0], "conditions": "../edges", "dropout": 0.0}
    run(top, tmp_path / "cache", **made)
    picture(tmp_path / "edges" / "0.png", 50)
    found = run(top, tmp_path / "cache", **made)
    check_equal(found, run(top, None, **made))
    assert found[2].vae == 1


@pytest.mark.slow
def test_what_cannot_be_kept_is_encoded_in_the_steps(tmp_path):
    top = pictures(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        found = run(top, tmp_path / "file")
    check_equal(found, run(top, None))
    drawn = run(top, tmp_path / "cache", crop="random")
    check_equal(drawn, run(top, None, crop="random"))
    assert drawn[2].vae >= 8 and not drawn[3].task.sized.encoders.away


@pytest.mark.slow
def test_a_video_pipeline_trains_on_videos_with_a_cache_and_without(tmp_path):
    top = videos(tmp_path)
    runs = [run(top, cache, make=lambda: tiny.make("wan"), frames=5) for cache in (None, tmp_path / "c", tmp_path / "c")]
    check_equal(runs[1], runs[0])
    check_equal(runs[2], runs[0])
    assert (runs[2][2].vae, runs[2][2].text) == (0, 0)
    task = runs[0][3].task
    assert [*task.sized.made] == [(5, *SIZE)] and task.sized.of((5, *SIZE)).call.observation.call["num_frames"] == 5
    assert task.last_sample()[0]["num_frames"] == 5 and task._sample_batch(1)["video"].shape == (1, 3, 5, *SIZE)


@pytest.mark.slow
def test_a_picture_that_goes_while_its_condition_is_unknown_is_named(tmp_path):
    top = pictures(tmp_path, edges=1)
    data = loader(top, conditions="../edges")
    data.skip_decoding = lambda item: True
    batch, example = next(data.epoch(0)), data.first(1)
    (tmp_path / "edges" / batch["name"][0]).unlink()
    task = PipelineDenoise(pix2pix(), {}, samples=0)
    task.setup(nn.Identity(), TaskInfo(SIZE, examples=lambda count: example))
    with pytest.raises(TrainError, match=r"of \d\.png\) cannot be read any more"):
        task.sized.of(SIZE).conditions.of(batch, batch["caption"])


def test_encoders_wait_on_the_cpu_until_they_are_needed():
    """On the device 'meta', which each machine has, as far as moving goes."""
    pipe = tiny.make("sd15")
    encoders, moved = Encoders(pipe, torch.device("meta")), []
    for name in ("vae", "text_encoder", "unet"):
        vars(getattr(pipe, name))["to"] = lambda device, name=name: moved.append((name, torch.device(device).type))
    encoders.leave("unet")
    assert sorted(moved) == [("text_encoder", "cpu"), ("vae", "cpu")]
    moved.clear()
    with encoders.present():
        assert sorted(moved) == [("text_encoder", "meta"), ("vae", "meta")] and not encoders.away
        moved.clear()
    assert sorted(moved) == [("text_encoder", "cpu"), ("vae", "cpu")] and encoders.away
    moved.clear()
    encoders.bring_back()
    encoders.bring_back()
    assert sorted(moved) == [("text_encoder", "meta"), ("vae", "meta")]
    on_cpu = Encoders(pipe, torch.device("cpu"))
    on_cpu.leave("unet")
    assert on_cpu.away == ()

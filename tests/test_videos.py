"""Videos as data: of each kind the frames that are asked for, all cropped alike; captions; what is too short or broken."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fxplug.config.run_config import check_settings
from fxplug.core.errors import SpecError, TrainError
from fxplug.training.data.image_files import Crop, rescale
from fxplug.training.data.image_sources import make_pixels
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import match_test_items, open_items
from fxplug.training.encoded_cache import EncodedCache
from fxplug.training.identity import describe_samples
from fxplug.training.image_encoding import encode_batch, encode_images
from fxplug.training.plugins import Plugins
from fxplug.training.tasks.model_call import get_images
from fxplug.training.train_section import Data


def frames(count, seed=0, size=(20, 28)):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(count)]


def in_folder(top: Path, pictures, suffix=".png"):
    top.mkdir(parents=True)
    for i, picture in enumerate(pictures):
        picture.save(top / f"frame{i}{suffix}")


def animated(file: Path, pictures, milliseconds=100):
    file.parent.mkdir(parents=True, exist_ok=True)
    options = {"lossless": True} if file.suffix == ".webp" else {}
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, **options)


def video(file: Path, pictures, rate=10, turned=0):
    """Write a video without loss, to be shown turned by so many degrees, counterclockwise."""
    av = pytest.importorskip("av")
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264rgb", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.options = *pictures[0].size, "rgb24", {"qp": "0"}
        if turned:
            stream.set_display_rotation(turned)
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_image(picture)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def loader(base, batch=1, *, train=False, hooks=None, **given):
    spec = check_settings(Data, {"videos": ".", "frames": 4, "size": 16, "captions": "none", **given}, "data")
    return Loader(open_items(spec, base), spec, batch, train=train, hooks=hooks)


def expected(pictures, size=(16, 16), place=Crop()):  # noqa: B008
    return rescale("video", make_pixels(pictures, size, place))


def whole(batch, key="video"):
    return batch[key] if isinstance(batch[key], torch.Tensor) else torch.stack([one.read() for one in batch[key]])


KINDS = {
    "folder": lambda top, pictures: in_folder(top / "a", pictures),
    "webp": lambda top, pictures: animated(top / "a.webp", pictures),
    "apng": lambda top, pictures: animated(top / "a.png", pictures),
    "mp4": lambda top, pictures: video(top / "a.mp4", pictures),
    "mkv": lambda top, pictures: video(top / "a.mkv", pictures),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [False, True])
def test_a_video_of_each_kind(tmp_path, kind, later):
    pictures = frames(12)
    KINDS[kind](tmp_path, pictures)
    one = loader(tmp_path)
    if later:
        one.skip_decoding = bool
    (batch,) = one.epoch(0)
    found = whole(batch)
    assert found.shape == (1, 3, 4, 16, 16) and found.dtype == torch.float32
    assert torch.equal(found[0], expected(pictures[:4]))
    assert batch["original_size"].tolist() == [[20, 28]] and batch["crop"].tolist() == [[0, 3]]
    assert "image" not in batch and one.sizes == [(16, 16)] and one.items.sizes == [(20, 28)]
    wide = loader(tmp_path, size=[16, 8], flip=True, crop="random", train=True, shuffle=False)
    seen = set()
    for epoch in range(6):
        (batch,) = wide.epoch(epoch)
        (top, left), flipped = batch["crop"][0].tolist(), batch["flipped"].item()
        seen.add((left, flipped))
        assert top == 0 and batch["video"].shape == (1, 3, 4, 16, 8)
    assert len(seen) > 3


def test_frames_of_a_second(tmp_path):
    pictures = frames(12)
    animated(tmp_path / "a.webp", pictures, 100)  # ten a second
    in_folder(tmp_path / "b", pictures)
    for fps, taken in ((10, [0, 1, 2, 3]), (5, [0, 2, 4, 6]), (4, [0, 2, 5, 7]), (20, [0, 0, 1, 1]), (None, [0, 1, 2, 3])):
        one, two = loader(tmp_path, fps=fps).epoch(0)
        assert torch.equal(one["video"][0], expected([pictures[i] for i in taken])), fps
        assert torch.equal(two["video"][0], expected(pictures[:4])), fps  # files have no times
    slow = loader(tmp_path, fps=3, frames=5)  # 1.2 seconds have four of them
    assert [batch["name"] for batch in slow.epoch(0)] == [["b"]]
    assert slow.skipped == {"a.webp": "it has 4 frames at 3 a second, and 'frames' is 5"}


def test_frames_of_a_second_of_a_video_file(tmp_path):
    pictures = frames(12)
    video(tmp_path / "a.mp4", pictures, rate=10)
    for fps, taken in ((10, [0, 1, 2, 3]), (5, [0, 2, 4, 6]), (20, [0, 0, 1, 1])):
        (batch,) = loader(tmp_path, fps=fps).epoch(0)
        assert torch.equal(batch["video"][0], expected([pictures[i] for i in taken])), fps
    assert not list(loader(tmp_path, fps=3, frames=5).epoch(0))


@pytest.mark.parametrize("turned", [90, -90, 180])
def test_a_turned_video_file_is_upright(tmp_path, turned):
    pictures = frames(4)
    video(tmp_path / "a.mp4", pictures, turned=turned)
    one = loader(tmp_path)
    (batch,) = one.epoch(0)
    shown = [picture.rotate(turned, expand=True) for picture in pictures]
    assert torch.equal(batch["video"][0], expected(shown))
    assert one.items.sizes == [(shown[0].height, shown[0].width)] and batch["original_size"].tolist() == [[*one.items.sizes[0]]]


def test_short_and_broken_videos_are_left_out_and_counted(tmp_path):
    for name, count in (("a", 4), ("b", 3), ("c", 4), ("d", 4), ("e", 4)):
        in_folder(tmp_path / name, frames(count))
    (tmp_path / "c" / "frame2.png").write_bytes(b"broken")
    frames(1, size=(30, 30))[0].save(tmp_path / "d" / "frame1.png")
    animated(tmp_path / "f.gif", frames(2))
    (tmp_path / "g.webp").write_bytes(b"RIFF")
    for train, later in ((False, None), (False, bool), (True, None)):
        one = loader(tmp_path, train=train)
        if later:
            one.skip_decoding = lambda item: False
        names = [batch["name"][0] for batch in one.epoch(0)]
        assert {*names} == {"a", "e"} and len(names) == (7 if train else 2)
        assert one.skipped == {
            "b": "it has 3 frames, and 'frames' is 4",
            "c (frame2.png)": "not an image",
            "d": "its frames have several sizes: 20x28 and 30x30",
            "f.gif": "it has 2 frames, and 'frames' is 4",
            "g.webp": one.skipped["g.webp"],
        }
    with pytest.raises(TrainError, match=r"'max_corrupt' is 0: b \(it has 3 frames"):
        list(loader(tmp_path, max_corrupt=0).epoch(0))


def test_captions_and_settings_are_beside_videos(tmp_path):
    in_folder(tmp_path / "1_x" / "shot.1", frames(4))
    in_folder(tmp_path / "plain", frames(4))
    animated(tmp_path / "b.gif", frames(4))
    (tmp_path / "1_x" / "shot.1.txt").write_text("one")
    (tmp_path / "plain.txt").write_text("two")
    (tmp_path / "b.txt").write_text("three")
    found = {batch["name"][0]: batch["caption"][0] for batch in loader(tmp_path, captions="required").epoch(0)}
    assert found == {"1_x/shot.1": "one", "plain": "two", "b.gif": "three"}
    (tmp_path / "plain.txt").unlink()
    with pytest.raises(SpecError, match="1 of 3 images have no caption: 'plain'"):
        loader(tmp_path, captions="required")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "plain", "text": "told"}\n')
    assert "told" in {batch["caption"][0] for batch in loader(tmp_path, captions="required").epoch(0)}


def test_what_counts_as_a_video(tmp_path):
    in_folder(tmp_path / "a10", frames(4))
    in_folder(tmp_path / "a2" / "deep", frames(4), ".jpg")
    in_folder(tmp_path / "still", frames(4), ".webp")
    in_folder(tmp_path / ".hidden", frames(4))
    animated(tmp_path / "mixed" / "a.gif", frames(4))
    frames(1)[0].save(tmp_path / "mixed" / "poster.png")
    frames(1)[0].save(tmp_path / "cover.jpg")
    items = loader(tmp_path).items
    assert items.names == ["a2/deep", "a10", "mixed/a.gif", "still"]
    assert len(items.notes) == 2 and all("are not in a video's folder" in note for note in items.notes)
    assert [path.name for path in items.files(0)] == [f"frame{i}.jpg" for i in range(4)]


def test_frames_are_in_natural_order(tmp_path):
    pictures = frames(12)
    in_folder(tmp_path / "a", pictures)  # frame2 before frame10
    (batch,) = loader(tmp_path, frames=12).epoch(0)
    assert torch.equal(batch["video"][0], expected(pictures))


@pytest.mark.parametrize("given, finding", [
    ({"frames": None}, r"data\.frames: needs a number: how many frames of each video"),
    ({"frames": 0}, "frames"),
    ({"fps": 0}, "fps"),
    ({"images": "."}, "found 'images' and 'videos'"),
    ({"conditions": "edges"}, r"data\.conditions: has no effect with 'videos'"),
    ({"videos": None, "images": ".", "fps": 4, "frames": None}, r"data\.fps: has no effect with 'images'"),
    ({"videos": "nowhere"}, r"data\.videos: no such folder '.*nowhere'"),
    ({"videos": "empty"}, r"no videos in '.*empty'; it is empty; a video is a folder of frames"),
    ({"videos": "pictures"}, r"no videos in '.*pictures'; it has files with \.png; a video is"),
])  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, given, finding):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    frames(1)[0].save(tmp_path / "pictures" / "a.png")
    with pytest.raises(SpecError, match=finding):
        loader(tmp_path, **given)


def test_a_video_file_without_av_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(SpecError, match=r"data\.videos: 'a\.mp4' needs the package 'av': pip install av"):
        loader(tmp_path)


def test_a_broken_video_file_is_left_out(tmp_path):
    video(tmp_path / "a.mp4", frames(4))
    video(tmp_path / "b.mp4", frames(4))
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[: len(data) // 2])
    (tmp_path / "c.mp4").write_bytes(b"")
    one = loader(tmp_path)
    assert [batch["name"] for batch in one.epoch(0)] == [["b.mp4"]] and {*one.skipped} == {"a.mp4", "c.mp4"}


def test_buckets_of_videos(tmp_path):
    for name, size in (("a", (20, 40)), ("b", (40, 20)), ("c", (20, 40))):
        in_folder(tmp_path / name, frames(4, size=size))
    one = loader(tmp_path, buckets={"step": 8})
    assert one.sizes == [(8, 24), (24, 8)]
    shapes = [tuple(batch["video"].shape[2:]) for batch in one.epoch(0)]
    assert sorted(shapes) == [(4, 8, 24), (4, 8, 24), (4, 24, 8)]


def test_videos_are_cached_as_pictures_are(tmp_path):
    for i in range(3):
        in_folder(tmp_path / "v" / str(i), frames(4, i))
    calls = []

    def encode(pixels):
        assert pixels.shape == (1, 3, 4, 16, 16)
        calls.append(1)
        return {"mean": pixels[0].mean((1, 2))}

    cache = EncodedCache(tmp_path / "c", "v")
    for count, change in ((3, None), (3, None), (4, "1/frame3.png"), (4, "1/frame4.png")):
        if change:
            frames(1, 9)[0].save(tmp_path / "v" / change)
        one = loader(tmp_path / "v")
        assert encode_images(one, cache, encode) and len(calls) == count, change  # a fifth frame is not read
    for lazy, batch in zip(one.epoch(0), loader(tmp_path / "v").epoch(0), strict=True):
        assert lazy["video"][0].pixels is None
        assert torch.equal(encode_batch(lazy, cache, encode)[0]["mean"], batch["video"][0].mean((1, 2)))
    assert len(calls) == 4
    digests = {describe_samples(loader(tmp_path / "v"), 0)["digest"]}
    frames(1, 7)[0].save(tmp_path / "v" / "0" / "frame0.png")
    assert describe_samples(loader(tmp_path / "v"), 0)["digest"] not in digests


class Darker(Plugins):
    transforms = True

    def has(self, hook):
        return hook == "transform_pil_image"


def test_what_takes_images_alone_refuses_videos(tmp_path):
    in_folder(tmp_path / "a", frames(4))
    with pytest.raises(TrainError, match="a is a video, and a plugin's transform_pil_image changes images"):
        list(loader(tmp_path, hooks=Darker()).epoch(0))
    one = loader(tmp_path)
    with pytest.raises(SpecError, match=r"data\.videos: the task takes images, and the data has videos"):
        get_images(next(one.epoch(0)))
    one.transform = lambda image, size: image
    with pytest.raises(TrainError, match="is a video, and the task changes images"):
        list(one.epoch(0))


def test_test_videos_are_left_out_of_those_around_them(tmp_path):
    for name in ("a", "b", "val/c"):
        in_folder(tmp_path / name, frames(4))
    spec = check_settings(Data, {"videos": ".", "frames": 4, "captions": "none", "test": "val"}, "data")
    train, test = open_items(spec, tmp_path), open_items(spec.test, tmp_path, test=True)
    assert train.names == ["a", "b"] and test.names == ["c"] and spec.test.frames == 4
    assert match_test_items(test, train) is test

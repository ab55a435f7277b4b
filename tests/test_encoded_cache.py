"""Caches on disk: every value comes back as it was put, whoever is killed, writes at once, or damages a file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import shutil
import time
import warnings
from pathlib import Path

import diffusers
import processes
import pytest
import tiny_pipelines
import torch
from torch import nn

from fxplug.config.run_config import check_settings
from fxplug.core import weight_files
from fxplug.core.errors import SpecError, TrainError
from fxplug.training import encoded_cache
from fxplug.training.encoded_cache import EncodedCache, default_folder, open_cache
from fxplug.training.model_digest import digest_models
from fxplug.training.train_section import Data


def value(i: int):
    """What is put for a number, the same in every process."""
    g = torch.Generator().manual_seed(i)
    return {"mean": torch.randn(4, i % 7, 3, generator=g), "std": torch.rand(2, generator=g), "size": (i, i + 1)}


def equal(one, two):
    if isinstance(one, torch.Tensor):
        flat = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*flat)
    if isinstance(one, dict):
        return type(two) is dict and list(one) == list(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return isinstance(two, tuple if isinstance(one, tuple) else list) and len(one) == len(two) and all(
            map(equal, one, two)
        )
    return type(one) is type(two) and (one == two or one != one != two)


def opened(folder, said=None, maker="maker", **given):
    return EncodedCache(folder, maker, fail if said is None else said.append, **given)


def fail(finding):
    raise AssertionError(finding)


DTYPES = sorted({*weight_files.DTYPES.values(), torch.complex128, torch.complex32}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_tensors_of_any_dtype_come_back(tmp_path, dtype, shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    assert opened(tmp_path).put("a", tensor)
    assert equal(opened(tmp_path).get("a"), tensor)


def test_values_of_any_form_come_back(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    values = [
        {"a": base, "b": base[1], "c": base.mT, "d": base[..., ::2], "e": base.expand(5, 2, 3, 4), "f": [base, base]},
        nn.Parameter(base), torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag,
        (), [], {}, [None, True, False, 0, -7, 1 << 200, "", "é\n\0", 0.1, -0.0, float("inf"), float("nan")],
        (1, (2, [3, (4,)])), {"": {"x": torch.float16}}, torch.Size([1, 2]), ["tensor", "0", [1], "float32"], 1.5, "text",
    ]  # fmt: skip
    for i, one in enumerate(values):
        cache = opened(tmp_path)
        assert cache.put({"i": i}, one) and cache.has({"i": i})
        for found in (cache.get({"i": i}), opened(tmp_path).get({"i": i}), opened(tmp_path, memory=0).get({"i": i})):
            assert equal(one, found), i
    found = opened(tmp_path).get({"i": 0})
    assert not found["a"].requires_grad and found["a"].device.type == "cpu" and found["a"].is_contiguous()


def test_what_cannot_be_stored_is_said_and_not_written(tmp_path):
    for one in (object(), {1: 2}, torch.zeros(2, device="meta"), [{"a": {3}}], torch.eye(2).to_sparse()):
        said: list[str] = []
        cache = opened(tmp_path, said)
        assert not cache.put("a", {"x": one}) and cache.get("a") is None
        assert len(said) == 1 and "cannot store" in said[0]


def test_other_keys_makers_and_formats_are_other_entries(tmp_path, monkeypatch):
    keys = ["a", ["a"], {"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": None}, {"b": 1}, {"a": [1, 2]}, {"a": [2, 1]}, 1, "1", None]
    cache = opened(tmp_path)
    for i, key in enumerate(keys):
        assert cache.get(key) is None and cache.put(key, value(i))
    for i, key in enumerate(keys):
        assert equal(opened(tmp_path).get(key), value(i))
    assert opened(tmp_path).get({"b": 2, "a": 1}) is None
    cache.put({"b": 2, "a": 1}, 5)
    assert opened(tmp_path).get({"a": 1, "b": 2}) == 5
    assert opened(tmp_path, maker="another").get("a") is None
    monkeypatch.setattr(encoded_cache, "FORMAT", encoded_cache.FORMAT + 1)
    newer = opened(tmp_path)
    assert newer.get("a") is None and newer.put("a", 3) and opened(tmp_path).get("a") == 3
    monkeypatch.undo()
    assert equal(opened(tmp_path).get("a"), value(0))


def test_an_entry_under_a_wrong_name_is_not_used(tmp_path):
    cache = opened(tmp_path)
    cache.put("a", value(1))
    other = opened(tmp_path, maker="another")
    for target in (cache.path("b"), other.path("b")):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cache.path("a"), target)
    said: list[str] = []
    assert opened(tmp_path, said).get("b") is None and "does not match its name" in said[0]


def test_no_byte_of_a_damaged_file_is_used(tmp_path):
    cache, one = opened(tmp_path), {"a": torch.arange(6, dtype=torch.int16), "b": [1.5, "x"]}
    cache.put("a", one)
    path = cache.path("a")
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:n] for n in range(0, len(whole), 7)] + [whole + b"\0", b"", b"{}", b"\0" * len(whole), os.urandom(300)]
    for at in range(len(whole)):
        bit = 1 << rng.randrange(8)
        damaged.append(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        said: list[str] = []
        found = opened(tmp_path, said).get("a")
        assert found is None or equal(found, one)  # of padding no bit matters
        assert (found is None) == (len(said) == 1), said
    path.write_bytes(b"")
    said = []
    cache = opened(tmp_path, said)
    assert [cache.get("a"), cache.get("a")] == [None, None] and len(said) == 1 and str(path) in said[0]
    assert cache.put("a", one) and equal(opened(tmp_path).get("a"), one)


def test_what_is_no_file_is_not_read(tmp_path):
    cache = opened(tmp_path)
    path = cache.path("a")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert cache.get("a") is None
    path.unlink()
    path.mkdir()
    said: list[str] = []
    cache = opened(tmp_path, said)
    assert cache.get("a") is None and not cache.put("a", 1) and "cannot be written: " in said[0]


def fill(folder, seed, ready):
    """Put every entry, in an order of its own."""
    cache, order = opened(folder, []), list(range(400))
    random.Random(seed).shuffle(order)
    ready.set()
    for i in order:
        cache.put({"i": i}, value(i))


def filler(folder, seed):
    ready = processes.CONTEXT.Event()
    made = processes.CONTEXT.Process(target=fill, args=(folder, seed, ready))
    made.start()
    assert ready.wait(120)
    return made


def count_files(folder):
    return sum(len(files) for *_, files in os.walk(folder))


def check(folder, least=0):
    """Every entry that is there is right; the number of them."""
    cache = opened(folder)  # fails where anything is said
    count = 0
    for i in range(400):
        found = cache.get({"i": i})
        assert found is None or equal(found, value(i)), i
        count += found is not None
    assert count >= least
    return count


@pytest.mark.slow
def test_killed_at_any_moment_no_entry_is_broken(tmp_path):
    rng, counts = random.Random(0), []
    for turn in range(8):
        if turn % 2 == 0:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        enough = count_files(tmp_path / "cache") + rng.randrange(150)
        process = filler(tmp_path / "cache", turn)
        while process.is_alive() and count_files(tmp_path / "cache") < enough:
            time.sleep(0.0005)
        process.kill()
        process.join()
        counts.append(check(tmp_path / "cache"))
    assert max(counts) > 0 and min(counts) < 400, counts
    cache = opened(tmp_path / "cache")
    for i in range(400):
        cache.put({"i": i}, value(i))
    assert check(tmp_path / "cache") == 400
    del cache
    others = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    left = list((tmp_path / "cache").rglob(".writing-*"))
    assert others == [] and left == []  # what the killed ones left is gone


@pytest.mark.slow
def test_processes_write_the_same_entries_at_once(tmp_path):
    writers = [filler(tmp_path, seed) for seed in (0, 0, 1)]
    while any(writer.is_alive() for writer in writers):
        check(tmp_path)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert check(tmp_path) == 400


def test_an_entry_stays_when_writing_it_anew_fails(tmp_path, monkeypatch):
    opened(tmp_path).put("a", 1)

    def full(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(weight_files, "save_file", full)
    said: list[str] = []
    cache = opened(tmp_path, said)
    assert not cache.put("a", 2) and not cache.put("b", 3) and not cache.writable
    assert len(said) == 1 and "the disk is full" in said[0] and "free some space" in said[0] and "'cache'" in said[0]
    assert cache.get("b") == 3  # in memory, as long as there is room
    monkeypatch.undo()
    again = opened(tmp_path)
    assert again.get("a") == 1 and again.get("b") is None
    del cache
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [again.path("a").name]


def with_little_room(folder):
    """What a process does whose files may have no more than 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    said: list[str] = []
    cache = opened(folder, said, memory=0)
    assert cache.put("small", torch.zeros(10))
    assert not cache.put("large", torch.zeros(100_000))
    assert cache.get("large") is None
    assert cache.get_or_make("other", lambda: 5) == 5
    (told,) = said
    assert "the file would be too large" in told and "free some space" in told


def test_a_full_disk_ends_nothing(tmp_path):
    ended = processes.ended(with_little_room, tmp_path / "cache", folder=tmp_path)
    assert ended.codes == [0], ended.stderr
    cache = opened(tmp_path / "cache")
    assert torch.equal(cache.get("small"), torch.zeros(10)) and not cache.has("large")
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [cache.path("small")]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    said: list[str] = []
    cache = opened(tmp_path / "file", said)
    assert cache.get("a") is None and not cache.has("a")
    assert cache.get_or_make("a", lambda: 1) == 1 and cache.get_or_make("b", lambda: 2) == 2
    assert len(said) == 1 and "cannot be written" in said[0] and "'cache' in the section 'data'" in said[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pickle.loads(pickle.dumps(cache)).put("a", 1)
    assert "cannot be written" in str(told[0].message)


def test_a_cache_that_is_cleared_meanwhile_is_filled_again(tmp_path):
    cache = opened(tmp_path / "c", memory=0)
    assert cache.put("a", 1)
    shutil.rmtree(tmp_path / "c")
    assert cache.get("a") is None and cache.put("b", 2) and cache.get("b") == 2


def test_memory_is_bounded(tmp_path):
    cache = opened(tmp_path, memory=10_000)
    for i in range(50):
        cache.put(i, torch.full((300,), float(i)))
        cache.put(i, torch.full((300,), float(i)))
    assert cache._bytes == sum(entry.bytes for entry in cache._kept.values()) <= 10_000 and len(cache._kept) == 8
    assert all(torch.equal(cache.get(i), torch.full((300,), float(i))) for i in range(50))


def test_where_the_cache_is(tmp_path, monkeypatch):
    def folder(**given):
        spec = check_settings(Data, {"images": "pictures", **given}, "data")
        found = open_cache(spec, tmp_path, "maker")
        return found and found.folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder() == tmp_path / "xdg/fxplug/encoded"
    assert folder(cache="mine") == tmp_path / "mine" and folder(cache=False) is None
    assert folder(cache=str(tmp_path / "abs")) == tmp_path / "abs"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder(cache="~/c") == tmp_path / "home/c"
    for other in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert default_folder() == tmp_path / "home/.cache/fxplug/encoded"
    monkeypatch.setenv("HOME", "")
    assert default_folder() is None or default_folder().is_absolute()
    for wrong in (True, 3, "", ["a"]):
        with pytest.raises(SpecError, match="must be a folder, or false for none"):
            folder(cache=wrong)
    with pytest.raises(SpecError, match="another crop in each epoch, but a cache holds one"):
        folder(cache="mine", crop="random", size=8)
    assert check_settings(Data, {"images": "a", "crop": "random", "size": 8}, "data").cache is None
    assert check_settings(Data, {"images": "a", "cache": "c", "test": "b"}, "data").test.cache == "c"


# --- what makes entries


class Net(nn.Module):
    def __init__(self, wide=4, **config):
        super().__init__()
        self.layer, self.config, self.gain = nn.Linear(wide, 3), config, 1.0
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def net(**config):
    torch.manual_seed(0)
    return Net(**config)


def change(edit):
    made = net()
    edit(made)
    return made


CHANGED = {
    "weights": lambda m: m.layer.weight.data.view(-1)[5:6].mul_(1 + 1e-6),
    "sign of zero": lambda m: m.table[0:1].neg_(),
    "buffers that are not saved": lambda m: m.table[2:3].add_(1),
    "dtype": lambda m: m.half(),
    "config": lambda m: m.config.update(scale=2),
    "attribute": lambda m: setattr(m, "gain", 2.0),
    "attribute of a layer": lambda m: setattr(m.layer, "gain", 2.0),
    "mode": lambda m: m.eval(),
    "layer of another class": lambda m: setattr(m, "layer", type("Other", (nn.Linear,), {})(4, 3)),
    "more": lambda m: m.add_module("more", nn.Identity()),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_digest_changes_with(what):
    assert digest_models(net()) != digest_models(change(CHANGED[what]))


def test_a_digest_is_of_what_models_do_not_of_where_they_are_from(tmp_path):
    one, two = net(), net()
    two.name_or_path, two.config["_name_or_path"] = "elsewhere", "there"
    assert digest_models(one) == digest_models(two) == digest_models(pickle.loads(pickle.dumps(one)))
    assert digest_models(one, torch.float16) != digest_models(one, torch.float32) != digest_models(one)
    assert digest_models({"a": 1}) != digest_models({"a": 1.0}) != digest_models({"a": "1"})
    assert digest_models([1, 2]) != digest_models([2, 1])
    for unknown in (object(), net().to("meta")):
        with pytest.raises(TrainError, match="the cache cannot identify"):
            digest_models(unknown)


def digests(folder):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    return [digest_models(getattr(pipe, part)) for part in ("vae", "text_encoder", "tokenizer", "scheduler")]


def print_digests(folder):
    print(*digests(folder))


def test_the_digest_of_a_pipelines_parts_is_the_same_in_every_process_and_folder(tmp_path):
    tiny_pipelines.save("sd15", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b") and len(set(first)) == 4
    assert processes.ended(print_digests, tmp_path / "b", folder=tmp_path).stdout.split() == first
    file = tmp_path / "b" / "tokenizer" / "tokenizer.json"
    found = json.loads(file.read_text("utf-8"))
    vocabulary = found["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(found), "utf-8")
    second = digests(tmp_path / "b")
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]


def test_a_changed_vae_finds_nothing_of_the_old_one(tmp_path):
    one, two = net(), change(CHANGED["weights"])
    EncodedCache(tmp_path, digest_models(one)).put("a", 1)
    assert EncodedCache(tmp_path, digest_models(two)).get("a") is None
    assert EncodedCache(tmp_path, digest_models(net())).get("a") == 1
    assert Path(tmp_path).is_dir()

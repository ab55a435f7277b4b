"""A folder of adapters in a few slots: indexed once, read beside, put in as they are asked for, and seen when they change."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest
import tiny
import torch
from safetensors.torch import save_file

import fxplug
from fxplug.serving import AdapterStore, Engine, Request
from fxplug.serving import store as stores
from fxplug.serving.adapter_index import INDEX

SIZE, RANK = 6, 2


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    return fxplug.trace(Small().eval(), torch.randn(2, SIZE))


@pytest.fixture
def module(traced):
    return fxplug.apply(traced, fxplug.load_pass("lora", at="**", rank=RANK, slots=4, per_sample=2))


def tensors(seed, rank=RANK, layers=("first", "second"), prefix="unet."):
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for layer in layers:
        for half, shape in (("A", (rank, SIZE)), ("B", (SIZE, rank))):
            made[f"{prefix}{layer}.lora_{half}.weight"] = torch.randn(*shape, generator=draw)
    return made


def write(folder, name, seed=0, **more):
    save_file(tensors(seed, **more), folder / f"{name}.safetensors")


def wait(store, *names, seconds=20.0):
    end = time.monotonic() + seconds
    while (lease := store.lease(names)) is None:
        assert time.monotonic() < end, (names, store)
        time.sleep(0.005)
    return lease


def change(module, names, x=None):
    """What an adapter does: its answer for each sample."""
    x = torch.ones(2, SIZE) if x is None else x
    with module.adapters.using([dict.fromkeys(names, 1.0)] * len(x)):
        return module(x).detach()


def want(traced, module, seed, rank=RANK):
    """The answer of the model with the update of a file."""
    plain = copy.deepcopy(traced)
    for layer in ("first", "second"):
        up, down = (tensors(seed, rank)[f"unet.{layer}.lora_{half}.weight"] for half in "BA")
        plain.get_parameter(f"{layer}.weight").data += up @ down
    return plain(torch.ones(2, SIZE)).detach()


def test_what_is_in_a_folder_and_what_is_refused(traced, module, tmp_path):
    write(tmp_path, "ink", 1)
    (tmp_path / "film").mkdir()
    save_file(tensors(2, prefix="base_model.model."), tmp_path / "film" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["first", "second"]}
    (tmp_path / "film" / "adapter_config.json").write_text(json.dumps(config))
    write(tmp_path, "high", 3, rank=4)
    write(tmp_path, "half", 4, layers=("first", "third"))
    write(tmp_path, "other", 5, layers=("conv_in",))
    write(tmp_path, "both", 6)
    words = tensors(7, prefix="text_encoder.", layers=("q_proj",))
    save_file({**tensors(6), **words}, tmp_path / "both.safetensors")
    write(tmp_path, "twice", 8)
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "adapter_config.json").write_text("{}")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "ink.safetensors").read_bytes()[:-8])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "readme.txt").write_text("none")
    nan = tensors(9)
    nan["unet.first.lora_A.weight"][0, 0] = float("nan")
    save_file(nan, tmp_path / "nan.safetensors")

    with AdapterStore(tmp_path, {"unet": module}) as store:
        infos = {info.name: info for info in store.list()}
        assert sorted(infos) == ["both", "cut", "empty", "film", "half", "high", "ink", "nan", "other", "twice"]
        assert (infos["ink"].kind, infos["ink"].ranks, infos["ink"].coverage) == ("lora", (RANK,), {"unet": 1.0})
        assert infos["both"].coverage == {"unet": 1.0, "text_encoder": 0.0} and not infos["ink"].in_slot
        for name, text in (
            ("inc", "no adapter 'inc' in .*did you mean 'ink'"), ("cut", "cut.safetensors"), ("empty", "empty.safetensors"),
            ("nan", "nan.safetensors.*not finite"), ("half", "1 of 2 layers are not in the graph: 'unet.third"),
            ("other", "fits no layer of unet|does not fit unet: 1 of 1"), ("high", "a rank above rank"),
            ("twice", "both adapters 'twice'"),
        ):  # fmt: skip
            for _ in range(2):
                with pytest.raises(fxplug.SpecError, match=text):
                    wait(store, name)
        with pytest.raises(fxplug.SpecError, match="3 adapters for unet, which has room for 2"):
            store.check(dict.fromkeys(["ink", "film", "both"], 1.0))
        with wait(store, "ink", "film") as lease:
            assert {info.name for info in store.list() if info.in_slot} == {"ink", "film"} == {*lease.names}
            torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 1))
            torch.testing.assert_close(change(module, ["film"]), want(traced, module, 2))
            with pytest.raises(fxplug.SpecError, match="pinned"):
                module.adapters.unload("ink")
        module.adapters.unload("ink")  # by somebody else: it is put in again
        wait(store, "ink").end()
        torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 1))
        for _ in range(2):
            lease.end()
    wrong = {"host_bytes": 0}, {"modules": {}}, {"folder": tmp_path / "no"}
    for given, text in zip(wrong, ("host_bytes must be", "modules must be", "no' cannot be read"), strict=True):
        with pytest.raises(fxplug.FxplugError, match=text):
            AdapterStore(**{"folder": tmp_path, "modules": {"unet": module}, **given})
    with AdapterStore(tmp_path, {"unet": module}, resize=True, partial=True) as store:
        wait(store, "half").end()
        with wait(store, "high"):
            assert (change(module, ["high"]) - want(traced, module, 3, rank=4)).norm() < 0.6 * want(traced, module, 3, 4).norm()


def test_files_that_are_new_changed_or_gone_are_seen(traced, module, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "SCAN", 0.05)
    write(tmp_path, "ink", 1)
    with AdapterStore(tmp_path, {"unet": module}) as store:
        lease = wait(store, "ink")
        write(tmp_path, "new", 2)
        wait(store, "new").end()
        time.sleep(0.01)
        write(tmp_path, "ink", 3)
        end = time.monotonic() + 20
        while (one := store.lease(["ink"])) is not None:  # until it is seen; the old one is in use
            assert time.monotonic() < end
            one.end()
            time.sleep(0.02)
        torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 1))
        lease.end()
        with wait(store, "ink"):
            torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 3))
        kept = (tmp_path / "ink.safetensors").stat()
        (tmp_path / "other").mkdir()
        for seed, how in ((4, os.replace), (5, shutil.copyfile)):  # as copying tools leave it: of one size and time
            write(tmp_path / "other", "ink", seed)
            how(tmp_path / "other" / "ink.safetensors", tmp_path / "ink.safetensors")
            os.utime(tmp_path / "ink.safetensors", ns=(kept.st_atime_ns, kept.st_mtime_ns))
            store.refresh()
            with wait(store, "ink"):
                torch.testing.assert_close(change(module, ["ink"]), want(traced, module, seed))
        (tmp_path / "new.safetensors").unlink()
        while any(info.name == "new" for info in store.list()):
            assert time.monotonic() < end
            time.sleep(0.02)
        for name in ("new", "../new", "", ".x", "a\0b"):
            with pytest.raises(fxplug.SpecError, match="no adapter "):
                store.lease([name])


def test_a_lease_has_what_somebody_else_unloads_between_its_looks(traced, module, tmp_path, monkeypatch):
    write(tmp_path, "ink", 1)
    with AdapterStore(tmp_path, {"unet": module}) as store:
        wait(store, "ink").end()
        look = store._is_in_slots

        def unload_after(name, stamp):
            found = look(name, stamp)
            if found:
                module.adapters.unload(name)
            return found

        monkeypatch.setattr(store, "_is_in_slots", unload_after)
        assert store.lease(["ink"]) is None
        monkeypatch.undo()
        with wait(store, "ink"):
            torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 1))


def test_what_was_wrong_with_a_file_is_told_of_that_file_alone(traced, module, tmp_path):
    write(tmp_path, "ink", 1)
    with AdapterStore(tmp_path, {"unet": module}) as store:
        (tmp_path / "ink.safetensors").unlink()
        assert store.lease(["ink"]) is None
        end = time.monotonic() + 20
        while not store._faults:  # nobody waits to be told
            assert time.monotonic() < end
            time.sleep(0.005)
        write(tmp_path, "ink", 2)
        store.refresh()
        with wait(store, "ink"):
            torch.testing.assert_close(change(module, ["ink"]), want(traced, module, 2))
        assert not store._faults


def test_two_hundred_adapters_in_four_slots_by_many_threads(traced, module, tmp_path):
    for i in range(200):
        write(tmp_path, f"a{i:03}", i)
    bytes_ = sum(t.numel() * 4 for t in tensors(0).values())
    wrong: list[object] = []
    with AdapterStore(tmp_path, {"unet": module}, host_bytes=20 * bytes_) as store:
        expected = {i: want(traced, module, i) for i in range(0, 200, 5)}

        def work(seed):
            draw = random.Random(seed)
            try:
                for _ in range(25):
                    i, j = draw.randrange(0, 200, 5), draw.randrange(200)
                    with wait(store, f"a{i:03}", f"a{j:03}", seconds=60):
                        found = change(module, [f"a{i:03}"])
                        if not torch.allclose(found, expected[i], rtol=1e-4, atol=1e-4):
                            wrong.append((seed, i))
                        assert store.used_bytes <= 40 * bytes_
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert wrong == [] and len(store._in_slots) == 4
        assert not any(held.leases for held in store._in_slots.values())


def test_the_second_start_reads_no_file_and_a_broken_index_is_made_anew(module, tmp_path, monkeypatch):
    for i in range(60):
        write(tmp_path, f"a{i}", i)

    def start():
        begin = time.process_time()
        with AdapterStore(tmp_path, {"unet": module}) as store:
            return time.process_time() - begin, store.list()

    first, infos = start()
    second, again = start()
    assert infos == again and second <= first / 3
    index = tmp_path / INDEX
    good = index.read_text()
    for text in ("", "[]", good[: len(good) // 2], good.replace('"lora"', "3"), good.replace('"unet": 1.0', '"unet": "x"')):
        index.write_text(text)
        assert start()[1] == infos and json.loads(index.read_text()) == json.loads(good)
    os.utime(tmp_path / "a0.safetensors")
    monkeypatch.setattr("fxplug.serving.adapter_index.INDEX", "no/such/place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    (tmp_path / "no").write_text("")
    start()
    assert [*(tmp_path / ".cache").rglob("*.json")]


KILLED = """
import json, os, sys
from pathlib import Path
from fxplug.core.errors import ArtifactError
from fxplug.core.writing import write_text
while True:
    for n in (1, 2000):
        write_text(Path(sys.argv[1]), json.dumps(["x"] * n), ArtifactError)
"""


def test_an_index_is_whole_whenever_its_writer_is_killed(tmp_path):
    index = tmp_path / INDEX
    for delay in (0.0, 0.013, 0.029):
        writer = subprocess.Popen([sys.executable, "-c", KILLED, str(index)])
        while not index.exists():
            time.sleep(0.01)
        time.sleep(delay)
        writer.kill()
        writer.wait()
        assert len(json.loads(index.read_text())) in (1, 2000)
        index.unlink()


@pytest.mark.slow
def test_an_engine_with_a_store(tmp_path):
    pipe = tiny.pipeline("StableDiffusionPipeline")
    for i in range(5):
        made = tiny.lora(tiny.pipeline("StableDiffusionPipeline"), f"store{i}.safetensors", seed=i, unet=["to_q"])
        shutil.copy(made / "pytorch_lora_weights.safetensors", tmp_path / f"s{i}.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    size = {"height": 32, "width": 32, "output_type": "pt", "num_inference_steps": 2}
    slots = fxplug.load_pass("lora", at="**.to_q", rank=4, slots=2, per_sample=1)
    pipe = fxplug.rewrite_pipeline(pipe, passes={"unet": [slots]}, prompt="a cat", height=32, width=32)
    with AdapterStore(tmp_path, {"unet": pipe.unet}) as store:
        engine = Engine(pipe, store=store, buckets=[4])
        requests = [Request(call={"prompt": "a cat", **size}, seed=1, adapters={f"s{i}": 1.0}) for i in range(5)]
        tickets = {id(t.request): t for t in engine.generate(requests)}
        pictures = [tickets[id(request)].result().images for request in requests]
        for i, picture in enumerate(pictures):
            assert all(not torch.equal(picture, other) for other in pictures[:i])
        again = list(engine.generate(reversed(requests)))
        assert all(torch.equal(t.result().images, tickets[id(t.request)].result().images) for t in again)
        wrong = {"s9": 1.0}, {"s0": 1.0, "s1": 1.0}, {"bad": 1}
        for adapters, text in zip(wrong, ("no adapter 's9'", "room for 1", "bad.safetensors"), strict=True):
            with pytest.raises(fxplug.SpecError, match=text):
                engine.submit(Request(call={"prompt": "a"}, adapters=adapters))
        assert not any(held.leases for held in store._in_slots.values())
    with AdapterStore(tmp_path, {"unet": copy.deepcopy(pipe.unet)}) as store:
        with pytest.raises(fxplug.SpecError, match="not one of the engine's models"):
            Engine(pipe, store=store)

"""Strangers' artifacts: names mean the tree, what they ask is bounded, one version of the folder is read."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import fuzz_artifacts
import hostile
import pytest
import torch
from test_artifact import craft, folder, node, pristine, refused, restamp, small  # noqa: F401
from torch import nn

import fxplug
from fxplug import ArtifactError
from fxplug.core.ir import functions
from fxplug.exports.call_signature import evaluate, parse


def test_hostile_artifacts_do_nothing():
    assert fuzz_artifacts.fuzz_artifacts(40, 0, wide=False) == []


def test_the_watch_sees_what_it_is_for(tmp_path):
    seen = []
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        watch = hostile.Watch()
        watch.on = True
        for act in (
            lambda: (tmp_path / "x").write_text("x"), lambda: os.system("true"), lambda: exec("1"),
            lambda: __import__("yaml.x"), lambda: os.remove(tmp_path / "x"), lambda: eval(compile("1", "<string>", "eval")),
        ):  # fmt: skip
            with contextlib.suppress(Exception):
                act()
            seen.append(bool(watch.found))
            watch.found = []
        os.write(write, json.dumps(seen).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert json.loads(os.read(read, 1000)) == [True] * 6


# --- names


@pytest.mark.parametrize(
    "key", ["graph", "code", "graphs", "to_folder", "recompile", "forward", "half", "classes", "in", "2_1", "a-b"]
)
def test_any_name_of_a_child_or_tensor_is_that_child_or_tensor(key, tmp_path):
    """nn.Module takes any name without a dot; the code must reach what the model reached."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for module in (self, nn.Module()):
                module._modules[key] = nn.Linear(4, 4)
                self._modules["inner"] = module if module is not self else nn.Module()
            self.inner._buffers[f"{key}x"] = torch.ones(4)

        def forward(self, x):
            return self.inner._modules[key](self._modules[key](x)) * self.inner._buffers[f"{key}x"]

    x = torch.randn(2, 4)
    model = Named()
    gm = fxplug.trace(model, x)
    assert torch.equal(gm(x), model(x))
    assert torch.equal(fxplug.load(fxplug.save(gm, tmp_path / "out"))(x), model(x))


TAKEN = ["to_folder", "_modules", "_call_impl", "graph", "training"]


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("kind", ["module", "buffer", "path", "attribute", "method"])
def test_no_name_reaches_a_class(folder, name, kind):  # noqa: F811
    """A declared name is reached as declared, or the artifact is refused: no attribute of a class is on the way."""

    def change(d):
        if kind == "module":
            d["modules"] = hostile.renamed(d["modules"], "a", name)
            d["tensors"] = hostile.renamed(d["tensors"], "a", name)
            node(d, "call_module", "a")["target"] = name
        elif kind == "buffer":
            d["modules"][""]["buffers"] = {name: True}
            d["tensors"] = hostile.renamed(d["tensors"], "offset", name)
            node(d, "get_attr")["target"] = name
        elif kind == "path":
            node(d, "get_attr")["target"] = f"a.{name}"
        elif kind == "attribute":
            d["modules"]["a"]["attributes"] = {name: {"function": "torch.relu"}}
        else:
            d["modules"]["a"]["attributes"] = {name: 1}

    craft(folder, change)
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    header, rest = hostile.split(files["model.safetensors"])
    text = json.dumps(hostile.renamed(hostile.renamed(header, "a", name) if kind == "module" else header, "offset", name)
                      if kind in ("module", "buffer") and kind == "buffer" else
                      (hostile.renamed(header, "a", name) if kind == "module" else header)).encode()  # fmt: skip
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + rest)
    restamp(folder)
    try:
        gm = fxplug.load(folder)
    except ArtifactError:
        return
    assert kind in ("module", "buffer", "attribute", "method")
    assert torch.equal(gm(torch.ones(2, 4)), small()(torch.ones(2, 4)))
    assert kind in ("module", "buffer") or name not in dir(nn.Module)


@pytest.mark.parametrize("name", ["self", "inf", "nan", "torch", "device", "NoneType", "print", "pytree", "fx_pytree"])
def test_no_node_has_a_name_that_the_code_uses(folder, name):  # noqa: F811
    craft(folder, lambda d: d["graphs"].update(eval=hostile.renamed(d["graphs"]["eval"], "relu", name)))
    refused(folder, "is not a valid node name")


BLOCKS = [
    "fxplug.training.trainer:Trainer",
    "fxplug.compat.zhijian:Addin",
    "fxplug.core.ir.traced_module:TracedModule",
    "fxplug.blocks:Block.at",
]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_a_list(folder, name):  # noqa: F811
    craft(folder, lambda d: d["modules"].update(a={"kind": "block", "class": name, "arguments": {}}))
    refused(folder, "fxplug has no block")


def test_modes_of_torch_are_left_in_order(folder):  # noqa: F811
    record = {"op": "call_function", "args": []}
    steps = [("e1", "enter_grad", [False]), ("e2", "enter_grad", [True]), ("l1", "exit_grad", [{"node": "e1"}]),
             ("l2", "exit_grad", [{"node": "e2"}])]  # fmt: skip
    nodes = [{**record, "name": n, "target": f"fxplug.ops.{t}", "args": a} for n, t, a in steps]
    craft(folder, lambda d: d["graphs"]["eval"].__setitem__(slice(-1, -1), nodes))
    refused(folder, "not the last one changed")


def test_functions_that_trust_their_callers_are_not_listed():
    names = *functions.list_functions(), *functions.list_methods()
    assert not [n for n in names if "fbgemm" in n or "quantized_" in n or n == "index"]


V, G, ROWS, SIZES = torch.ones(3, 4), torch.ones(3, 1), torch.ones(4, 2), torch.tensor([2, 1, 1])
LAYER = ([torch.ones(1, 2, 2)] * 2, [torch.ones(8, 2)] * 2, False, 1, 0.0, False, False)
SOUND = {
    "torch._weight_norm": (V, G, 0),
    "torch._pad_packed_sequence": (ROWS, SIZES, False, 0.0, 3),
    "torch.nn.utils.rnn.PackedSequence": (ROWS, SIZES),
    "torch.lstm": (ROWS, SIZES, *LAYER),
}
BATCHES = [[], [2, 1, 2, 1, 2, 1], [5], [-1, 5], [4, 0], [[2], [2]], 4, [0, 4], [2**62, 2**62, 2**62, 2**62, 4]]
NORMS = [(G[:1], 0), (G, 1), (V, 0), (G, -1), (G, 2), (G, 9), (G.to("meta"), 0)]
ODD = [
    *[("torch._weight_norm", (V, *args)) for args in NORMS],
    ("torch._weight_norm", (torch.tensor(1.0), torch.tensor(1.0), -1)),
    *[
        (name, (ROWS, torch.tensor(sizes, dtype=torch.int64), *args[2:]))
        for sizes in BATCHES
        for name, args in SOUND.items()
        if args[0] is ROWS
    ],
]


def test_functions_that_trust_their_callers_are_called_with_what_they_take():
    """Without the checks most of these read or write memory that is not theirs."""
    for name, args in SOUND.items():
        functions.list_functions()[name](*args)
    for name, args in ODD:
        with pytest.raises(fxplug.GuardError):
            functions.list_functions()[name](*args)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm_is_what_it_was(dim, tmp_path):
    with pytest.warns((FutureWarning, DeprecationWarning)):
        model = nn.utils.weight_norm(nn.Linear(4, 4), dim=dim).eval()
    x = torch.randn(2, 4)
    gm = fxplug.trace(model, x)
    loaded = fxplug.load(fxplug.save(gm, tmp_path / "out"))
    assert '"torch._weight_norm"' in (tmp_path / "out" / "graph.json").read_text()
    assert torch.equal(gm(x), model(x)) and torch.equal(loaded(x), model(x))
    again = fxplug.save(loaded, tmp_path / "again")
    assert all((again / f.name).read_bytes() == f.read_bytes() for f in (tmp_path / "out").iterdir())


# --- budgets


def deep(d):
    path = ""
    for _ in range(3000):
        path = f"{path}.a".lstrip(".")
        d["modules"][f"{path}"] = {"kind": "container", "classes": ["M"], "attributes": {}, "parameters": {}, "buffers": {}}


def shared(d):
    """Each of 40 modules holds the next one twice: 2^40 paths."""
    held = {"kind": "container", "classes": ["M"], "attributes": {}, "parameters": {}, "buffers": {}}
    last = None
    for i in range(40):
        path = f"m{i}"
        d["modules"][path] = held
        if last is not None:
            d["modules"].update({f"{path}.x": {"kind": "same", "as": last}, f"{path}.y": {"kind": "same", "as": last}})
        last = path


def argument(cls, **arguments):
    return lambda d: d["modules"].update(
        {"a": {"kind": "block" if ":" in cls else "module", "class": cls, "arguments": arguments}}
    )


BUDGETS = {
    "layers": argument("LSTM", input_size=2, hidden_size=2, num_layers=10**9),
    "butterflies": argument("fxplug.blocks:Boft", shape=[4, 10**9], block_size=7),
    "prime": argument("fxplug.blocks:Oft", shape=[4, 10**12 + 39], block_size=7),
    "huge prime": argument("fxplug.blocks:Oft", shape=[4, 10**40 + 121], block_size=7),
    "range": lambda d: node(d, target="torch.relu").update(args=[{"range": [0, 10**8, 1]}]),
    "range argument": argument("Conv2d", in_channels=1, out_channels=1, kernel_size={"range": [0, 10**8, 1]}),
    "deep": deep,
    "shared": shared,
    "cycle": lambda d: d["modules"].update({"a.z": {"kind": "same", "as": "a"}}),
    "nodes": lambda d: d["graphs"]["eval"].__setitem__(
        slice(1, 1), [{"name": f"z{i}", "op": "get_attr", "target": "offset"} for i in range(100_000)]
    ),
    "long text": lambda d: d["extras"].update(text="x" * 10**6),
    "long name": lambda d: node(d, target="torch.relu").update(target="x" * 10**6),
    "digits": lambda d: node(d, target="torch.relu").update(args=[10**4000 * 10**4000]),
    "tensor": lambda d: d["tensors"]["offset"].update(shape=[2**62]),
}


def most() -> int:
    """Bytes of memory that the process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.fixture
def digits():
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("name", BUDGETS)
def test_what_a_file_asks_is_bounded(folder, name, digits):  # noqa: F811
    craft(folder, BUDGETS[name])
    size = (folder / "graph.json").stat().st_size
    before, began = most(), time.process_time()
    with pytest.raises(ArtifactError) as error:
        fxplug.load(folder)
    spent = time.process_time() - began
    assert most() - before < 100_000_000 + 20 * size and len(str(error.value)) < 600
    assert spent < 2, spent


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": [' + b"{}," * 20_000_000 + b"{}]}",
        b"[" * 10**6,
        b'"' + b'\\"' * 10**6,
        b"9" * 10**6,
        b"{" * 10**6,
        b'"' + b"x" * 10**7,
    ],
)
def test_json_is_measured_before_it_is_read(folder, text):  # noqa: F811
    (folder / "graph.json").write_bytes(text)
    restamp(folder)
    before = most()
    refused(folder, r"graph.json (has|is)")
    assert most() - before < 100_000_000 + 3 * len(text)


@pytest.mark.parametrize(
    "text", ["9**9**9", "(2**60000)**60000", "-" * 3000 + "1", "L['x'].size()[0]**10**10", "+".join("1" * 900)]
)
def test_conditions_of_packages_are_bounded(text):
    with pytest.raises((fxplug.FxplugError, ArithmeticError)) as error:
        evaluate(parse(text), {"x": torch.ones(3)})
    assert len(str(error.value)) < 300


# --- the folder


def test_several_saves_into_one_folder_and_loads_meanwhile(tmp_path):
    modules = [small(0), small(1)]
    wanted = [m.b.weight for m in modules]
    errors, done = [], threading.Event()

    def save(module):
        try:
            for _ in range(5):
                fxplug.save(module, tmp_path / "out")
        except Exception as error:
            errors.append(error)

    def load():
        while not done.is_set():
            try:
                found = fxplug.load(tmp_path / "out")
                assert any(
                    torch.equal(found.b.weight, w) and torch.equal(found.a.weight, m.a.weight)
                    for w, m in zip(wanted, modules, strict=True)
                )
            except Exception as error:
                errors.append(error)

    fxplug.save(modules[0], tmp_path / "out")
    threads = [threading.Thread(target=save, args=(m,)) for m in modules]
    reader = threading.Thread(target=load)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert errors == [] and [p.name for p in tmp_path.iterdir()] == ["out"]


def forked(act):
    """The process that does this."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        act()
        code = 0
    except SystemExit as error:
        code = int(error.code)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        os._exit(code)


def test_processes_that_save_into_one_folder_and_load_meanwhile(tmp_path):
    modules, out = [small(0), small(1)], tmp_path / "out"
    fxplug.save(modules[0], out)

    def save(module):
        for _ in range(5):
            fxplug.save(module, out)

    savers = [forked(lambda module=module: save(module)) for module in modules]
    codes = []
    while len(codes) < len(savers):
        found = fxplug.load(out).state_dict()
        assert any(all(torch.equal(found[k], v) for k, v in m.state_dict().items()) for m in modules)
        codes += [status for pid, status in [os.waitpid(-1, os.WNOHANG)] if pid in savers]
    assert codes == [0, 0] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_save_that_is_ended_leaves_nothing(number, tmp_path, monkeypatch):
    fxplug.save(small(0), tmp_path / "out")
    read, write = os.pipe()

    def wait(*args):
        os.write(write, b"x")
        time.sleep(60)

    monkeypatch.setattr("fxplug.core.artifacts.artifact.save_file", wait)
    saver = forked(lambda: fxplug.save(small(1), tmp_path / "out"))
    os.read(read, 1)
    assert len(os.listdir(tmp_path)) == 2
    os.kill(saver, number)
    assert os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]) == 128 + number
    assert os.listdir(tmp_path) == ["out"]
    assert torch.equal(fxplug.load(tmp_path / "out").a.weight, small(0).a.weight)


@pytest.mark.parametrize("name", ["manifest.json", "graph.json", "model.safetensors", "graph.txt"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device"])
def test_files_are_plain_files_of_the_folder(folder, name, kind):  # noqa: F811
    path = folder / name
    path.rename(folder.parent / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder.parent / "elsewhere" if kind == "link" else "/dev/zero")
    refused(folder, rf"{name} cannot be read: it is (a link|a pipe|a folder)")


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    fxplug.save(small(), tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="cannot be written: (not a directory|file exists)"):
        fxplug.save(small(), tmp_path / "file" / "out")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxplug.core.artifacts.artifact.save_file", full)
    with pytest.raises(ArtifactError, match="cannot be written: the disk is full; nothing in it was changed"):
        fxplug.save(small(1), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out"]
    assert torch.equal(fxplug.load(tmp_path / "out").a.weight, small().a.weight)


def test_what_version_0_wrote_still_loads():
    """An artifact of the first format, with LoRA and an LSTM, as it was written then."""
    gm = fxplug.load(Path(__file__).parents[1] / "data" / "old_artifact")
    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    wanted = torch.tensor(json.loads((Path(__file__).parents[1] / "data" / "old_artifact" / "result.json").read_text()))
    torch.testing.assert_close(gm(x), wanted)

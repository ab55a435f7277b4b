"""Saving and loading: nothing lost on the way, nothing run that an artifact brings, nothing half written."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
import torch
import torch.nn.functional as F
import zoo
from exact import compare, difference
from sweeps import sweep
from torch import nn

import fxplug
from fxplug import ArtifactError
from fxplug.core import writing
from fxplug.core.artifacts.document import ModuleRecord
from fxplug.core.artifacts.modules import ModuleReader, write_modules
from fxplug.core.artifacts.modules import difference as rebuilt_difference
from fxplug.core.artifacts.value_json import Settings, decode, encode
from fxplug.core.ir import functions, ops
from fxplug.core.ir.containers import Container
from fxplug.core.ir.traced_module import TracedModule
from fxplug.core.spec.addresses import Port

Pair = namedtuple("Pair", ["left", "right"])


class Mixed(nn.Module):
    """Leaves that are hard to rebuild, tied weights, constants, both modes, odd strides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.rnn = nn.RNN(16, 8, nonlinearity="relu", bias=False, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True, add_bias_kv=True, dropout=0.1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=True)
        self.norm = nn.BatchNorm1d(8, eps=1e-3)
        self.conv = nn.Conv1d(8, 8, 3, padding="same", padding_mode="reflect", groups=2)
        self.act = nn.PReLU(8, init=0.1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(4, 8).T, persistent=False)
        self.register_buffer("turn", torch.randn(8, dtype=torch.complex64))
        self.register_parameter("nothing", None)
        self.depth = 3

    def forward(self, tokens: torch.Tensor, scale: float = 0.5, *, flip: bool = False) -> Pair:
        x = self.embed(tokens)
        x = self.rnn(self.lstm(x)[0])[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.layer(x)
        x = self.act(self.conv(self.norm(x.transpose(1, 2))))
        x = x * self.table.mean(1)[:, None] * scale + torch.tensor([float("inf"), 1.0]).min()
        if self.training:
            x = x * 2
        x = torch.view_as_real(x.transpose(1, 2) * self.turn).sum(-1)
        return Pair(self.head(x), x.to(torch.float64, memory_format=torch.contiguous_format)[..., 1:])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor, note: str = "plain") -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) + self.offset


def small(seed: int = 0) -> TracedModule:
    torch.manual_seed(seed)
    return fxplug.trace(Small().eval(), torch.randn(2, 4))


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def same_states(a: nn.Module, b: nn.Module) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    ours, theirs = dict(b.named_parameters()), dict(a.named_parameters())
    assert list(ours) == list(theirs)
    assert [p.requires_grad for p in ours.values()] == [p.requires_grad for p in theirs.values()]
    for name, tensor in [*a.named_parameters(), *a.named_buffers()]:
        other = b.get_parameter(name) if isinstance(tensor, nn.Parameter) else b.get_buffer(name)
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype and tensor.stride() == other.stride(), name


# --- round trips

CASES = ("UNet2DConditionModel-sd15", "AutoencoderTiny", "timm/vision_transformer", "timm/resnet", "timm/tf_efficientnet_lite0")


def swin() -> tuple[nn.Module, Callable[[int], object]]:
    import timm

    sizes = {"depths": (1, 1, 2, 1), "embed_dim": 16, "num_heads": (1, 2, 4, 8)}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, **sizes)
    return model.eval(), lambda batch: ((torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(0)),), {})


@sweep("name", [*CASES, "swin"], "timm/vision_transformer", "AutoencoderTiny")
def test_zoo_round_trip(name: str, tmp_path: Path) -> None:
    if name == "swin":
        model, inputs = swin()
    else:
        case = next(c for c in zoo.cases(name) if c.fast and c.name.endswith(name))
        model, inputs = case.build(), case.inputs
    args, kwargs = inputs(1)
    gm = fxplug.trace(model, args, kwargs)
    fxplug.save(gm, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved", allow=["diffusers"])
    fxplug.save(again, tmp_path / "again")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "again")
    same_states(gm, again)
    for mode in (False, True):
        gm.train(mode), again.train(mode)
        assert compare(gm, again, lambda: inputs(2)) is None


def test_hard_modules_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    tokens = torch.randint(0, 11, (2, 6))
    gm = fxplug.trace(model, tokens)
    gm.head.requires_grad_(False)
    fxplug.save(gm, tmp_path / "out")
    again = fxplug.load(tmp_path / "out")
    same_states(gm, again)
    assert again.head.weight is again.embed.weight
    assert "table" not in again.state_dict() and again.nothing is None and again.depth == 3
    assert again.lstm._flat_weights[0] is again.lstm.weight_ih_l0
    assert repr(again.layer) == repr(gm.layer) and not again.training
    for mode in (False, True):
        results = []
        for module in (gm, again):
            module.train(mode)
            torch.manual_seed(3)
            results.append(module(tokens))
        assert results[1]._fields == ("left", "right")
        assert difference(tuple(results[0]), tuple(results[1])) is None
    with pytest.raises(fxplug.GuardError, match="'scale' was 0.5"):
        again(tokens, 0.25)
    allowed = fxplug.load(tmp_path / "out", allow=[__name__])
    assert type(allowed(tokens)) is Pair


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    gm = small()
    fxplug.save(gm, tmp_path / "a", config={"model": "small", "passes": []})
    first = files_of(tmp_path / "a")
    fxplug.save(gm, tmp_path / "a", config={"model": "small", "passes": []})
    fxplug.save(fxplug.load(tmp_path / "a"), tmp_path / "b", config={"model": "small", "passes": []})
    assert files_of(tmp_path / "a") == first == files_of(tmp_path / "b")
    assert set(first) == {"model.safetensors", "graph.json", "graph.txt", "config.yaml", "manifest.json"}
    assert "def forward(self, x" in first["graph.txt"].decode()


@pytest.mark.slow
def test_loads_where_the_library_is_not(tmp_path: Path) -> None:
    case = next(c for c in zoo.cases("UNet2DConditionModel-sd15"))
    model = case.build()
    args, kwargs = case.inputs(batch=1)
    gm = fxplug.trace(model, args, kwargs)
    fxplug.save(gm, tmp_path / "out")
    wanted = gm(*args, **kwargs).sample
    torch.save((args, kwargs, wanted), tmp_path / "io")
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("diffusers", "timm"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch, fxplug
gm = fxplug.load(sys.argv[1])
args, kwargs, wanted = torch.load(sys.argv[2])
out = gm(*args, **kwargs)
assert torch.equal(out.sample, wanted) and torch.equal(out[0], wanted) and torch.equal(out["sample"], wanted)
assert gm.config.in_channels == gm.config["in_channels"] == 4 and gm.config.block_out_channels == (8, 16)
assert gm.dtype == torch.float32 and gm.device.type == "cpu"
assert not {"diffusers", "timm"} & set(sys.modules)
try:
    gm.config["in_channels"] = 3
except TypeError:
    print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "io")], capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr


def test_meta_survives(tmp_path: Path) -> None:
    gm = small()
    said = {"about": "", "train": True, "neutral": False, "sites": [], "inputs": [], "networks": []}
    gm.meta["passes"] = [{"name": "extra", "params": {"rank": 4}, "lr": 1e-4, **said}]
    gm._modules["extra"] = Container(("Added",))
    gm.extra._parameters["weight"] = nn.Parameter(torch.randn(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_module")
    node.meta["pass"] = {"name": "extra", "rule": 0, "site": "a"}
    fxplug.save(gm, tmp_path / "out")
    assert (tmp_path / "out" / "extra.safetensors").is_file()
    again = fxplug.load(tmp_path / "out")
    assert again.meta["passes"] == gm.meta["passes"]
    same_states(gm, again)
    for old, new in zip(gm.graph.nodes, again.graph.nodes, strict=True):
        known = ("port", "index", "shape", "dtype", "effect", "reads_dtype", "pass", "behind")
        assert {k: old.meta[k] for k in known if k in old.meta} == {k: new.meta[k] for k in known if k in new.meta}
        assert dict(old.meta["nn_module_stack"]) == dict(new.meta["nn_module_stack"])
        assert (old.name, old.op, old.target, old.args, old.kwargs) == (
            new.name,
            new.op,
            new.target,
            _renamed(new.args, gm),
            _renamed(new.kwargs, gm),
        )
    assert isinstance(next(n.meta["port"] for n in again.graph.nodes if "port" in n.meta), Port)


def _renamed(value: object, gm: TracedModule) -> object:
    nodes = {n.name: n for n in gm.graph.nodes}
    return torch.fx.node.map_arg(value, lambda n: nodes[n.name])


def test_apply_works_on_a_loaded_module(tmp_path: Path) -> None:
    gm = small()
    x = torch.randn(3, 4)
    p = fxplug.load_pass("lora", rank=2)
    fxplug.save(gm, tmp_path / "base")
    again = fxplug.load(tmp_path / "base")
    new = fxplug.apply(again, p)
    assert new.code == fxplug.apply(gm, p).code
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.1)
    fxplug.save(new, tmp_path / "new")
    back = fxplug.load(tmp_path / "new")
    assert torch.equal(back(x), new(x)) and back.meta["passes"] == new.meta["passes"]
    assert (tmp_path / "new" / "lora.safetensors").is_file()
    with pytest.raises(fxplug.ClashError):
        fxplug.apply(back, p)
    assert fxplug.apply(back, fxplug.load_pass("lora", rank=2, name="second")) is not None


def test_meta_weights_keep_their_shapes(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Small().eval()
    gm = fxplug.trace(model, torch.randn(2, 4, device="meta"))
    fxplug.save(gm, tmp_path / "out")
    again = fxplug.load(tmp_path / "out")
    assert all(p.is_meta for p in again.parameters()) and again.a.weight.shape == (6, 4)
    assert again.code == gm.code


def test_keys_that_are_no_identifiers(tmp_path: Path) -> None:
    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.ModuleDict({"2-1": nn.Linear(4, 4), "0": nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by["2-1"](x) + self.by["0"].weight

    x = torch.randn(4, 4)
    gm = fxplug.trace(Keys(), x)
    fxplug.save(gm, tmp_path / "out")
    assert torch.equal(fxplug.load(tmp_path / "out")(x), gm(x))


def test_modes_and_devices(tmp_path: Path) -> None:
    gm = small().train()
    gm.b.eval()
    fxplug.save(gm, tmp_path / "out")
    again = fxplug.load(tmp_path / "out", device="meta")
    assert again.training and again.a.training and not again.b.training
    assert again.a.weight.is_meta


def test_values_round_trip() -> None:
    values = [
        None,
        True,
        1,
        2.5,
        "a",
        float("inf"),
        -float("inf"),
        (1, (2, [3])),
        {"a": (1,), 2: None},
        slice(1, None, 2),
        range(1, 9, 2),
        torch.float16,
        torch.channels_last,
        torch.strided,
        torch.device("cuda:1"),
        1 + 2j,
        ...,
        b"\x00\xff",
        torch.Size([1, 2]),
        int,
        Settings(a=1),
    ]
    for value in values:
        again = decode(json.loads(json.dumps(encode(value))))
        assert again == value and type(again) is type(value), value
    assert decode(encode(float("nan"))) != decode(encode(float("nan")))
    settings = copy.deepcopy(Settings(a=1))
    assert settings.a == 1
    for change in (lambda: settings.update(b=2), lambda: settings.__setitem__("a", 2), lambda: setattr(settings, "a", 2)):
        with pytest.raises(TypeError):
            change()


class Unlisted(nn.Module):
    """Functions that `torch.overrides` does not list, and writes by functions in place of methods."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(torch.asarray(x)) + F.hardsigmoid(x) * torch.fft.fftfreq(x.shape[-1])
        y = F.leaky_relu_(F.relu_(y) - 1) + torch.clamp_(x * 2, 0, 1)
        return torch.nan_to_num_(y / torch.fill(x, 2.0)) @ torch.vander(torch.as_strided(x * 1, (4,), (1,)))


def test_functions_that_torch_does_not_list(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    gm = fxplug.trace(Unlisted(), x)
    fxplug.save(gm, tmp_path)
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        assert difference(Unlisted()(x), fxplug.load(tmp_path)(x)) is None


def test_every_function_that_models_call_may_be_in_an_artifact() -> None:
    known = set(functions.list_functions().values())
    # these call others, and are recorded as those
    composed = {"sigmoid", "tanh", "upsample", "upsample_bilinear", "upsample_nearest"}
    no_functions = re.compile("Optional|assert_|boolean_dispatch|handle_torch|has_torch|(scaled_)?(grouped_|add)?mm")
    for space in (F, torch.linalg, torch.fft, torch.special):
        for name, value in vars(space).items():
            if callable(value) and not name.startswith("_") and not isinstance(value, type):
                assert value in known or name in composed or no_functions.match(name), name


def test_every_torch_module_is_rebuilt() -> None:
    kinds: list[nn.Module] = [
        nn.Conv2d(4, 8, 3, bias=False, groups=2),
        nn.ConvTranspose2d(4, 4, 3, output_padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((4, 4), bias=False),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Dropout(0.3, inplace=True),
        nn.GELU("tanh"),
        nn.Softmax(-1),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=False),
        nn.AdaptiveAvgPool2d((1, None)),
        nn.Identity(4, a=1),
        nn.Embedding(5, 3, padding_idx=1),
        nn.Bilinear(2, 3, 4),
        nn.GRU(3, 4, bias=False),
        nn.LSTM(3, 4, proj_size=2),
        nn.PReLU(3),
        nn.MultiheadAttention(4, 2),
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_zero_attn=True),
        nn.TransformerDecoderLayer(4, 2),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False),
        nn.InstanceNorm2d(3, affine=True),
        nn.RMSNorm(4),
        nn.Unflatten(1, (2, 2)),
        nn.PixelShuffle(2),
        nn.LeakyReLU(0.3),
        nn.CrossEntropyLoss(torch.ones(3)),
        nn.ZeroPad2d(1),
        nn.Sequential(nn.Linear(1, 2), nn.ReLU()),
        nn.ParameterList([torch.ones(2)]),
        nn.LSTMCell(2, 3),
    ]
    root = nn.Module()
    for index, module in enumerate(kinds):
        root.add_module(str(index), module)
    root.shared = kinds[0]
    records = json.loads(json.dumps(write_modules(root)))
    again = ModuleReader([]).read({path: ModuleRecord(**record) for path, record in records.items()})[""]
    assert again.shared is again._modules["0"]
    for index, module in enumerate(kinds):
        other = again._modules[str(index)]
        problem = rebuilt_difference(module, other)
        assert problem is None or "its tensors" in problem, (module, problem)
        assert list(module.state_dict()) == list(other.state_dict())
        assert repr(module) == repr(other) or isinstance(module, nn.ParameterList)  # that one prints its values


# --- classes that are not torch's


class Gate(nn.Module):
    is_block = True

    def __init__(self, width: int, start: float = 0.5) -> None:
        super().__init__()
        self.width, self.start = width, start
        self.weight = nn.Parameter(torch.full((width,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Forgetful(nn.Module):
    def __init__(self, kind: object) -> None:
        super().__init__()
        self.thing = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Host(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_blocks_and_leaves_need_permission(tmp_path: Path) -> None:
    gm = fxplug.trace(Host(Gate(4)).eval(), torch.randn(2, 4))
    fxplug.save(gm, tmp_path / "out")
    with pytest.raises(ArtifactError, match=rf"the class Gate of {__name__}, which is not allowed: load\(folder, allow="):
        fxplug.load(tmp_path / "out")
    again = fxplug.load(tmp_path / "out", allow=[__name__])
    assert isinstance(again.inner, Gate) and again.inner.width == 4
    with pytest.raises(ArtifactError, match="not allowed"):
        fxplug.load(tmp_path / "out", allow=[__name__[:-1]])


def test_a_leaf_that_cannot_be_rebuilt(tmp_path: Path) -> None:
    gm = fxplug.trace(Host(Forgetful(object())).eval(), torch.randn(2, 4), leaf=["inner"])
    with pytest.raises(ArtifactError, match=r"'inner' \(Forgetful\) cannot be rebuilt .*'kind'.* Trace without that leaf"):
        fxplug.save(gm, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- the folder


def test_other_files_stay_and_stale_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    gm = small()
    said = {"params": {}, "train": True, "neutral": True, "sites": [], "inputs": [], "networks": []}
    gm.meta["passes"] = [{"name": "old", **said}]
    fxplug.save(gm, folder, config={"a": 1})
    (folder / "notes.md").write_text("mine")
    (folder / "logs").mkdir()
    (folder / "logs" / "one.csv").write_text("1")
    fxplug.save(small(1), folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "graph.json",
        "graph.txt",
        "logs",
        "manifest.json",
        "model.safetensors",
        "notes.md",
    ]
    assert (folder / "logs" / "one.csv").read_text() == "1"
    fxplug.load(folder)
    with pytest.raises(ArtifactError, match="exists"):
        fxplug.save(gm, folder, overwrite=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ArtifactError, match="has files and is not an artifact"):
        fxplug.save(gm, tmp_path / "home")


def test_without_exchange_the_old_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxplug.core.writing._exchange", lambda a, b: False)
    folder = tmp_path / "out"
    fxplug.save(small(), folder)
    fxplug.save(small(1), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    folder.rename(tmp_path / ".out.old")  # killed between the two renames
    fxplug.load(folder)
    fxplug.save(small(2), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def killed(save: Callable[[], object], seconds: float) -> None:
    """Save again and again in a process that is killed at some time."""
    saver = os.fork()
    if not saver:
        while True:
            save()
    time.sleep(seconds)
    os.kill(saver, signal.SIGKILL)
    os.waitpid(saver, 0)


def time_of(save: Callable[[], object]) -> float:
    save()
    began = time.monotonic()
    save()
    return time.monotonic() - began


def kills(folder: Path) -> None:
    modules = [small(0), small(1)]
    spent = time_of(lambda: fxplug.save(modules[0], folder))
    rng = random.Random(0)
    for exchange in [True] * 10 + [False] * 10:
        if not exchange:
            writing._exchange = lambda a, b: False
        fxplug.save(modules[0], folder)
        killed(lambda: [fxplug.save(module, folder) for module in reversed(modules)], rng.random() * 4 * spent)
        left = sorted(p.name for p in folder.parent.iterdir())
        again = fxplug.load(folder)
        print([torch.equal(again.a.weight, m.a.weight) for m in modules].index(True), *left)
    fxplug.save(modules[0], folder)
    print(*os.listdir(folder.parent), flush=True)


def alone(function: Callable[[Path], None], tmp_path: Path) -> list[str]:
    """What a function prints in a process of its own, which may fork: its folder has nothing beside it."""
    for name in ("printed", "saved"):
        (tmp_path / name).mkdir()
    done = processes.ended(function, tmp_path / "saved" / "out", folder=tmp_path / "printed")
    assert done.codes == [0], done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_kill_leaves_a_whole_artifact(tmp_path: Path) -> None:
    *found, last = alone(kills, tmp_path)
    assert len(found) == 20 and last == "out"
    assert {line[0] for line in found} == {"0", "1"} and any("writing" in line for line in found), found


# --- hostile and damaged artifacts


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "out"
    fxplug.save(small(), folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    new = tmp_path / "out"
    new.mkdir()
    for name, data in files_of(pristine).items():
        (new / name).write_bytes(data)
    return new


def restamp(folder: Path, **changes: object) -> None:
    """Make the manifest agree with the files again, as an attacker would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in list(manifest["files"]):
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    manifest.update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def craft(folder: Path, change: object) -> None:
    document = json.loads((folder / "graph.json").read_text())
    change(document)  # type: ignore[operator]
    (folder / "graph.json").write_text(json.dumps(document))
    restamp(folder)


def refused(folder: Path, match: str, **options: object) -> None:
    with pytest.raises(ArtifactError, match=match):
        fxplug.load(folder, **options)  # type: ignore[arg-type]


def test_damaged_files(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    refused(folder, "model.safetensors has .* truncated")
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(folder, "SHA-256 differs")
    weights.write_bytes((10 << 30).to_bytes(8, "little") + data[8:])
    restamp(folder)
    refused(folder, "claims a header of 10737418240 bytes")
    weights.unlink()
    refused(folder, "model.safetensors is missing")
    (folder / "manifest.json").write_text("{")
    refused(folder, "manifest.json is not JSON")
    (folder / "manifest.json").unlink()
    refused(folder, "is not an artifact: it has no manifest.json")
    refused(folder / "nowhere", "there is no folder")


def test_newer_format(folder: Path) -> None:
    restamp(folder, format=2, fxplug="9.9")
    refused(folder, "format 2, written by fxplug 9.9; this version reads up to 1: update")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "a\\b", "."])
def test_names_that_leave_the_folder(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "", "size": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(folder, "is outside the folder")


def test_code_has_no_place(folder: Path) -> None:
    (folder / "hook.py").write_text("raise SystemExit")
    refused(folder, "hook.py is in the folder of the artifact")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["hook.py"] = {"sha256": "", "size": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(folder, "a kind of file that an artifact does not have")
    (folder / "hook.py").unlink()
    del manifest["files"]["hook.py"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    craft(folder, lambda d: d.update(code="import os"))
    refused(folder, "unknown key 'code'")


def test_json_that_is_none(folder: Path) -> None:
    text = (folder / "graph.json").read_text()
    (folder / "graph.json").write_text(text.replace('"format": 1', '"format": NaN'))
    restamp(folder)
    refused(folder, "NaN, which is not JSON")
    refused(folder, "the limit is 100", limits=fxplug.Limits(json=100))
    (folder / "graph.json").write_text(text.replace('"format": 1', '"format": 1, "format": 1'))
    restamp(folder)
    refused(folder, "twice in one object")


def node(document: dict, op: str = "call_function", target: str | None = None) -> dict:
    (nodes,) = document["graphs"].values()
    return next(n for n in nodes if n["op"] == op and target in (None, n["target"]))


TARGETS = [
    "torch.load",
    "torch.hub.load",
    "torch.ops.load_library",
    "builtins.eval",
    "os.system",
    "torch.rleu",
    "torch.save",
    "operator.methodcaller",
    "operator.attrgetter",
    "builtins.getattr",
    "torch.from_file",
    "fxplug.ops.Record",
    7,
    None,
    [],
    "torch.utils.cpp_extension.load",
    "torch._C._nn.linear",
]


@pytest.mark.parametrize("target", TARGETS)
def test_unknown_functions(folder: Path, target: object) -> None:
    craft(folder, lambda d: node(d, target="torch.relu").update(target=target))
    refused(folder, r"is not one that a graph may call" + (r" \(did you mean 'torch.relu'" if target == "torch.rleu" else ""))


@pytest.mark.parametrize(
    "method", ["__class__", "__reduce__", "numpy", "register_hook", "data_ptr", "backward", "x; y", "apply_", 3]
)
def test_unknown_methods(folder: Path, method: object) -> None:
    craft(folder, lambda d: node(d, target="torch.relu").update(op="call_method", target=method))
    refused(folder, "is not a method that a graph may call")


BAD_NAMES = ["x\nimport os", "a b", "", "import", "a.b", "ü", "1a", 'x"', "relu(", None, 5]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(folder: Path, name: object) -> None:
    craft(folder, lambda d: node(d, target="torch.relu").update(name=name))
    refused(folder, "is not a valid node name")


CHANGES = {
    "placeholder name": (lambda d: node(d, "placeholder").update(target="x=__import__('os')"), "is not a valid argument"),
    "placeholder stars": (lambda d: node(d, "placeholder").update(target="***x"), "is not a valid argument"),
    "placeholder self": (lambda d: node(d, "placeholder").update(target="self"), "cannot be the name of an argument"),
    "placeholder default": (lambda d: node(d, "placeholder", "note").update(args=[{"node": "x"}]), "only a plain value"),
    "placeholder arguments": (lambda d: node(d, "placeholder").update(args=[1, 2]), "arguments that a placeholder cannot have"),
    "attribute dunder": (lambda d: node(d, "get_attr").update(target="offset.__class__"), "a name that Python reserves"),
    "attribute code": (lambda d: node(d, "get_attr").update(target='offset") or ("'), "must be letters"),
    "attribute keyword": (lambda d: node(d, "get_attr").update(target="offset.import"), "not a tensor of the artifact"),
    "attribute unknown": (lambda d: node(d, "get_attr").update(target="forward"), "not a tensor of the artifact"),
    "module dunder": (lambda d: node(d, "call_module").update(target="a.__init__"), "a name that Python reserves"),
    "module unknown": (lambda d: node(d, "call_module").update(target="train"), "not a module of the artifact"),
    "module root": (lambda d: node(d, "call_module").update(target=""), "is not a valid module path"),
    "later node": (lambda d: node(d, target="torch.relu").update(args=[{"node": "output"}]), "not defined before it"),
    "no node": (lambda d: node(d, target="torch.relu").update(args=[{"node": "zzz"}]), "not defined before it"),
    "itself": (lambda d: node(d, target="torch.relu").update(args=[{"node": "relu"}]), "not defined before it"),
    "duplicate": (lambda d: d["graphs"]["eval"].insert(1, d["graphs"]["eval"][0]), "two nodes are named 'x'"),
    "keyword argument": (lambda d: node(d, target="torch.relu").update(kwargs={"a=1)\nimport os#": 1}), "is not a valid "
                                                                                                        "argument name"),
    "address": (
        lambda d: node(d, target="torch.relu").update(op="call_method", target="new", kwargs={"cdata": 8}),
        "'new' is not a method that a graph may call",
    ),
    "unknown op": (lambda d: node(d).update(op="exec"), "must be one of placeholder, .*, not 'exec'"),
    "unknown tag": (lambda d: node(d, target="torch.relu").update(args=[{"pickle": "gASV"}]), "no type of value is called "
                                                                                              "'pickle'"),
    "function as argument": (
        lambda d: node(d, target="torch.relu").update(args=[{"function": "torch.relu"}]),
        "no type of value",
    ),
    "dtype": (lambda d: node(d, target="torch.relu").update(args=[{"dtype": "load"}]), "'load' is not a valid dtype"),
    "two tags": (lambda d: node(d, target="torch.relu").update(args=[{"tuple": [], "list": []}]), "not an encoded value"),
    "entry in node": (lambda d: node(d).update(code="1"), "unknown key 'code'"),
    "entry in meta": (lambda d: node(d)["meta"].update(stack_trace="x"), "unknown key 'stack_trace'"),
    "output first": (lambda d: d["graphs"]["eval"].reverse(), "ArtifactError|not defined|output"),
    "no output": (lambda d: d["graphs"]["eval"].pop(), "end with one output"),
    "stack": (lambda d: node(d)["meta"].update(stack=10**6), "cannot be used: IndexError"),
    "shape": (lambda d: node(d)["meta"].update(shape=["x"]), "whole number"),
    "port": (
        lambda d: next(n for n in d["graphs"]["eval"] if "port" in n.get("meta", {}))["meta"].update(port=["a", "up", []]),
        "must be one of in, out, param, not 'up'",
    ),
    "graph name": (lambda d: d["graphs"].update(other=[]), "unknown key 'other'"),
    "no graph": (lambda d: d.update(graphs={}), "has no graph"),
    "result code": (
        lambda d: node(d, target="torch.relu").update(target={"result": "a:b", "fields": ["a=1"]}),
        "is not a valid field of a result",
    ),
    "result name": (
        lambda d: node(d, target="torch.relu").update(target={"result": "a:b c", "fields": ["a"]}),
        "is not a valid name of a result",
    ),
    "torch.nn class": (
        lambda d: d["modules"]["a"].update({"class": "Linaer"}),
        "no module class 'Linaer'.*did you mean 'Linear'",
    ),
    "torch.nn function": (lambda d: d["modules"]["a"].update({"class": "Parameter"}), "no module class 'Parameter'"),
    "module kind": (lambda d: d["modules"]["a"].update(kind="pickle"), "must be one of none, .*, not 'pickle'"),
    "module arguments": (lambda d: d["modules"]["a"]["arguments"].update({"in_features": "x"}), "Linear cannot be rebuilt"),
    "module attribute": (lambda d: d["modules"]["a"]["attributes"].update({"_forward_hooks": []}), "an attribute of every "
                                                                                                   "module"),
    "module dunder attribute": (lambda d: d["modules"]["a"]["attributes"].update({"__class__": 1}), "an attribute of every "
                                                                                                    "module"),
    "container attribute": (lambda d: d["modules"][""]["attributes"].update({"forward": 1}), "an attribute of every module"),
    "module path": (lambda d: d["modules"].update({"c d": {"kind": "none"}}), "is not a valid module path"),
    "orphan": (lambda d: d["modules"].update({"z.y": {"kind": "none"}}), "must come after its parent"),
    "alias": (lambda d: d["modules"].update({"z": {"kind": "same", "as": "y"}}), "must come before it"),
    "block import": (
        lambda d: d["modules"].update({"a": {"kind": "block", "class": "os:system", "arguments": {}}}),
        "not allowed",
    ),
    "leaf import": (
        lambda d: d["modules"].update({"a": {"kind": "leaf", "class": "torch.hub:load", "arguments": {}}}),
        "not allowed",
    ),
    "block no class": (
        lambda d: d["modules"].update({"a": {"kind": "block", "class": "fxplug.ops:guard", "arguments": {}}}),
        "fxplug has no block",
    ),
    "block no block": (
        lambda d: d["modules"].update(
            {"a": {"kind": "block", "class": "fxplug.core.ir.traced_module:Container", "arguments": {}}}
        ),
        "fxplug has no block",
    ),
    "block path": (
        lambda d: d["modules"].update({"a": {"kind": "block", "class": "fxplug.blocks:Lora.__init__", "arguments": {}}}),
        "import path|fxplug has no block",
    ),
    "tensor dtype": (lambda d: d["tensors"]["offset"].update(dtype="float16"), "in its file, and"),
    "tensor shape": (lambda d: d["tensors"]["offset"].update(shape=[5]), "in its file, and"),
    "tensor strides": (lambda d: d["tensors"]["offset"].update(stride=[10**12]), "do not fit its shape"),
    "tensor kind": (lambda d: d["tensors"]["offset"].update(kind="code"), "must be one of parameter, buffer, not 'code'"),
    "tensor missing": (lambda d: d["tensors"].pop("offset"), "do not match: 'offset'"),
    "tensor surplus": (lambda d: d["tensors"].update(more=d["tensors"]["offset"]), "do not match: 'more'"),
    "tensor alias": (lambda d: d["tensors"]["a.weight"].update(same_as="b.weight"), "has the tensor 'a.weight'|come before"),
    "missing entry": (lambda d: d.pop("modules"), "missing key 'modules'"),
    "wrong type": (lambda d: d.update(tensors=[]), "must be a mapping, not a list"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_hostile_documents(folder: Path, case: str) -> None:
    change, message = CHANGES[case]
    craft(folder, change)
    refused(folder, message)


BREAKOUTS = [
    "', print('x'), '",
    '"',
    "\\",
    "\n",
    "'''",
    "{x}",
    "\u2028",
    "\x00",
    'getattr(self, "offset")',
    "# ' \"",
    "getattr(self, \"' + exit() + '\")",
    "getattr(self[",
    '], " + exit() + ")',
]


@pytest.mark.parametrize("first", BREAKOUTS)
def test_texts_stay_texts(folder: Path, first: str) -> None:
    """A text in the graph is data: it comes out as it went in, or the artifact is refused; it never runs."""

    def change(document: dict) -> None:
        names = node(document, target="fxplug.ops.check_constants")
        names["args"][1]["tuple"][0] = first
        names["args"].append({"tuple": ['], "b")', first]})
        node(document, "placeholder", "note")["args"] = [first]

    craft(folder, change)
    try:
        gm = fxplug.load(folder)
    except ArtifactError as error:
        assert "would be executed as code" in str(error)
    else:
        assert next(n for n in gm.graph.nodes if n.target == "note").args == (first,)


@pytest.mark.parametrize("name", [n for n in functions.OPS if not n.startswith("enter")])
def test_hostile_arguments_of_our_own_functions(name: str) -> None:
    for arguments in ([], ["__import__('os')"] * 3, [{"a": 1}, ("x",), object()], ["cpu", torch.float16, 1, 2, 3]):
        with contextlib.suppress(Exception):
            getattr(ops, name)(*arguments)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "name, target, arguments, message",
    [
        ("enter", "enter_grad", [False], "no node restores it"),
        ("enter", "enter_autocast", ["cpu", {"dtype": "bfloat16"}, True, True], "no node restores it"),
        ("leave", "exit_grad", [False], "not the last one changed"),
        ("leave", "exit_autocast", [{"node": "x"}], "not the last one changed"),
    ],
)
def test_modes_of_torch_are_left_alone(folder: Path, name: str, target: str, arguments: list[object], message: str) -> None:
    record = {"name": name, "op": "call_function", "target": f"fxplug.ops.{target}", "args": arguments}
    craft(folder, lambda d: d["graphs"]["eval"].insert(-1, record))
    refused(folder, message)


def test_results_need_permission(folder: Path) -> None:
    craft(folder, lambda d: node(d, target="torch.relu").update(target={"result": "subprocess:Popen"}))
    again = fxplug.load(folder)
    assert any(n.target is ops.Record for n in again.graph.nodes)
    refused(folder, "is not a result class", allow=["subprocess"])
    craft(folder, lambda d: node(d, target={"result": "subprocess:Popen"}).update(target={"result": "no_such_package:Thing"}))  # type: ignore[arg-type]
    refused(folder, "cannot be imported", allow=["no_such_package"])


def test_what_others_noted_on_a_layer_is_no_hindrance(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2))
    for number, layer in enumerate(model):  # as ultralytics does; `type` is a method of every module
        layer.i, layer.type = number, "torch.nn.modules"
    x = torch.randn(1, 3, 8, 8)
    gm = fxplug.trace(model, x)
    fxplug.save(gm, tmp_path)
    again = fxplug.load(tmp_path)
    assert torch.equal(again(x), model(x)) and again.get_submodule("1").i == 1 and callable(again.get_submodule("1").type)


def test_unpickling_never_happens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("unpickles"))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("unpickles"))
    before = set(sys.modules)
    fxplug.load(folder)
    assert all(m.partition(".")[0] in ("torch", "fxplug", "safetensors") for m in set(sys.modules) - before)


def test_what_is_not_traced_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="save takes a traced module, not a Linear"):
        fxplug.save(nn.Linear(1, 1), tmp_path / "out")  # type: ignore[arg-type]
    gm = small()
    gm.meta["passes"] = [{"name": "../up"}]
    with pytest.raises(ArtifactError, match="cannot be a file name"):
        fxplug.save(gm, tmp_path / "out")
    with pytest.raises(ArtifactError, match="not plain data"):
        fxplug.save(small(), tmp_path / "out", config={"a": object()})
    assert not os.listdir(tmp_path)


def test_no_path_of_the_machine_is_in_an_artifact(tmp_path, monkeypatch):
    """It is given to others: of files of passes it has what they are called, wherever they lie and from wherever it is made."""
    home = tmp_path / "home" / "own"
    home.mkdir(parents=True)
    lora = (Path(__file__).parents[2] / "passes/lora.yaml").read_text()
    (home / "mine.yaml").write_text(lora)
    monkeypatch.chdir(tmp_path)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for source, name in ((home / "mine.yaml", "own/mine.yaml"), ("lora", "passes/lora.yaml")):
        new = fxplug.apply(gm, fxplug.load_pass(source, at="0", rank=2))
        out = tmp_path / f"saved-{len(name)}"
        fxplug.save(new, out)
        text = "".join(file.read_text() for file in out.glob("*.json")) + (out / "graph.txt").read_text()
        assert f"{name}:" in text and str(tmp_path) not in text and str(Path(fxplug.__file__).parents[1]) not in text


VIEWS = {
    "same": lambda a: (a, a),
    "transposed": lambda a: (a, a.T),
    "overlapping": lambda a: (a.view(-1)[:18].view(3, 6), a.view(-1)[12:30].view(3, 6)),
    "apart": lambda a: (a[:3], a[3:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_parameters_in_one_memory_are_refused_unless_they_lie_apart(name, tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model.one, model.two = (nn.Parameter(view) for view in VIEWS[name](torch.randn(6, 6)))
    gm = fxplug.trace(model.eval(), torch.randn(2, 6))
    if name != "apart":
        with pytest.raises(fxplug.ArtifactError, match="'one' and 'two' are views of one memory, which a file cannot"):
            fxplug.save(gm, tmp_path / "gm")
        assert not (tmp_path / "gm").exists()
        gm.two = nn.Parameter(gm.two.clone())
    fxplug.save(gm, tmp_path / "gm")
    assert torch.equal(fxplug.load(tmp_path / "gm").two, gm.two)

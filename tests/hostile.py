"""Hostile artifacts: real ones with anything in them changed, hashes recomputed; and a watch over what loading and calling do.

A case is a number: `case(seed)` always makes the same folder.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxplug
from fxplug.core.artifacts.modules import block_classes, torch_classes
from fxplug.core.ir import functions
from fxplug.core.ir.containers import Container
from fxplug.core.ir.traced_module import TracedModule
from fxplug.core.torch_internals.modules import get_modes

PLAIN_ERRORS = (
    fxplug.FxplugError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError,
    MemoryError, NotImplementedError,
)  # fmt: skip


class Layers(nn.Module):
    """Leaves of many kinds, an attribute, constants, a list, tied weights, and another graph for training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.named = nn.ModuleDict({"2-1": nn.Conv1d(8, 8, 3, padding=1, padding_mode="reflect")})
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.randn(4, 8), persistent=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.depth = 3

    def forward(self, tokens: torch.Tensor, scale: float = 0.5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.lstm(self.embed(tokens))[0]
        x = self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = torch.relu(block(x)) * scale
        x = self.norm(self.named["2-1"](x.transpose(1, 2))).transpose(1, 2)
        if self.training:
            x = x * 2
        with torch.no_grad():
            size = x.shape[1] * x.shape[2] // 2
        return self.head(x.reshape(x.shape[0], -1, 8)), {"mean": x.mean() + self.table.sum() * size}


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor, note: str = "plain") -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) + self.offset


@dataclass
class Base:
    """A saved artifact: its files by name, and a call."""

    files: dict[str, bytes]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


ZOO = ("timm/vision_transformer", "timm/mobilevit", "diffusers/UNet2DConditionModel-sd15")


@cache
def bases(folder: Path, wide: bool = False) -> list[Base]:
    """The artifacts that are changed: small ones, with adapters, slots and both modes among them.

    With `wide` models of the zoo are among them.
    """
    torch.manual_seed(0)
    x, tokens = torch.randn(2, 4), torch.randint(0, 11, (2, 6))
    linears, layers = fxplug.trace(Linears().eval(), x), fxplug.trace(Layers().eval(), tokens)
    made = [(linears, (x,)), (layers, (tokens,))]
    for name, options in (("lora", {"rank": 2}), ("lora", {"rank": 2, "slots": 2}), ("oft", {"block_size": 2}), ("ia3", {})):
        made.append((fxplug.apply(linears, fxplug.load_pass(name, at="*", **options)), (x,)))
    calls = [(module, args, {}) for module, args in made]
    if wide:
        import zoo

        for case in (case for case in zoo.cases() if case.name in ZOO):
            args, kwargs = case.inputs()
            calls.append((fxplug.trace(case.build(), args, kwargs), args, kwargs))
    found = []
    for index, (module, args, kwargs) in enumerate(calls):
        path = fxplug.save(module, folder / f"base{index}")
        found.append(Base({file.name: file.read_bytes() for file in path.iterdir()}, args, kwargs))
    return found


# --- changes

NAMES = sorted(
    {
        *dir(TracedModule), *dir(Container), *dir(nn.Linear), *vars(nn.Module()), *dir(dict), "self", "torch", "device", "inf",
        "nan", "NoneType", "print", "exec", "eval", "__import__", "pytree", "fx_pytree", "operator", "math_sqrt", "classes",
        "fxplug_ops_guard", "fxplug_ops_edge", "getattr", "slice", "graphs.get", "a.forward", "_modules.get", "code", "in",
        "2-1", "0", "1", "x", "a", "b", "ü", "a b", "", ".", "..", "a..b", "a.b", 'x"', "x'", "x\n", "\x1b[31m", "A" * 300,
    }
)  # fmt: skip
FUNCTIONS = sorted(functions.list_functions()) + ["os.system", "builtins.eval", "torch.load", "torch.save", "torch.compile"]
METHODS = sorted(functions.list_methods()) + ["numpy", "apply_", "__class__", "register_hook", "format"]
CLASSES = sorted(torch_classes()) + sorted(block_classes()) + [
    "fxplug.training.trainer:Trainer", "fxplug.core.ir.traced_module:TracedModule", "fxplug.compat.zhijian:Addin", "os:system",
    "torch.nn:Linear", "fxplug.blocks:Block", "subprocess:Popen", "LazyLinear", "DataParallel", "Module",
]  # fmt: skip
INTEGERS = [0, 1, -1, 2, 3, 4, 6, 8, 63, 2**31, 2**62, 2**63 - 1, -(2**63), 10**40]
TEXTS = [
    "",
    "x",
    "mean",
    "none",
    "zeros",
    "import os",
    "'); import os #",
    '"',
    "\\",
    "{x}",
    "\n",
    "\x00",
    'getattr(self, "a")',
    "self.a",
]


def value(r: random.Random, nodes: list[str] = [], depth: int = 0) -> Any:  # noqa: B006
    """Any encoded value."""
    kinds = 10 if depth > 3 else 14
    match r.randrange(kinds):
        case 0 | 1 | 2 if nodes:
            return {"node": r.choice(nodes)}
        case 3:
            return r.choice(TEXTS)
        case 4:
            return r.choice([None, True, False])
        case 5:
            return r.choice([0.5, 1e308, -0.0, 1e-320, {"float": "nan"}, {"float": "inf"}, {"float": "1e999"}])
        case 6:
            form = r.choice(["dtype", "layout", "memory_format", "device", "type", "bytes", "ellipsis", "node", "function"])
            return {
                form: r.choice(["float16", "strided", "cpu", "meta", "lazy", "int", "00", True, "relu", "channels_last", 3])
            }
        case 7:
            return {r.choice(["range", "slice"]): [r.choice([*INTEGERS, None]) for _ in range(r.choice([1, 2, 3, 3]))]}
        case 10:
            return [value(r, nodes, depth + 1) for _ in range(r.randrange(4))]
        case 11:
            return {r.choice(["tuple", "size", "complex"]): [value(r, nodes, depth + 1) for _ in range(r.randrange(4))]}
        case 12:
            kind = r.choice(["dict", "settings"])
            return {kind: [[value(r, [], depth + 2), value(r, nodes, depth + 1)] for _ in range(r.randrange(3))]}
        case 13:
            return {r.choice(NAMES): value(r, nodes, depth + 1)}
    return r.choice(INTEGERS)


def graph(r: random.Random, d: dict[str, Any]) -> list[dict[str, Any]]:
    return d["graphs"][r.choice(list(d["graphs"]))]


def node(r: random.Random, d: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    nodes = graph(r, d)
    index = r.randrange(len(nodes))
    return nodes[index], [n["name"] for n in nodes[:index]]


def renamed(data: Any, old: str, new: str) -> Any:
    """The same with a name replaced wherever it is one, or begins a path."""
    if isinstance(data, str):
        return new + data[len(old) :] if data == old or data.startswith(f"{old}.") else data
    if isinstance(data, list):
        return [renamed(member, old, new) for member in data]
    if isinstance(data, dict):
        return {renamed(k, old, new): renamed(v, old, new) for k, v in data.items()}
    return data


def rename_path(r: random.Random, d: dict[str, Any], weights: dict[str, Any]) -> None:
    """A module, parameter or buffer gets another name, everywhere."""
    old = r.choice([p for p in [*d["modules"], *d["tensors"]] if p])
    parent, _, key = old.rpartition(".")
    new = r.choice(NAMES)
    path = f"{parent}.{new}" if parent else new
    for part in ("modules", "tensors", "graphs", "stacks"):
        d[part] = renamed(d[part], old, path)
    if parent in d["modules"]:
        for table in ("parameters", "buffers"):
            if key in d["modules"][parent].get(table, {}):
                d["modules"][parent][table] = {new if k == key else k: v for k, v in d["modules"][parent][table].items()}
    for file in weights:
        weights[file] = renamed(weights[file], old, path)


def rename_node(r: random.Random, d: dict[str, Any], weights: Any) -> None:
    mode = r.choice(list(d["graphs"]))
    d["graphs"][mode] = renamed(d["graphs"][mode], r.choice(d["graphs"][mode])["name"], r.choice(NAMES))


def change_node(r: random.Random, d: dict[str, Any], weights: Any) -> None:
    record, before = node(r, d)
    key = r.choice(["target", "args", "args", "kwargs", "op", "name", "meta"])
    if key == "target":
        paths = [*d["modules"], *d["tensors"]]
        op = record["op"]
        known = {"call_function": FUNCTIONS, "call_method": METHODS, "call_module": paths, "get_attr": paths}.get(op, NAMES)
        record["target"] = r.choice(
            [r.choice(known), r.choice(known), r.choice(NAMES), {"result": "a:B", "fields": [r.choice(NAMES)]}]
        )
    elif key == "args":
        args = record.setdefault("args", [])
        if args and r.random() < 0.6:
            args[r.randrange(len(args))] = value(r, before)
        else:
            args.insert(r.randrange(len(args) + 1), value(r, before))
    elif key == "kwargs":
        record.setdefault("kwargs", {})[r.choice([*NAMES, "out", "dim", "dtype", "inplace"])] = value(r, before)
    elif key == "op":
        record["op"] = r.choice(["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"])
    else:
        record[key] = value(r, before)


def insert_node(r: random.Random, d: dict[str, Any], weights: Any) -> None:
    nodes = graph(r, d)
    index = r.randrange(1, len(nodes))
    before = [n["name"] for n in nodes[:index]]
    op = r.choice(["call_function"] * 4 + ["call_method"] * 2 + ["call_module", "get_attr", "placeholder"])
    paths = [*d["modules"], *d["tensors"]]
    known = {"call_function": FUNCTIONS, "call_method": METHODS, "placeholder": NAMES}.get(op, paths)
    args = [value(r, before) for _ in range(0 if op in ("get_attr", "placeholder") else r.randrange(1, 5))]
    if op == "call_method" and args:
        args[0] = {"node": r.choice(before)}
    name = r.choice(["new", "new", "new", r.choice(NAMES)])
    nodes.insert(index, {"name": name, "op": op, "target": r.choice(known), "args": args})
    if r.random() < 0.5:
        nodes[-1]["args"] = [{"tuple": [{"node": name}, nodes[-1]["args"][0]]}]


def change_module(r: random.Random, d: dict[str, Any], weights: Any) -> None:
    path = r.choice(list(d["modules"]))
    record = d["modules"][path]
    held = value(r) if r.random() < 0.7 else {"function": r.choice(FUNCTIONS)}
    match r.randrange(8):
        case 0:
            record.setdefault("attributes", {})[r.choice(NAMES)] = held
        case 1:
            record.setdefault("attributes", {})[
                r.choice(["forward", "_flat_weights_names", "_call_impl", "activation", "terms"])
            ] = held
        case 2 if isinstance(record.get("arguments"), dict) and record["arguments"]:
            record["arguments"][r.choice(list(record["arguments"]))] = r.choice([held, 10**9, 10**12 + 39, -1])
        case 3:
            arguments = record.get("arguments")
            more = r.choice(["device", "dtype", "num_layers", "bias", "rank", "slots", "levels", "shape", r.choice(NAMES)])
            record["arguments"] = {**(arguments if isinstance(arguments, dict) else {}), more: r.choice([held, 10**9])}
        case 4:
            record["class"] = r.choice([*CLASSES, r.choice(NAMES)])
        case 5:
            record["kind"] = r.choice(["none", "same", "container", "module", "block", "leaf"])
        case 6:
            d["modules"][f"{path}.{r.choice(NAMES)}".lstrip(".")] = {"kind": "same", "as": r.choice(list(d["modules"]))}
        case 7:
            kind = r.choice(["module", "block"])
            new = {"kind": kind, "class": r.choice(CLASSES), "arguments": r.choice([None, {}, {"num_layers": 10**9}])}
            d["modules"][r.choice([path, f"{path}.{r.choice(NAMES)}".lstrip(".")])] = new


def change_tensor(r: random.Random, d: dict[str, Any], weights: dict[str, Any]) -> None:
    record = d["tensors"][r.choice(list(d["tensors"]))]
    if r.random() < 0.5:
        key = r.choice(["kind", "shape", "dtype", "persistent", "requires_grad", "stride", "same_as", "stored"])
        record[key] = r.choice([value(r), r.choice(list(d["tensors"])), [2**40, 2**40], "int64", "parameter", [0], [-1], False])
        return
    header = weights[r.choice(list(weights))]
    if header:
        held = header[r.choice(list(header))]
        key = r.choice(["dtype", "shape", "data_offsets"])
        held[key] = r.choice([value(r), "F16", "BOOL", [2**62], [0, 2**62], [4, 2], [-1, 3], [1] * 200])


def change_anything(r: random.Random, d: dict[str, Any], weights: Any) -> None:
    """Any entry of the document, at any depth."""
    at: Any = d
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = r.choice(keys)
        if isinstance(at[key], (dict, list)) and at[key] and r.random() < 0.85:
            at = at[key]
            continue
        if r.random() < 0.2:
            del at[key]
        else:
            at[key] = copy.deepcopy(r.choice([value(r), r.choice(list(d.values())), r.choice(NAMES)]))
        return


CHANGES = [rename_path, rename_path, rename_node, change_node, change_node, insert_node, insert_node, change_module,
           change_module, change_tensor, change_anything]  # fmt: skip


def change_bytes(r: random.Random, files: dict[str, bytes]) -> None:
    name = r.choice(list(files))
    data = bytearray(files[name])
    match r.randrange(6):
        case 0:
            del data[r.randrange(len(data)) :]
        case 1:
            for _ in range(r.randrange(1, 8)):
                data[r.randrange(len(data))] = r.randrange(256)
        case 2:
            at = r.randrange(len(data))
            data[at:at] = r.choice([b"[" * 3000, b"9" * 5000, b"{}," * 1000, b"\xff\xfe", b"NaN", b"1e999", b'"\\u001b[2J"'])
        case 3:
            data = bytearray(b"[" * 100_000 if name.endswith("json") else (2**40).to_bytes(8, "little") + bytes(data[8:]))
        case 4:
            data = bytearray(b'{"a": [' + b"{}," * 100_000 + b"{}]}")
        case 5:
            at = r.randrange(len(data))
            data[at:at] = data[at // 2 : at]
    files[name] = bytes(data)


def change_folder(r: random.Random, folder: Path) -> None:
    """What lies in the folder is no file, or another one."""
    path = folder / r.choice(["manifest.json", "graph.json", "model.safetensors", "graph.txt"])
    kind = r.randrange(6)
    if kind == 0:
        path.rename(folder / "moved")
        path.symlink_to(folder / "moved")
    elif kind in (1, 2):
        path.unlink()
        os.mkfifo(path) if kind == 1 else path.mkdir()
    elif kind == 3:
        path.unlink()
    elif kind == 4:
        (folder / r.choice(["hook.py", "weights.pt", "\x1b[31m.so"])).write_bytes(b"")
    else:
        path.unlink()
        path.symlink_to("/dev/zero")


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the rest of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def case(seed: int, folder: Path, base: Path, wide: bool = False) -> Base:
    """Write the hostile artifact of that number into an empty folder; `wide` as in `bases`."""
    r = random.Random(seed)
    known = bases(base, wide)
    chosen = known[r.choice([0, 0, 1, *range(len(known))])]
    files = dict(chosen.files)
    document = json.loads(files["graph.json"])
    weights = {name: split(data) for name, data in files.items() if name.endswith(".safetensors")}
    headers = {name: header for name, (header, _) in weights.items()}
    for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # an earlier change took its place
            r.choice(CHANGES)(r, document, headers)
    files["graph.json"] = json.dumps(document).encode()
    for name, header in headers.items():
        text = json.dumps(header).encode()
        files[name] = len(text).to_bytes(8, "little") + text + weights[name][1]
    if r.random() < 0.1:
        change_bytes(r, files)
    broken = files["manifest.json"] != chosen.files["manifest.json"]
    manifest = json.loads(chosen.files["manifest.json"]) if r.random() > 0.02 else {"format": value(r), "files": value(r)}
    for name in list(manifest["files"]) if isinstance(manifest.get("files"), dict) else []:
        if name in files and r.random() > 0.01:
            manifest["files"][name] = {"sha256": hashlib.sha256(files[name]).hexdigest(), "size": len(files[name])}
        elif r.random() < 0.3:
            manifest["files"][r.choice(NAMES)] = value(r)
    if not broken:
        files["manifest.json"] = json.dumps(manifest).encode()
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if r.random() < 0.04:
        change_folder(r, folder)
    return chosen


# --- the watch

READING = {
    "open",
    "os.listdir",
    "os.scandir",
    "import",
    "compile",
    "exec",
    "sys._getframe",
    "object.__getattr__",
    "builtins.id",
}
SILENT = {"object.__setattr__", "object.__delattr__", "marshal.loads", "gc.get_referrers", "array.__new__", "signal.setitimer"}
IMPORTS = ("torch", "fxplug", "numpy", "sympy", "mpmath", "encodings", "math", "opt_einsum")


class Watch:
    """Notes what Python is about to do, while `on`, that reading data does not need."""

    def __init__(self) -> None:
        self.on, self.found = False, []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and not self.allowed(event, args):
            self.on = False
            self.found.append(f"{event}{args!r}"[:300])
            self.on = True

    def allowed(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = args
            return not (set(mode or "") & set("wax+")) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event == "import":
            return args[0].partition(".")[0] in IMPORTS or args[0].partition(".")[0] in sys.stdlib_module_names
        if event == "compile":
            # FX's code; trees of it, which are only read; the constructor of a stand-in for a named tuple
            return str(args[1]).startswith(("<eval_with_key>", "<unknown>", "<string>", "<fstring>")) or args[0] is None
        if event == "exec":
            code = args[0]
            inner = [c for c in code.co_consts if hasattr(c, "co_names")]
            tuples = code.co_filename == "<string>" and [c.co_names for c in inner] == [("_tuple_new",)] and not code.co_names
            installed = code.co_filename.startswith((sys.base_prefix, sys.prefix, str(Path(torch.__file__).parent), "<frozen"))
            return tuples or installed or code.co_filename.startswith("<eval_with_key>")
        return event in READING | SILENT


def state() -> tuple[Any, ...]:
    """What of the process a call might leave changed."""
    return (
        *get_modes().items(), torch.get_num_threads(), torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), os.getcwd(), sys.getrecursionlimit(),
    )  # fmt: skip


def _seconds(folder: Path) -> float:
    """Of processor time, to refuse a folder again: a neighbour on the machine may have held up the first time."""
    began = time.process_time()
    with contextlib.suppress(fxplug.ArtifactError):
        fxplug.load(folder)
    return time.process_time() - began


def outcome(folder: Path, base: Base, watch: Watch) -> tuple[str, list[str]]:
    """What became of a hostile artifact, 'refused', 'failed' or 'ran', and what was wrong with that."""
    wrong: list[str] = []
    before, began = state(), time.process_time()
    watch.found, watch.on = [], True
    try:
        module = fxplug.load(folder)
        result = "ran"
    except fxplug.ArtifactError as error:
        result = "refused"
        if len(str(error)) > 1500 or not str(error).replace("\n", "").isprintable():
            wrong.append(f"a message that cannot be shown: {str(error)[:200]!r}")
    except BaseException as error:
        result = "refused"
        wrong.append(f"load raised {type(error).__name__}: {str(error)[:200]}")
    spent = time.process_time() - began
    if result == "refused" and (spent := min([spent, *(_seconds(folder) for _ in range(3 * (spent > 1)))])) > 1:
        wrong.append(f"refused after {spent:.1f} s")
    if result == "ran":
        try:
            module(*base.args, **base.kwargs)
        except NameError as error:
            wrong.append(f"the code has a name that is not there: {error}")
        except PLAIN_ERRORS:
            result = "failed"
        except BaseException as error:
            wrong.append(f"the call raised {type(error).__name__}: {str(error)[:200]}")
    watch.on = False
    wrong += watch.found
    if state() != before:
        wrong.append(f"the process is not as it was: {before} {state()}")
    return result, wrong

"""Random damage to adapter files of every layout: each loads with finite outputs, or is refused and nothing has changed."""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
from functools import cache
from pathlib import Path

import torch
from hostile_files import ODD, PATTERNS, attacked, attacks
from torch import nn

import fxplug

ASSETS = Path(__file__).parents[2] / "shared" / "assets" / "adapters"
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64"}
LAYERS = {"blocks.0.to_q": (8, 8), "blocks.1.to_q": (8, 8), "blocks.0.ff": (12, 8), "conv": (6, 12, 3, 3)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(8, 8), "ff": nn.Linear(8, 12)}) for _ in range(2))
        self.conv = nn.Conv2d(12, 6, 3, padding=1)

    def forward(self, indices):
        x = self.words(indices)
        for block in self.blocks:
            x = torch.tanh(block["ff"](x + torch.tanh(block["to_q"](x))))[..., :8] + x
        x = torch.cat([x, x[..., :4]], -1)
        return self.conv(x.movedim(-1, 1))


INPUT = torch.arange(10).reshape(2, 5, 1)


@cache
def modules():
    """A module for each kind of slots, with the bits it has when nothing is loaded."""
    torch.manual_seed(0)
    gm = fxplug.trace(Net().eval(), (INPUT,))
    made = []
    for name, given in (("lora", {"rank": 8}), ("loha", {"rank": 4}), ("lokr", {"rank": 2, "factor": 2})):
        new = fxplug.apply(gm, fxplug.load_pass(name, at="**", slots=2, **given))
        made.append((new, {key: value.clone() for key, value in new.state_dict().items()}))
    return made


def updates(rng, kind):
    """Tensors by layer and role."""
    made = {}
    for layer in rng.sample(sorted(LAYERS), rng.randint(1, len(LAYERS))):
        out, inner, *kernel = LAYERS[layer]
        r, flat = rng.choice([1, 2, 4]), inner * (9 if kernel else 1)
        if kind == "lora":
            made[layer] = {"down": torch.randn(r, inner, *kernel), "up": torch.randn(out, r, *[1] * len(kernel))}
            if rng.random() < 0.1 and kernel:
                made[layer] |= {"down": torch.randn(r, inner, 1, 1), "mid": torch.randn(r, r, *kernel)}
        elif kind == "loha":
            made[layer] = {f"hada_w{n}_{s}": torch.randn((out, r) if s == "a" else (r, flat)) for n in (1, 2) for s in "ab"}
        else:
            made[layer] = {"lokr_w1": torch.randn(2, 2), "lokr_w2": torch.randn(out // 2, inner // 2, *kernel)}
            if not kernel and rng.random() < 0.5:
                made[layer].pop("lokr_w2")
                made[layer] |= {"lokr_w2_a": torch.randn(out // 2, 2), "lokr_w2_b": torch.randn(2, inner // 2)}
    return made


def written(rng, kind):
    """A sound adapter: tensors by key, a configuration or None, metadata."""
    layouts = ["peft", "diffusers", "kohya", "ai-toolkit", "old", "own", "packed"] if kind == "lora" else ["kohya", "peft"]
    layout = rng.choice(layouts)
    state, about, config = {}, {}, None
    pefts = layout in ("peft", "diffusers", "ai-toolkit", "packed")
    halves = {"down": "lora_A", "up": "lora_B", "mid": "lora_mid"} if pefts else {}
    for layer, tensors in updates(rng, kind).items():
        for role, tensor in tensors.items():
            name = f"{'transformer' if layout == 'ai-toolkit' else 'unet'}.{layer}"
            own = {"peft": f"base_model.model.{layer}", "kohya": f"lora_unet_{layer.replace('.', '_')}", "old": layer}
            name = own.get(layout, name)
            if layout == "own":
                state[f"lora.{layer}.Lora.{role}.weight"] = tensor
            elif role in ("down", "up", "mid"):
                state[f"{name}.{halves.get(role, f'lora_{role}')}.weight"] = tensor
            else:
                state[f"{name}.{role}"] = tensor
        if layout in ("kohya", "own") and rng.random() < 0.7:
            state[f"{name}.alpha" if layout == "kohya" else f"lora.{layer}.Lora.scale"] = torch.tensor(2.0)
    if layout == "peft":
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["to_q"], "use_rslora": rng.random() < 0.2}
        config |= {"alpha_pattern": {"to_q": 4}, "rank_pattern": {"^blocks.0": 2} if rng.random() < 0.1 else {}}
    if layout == "packed":
        about["lora_adapter_metadata"] = json.dumps({"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"conv": 2}})
    return state, config, about


def odd_tensor(rng, tensor):
    value = rng.choice([float("nan"), float("inf"), 1e30, -1e38, 0.0, 1e-40])
    forms = [
        lambda: tensor.reshape(-1), lambda: tensor.T if tensor.dim() == 2 else tensor[None], lambda: tensor.reshape(-1)[:0],
        lambda: torch.zeros(()), lambda: tensor.reshape(1, 1, 1, 1, 1, 1, -1), tensor.long, tensor.half, tensor.bfloat16,
        tensor.double, lambda: torch.full(tensor.shape, value),
        lambda: torch.randn([rng.choice([0, 1, 2, 3, 8, 12, 300]) for _ in range(rng.randint(0, 4))]),
        lambda: torch.zeros(rng.choice([20000, 2]), rng.choice([20000, 1]) // 100),
        lambda: tensor * 1e20,
    ]  # fmt: skip
    return rng.choice(forms)()


def damage_state(rng, state, config, about):
    for _ in range(rng.randint(1, 3)):
        keys = list(state)
        if not keys:
            return config
        key, act = rng.choice(keys), rng.randint(0, 9)
        if act <= 2:
            state[key] = odd_tensor(rng, state[key])
        elif act == 3:
            names = [
                key[:-3], f"{key}.alpha", key.replace(".", "_"), "x" * rng.choice([3, 5000]), "\x1b]0;a\a", "a.\ud800",
                key.replace("lora", "lorA"), "." * 900 + key, "a." * 700 + key, f"_{key}", f"{key}\n", f"_orig_mod.{key}",
                key.replace(".weight", ".other.weight"),
            ]  # fmt: skip
            state[rng.choice(names)] = state.pop(key)
        elif act == 4:
            del state[key]
        elif act == 5:
            owner = key.rpartition(".")[0]
            names = [
                f"{key.rpartition('.lora')[0]}.alpha", "lora.gates.table.names", "emb_params", "lora.gates.table.entries",
                f"{owner}.dora_scale", f"{owner}.bias", f"{key}x",
            ]  # fmt: skip
            state[rng.choice(names)] = odd_tensor(rng, torch.randn(4, 8))
        elif act == 6:
            text = json.dumps(rng.choice([{"unet.r": rng.choice(ODD)}, {"unet.lora_alpha": rng.choice(ODD), "unet.r": 4}, []]))
            about["lora_adapter_metadata"] = rng.choice([text, text, "[" * 5000, "{", text[:-1], "\0"])
        elif act == 7 and config is not None:
            key = rng.choice(["r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "peft_type"])
            config[key] = rng.choice(ODD)
        elif config is not None:
            values = {rng.choice(PATTERNS): rng.choice([4, 4, *ODD]) for _ in range(rng.choice([1, 1, 2, 300]))}
            config[rng.choice(["alpha_pattern", "rank_pattern"])] = values
    return config


def safetensors(rng, state, about, odd):
    """The bytes of a safetensors file; with `odd`, its header does not fit them."""
    header, body = ({"__metadata__": about} if about else {}), b""
    for key, tensor in state.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        offsets = [len(body), len(body) + len(data)]
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    if odd and state:
        entry = header[rng.choice(list(state))]
        part = rng.choice(["dtype", "shape", "data_offsets", "more", "meta", "less"])
        if part == "more":
            entry["x"] = 1
        elif part == "less":
            entry.pop("dtype")
        elif part == "meta":
            header["__metadata__"] = rng.choice([*ODD, {"a": 1}])
        else:
            entry[part] = rng.choice([*ODD, [10**9, 10**9], [0, 10**18], [-1, 4], [0, 4], "F4", "F8_E4M3", "I8", [True, 4]])
    text = json.dumps(header).encode()
    if odd and rng.random() < 0.3:
        text = text.replace(b"{", rng.choice([b"[", b"{{", b'{"a":{},', b"{" * 99]), 1)
    return struct.pack("<Q", len(text)) + text + body


def damage_bytes(rng, data):
    act = rng.randint(0, 6)
    at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 400) + 1)
    if act == 0:
        return data[:at]
    if act == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))) + data[at + rng.choice([0, 4]) :]
    if act == 2:
        return rng.choice(
            [b"", b"\0" * 64, b"\xff" * 64, b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n", b"PK\3\4"]
        )
    if act == 3:
        return struct.pack("<Q", rng.choice([0, 2, 2**63, 2**64 - 1, len(data), 10**8])) + data[8:]
    made = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        made[rng.randrange(min(len(made), 2000 if act == 4 else len(made)))] ^= 1 << rng.randrange(8)
    return bytes(made)


class Trap:
    def __reduce__(self):
        return (os.system, ("touch /tmp/trapped",))


def case(rng, folder: Path, kind: str) -> Path:
    """A hostile file or folder below `folder`."""
    state, config, about = written(rng, kind)
    how = rng.random()
    if 0.15 < how < 0.65:
        config = damage_state(rng, state, config, about)
    pickled = rng.random() < 0.35
    name = ("adapter_model" if config is not None else "ink") + rng.choice([".bin", ".pt"] if pickled else [".safetensors"])
    file = folder / name
    if pickled:
        value = dict(state.items())
        extra = rng.random()
        if extra < 0.15:
            odd = [Trap(), torch.zeros(1).expand(10**6, 10**4), torch.ones(2).to_sparse(), nn.Linear(2, 2), {1, 2}, [1]]
            value["x"] = rng.choice(odd)
        elif extra < 0.2:
            value = {"state_dict": value, "epoch": 3}
        torch.save(value, file, _use_new_zipfile_serialization=rng.random() < 0.6)
        if rng.random() < 0.1 and zipfile.is_zipfile(file):  # compressed
            inner = {i.filename: zipfile.ZipFile(file).read(i) for i in zipfile.ZipFile(file).infolist()}
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
                for key, data in inner.items():
                    packed.writestr(rng.choice([key, key, "../" + key]), data)
    else:
        file.write_bytes(safetensors(rng, state, about, rng.random() < 0.1))
    if config is not None:
        text = json.dumps(config)
        if rng.random() < 0.1:
            odd = [text[:-2], "[" * 100_000, "9" * 100_000, "{}" * 10, "[]", '{"r": 1, "r": 2}', "\ufeff" + text, "null"]
            text = rng.choice(odd)
        (folder / "adapter_config.json").write_text(text, "utf-8", "surrogatepass")
    if 0.65 <= how < 0.9:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
    elif how > 0.96:
        kind = rng.choice(["fifo", "folder", "loop", "device", "other", "none"])
        other = file.with_suffix(rng.choice([".safetensors", ".bin"]))
        if kind == "other":
            file.rename(other)
            file = other
        else:
            file.unlink()
            make = {
                "fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda f: os.symlink(f, f), "none": lambda f: None,
                "device": lambda f: os.symlink(rng.choice(["/dev/zero", "/dev/stdin"]), f),
            }  # fmt: skip
            make[kind](file)
    return folder if config is not None and rng.random() < 0.7 else file


def changed(module, before) -> str:
    now = module.state_dict()
    other = next((key for key in before if not torch.equal(now[key], before[key])), "")
    return other or ("" if now.keys() == before.keys() else "keys")


def one(seed: str, folder: Path) -> tuple[str, str]:
    """What happened with one case, and what is wrong with that."""
    rng = random.Random(seed)
    torch.manual_seed(rng.randrange(2**31))
    kind = rng.choice(["lora", "lora", "lora", "loha", "lokr"])
    real = sorted(f for f in ASSETS.glob("*/*") if f.is_file() and f.stat().st_size < 4 << 20) if ASSETS.is_dir() else []
    if real and rng.random() < 0.02:
        chosen = rng.choice(real)
        path = folder / chosen.name
        path.write_bytes(damage_bytes(rng, chosen.read_bytes()))
    else:
        path = case(rng, folder, kind)
    module, before = rng.choice(modules()) if rng.random() < 0.2 else modules()[["lora", "loha", "lokr"].index(kind)]
    given = {"partial": rng.random() < 0.3, "adapter": rng.choice([None, None, None, "default", "x" * 3000])}
    size = sum(f.lstat().st_size for f in folder.iterdir())
    _, refused, wrong = attacked(lambda: module.adapters.load("ink", path, **given), size)
    if not wrong and refused is None:
        module.adapters.use("ink")
        with torch.no_grad():
            if not module(INPUT).isfinite().all():
                wrong = "the output is not finite"
        module.adapters.use(None)
        module.adapters.unload("ink")
    key = changed(module, before)
    if key:
        wrong = wrong or f"'{key}' is another than before"
        module.load_state_dict(before)
    return "refused" if refused is not None else "loaded", wrong


def fuzz_adapters(cases: int, seed: int) -> list[str]:
    """Run so many cases, from this seed on; a line for each miss."""
    modules()
    return attacks("adapters", one, cases, seed)

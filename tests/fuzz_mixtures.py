"""Adapters of random kinds and ranks in one batch, each sample with a mixture of its own: as its weights alone give."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

import fxplug
from fxplug.core.errors import FxplugError

COST = 20
RANK, SLOTS, MOST = 6, 6, 3
KINDS = ("lora", "dora", "loha", "lokr", "loha+dora", "ia3")
GATES = {"peft_type": "IA3", "feedforward_modules": [], "target_modules": "all-linear"}  # what PEFT's file needs beside it
GROUPS = ["picture", "grouped", "tokens", "vector", "table"]  # layers with strengths of their own
Row = float | fxplug.Strength
Own = dict[str, tuple[str, dict[str, Tensor]]]  # the kind and tensors of an adapter by layer


class Mixed(nn.Module):
    """Layers of each kind and of random sizes: pictures, volumes, signals, tokens in both orders, vectors."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        wide, groups, bias = 4 * pick.randint(1, 2), pick.choice([1, 2, 4]), pick.random() < 0.5
        self.table = nn.Embedding(9, wide)
        self.tokens, self.turned = nn.Linear(wide, 12, bias=bias), nn.Linear(12, wide)
        self.picture = nn.Conv2d(3, wide, pick.choice([1, 3]), pick.randint(1, 2), 1, bias=bias)
        self.grouped = nn.Conv2d(wide, 8, 3, padding="same", groups=groups, padding_mode=pick.choice(["zeros", "circular"]))
        self.line, self.volume = nn.Conv1d(8, 4, 3, dilation=pick.randint(1, 2), bias=bias), nn.Conv3d(4, wide, (1, 3, 1))
        self.vector = nn.Linear(wide, wide)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        tokens = self.turned(self.tokens(self.table(index)).transpose(0, 1)).transpose(0, 1)
        line = self.line(torch.tanh(self.grouped(torch.tanh(self.picture(x)))).flatten(2))
        volume = self.volume(line[:, :, :12].unflatten(2, (2, 3, 2)))
        return self.vector(volume.flatten(2).mean(2)) + tokens.mean(1)


def draw_call(batch: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs of so many samples."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 10, 10, generator=gen).to(dtype), torch.randint(0, 9, (batch, 5), generator=gen)


def draw_update(layer: nn.Module, kind: str, pick: random.Random, gen: torch.Generator) -> dict[str, Tensor]:
    """The tensors of an update of a layer, as PEFT and LyCORIS name and shape them."""
    w: Any = layer.weight

    def normal(*shape: int) -> Tensor:
        return 0.4 * torch.randn(*shape, generator=gen, dtype=torch.float64)

    out, rest, tail = len(w), tuple(w.shape[1:]), [1] * (w.dim() - 2)
    inner = w[0].numel()
    rank = pick.randint(1, RANK // 2)
    if getattr(layer, "groups", 1) > 1:
        rank = min(rank, out // layer.groups)  # type: ignore[operator]
    if kind == "ia3":
        return {"ia3_l": 1 + normal(*([out, 1] if isinstance(layer, nn.Linear) else [1, out, *tail]))}
    if kind.startswith("loha"):
        rank = pick.randint(1, 2) if getattr(layer, "groups", 1) == 1 else 1  # a product's rank is its square
        sizes = {"a": (out, rank), "b": (rank, inner)}
        made = {f"hada_w{i}_{half}": normal(*size) for i in (1, 2) for half, size in sizes.items()}
    elif kind == "lokr":
        rank, made = 1, {"lokr_w1": normal(2, 1), "lokr_w2_a": normal(out // 2, 1), "lokr_w2_b": normal(1, inner)}
    else:
        made = {"lora_A.weight": normal(rank, *rest), "lora_B.weight": normal(out, rank, *tail)}
    if kind.startswith("lo") and kind not in ("lora", "dora"):
        made["alpha"] = torch.tensor(float(rank), dtype=torch.float64)
    if kind.endswith("dora"):
        sizes = [out] if w.dim() == 2 and kind == "dora" else [out, *[1] * (w.dim() - 1)] if kind != "dora" else [1, out, *tail]
        norm = torch.linalg.vector_norm(w.detach().double().flatten(1), dim=1)
        made["lora_magnitude_vector.weight" if kind == "dora" else "dora_scale"] = (norm * (1 + normal(out))).reshape(sizes)
    return made


def change(layer: nn.Module, kind: str, own: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The differences of a layer's weight and bias that an update of it makes, by the papers' formulas, in float64."""
    w, bias = layer.weight.detach().double(), getattr(layer, "bias", None)  # type: ignore[union-attr, operator]
    if kind == "ia3":
        gate = own["ia3_l"].flatten() - 1
        return w * gate.view(-1, *[1] * (w.dim() - 1)), None if bias is None else bias.detach().double() * gate
    if kind.startswith("loha"):
        product = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    elif kind == "lokr":
        product = torch.kron(own["lokr_w1"], own["lokr_w2_a"] @ own["lokr_w2_b"])
    else:
        up, down, groups = own["lora_B.weight"].flatten(1), own["lora_A.weight"].flatten(1), getattr(layer, "groups", 1)
        if isinstance(layer, nn.Embedding):
            up, down = own["lora_A.weight"].T, own["lora_B.weight"].T
        product = up @ down if len(down) == up.shape[1] else torch.cat([
            part @ half for part, half in zip(up.chunk(groups), down.chunk(groups), strict=True)
        ])  # fmt: skip
    product = product.reshape(w.shape)
    if not kind.endswith("dora"):
        return product, None
    magnitude = next(value for key, value in own.items() if "magnitude" in key or "dora_scale" in key)
    norm = torch.linalg.vector_norm((w + product).flatten(1), dim=1)
    return (w + product) * (magnitude.flatten() / norm).view(-1, *[1] * (w.dim() - 1)) - w, None


def draw_adapter(model: nn.Module, kind: str, seed: int) -> Own:
    """An adapter on some of the layers of a model."""
    gen, pick, made = torch.Generator().manual_seed(seed), random.Random(seed), {}
    for name, layer in model.named_modules():
        if getattr(layer, "weight", None) is None or pick.random() < 0.3:
            continue
        if isinstance(layer, nn.Embedding):
            if kind == "lora":  # as PEFT has no other
                halves = 0.4 * torch.randn(2, 9, generator=gen), 0.4 * torch.randn(layer.embedding_dim, 2, generator=gen)
                made[name] = kind, dict(zip(("lora_A.weight", "lora_B.weight"), (h.double() for h in halves), strict=True))
            continue
        made[name] = kind, draw_update(layer, kind, pick, gen)
    return made


def write_state(own: Own, dtype: torch.dtype) -> dict[str, Tensor]:
    """An adapter as the tensors of its file."""
    state = {}
    for name, (_, tensors) in own.items():
        for key, value in tensors.items():
            if name == "table":
                key = key.replace("lora_A.weight", "lora_embedding_A").replace("lora_B.weight", "lora_embedding_B")
            state[f"{name}.{key}"] = value.to(dtype).contiguous()
    return state


def take(strength: Row, layer: str) -> float:
    """How much of an adapter a layer takes."""
    if not isinstance(strength, fxplug.Strength):
        return strength
    blocks = strength.blocks or {}
    return strength.value * blocks.get(layer, blocks.get("**", 1.0))


def make_alone(model: nn.Module, row: dict[str, Row], adapters: dict[str, Own]) -> nn.Module:
    """The model with the weights that one mixture makes of it: its differences times their strengths added up."""
    made = copy.deepcopy(model).double()
    for name, layer in made.named_modules():
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        base = copy.deepcopy(layer)
        for adapter, strength in row.items():
            if name not in adapters[adapter]:
                continue
            one, two = change(base, *adapters[adapter][name])
            weight.data += take(strength, name) * one  # type: ignore[union-attr]
            if two is not None and bias is not None:
                bias.data += take(strength, name) * two
    return made


def draw_strength(pick: random.Random, groups: bool) -> Row:
    """A number that every dtype has, with `groups` sometimes by block."""
    value = pick.choice([1.0, 0.5, -0.25, 0.0, 2.0])
    if not groups or pick.random() < 0.5:
        return value
    names = (["**"] if pick.random() < 0.3 else []) + pick.sample(GROUPS, pick.randint(0, 3))
    return fxplug.Strength(value, {name: pick.choice([0.0, 0.5, -1.0, 1.0]) for name in names})


def draw_rows(pick: random.Random, names: list[str], batch: int, groups: bool = False) -> list[dict[str, Row]]:
    """Mixtures, some of nothing."""
    some = [pick.sample(names, pick.randint(0, min(MOST, len(names)))) for _ in range(batch)]
    return [{name: draw_strength(pick, groups) for name in row} for row in some]


def load(module: Any, adapters: dict[str, Own], dtype: torch.dtype) -> None:
    """Put adapters into slots."""
    for name, own in adapters.items():
        if own:
            gates = GATES if any(kind == "ia3" for kind, _ in own.values()) else None
            module.adapters.load(name, write_state(own, dtype), config=gates)


def measure(got: Tensor, model: nn.Module, rows: list[dict[str, Row]], adapters: dict[str, Own], call: Any) -> float:
    """How far the samples of a batch are from the same samples with their weights alone, over the largest value."""
    worst, size = 0.0, 1.0
    for i, row in enumerate(rows):
        alone = make_alone(model, row, adapters)(call[0][i : i + 1].double(), call[1][i : i + 1])[0]
        worst, size = max(worst, float((got[i].double() - alone).abs().max())), max(size, float(alone.abs().max()))
    return worst / size


@torch.no_grad()
def miss(seed: int) -> str:
    """What is wrong in one case; nothing where all is as it should be."""
    pick = random.Random(f"mixtures {seed}")
    torch.manual_seed(seed)
    dtype, bound = pick.choice([(torch.float32, 1e-5), (torch.float64, 1e-9)])
    model = Mixed(pick).eval().to(dtype)
    gm = fxplug.trace(model, draw_call(4, seed, dtype))
    slots, each = pick.randint(2, SLOTS), pick.randint(1, MOST)
    groups = pick.choice([None, GROUPS])
    slot = fxplug.load_pass("dora", at="**", rank=RANK, slots=slots, per_sample=min(each, slots), groups=groups)
    new = fxplug.apply(gm, slot)
    adapters = {f"a{i}": draw_adapter(model, pick.choice(KINDS), seed * 100 + i) for i in range(slots)}
    adapters = {name: own for name, own in adapters.items() if own}
    try:
        load(new, adapters, dtype)
        for turn in range(3):
            batch = pick.randint(1, 5)
            rows = [dict(list(row.items())[: min(each, slots)]) for row in draw_rows(pick, list(adapters), batch, bool(groups))]
            call = draw_call(batch, seed + turn, dtype)
            if turn == 2 and rows[0]:  # what a row takes stays, of what is put in again
                new.adapters.use(rows)
                name = next(iter(rows[0]))
                gates = GATES if "ia3" in {kind for kind, _ in adapters[name].values()} else None
                new.adapters.load(name, write_state(adapters[name], dtype), config=gates, replace=True)
                got = new(*call)
            else:
                with new.adapters.using(rows):
                    got = new(*call)
            if (far := measure(got, model, rows, adapters, call)) > bound:
                kinds = {name: {kind for kind, _ in own.values()} for name, own in adapters.items()}
                return f"{seed}: {far:.1e} from the samples alone, {dtype}, {rows}, {kinds}"
            if turn == 1:  # other weights below the adapters
                model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})
                gm.load_state_dict(model.state_dict())
                new.load_state_dict(model.state_dict(), strict=False)
    except FxplugError as error:
        return f"{seed}: {type(error).__name__}: {error}"[:400]
    return ""


def fuzz_mixtures(cases: int, seed: int) -> list[str]:
    """A line for each case in which something is wrong."""
    return [line for case in range(cases) if (line := miss(seed + case))]

"""Features and heads over processes: pairs of layers found by trying, weights in parts, exact forward and backward."""

from __future__ import annotations

import functools
import math

import processes
import pytest
import small
import torch
import torch.nn.functional as F
import zoo
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.comparison import measure_distance
from fxplug.core.ir.containers import list_leaves
from fxplug.parallel import local_weights
from fxplug.parallel.planning.trials import ShardTrials
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import make_position, run_simulated
from fxplug.parallel.runtime.shares import AllReduceMean, Count, Once, Part

CLOSE = 1e-6
CASES = {case.name: case for case in zoo.cases("")}
WIDTH, HEADS = 24, 4


# --- the operations


def test_parts_of_weights_are_the_same_kept_or_taken():
    ways = fill_degrees({"tensor": 3})
    weight = torch.randn(2 * (5 + 4) * 3, 6, requires_grad=True)
    part = Part(ways, "tensor", 0, 3, 2)
    given = torch.randn(weight.shape)

    def run(rank):
        taken = part(weight, 5, 4)
        kept = taken.detach().clone().requires_grad_()
        grown = torch.autograd.grad((part(kept, 5, 4) * 3).sum(), kept)[0]
        with pytest.raises(fxplug.GuardError, match=r"a weight of shape \(7, 6\) must be complete, 54 along dimension 0"):
            part(weight[:7], 5, 4)
        return taken, part(kept, 5, 4), grown, torch.autograd.grad((taken * part(given, 5, 4)).sum(), weight)[0]

    found = run_simulated(ways, run)
    assert sum(len(taken) for taken, *_ in found) == len(weight)
    for taken, kept, grown, _ in found:
        assert torch.equal(taken, kept) and torch.equal(grown, torch.ones_like(grown))
    torch.testing.assert_close(sum(row[3] for row in found), given)


def test_what_one_adds_means_and_numbers():
    ways = fill_degrees({"tensor": 3})
    x = torch.randn(4, 7)

    def run(rank):
        first = 7 * rank // 3
        part = x[:, first : 7 * (rank + 1) // 3]
        mean = AllReduceMean(ways, "tensor")(part.mean(1), 7)
        return Once(ways, "tensor")(x), mean, Count(ways, "tensor")(21, 7), part.shape[1]

    found = run_simulated(ways, run)
    torch.testing.assert_close(sum(once for once, *_ in found), x)
    for _, mean, count, length in found:
        torch.testing.assert_close(mean, x.mean(1))
        assert count == 3 * length


# --- models that nobody listed


class Separate(nn.Module):
    """Attention with layers of their own for queries, keys and values, fewer of those, and norms of queries and keys."""

    def __init__(self, held: int = HEADS, norm: str = "", repeat: bool = True) -> None:
        super().__init__()
        self.held, self.repeat, size = held, repeat, WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * size) for n in (HEADS, held, held))
        self.out = nn.Linear(WIDTH, WIDTH)
        kinds = {"": nn.Identity, "head": lambda: nn.LayerNorm(size), "all": lambda: nn.RMSNorm(WIDTH)}
        kinds["centred"] = lambda: nn.LayerNorm(WIDTH)
        self.norm, self.again = kinds[norm](), kinds[norm]()
        self.kind = norm

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.kind in ("all", "centred"):
            q, k = self.norm(q), self.again(k)
        size = q.shape[-1] // HEADS
        q, k, v = (t.view(b, -1, t.shape[-1] // size, size).transpose(1, 2) for t in (q, k, v))
        if self.kind == "head":
            q, k = self.norm(q), self.again(k)
        if self.held != HEADS and self.repeat:
            k, v = (t.repeat_interleave(HEADS // self.held, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.held != HEADS and not self.repeat)
        return self.out(y.transpose(1, 2).reshape(b, -1, WIDTH))


class Fused(nn.Module):
    """Attention with one layer for queries, keys and values behind each other, and its sum written out."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        a = (q @ k.transpose(-2, -1) * (c // HEADS) ** -0.5).softmax(-1)
        return self.out((a @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP of one layer for gate and value, without biases; or two with them."""

    def __init__(self, fused: bool, hidden: int = 21) -> None:
        super().__init__()
        self.fused = fused
        self.up = nn.Linear(WIDTH, 2 * hidden if fused else hidden, bias=not fused)
        self.gate = nn.Identity() if fused else nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=not fused)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1) if self.fused else (self.up(x), self.gate(x))
        return self.down(F.silu(a) * b)


class Both(nn.Module):
    """Attention and MLP beside each other, whose features one layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Fused()
        self.attn.out = nn.Identity()
        self.up, self.out = nn.Linear(WIDTH, 8 * 6), nn.Linear(WIDTH + 8 * 6, WIDTH)

    def forward(self, x):
        return self.out(torch.cat([self.attn(x), F.gelu(self.up(x))], -1))


class Network(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


MODELS = {
    "fused": lambda: Network(Fused(), Gated(True)),
    "no bias": lambda: Network(Fused(False), Gated(True)),
    "separate": lambda: Network(Separate(), Gated(False)),
    "grouped": lambda: Network(Separate(2), Gated(False)),
    "grouped by the function": lambda: Network(Separate(2, repeat=False), Gated(True)),
    "norms of heads": lambda: Network(Separate(norm="head"), Gated(True)),
    "norms of all": lambda: Network(Separate(norm="all"), Gated(True)),
    "centred norms of all": lambda: Network(Separate(norm="centred"), Gated(True)),
    "both": lambda: Network(Both(), Both()),
}

def inputs(batch=2, tokens=9):
    return small.seeded(lambda: (torch.randn(batch, tokens, WIDTH),))


@functools.cache
def own(name):
    model = small.seeded(MODELS[name]).eval()
    return fxplug.trace(model, inputs()).eval()


@sweep("name", MODELS, "fused", "grouped", "norms of heads")
def test_heads_and_features_in_parts(name):
    gm = own(name)
    plan = fxplug.parallel_plan(gm, inputs(), tensor=2)
    assert plan.check() < CLOSE and plan.share > 0.9, plan
    new = fxplug.parallelize(gm, plan)
    given = inputs(3, 14)
    want = gm(*given)
    for out in run_simulated(plan.ways, lambda rank: new(*given)):
        assert measure_distance(want, out) < CLOSE


WAYS = [{"tensor": 3}, {"tensor": 4}, {"tensor": 2, "ulysses": 2}, {"tensor": 2, "ring": 2}, {"tensor": 2, "batch": 2}]


@sweep("ways", WAYS, {"tensor": 3}, {"tensor": 2, "ulysses": 2}, ids=str)
@pytest.mark.parametrize("name", ["fused", "grouped", "norms of heads"])
def test_more_ways_and_other_axes(name, ways):
    plan = fxplug.parallel_plan(own(name), inputs(4, 9), **ways)
    assert plan.check() < CLOSE and plan.share > 0.4, plan


class Masked(nn.Module):
    """As many samples as heads, and a mask for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Separate()

    def forward(self, x, mask):
        a = self.attn
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (a.q, a.k, a.v))
        return a.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2))


def test_a_mask_whose_samples_are_as_many_as_heads():
    given = (*inputs(HEADS), torch.arange(9).expand(HEADS, 9) < torch.tensor([[4], [9], [6], [7]]))
    gm = fxplug.trace(small.seeded(Masked).eval(), given)
    plan = fxplug.parallel_plan(gm, given, tensor=2)
    assert plan.share == 1 and plan.check() < CLOSE, plan


def test_keys_and_values_of_fewer_heads_than_processes_are_everywhere():
    plan = fxplug.parallel_plan(own("grouped"), inputs(), tensor=4)
    names = {str(n.target) for n in plan.stages[0].found.starts}
    assert "layers.0.q.weight" in names and "layers.0.k.weight" not in names
    assert plan.check() < CLOSE


@pytest.mark.parametrize("name", ["norms of heads", "centred norms of all"])
def test_gradients_are_those_of_one_process(name):
    gm = own(name)
    plan = fxplug.parallel_plan(gm, inputs(), tensor=3)
    new = fxplug.parallelize(gm, plan)
    params = list(gm.parameters())
    one = torch.autograd.grad(gm(*inputs()).square().mean(), params)

    def run(rank):
        return torch.autograd.grad(new(*inputs()).square().mean(), params)

    many = run_simulated(plan.ways, run)
    for index, want in enumerate(one):
        torch.testing.assert_close(sum(row[index] for row in many) / 3, want, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2])
def test_adapters_on_split_layers(slots):
    options = {"rank": 2, **({"slots": slots} if slots else {})}
    new = fxplug.apply(own("separate"), fxplug.load_pass("lora", at="re:.*(q|v|out|up|down)$", **options))
    with torch.no_grad():
        for name, p in new.named_parameters():
            if name.startswith("lora."):
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
    plan = fxplug.parallel_plan(new, inputs(), tensor=2)
    assert plan.check() < CLOSE and plan.share > 0.7, plan


NAMES = {
    "diffusers/DiTTransformer2DModel": 0.9, "diffusers/PixArtTransformer2DModel": 0.7, "diffusers/SD3Transformer2DModel": 0.9,
    "diffusers/FluxTransformer2DModel": 0.9, "diffusers/WanTransformer3DModel": 0.9, "timm/beit": 0.9,
}  # fmt: skip


@sweep("name", NAMES, "diffusers/DiTTransformer2DModel")
def test_models_of_libraries(name):
    args, kwargs = CASES[name].inputs(2)
    gm = fxplug.trace(CASES[name].build().eval(), args, kwargs, check=False).eval()
    plan = fxplug.parallel_plan(gm, args, kwargs, tensor=2, check=False)
    assert plan.share >= NAMES[name] and plan.check() < CLOSE, plan


@pytest.mark.slow
def test_a_text_encoder_of_another_library():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
    given = {"input_ids": torch.arange(18).view(2, 9)}
    gm = fxplug.trace(small.seeded(lambda: transformers.T5EncoderModel(config)).eval(), (), given, check=False)
    plan = fxplug.parallel_plan(gm, (), given, tensor=3)
    assert plan.share > 0.99 and plan.check() < CLOSE, plan


# --- as every other module


def test_the_plan_is_printed():
    text = str(fxplug.parallel_plan(own("fused"), inputs(), tensor=2))
    for line in (
        "tensor 2",
        "tensor_parallel: 9",
        "stream 0: 4 from 'layers_0_qkv_weight', dimension 0, in parts of [2, 2]",
        "whole at 'head': ",
        "2 collectives of process 0 send",
    ):
        assert line in text, text


def test_wrong_calls_are_told():
    gm = own("fused")
    for given, text in [
        ({"tensor": 0}, "tensor must be a whole number, 1 or more, not 0"),
        ({"tensor": 64}, "nothing of this model can be split along 'tensor': .*are fewer than 64 processes"),
    ]:
        with pytest.raises(fxplug.SpecError, match=text):
            fxplug.parallel_plan(gm, inputs(), **given)
    alone = fxplug.trace(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(fxplug.SpecError, match="nothing of this model can be split along 'tensor'"):
        fxplug.parallel_plan(alone, torch.randn(2, 3), tensor=2)
    with pytest.raises(fxplug.SpecError, match="localize takes a parallel module"):
        fxplug.localize(gm)


@pytest.mark.parametrize("lowered", [False, True])
def test_parts_of_weights_are_not_saved_as_if_they_were_whole(lowered, tmp_path, monkeypatch):
    gm = fxplug.lower(own("separate")) if lowered else own("separate")
    new = fxplug.parallelize(gm, fxplug.parallel_plan(gm, inputs(), tensor=2, check=False))
    monkeypatch.setattr(local_weights, "find_position", lambda ways, mesh: make_position(ways, 0))
    assert fxplug.localize(new).meta["parts"]
    with pytest.raises(fxplug.ArtifactError, match="this process has only its shard of .* weights"):
        fxplug.save(new, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def learn(new):
    """Losses of some steps: parts have their own gradient."""
    x, target = inputs()[0], small.seeded(lambda: torch.randn(2, 9, 5))
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1, momentum=0.9)  # a bias of keys has no gradient but rounding
    return processes.learned(new, lambda: (new(x) - target).square().mean(), optimizer, 6)


def process(rank, folder):
    gm = own("separate")
    plan = fxplug.parallel_plan(gm, inputs(), tensor=2, check=False)
    new = fxplug.parallelize(gm, plan)
    count = [sum(p.numel() for n, p in m.named_parameters() if "layers" in n and "weight" in n) for m in (gm, new)]
    assert new.layers[0].q.weight.shape == (WIDTH // 2, WIDTH) and count[1] <= 0.53 * count[0]
    assert gm.layers[0].q.weight.shape == (WIDTH, WIDTH)
    assert measure_distance(gm(*inputs()), new(*inputs())) < CLOSE
    with pytest.raises(fxplug.ArtifactError, match="this process has only its shard of .* weights, such as 'layers.0.k.bias'"):
        fxplug.save(new, folder + "/never")
    loaded = fxplug.localize(fxplug.load(folder))  # saved by one process, whole
    assert loaded.layers[0].q.weight.shape == (WIDTH // 2, WIDTH)
    compiled = torch.compile(loaded, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        assert measure_distance(gm(*inputs()), compiled(*inputs())) < CLOSE
    losses = learn(new)
    state = fxplug.whole_state(new)
    torch.save((losses, state), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_keep_half_and_learn_what_one_does(tmp_path):
    gm = own("separate")
    fxplug.save(fxplug.parallelize(gm, fxplug.parallel_plan(gm, inputs(), tensor=2)), tmp_path / "saved")
    processes.group(process, str(tmp_path / "saved"))
    again = fxplug.trace(small.seeded(MODELS["separate"]).eval(), inputs()).eval()
    losses = learn(again)
    for rank in range(2):
        found, state = torch.load(tmp_path / "saved" / f"{rank}.pt")
        assert found == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
        for name, want in again.state_dict().items():
            torch.testing.assert_close(state[name], want, rtol=1e-4, atol=1e-6)
    assert list_leaves(state)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "batch"])
def test_a_plan_is_found_on_fewer_tokens(way, monkeypatch):
    """It is the plan of all of them, and its share is that of the call it was made for."""
    gm, (x,), tried = own("fused"), inputs(2, 803), []
    real = ShardTrials.random
    random = lambda self, shape, kind: tried.append(math.prod(shape)) or real(self, shape, kind)  # noqa: E731
    monkeypatch.setattr(ShardTrials, "random", random)
    few = fxplug.parallel_plan(gm, (x[:, :40],), **{way: 2})
    count = len(tried)
    many = fxplug.parallel_plan(gm, (x,), **{way: 2})
    assert sum(tried[count:]) < 10 * sum(tried[:count])
    assert many.check() < CLOSE and many.share >= few.share > 0.9  # attention, of which all is split, weighs more
    (a,), (b,) = (plan.stages for plan in (many, few))
    assert {n.name: step for n, step in a.found.steps.items()} == {n.name: step for n, step in b.found.steps.items()}


class Fixed(nn.Module):
    """Takes no other number of tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.position = nn.Linear(16, 64), nn.Linear(64, 16), nn.Parameter(torch.randn(160, 16))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x + self.position)))


def test_a_model_that_takes_no_fewer_tokens_is_planned_on_all():
    gm = fxplug.trace(Fixed().eval(), torch.randn(2, 160, 16)).eval()
    plan = fxplug.parallel_plan(gm, torch.randn(2, 160, 16), tensor=2)
    assert plan.check() < CLOSE and plan.share == 1

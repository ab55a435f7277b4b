"""A fixed sample of random models and passes; `python tests/fuzz.py models` and `passes` judge any number of them."""

from __future__ import annotations

import fuzz_models
import fuzz_passes
import fuzz_ports
import pytest
import random_models
import torch
from sweeps import sweep

import fxplug

NAMES = sorted(random_models.HOSTILE)
# what a hostile line may read: state, gradients, sizes, memory, autocast, one tensor given twice
FEW = ("as traced", "no_grad", "train", "inference", "batch 3", "taller", "channels last", "autocast", "the same twice")
# each family by its first word
FAMILIES = {name.partition("_")[0]: name for name in sorted(random_models.FAMILIES, reverse=True)}
WAYS = [way for way in fuzz_models.WAYS if way.name in FEW]


def hold(program, ways=None):
    verdict = fuzz_models.judge(program, ways)
    assert verdict.kind not in fuzz_models.MISSES, f"{verdict}\n{random_models.source(program)}"


# a loop of asyncio that is refused half made says so when it is collected
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("names", [NAMES[i::12][:4] for i in range(3)], ids="-".join)  # the slow tests have each of them
def test_what_forward_reads_is_held_or_refused(names):
    for name in names:
        hold(random_models.program(0, False, only=name), WAYS)


@pytest.mark.parametrize("name", FAMILIES.values())  # as above
def test_a_sample_of_each_family(name):
    program = random_models.program(0, False, only=name)
    program.training, program.given = name < "h", "same" * name.startswith("shared")
    hold(program, WAYS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [*random_models.ORDINARY, *random_models.HOSTILE])
def test_each_snippet(name):
    """Among few others, in the ways that its kind is about; `make fuzz` has it among more, in more ways."""
    if name in random_models.HOSTILE:
        hold(random_models.program(1, False, only=name), WAYS)
    else:
        hold(random_models.program(0, False, only=name))


@sweep("seed", range(12), 0, 1, 2)
def test_random_models(seed):
    hold(fuzz_models.case(seed), None if seed % 2 == 0 else WAYS)


@sweep("seed", [*range(4), 40022, 40047], 1, 5)  # the last two have passes in attentions
def test_random_passes(seed):
    kind, what, _ = fuzz_passes.judge(seed)
    assert kind == "equal", what


def test_the_same_seed_is_the_same_model():
    texts = [[random_models.source(fuzz_models.case(seed)) for seed in range(20)] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 20
    program = fuzz_models.case(1)
    smaller = program.without({program.numbers()[0]})
    assert len(smaller.names()) < len(program.names())


class Wrong(torch.nn.Module):
    """A traced module with one fault."""

    def __init__(self, gm, fault):
        super().__init__()
        self.gm, self.fault, self.calls = gm, fault, 0
        for table in ("_parameters", "_buffers", "_modules"):
            getattr(self, table).update(getattr(gm, table))

    def state_dict(self, *args, **kwargs):
        return self.gm.state_dict(*args, **kwargs)

    def named_parameters(self, *args, **kwargs):
        return self.gm.named_parameters(*args, **kwargs)

    def train(self, mode=True):
        self.gm.train(mode)
        return super().train(mode)

    def forward(self, *args, **kwargs):
        self.calls += 1
        out = self.gm(*args, **kwargs)
        match self.fault:
            case "second call" if self.calls == 2:
                out = out + 1e-6
            case "gradient":
                out = out.detach().requires_grad_() + 0 * out
            case "input":
                args[0].data.add_(1)
            case "random":
                torch.rand(1)
            case "dtype":
                out = out.double()
            case "raw":
                raise KeyError("x")
            case "always":
                raise fxplug.GuardError("never")
        return out


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        ("second call", "silent", "as traced, twice: output"),
        ("gradient", "silent", "gradient of"),
        ("input", "silent", "inputs afterwards"),
        ("random", "silent", "random state"),
        ("dtype", "silent", "float64"),
        ("raw", "raw", "KeyError"),
        ("always", "useless", "never"),
        ("dirty", "dirty", "mark"),
        ("trace", "raw", "trace: ValueError"),
        ("", "guarded", ""),
    ],
)
def test_the_judge_sees_each_kind_of_fault(monkeypatch, fault, kind, what):
    trace = fxplug.trace

    def faulty(model, *args, **kwargs):
        if fault == "trace":
            raise ValueError("no")
        gm = trace(model, *args, **kwargs)
        if fault == "dirty":
            next(model.parameters()).mark = 1
        return Wrong(gm, fault)

    monkeypatch.setattr(fxplug, "trace", faulty)
    program = random_models.program(0, False, only="conv")
    program.result = "tensor"
    names = ("as traced", "as traced, twice", "backward", "flag")
    found = fuzz_models.judge(program, [w for w in fuzz_models.WAYS if w.name in names])
    assert (found.kind, what in found.what) == (kind, True), found


@pytest.mark.slow
def test_random_ports_of_operations():
    assert fuzz_ports.fuzz_ports(12, 0) == []

"""In eager code on a CPU only the slots that some sample takes are computed, and results are those of all slots."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from test_switching import Looking, Odd, inputs, vit
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fxplug

USES = [None, "one", {"one": 0.5, "two": -1.0}, {"one": 0.3, "two": 1.0, "three": 2.0}]
MIXED = [["one", None, "two", "one"], [None, None, "three", None]]
LORA = {"at": "blocks.**", "within": ["Linear"], "rank": 4}


def filled(gm, kind, **options):
    """A module with four slots, three of them used."""
    torch.manual_seed(1)
    new = fxplug.apply(gm, fxplug.load_pass(kind, slots=4, **options))
    for name in ("one", "two", "three"):
        plain = fxplug.apply(gm, fxplug.load_pass(kind, **options))
        own = {key: torch.randn_like(p) * 0.3 for key, p in plain.named_parameters() if key.startswith(f"{kind}.")}
        scales = {key: value for key, value in plain.named_buffers() if key.startswith(f"{kind}.")}
        new.adapters.load(name, {**own, **scales})
    return new


@pytest.fixture(scope="module")
def gm():
    return fxplug.trace(vit(), (inputs(2),))


@pytest.fixture(scope="module")
def slots(gm):
    return filled(gm, "lora", **LORA)


def all_of(new, *args):
    """What all slots give, as where something looks on."""
    with Looking():
        return new(*args)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@torch.no_grad()
@sweep("kind", ["lora", "loha", "lokr", "lora_weight", "dora"], "lora", "dora")
def test_slots_that_nobody_takes_change_nothing(gm, kind):
    new = filled(gm, kind, **LORA)
    x, seen = inputs(), []
    for what in USES + (MIXED if kind == "lora" else []):
        new.adapters.use(what)
        same(new(x), all_of(new, x))
        seen.append(new(x))
    assert len({float(result.sum()) for result in seen}) == len(seen), "each of them is something else"


@torch.no_grad()
def test_layers_of_every_kind_and_values_without_samples():
    torch.manual_seed(0)
    x, words = torch.randn(4, 3, 8, 8), torch.randint(0, 20, (4, 3))
    gm = fxplug.trace(Odd().eval(), (x, words))
    new = filled(gm, "lora", at="*", rank=4)
    for what in USES:
        new.adapters.use(what)
        same(new(x, words), all_of(new, x, words))
    for what in MIXED:
        with pytest.raises(fxplug.SpecError, match="change 'positions', whose input has no samples"):
            new.adapters.use(what)
    new = filled(gm, "lora", at="re:^(?!positions)", rank=4)
    for what in MIXED:
        new.adapters.use(what)
        same(new(x, words), all_of(new, x, words))


@torch.no_grad()
def test_what_lies_in_a_slot_that_nobody_takes_reaches_no_result(gm):
    new, x = filled(gm, "lora", **LORA), inputs()
    new.adapters.use({"one": 1.0, "two": 0.5})
    expected = new(x)
    for bank in (m for m in new.modules() if hasattr(m, "down") and hasattr(m, "slots")):
        bank.down.weight[2 * bank.rank :] = torch.inf
        bank.up.weight[:, 2 * bank.rank :] = torch.nan
    assert torch.equal(new(x), expected)
    assert all_of(new, x).isnan().all()


def test_gradients_are_those_of_all_slots(slots):
    for what in ("two", ["one", None, "two", "one"], None):
        slots.adapters.use(what)
        wanted, found = (inputs().requires_grad_() for _ in range(2))
        all_of(slots, wanted).square().sum().backward()
        slots(found).square().sum().backward()
        same(found.grad, wanted.grad)


@torch.no_grad()
def test_hooks_on_the_halves_of_a_bank_are_called(gm):
    new, x = filled(gm, "lora", **LORA), inputs()
    new.adapters.use("one")
    bank = next(m for m in new.modules() if hasattr(m, "down") and hasattr(m, "slots"))
    expected, seen = new(x), []
    bank.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    same(new(x), expected)
    assert seen == [4 * bank.rank]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_captures_the_calls_holds_for_every_slot(slots):
    x, uses = inputs(), [*USES, *MIXED]
    slots.adapters.use("one")
    captured = make_fx(slots)(x)
    for what in uses:
        slots.adapters.use(what)
        same(captured(x), slots(x))
    (table,) = (name for name, _ in slots.named_buffers() if name.endswith("table.weights"))
    tables, results = [], []
    for what in USES:
        slots.adapters.use(what)
        tables.append(slots.get_buffer(table).clone())
        results.append(slots(x))
    each = torch.vmap(lambda weights: functional_call(slots, {table: weights}, (x,)))(torch.stack(tables))
    same(each, torch.stack(results))


@torch.no_grad()
def test_an_empty_batch(slots):
    slots.adapters.use("one")
    assert slots(inputs(0)).shape == (0, 5)

"""What values, calls and graphs give, compared: by one table of tolerances, exactly in words, and node by node."""

import math
import operator

import pytest
import torch
from torch import fx, nn

from fxplug.core.ir import comparison
from fxplug.core.ir.comparison import (
    DTYPES,
    Outcome,
    Tolerance,
    describe_difference,
    is_close,
    is_equal,
    measure_difference,
    measure_distance,
    run,
)
from fxplug.core.rewriter.probe import GraphRun

TABLE = {name: row for name, row in vars(comparison).items() if isinstance(row, Tolerance)}


def test_the_table_has_a_row_for_each_purpose_and_none_is_empty():
    assert list(TABLE) == ["RESULT", "WITHIN", "COMPILED", "REWRITTEN", "REPEATED"]
    assert all(len(share) == len(DTYPES) and min(share) >= 0 for row in TABLE.values() for share in row[:2])
    assert all(0 < row.of_largest[i] < 1 for row in TABLE.values() for i in range(len(DTYPES)))


@pytest.mark.parametrize("name", TABLE)
def test_a_row_allows_what_it_says_and_no_more(name):
    row = TABLE[name]
    wanted = torch.linspace(0.5, 2, 64, dtype=torch.float64)
    of_largest, of_number = row.shares(wanted)
    allowed = of_number * wanted + of_largest * 2
    assert is_close(wanted, wanted + 0.99 * allowed, row) and not is_close(wanted, wanted - 1.01 * allowed, row)
    assert measure_difference(wanted, wanted + allowed / 2, row).times == pytest.approx(0.5)
    small = torch.tensor([1e-6, 1.0])  # a number near 0 is held to the largest, or to itself
    assert is_close(small, torch.tensor([2e-6, 1.0]), row) is (of_number == 0)


def test_the_widest_of_the_dtypes_that_a_value_was_computed_in_counts():
    one = torch.ones(3)
    assert not is_close(one, one * 1.001, comparison.RESULT)
    assert is_close(one, one * 1.001, comparison.RESULT, [torch.bfloat16, torch.float32])


@pytest.mark.parametrize("name", TABLE)
def test_zero_stands_for_nan_where_kernels_of_attention_are_compared_only(name):
    row, nan = TABLE[name], torch.tensor([1.0, math.nan])
    assert is_close(nan, nan.clone(), row)
    assert is_close(nan, torch.tensor([1.0, 0.0]), row) is row.zero_for_nan is (name in ("RESULT", "WITHIN", "COMPILED"))
    assert not is_close(nan, torch.tensor([1.0, 2.0]), row) and not is_close(torch.tensor([1.0, 0.0]), nan, row)
    assert measure_distance(torch.tensor([math.inf]), torch.tensor([-math.inf])) == math.inf


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": [torch.ones(2), 1]}, {"x": [torch.ones(2), 1]}),
        ({"x": [torch.ones(2), 1]}, {"x": [torch.ones(2), 2]}),
        ((torch.ones(2),), [torch.ones(2)]),
        ([], [torch.ones(2)]),
        ({}, {}),
        (torch.tensor([math.nan]), torch.tensor([math.nan])),
        (torch.ones(2), None),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn)),
    ],
)
def test_what_is_equal_differs_in_nothing(a, b):
    assert is_equal(a, b) is (describe_difference(a, b) is None)


# --- calls


def test_a_call_leaves_what_later_ones_do_not_reach():
    def add(x, into):
        into += x
        return into

    x, into = torch.ones(2, requires_grad=True), torch.zeros(2)
    first = run(add, ((x, into), {}))
    assert first.out is into and first.inputs[0][0] is x
    first.keep()
    second = run(add, ((x, into), {}))
    assert first.diff(second) == "outputs differ by 1.0e+00" and not first.out.requires_grad


def test_calls_differ_in_result_inputs_state_and_error():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    base = Outcome(one, ((one,), {}), {"'buffer'": one, "'weight'": one})
    assert base.diff(Outcome(one.clone(), ((one,), {}), {"'buffer'": one.clone()})) is None, "what both have left"
    assert base.diff(Outcome(one, ((two,), {}))) == "the inputs differ after the call, by 1.0e+00 at [0][0]"
    assert base.diff(Outcome(one, ((one,), {}), {"'weight'": two})) == "'weight' differs after the call, by 1.0e+00"
    failed = run(operator.add, ((1, "x"), {}))
    assert isinstance(failed.error, TypeError) and failed.diff(run(operator.add, ((1, "x"), {}))) is None
    assert failed.diff(run(operator.add, ((1, 1), {}))).startswith("errors differ: TypeError(")
    assert base.difference(Outcome(two, dtypes={torch.float32}), comparison.RESULT).distance == 1


# --- graphs


class Steps(nn.Module):
    def forward(self, x, *rest):
        y = x + 1
        return [y.mm(rest[0]), {"y": y}]


def _run(keep=True, inner=3):
    graph = fx.symbolic_trace(Steps(), concrete_args=None).graph
    x = torch.ones(2, 3)
    return GraphRun(Steps(), graph, [x, (torch.ones(inner, 2),)], keep)


def test_a_run_gives_each_node_with_its_value():
    steps = _run()
    names = {node.name: value for node, value in steps}
    assert list(names) == [node.name for node in steps.graph.nodes] and is_equal(names["add"], torch.full((2, 3), 2.0))
    result = _run().finish()
    assert type(result) is list and type(result[1]) is dict, "plain containers, as the code gives"


def test_a_run_keeps_what_is_read_later_only():
    steps = _run(keep=False)
    for node, _ in steps:
        assert all(source in steps.env for source in node.all_input_nodes), "what the node read is there still"
    assert {node.name for node in steps.env} <= {"output", *(node.name for node in node.all_input_nodes)}


def test_a_failure_says_where_it_was():
    steps = _run(inner=5)
    with pytest.raises(RuntimeError) as caught:
        steps.finish()
    assert steps.at.name == "mm" and caught.value.__notes__ == ["at 'mm' of the graph"]

"""The operations that edit a graph, each on a graph of a few nodes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from fxplug.core.ir.graph import (
    change,
    copy_nodes,
    erase,
    erase_unused,
    insert,
    meta_of,
    move,
    redirect,
    replace,
    rewire,
    set_argument,
)

FLOATS = {"shape": (2, 3), "dtype": torch.float32}


@pytest.fixture
def graph():
    """x, y = neg(x), z = cat([y, x], dim=0), w = y[x:y], -> (z, {"w": w}), y"""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_function", operator.neg, (x,), name="y")
    z = graph.create_node("call_function", torch.cat, ([y, x],), {"dim": 0}, name="z")
    w = graph.create_node("call_function", operator.getitem, (y, slice(x, y)), name="w")
    graph.output(((z, {"w": w}), y))
    return graph


def named(graph):
    return {node.name: node for node in graph.nodes}


def order(graph):
    return " ".join(node.name for node in graph.nodes)


@pytest.mark.parametrize(("place", "expected"), [
    ({"after": "y"}, "x y neg z w output"), ({"before": "y"}, "x neg y z w output"), ({}, "x y z w output neg"),
    ({"after": "output"}, "x y z w output neg"), ({"after": "y", "before": "w"}, "x y z neg w output"),
])  # fmt: skip
def test_a_node_is_inserted_at_its_place(graph, place, expected):
    nodes = named(graph)
    insert(graph, "call_function", operator.neg, (nodes["x"],), **{key: nodes[name] for key, name in place.items()})
    assert order(graph) == expected


def test_an_inserted_node_has_its_own_name_and_meta(graph):
    nodes, meta = named(graph), dict(FLOATS)
    new = insert(graph, "call_function", torch.cat, ([nodes["x"]],), {"dim": 1}, after=nodes["x"], name="y", meta=meta)
    meta["pass"] = "later"
    assert (new.name, new.meta, new.kwargs) == ("y_1", FLOATS, {"dim": 1})
    assert insert(graph, "get_attr", "a.b").name == "a_b"
    graph.lint()


def test_meta_is_that_of_a_tensor_or_what_is_known_of_a_node(graph):
    node = named(graph)["y"]
    assert meta_of(torch.zeros(2, 3)) == FLOATS and meta_of(node) == {}
    node.meta.update(FLOATS, index=0)
    assert meta_of(node) == FLOATS and meta_of(node, "dtype", "pass", "index") == {"dtype": torch.float32, "index": 0}


def test_copies_have_names_and_meta_and_read_copies(graph):
    nodes, new, values = named(graph), fx.Graph(), {}
    nodes["y"].meta.update(FLOATS)
    values[nodes["x"]] = insert(new, "placeholder", "mine")
    copy_nodes(graph.nodes, new, values)
    assert order(new) == "mine y z w output" and str(values[nodes["w"]].args) == "(y, slice(mine, y, None))"
    values[nodes["y"]].meta["index"] = 1
    assert nodes["y"].meta == FLOATS and values[nodes["y"]].meta == {**FLOATS, "index": 1}
    with pytest.raises(KeyError):
        copy_nodes([nodes["z"]], fx.Graph(), {})


@pytest.mark.filterwarnings("error")
def test_a_node_moves(graph):
    nodes = named(graph)
    move(nodes["w"], before=nodes["z"])
    move(nodes["w"], after=nodes["y"])  # where it is
    assert order(graph) == "x y w z output" and nodes["w"] < nodes["z"]
    move(nodes["z"], after=nodes["y"])
    assert order(graph) == "x y z w output" and nodes["z"] < nodes["w"]


def test_a_node_changes_and_keeps_the_rest(graph):
    nodes = named(graph)
    change(nodes["z"], target=torch.stack)
    assert (nodes["z"].target, str(nodes["z"].args), nodes["z"].kwargs) == (torch.stack, "([y, x],)", {"dim": 0})
    change(nodes["z"], args=([nodes["y"]],))
    assert (str(nodes["z"].args), nodes["z"].kwargs) == ("([y],)", {"dim": 0}) and nodes["z"] not in nodes["x"].users
    change(nodes["z"], kwargs={})
    assert (str(nodes["z"].args), nodes["z"].kwargs) == ("([y],)", {})


def test_an_argument_is_set_where_it_stands(graph):
    node = named(graph)["z"]
    set_argument(node, 1, "dim", 1)
    set_argument(node, 2, "out", None)
    assert len(node.args) == 1 and node.kwargs == {"dim": 1, "out": None}
    change(node, args=(*node.args, 0, "last"), kwargs={"out": None})
    set_argument(node, 1, "dim", -1)
    assert node.args[1:] == (-1, "last") and node.kwargs == {"out": None}


def test_a_node_reads_other_values_wherever_they_stand(graph):
    nodes = named(graph)
    rewire(nodes["w"], {nodes["y"]: nodes["x"], nodes["x"]: nodes["y"]})
    assert str(nodes["w"].args) == "(x, slice(y, x, None))"
    change(nodes["z"], kwargs={"dim": 0, "out": nodes["y"]})
    rewire(nodes["z"], {nodes["y"]: [nodes["x"], 1]})
    assert str(nodes["z"].args) == "([[x, 1], x],)" and str(nodes["z"].kwargs) == "{'dim': 0, 'out': [x, 1]}"
    assert list(nodes["y"].users) == [nodes["output"], nodes["w"]]


def test_readers_are_redirected_but_for_those_to_keep(graph):
    nodes = named(graph)
    new = insert(graph, "call_function", operator.pos, (nodes["y"],), after=nodes["y"], name="new")
    redirect(nodes["y"], new, keep={nodes["z"]})
    assert str(new.args) == "(y,)" and str(nodes["z"].args) == "([y, x],)"
    assert str(nodes["w"].args) == "(new, slice(x, new, None))" and str(nodes["output"].args) == "(((z, {'w': w}), new),)"
    redirect(nodes["y"], new)
    assert list(nodes["y"].users) == [new]


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_takes_the_place_of_a_node(graph, nested):
    nodes = named(graph)
    replace(nodes["y"], [nodes["x"]] if nested else nodes["x"])
    value = "[x]" if nested else "x"
    assert order(graph) == "x z w output" and str(nodes["z"].args) == f"([{value}, x],)"
    assert str(nodes["w"].args) == f"({value}, slice(x, {value}, None))"
    assert str(nodes["output"].args) == f"(((z, {{'w': w}}), {value}),)"


def test_nodes_are_erased_whatever_their_order(graph):
    nodes = named(graph)
    with pytest.raises(RuntimeError, match="users"):
        erase([nodes["y"]])
    change(nodes["output"], args=(nodes["y"],))
    y = insert(graph, "call_function", operator.pos, (nodes["z"],), after=nodes["z"])
    erase([nodes["z"], y, nodes["w"]])
    assert order(graph) == "x y output"


def test_what_nobody_reads_is_erased_with_what_it_alone_reads(graph):
    nodes = named(graph)
    unused = insert(graph, "placeholder", "unused", before=nodes["x"])
    change(nodes["output"], args=(None,))
    erase_unused([nodes["y"], nodes["z"]])
    assert order(graph) == "unused x y w output", "w reads y"
    erase_unused(graph.nodes, lambda node: node is not nodes["w"])
    assert order(graph) == "unused x y w output"
    erase_unused(graph.nodes)
    assert order(graph) == "unused x output" and unused.op == "placeholder"

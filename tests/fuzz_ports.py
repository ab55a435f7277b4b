"""Rules on operations of random models: what `port` names changes, and nothing else, as in an interpreter of the graph."""

from __future__ import annotations

import collections
import copy
import itertools
import random
from typing import Any

import fuzz_models
import random_models
import torch
from fuzz_models import Way, limited, plain, unequal
from torch import fx

import fxplug
from fxplug.blocks import Block
from fxplug.core.ir.functions import get_short_name
from fxplug.core.ir.graph import without_edges


class Half(Block):
    """Half of a value that has floating-point numbers; any other value as it is."""

    def forward(self, v: Any) -> Any:
        return half(v)


def half(value: Any) -> Any:
    return value / 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Changed(fx.Interpreter):
    """The graph run with half of one operand, or of one member of the result, at some of its nodes."""

    def __init__(self, gm: Any, names: set[str], operand: int | None, member: int | None) -> None:
        super().__init__(gm, graph=without_edges(gm.graph))
        self.names, self.operand, self.member = names, operand, member

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self.names:
            return super().run_node(n)
        count = itertools.count()

        def value(read: fx.Node) -> Any:
            chosen = "shape" in read.meta and next(count) == self.operand
            return half(self.env[read]) if chosen else self.env[read]

        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value)
        result = getattr(self, n.op)(n.target, args, kwargs)
        if self.operand is not None:
            return result
        if self.member is None:
            return half(result)
        return [half(part) if index == self.member else part for index, part in enumerate(result)]


def judge(seed: int, counts: collections.Counter[str]) -> str | None:
    """What is wrong with the rules on one model, or None."""
    rng = random.Random(f"ports {seed}")
    program = random_models.program(seed, False)
    program.training = program.warm = False
    with random_models.built(random_models.write(random_models.source(program)), seed) as (_, model):
        way = Way("as traced", grad=False)
        args, kwargs = fuzz_models.inputs(program.first, way, seed)
        try:
            with torch.no_grad():
                gm = fxplug.trace(model.eval(), args, kwargs)
        except Exception:
            counts["not traced"] += 1
            return None
        for _ in range(6):
            nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method") and "fxplug" not in str(n.target)]
            nodes = [n for n in nodes if n.target is not getattr and any("shape" in read.meta for read in n.all_input_nodes)]
            if not nodes:
                return None
            op = get_short_name(rng.choice(nodes).target)
            before, index = rng.random() < 0.7, rng.choice([None, 0, 0, 1, 2])
            port = None if index is None else f"{'x' if before else 'y'}[{index}]"
            rule = fxplug.Rule(
                fxplug.Match(path="**", op=op), use=Half, place="before" if before else "after", port=port, args=["value"]
            )
            try:
                sites = fxplug.find(gm, fxplug.Pass("p", rules=[rule]))
                new = fxplug.apply(gm, sites)
            except fxplug.FxplugError as error:
                counts[type(error).__name__] += 1
                continue
            names = {site.node for site in sites}
            runs = (new, Changed(gm, names, (index or 0) if before else None, index))
            results = [_outcome(run, args, kwargs, seed) for run in runs]
            if any(isinstance(result, Exception) for result in results):
                counts["fails"] += 1
                if not all(isinstance(result, Exception) for result in results):
                    return f"{op} {port}: {results}"[:300]
                continue
            counts["equal"] += 1
            if found := unequal(plain(results[1]), plain(results[0])):
                return f"{op} {port or ('x' if before else 'y')}: {found}"
    return None


def _outcome(run: Any, args: Any, kwargs: Any, seed: int) -> Any:
    """What a call gives, or the error that it raises."""
    torch.manual_seed(seed)
    args, kwargs = copy.deepcopy((args, kwargs))
    try:
        with torch.no_grad():
            if not isinstance(run, fx.Interpreter):
                return run(*args, **kwargs)
            inputs = {n.target.lstrip("*"): n for n in run.graph.find_nodes(op="placeholder")}
            given = dict(zip(inputs, args, strict=False)) | kwargs
            return _plain(run.run(*(given.get(name, *n.args) for name, n in inputs.items())))
    except Exception as error:
        return error


def _plain(value: Any) -> Any:
    """FX's lists and mappings as Python's own."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_plain(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if type(value) is tuple else value


def fuzz_ports(cases: int, seed: int) -> list[str]:
    """A line for each miss."""
    misses: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    for number in range(seed, seed + cases):
        try:
            with limited(fuzz_models.SECONDS):
                found = judge(number, counts)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            misses.append(f"case {number}: {found}")
    print(dict(counts))
    return misses

"""What a pass brings beside its blocks: new inputs of the model and their sizes, and networks traced into the same graph."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..capture.fake_tensors import silence_torch
from ..capture.isolation import forbid_mutation
from ..errors import ClashError, MatchError, SpecError, TraceError, did_you_mean, quote
from ..ir import ops
from ..ir.containers import Container
from ..ir.graph import Graph, copy_graph, insert
from ..ir.regions import Regions, expand_ports, find_input, find_source, list_member_ports
from ..ir.traced_module import TracedModule, strip_to_container
from ..spec.addresses import WHOLE, Port, is_covered, is_pattern, parse_port, select
from ..spec.pass_file import import_target
from ..spec.rules import GATES, Pass
from .graft import Graft, find_last_input, trace_module
from .sites import expand_address, get_own_inputs, name_input


def factors(size: int | str) -> list[int | str]:
    """Return the factors of a size: `8*h` is 8 and h."""
    if isinstance(size, int):
        return [size]
    return [int(part) if part.isdigit() else part for part in re.split(r"\s*\*\s*", size.strip())]


def named_sizes(gm: TracedModule, p: Pass) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the values of the names in the shapes of a pass's inputs; and the candidates for unbound ones."""
    own = get_own_inputs(gm, p)
    bound: dict[str, int] = {}
    placeholders = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
    for name in p.inputs.keys() - own.keys():
        shape, wanted = placeholders[name].meta.get("shape"), p.inputs[name]["shape"]
        if shape is None or len(shape) != len(wanted):
            found = "no tensor" if shape is None else f"of shape {list(shape)}"
            raise SpecError(f"{p.name}: the model's input '{name}' is {found}; the pass needs {wanted}")
        for size, known in zip(wanted, shape, strict=True):
            if isinstance(size, str) and size.isidentifier():
                bound[size] = int(known)
    free: dict[str, list[int]] = {}
    for spec in own.values():
        for factor in (f for size in spec["shape"] or () for f in factors(size) if isinstance(f, str)):
            if factor not in bound:
                free.setdefault(factor, spec["try"].get(factor) or TRIES)
    return bound, free


def find_bare_names(own: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names that are a whole size where the inputs of a pass first have them: nothing else depends on such a size.

    A name that is a factor first, as f in `f*h`, is a ratio that the blocks of the pass decide; it is found by trying.
    """
    first: dict[str, bool] = {}
    for spec in own.values():
        for size in spec["shape"] or ():
            for factor in factors(size):
                first.setdefault(str(factor), factor == size and factor not in spec["try"])
    return {name for name, whole in first.items() if whole and name.isidentifier()}


CHECKS = (ops.check_inputs, ops.check_numbers, ops.check_constants, ops.check_added)  # of inputs, at a graph's head
TRIES = [8, 4, 2, 16, 1, 32]  # what a size that nothing binds may be: how much larger a condition is than a latent


def _with_gates(gm: TracedModule, p: Pass) -> Pass:
    """Add the network `gates` to a pass with slots, which computes each sample's weights of them; each block gets its result.

    Raises SpecError for an invalid rank, or if the model has no input with samples.
    """
    if not p.slots or GATES in p.networks:
        return p
    given = [rule.options.get("rank_max") for rule in p.rules]
    of = [rule.options.get("rank", 8) if rank is None else rank for rank, rule in zip(given, p.rules, strict=True)]
    for rank in of:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise SpecError(f"{p.name}: rank_max must be a whole number, 1 or more, not {quote(rank)}", where=p.where)
    beside = [rank for rank, rule in zip(of, p.rules, strict=True) if rule.place != "param"]  # others read no rows
    if p.per_sample:
        return _by_sample(gm, p)
    first, *others = dict.fromkeys(beside or of[:1])
    results = {first: 0, **{rank: 2 + n for n, rank in enumerate(others)}}  # which result of `Table` has the rows of a rank
    options = {"slots": p.slots, "rank": first, **({"others": others} if others else {})}
    gates = {"use": "fxplug.blocks:Gates.of", "options": options, "args": [_find_samples(gm, p)[0]], "neutral": True}
    rules = []
    for rank, rule in zip(of, p.rules, strict=True):
        part = 1 if rule.place == "param" else results[rank]
        rules.append(replace(rule, args=(*rule.args, f"{GATES}:out[{part}]")))
    return replace(p, networks={**p.networks, GATES: gates}, rules=rules)


def _by_sample(gm: TracedModule, p: Pass) -> Pass:
    """Give a pass with `per_sample` its gates, and its rules the blocks that gather the factors of each sample.

    Raises SpecError for a rule whose block has none.
    """
    options: dict[str, Any] = {"slots": p.slots + 1, "rank": 1, "per_sample": p.per_sample}
    groups = None if p.groups is None else find_groups(gm, p)
    if groups is not None:
        options["groups"] = 1 + len(groups)  # the first is that of the rest
    samples, node = _find_samples(gm, p)
    use = "fxplug.blocks:Gates.of"
    if p.regions:
        use = "fxplug.blocks:RegionGates.of"
        options["latents"] = node.name
    gates = {"use": use, "options": options, "args": [samples], "neutral": True}
    rules = []
    for rule in p.rules:
        block = rule.use if isinstance(rule.use, type) or rule.use is None else import_target(rule.use, rule.where)
        if not (other := getattr(block, "by_sample", "")):
            name = getattr(block, "__name__", "a rule without a block")
            raise SpecError(
                f"{p.name}: per_sample is for adapters beside their layers, as in the passes lora and dora, and {name} has "
                "none by sample: leave per_sample out",
                where=p.where,
            )
        match = rule.match
        if rule.place == "param":  # the block acts beside the layers whose parameter it maps without per_sample
            if rule.port not in (None, "weight"):
                raise SpecError(
                    f"{p.name}: with per_sample an adapter acts on a layer's result, which {quote(rule.port)} alone does not "
                    "give: leave param out, or per_sample",
                    where=p.where,
                )
            known: tuple[str, ...] = getattr(import_target(other, rule.where), "layers", ())
            classes = tuple(one for one in match.module if one in known) if match.module else known
            if not classes:
                raise SpecError(
                    f"{p.name}: per_sample is for {', '.join(known)}, not {', '.join(map(str, match.module))}", where=p.where
                )
            match = replace(match, module=classes, bare=False)
        args = ("x", "y", f"{GATES}:out[0]", f"{GATES}:out[2]", *([f"{GATES}:out[3][:]"] if p.regions else []))
        made = {**rule.options, "per_sample": p.per_sample, **({} if groups is None else {"groups": groups})}
        if p.regions:
            made["regions"] = True
        rules.append(replace(rule, match=match, use=other, place="after", port=None, args=args, options=made))
    return replace(p, networks={**p.networks, GATES: gates}, rules=rules)


def find_groups(gm: TracedModule, p: Pass) -> list[str]:
    """Return the groups of layers of a pass as patterns, of which the first that covers a layer counts.

    "block" makes one of each part that diffusers' `set_adapters` names by itself: the attentions and residual blocks in the
    parts of a UNet; in another model each block of a list. Raises SpecError for a pattern that nothing here has.
    """
    paths = [path for path, _ in gm.named_modules() if path]
    if p.groups != "block":
        for pattern in p.groups:
            if not any(is_covered(pattern, path) for path in paths):
                raise SpecError(f"{p.name}: groups: nothing is at '{pattern}'{did_you_mean(pattern, paths)}", where=p.where)
        return list(p.groups)
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        if parts[0] in ("down_blocks", "up_blocks", "mid_block"):
            depth = 4 - (parts[0] == "mid_block")
            inner = len(parts) >= depth and parts[depth - 1].isdigit()
            found[".".join(parts[: depth if inner else depth - 2])] = None
        elif numbers and numbers[0]:
            found[".".join(parts[: numbers[0] + 1])] = None
    return sorted(found, key=lambda path: (-path.count("."), path))


def _find_samples(gm: TracedModule, p: Pass) -> tuple[str, fx.Node]:
    """Return the address and the node of the input with the samples in its first dimension: the one that the pass names, else
    the first tensor."""
    regions = Regions(gm.graph, gm)
    inputs = regions.by_key[""].inputs
    if p.samples is None:
        first = next(((str(port), node) for port, _, node in inputs if node.meta.get("shape")), None)
        if first is None:
            raise SpecError(
                f"{p.name}: slots are chosen by sample, and no input of the model is a tensor with samples in its first "
                "dimension: name one with 'samples'"
            )
        return first
    wanted = parse_port(f":in.{p.samples}")
    try:
        port, _, node = find_input(regions, regions.by_key[""], wanted)
    except MatchError as error:
        text = str(error) + did_you_mean(str(wanted), [str(port) for port, _, _ in inputs])
        raise SpecError(f"{p.name}: samples: {text}", where=p.where) from None
    if not node.meta["shape"]:
        found = f"'{port}' was one number when traced and has no dimension of samples"
        raise SpecError(f"{p.name}: samples: {found}", where=p.where)
    return str(port), node


def join(gm: TracedModule, p: Pass) -> tuple[TracedModule, Pass]:
    """Return `gm` with the inputs and networks of a pass in its graph and module tree; or `gm` itself if the pass has none.

    The pass is returned with the network that its slots need. Raises SpecError, MatchError or TraceError for an input or
    network that does not fit the model.
    """
    p = _with_gates(gm, p)
    if not p.inputs and not p.networks:
        return gm, p
    from .network_sources import make_network

    modules = {name: make_network(gm, p, name, spec) for name, spec in p.networks.items()}
    failed: TraceError | None = None
    tried = []
    differences = "".join(_differences(gm, name, module) for name, module in modules.items())
    bound, free = named_sizes(gm, p)
    for choice in itertools.product(*free.values()):
        sizes = {**bound, **dict(zip(free, choice, strict=True))}
        try:
            with silence_torch(), forbid_mutation(gm, f"a network ({', '.join(modules)})"):
                return _join(gm, p, modules, sizes), p
        except (MatchError, SpecError) as error:
            raise type(error)(f"{p.name}: {getattr(error, 'finding', error)}") from None
        except TraceError as error:
            failed = failed or error
            tried.append(", ".join(f"{k}={v}" for k, v in sizes.items()))
        if differences:
            break  # of another architecture: no size will do
    assert failed is not None
    more = f"\n  no size fits: tried {'; '.join(tried)}" if len(tried) > 1 else ""
    if differences:
        raise TraceError(f"{p.name}: the network was made for another model:{differences}\n  {failed}") from failed
    raise TraceError(f"{p.name}: {failed}{more}") from failed


def _differences(gm: TracedModule, name: str, module: nn.Module) -> str:
    """List the weights that a network and the model have under one name, in other shapes."""
    host = {key: list(value.shape) for key, value in gm.state_dict().items()}
    rows = [
        f"\n  {key} is {list(value.shape)} in '{name}' and {host[key]} in the model"
        for key, value in module.state_dict().items()
        if key in host and host[key] != list(value.shape)
    ]
    return "".join(rows[:3]) + (f"\n  ... and {len(rows) - 3} more" if len(rows) > 3 else "")


# --- into the graph


def _join(gm: TracedModule, p: Pass, modules: Mapping[str, nn.Module], sizes: Mapping[str, int]) -> TracedModule:
    tree = strip_to_container(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        _add_inputs(gm, graph, p, sizes)
    for name, module in modules.items():
        first = next(iter(graphs.values()))
        given = _Arguments(gm, first, p, name, module).bound()
        sub = trace_module(module, given.args, given.kwargs, f"network '{name}' ({type(module).__name__})")
        _place(tree, p.name, name, sub, gm.training)
        if len(sub.graphs) > len(graphs):  # the network alone tells training from evaluation
            graphs[not next(iter(graphs))] = copy_graph(first)
        for mode, graph in graphs.items():
            inner = sub.graphs.get(mode) or next(iter(sub.graphs.values()))
            bound = _Arguments(gm, graph, p, name, module).bound()
            bound.apply_defaults()
            path = f"{p.name}.{name}"
            outer = next(n for n in graph.nodes if n.op == "placeholder").meta["nn_module_stack"]
            graft = Graft(
                graph,
                path,
                path,
                {**outer, path: (path, type(module).__qualname__)},
                {"name": p.name, "site": name, "place": "network", "block": type(module).__name__, "region": True},
                edges=True,
            )
            graft.put(inner, bound.arguments)
            graph.lint()
    return gm.derived(tree, graphs)


def _place(tree: nn.Module, owner: str, name: str, sub: TracedModule, training: bool) -> None:
    if owner not in tree._modules:
        tree._modules[owner] = Container(("Added",))
        tree._modules[owner].training = training  # type: ignore[union-attr]
    tree._modules[owner]._modules[name] = strip_to_container(sub).train(training)  # type: ignore[union-attr]


def _add_inputs(gm: TracedModule, graph: Graph, p: Pass, sizes: Mapping[str, int]) -> None:
    """Add new arguments to the model, each with a check and an edge, like its own inputs."""
    dtypes = [n.meta["dtype"] for n in graph.nodes if n.op == "placeholder" and "dtype" in n.meta]
    floating = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    alone = find_bare_names(get_own_inputs(gm, p))
    for name, spec in get_own_inputs(gm, p).items():
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        called = name_input(gm, p, name)
        if called in {str(n.target).lstrip("*") for n in placeholders}:
            raise ClashError(f"{p.name}: the model has an argument '{called}' already; give the pass another name")
        last = placeholders[-1]
        rest = last if str(last.target).startswith("**") else None
        made_by = {"name": p.name}
        meta = {"pass": made_by, "nn_module_stack": placeholders[0].meta["nn_module_stack"]}
        node = insert(graph, "placeholder", called, (spec["default"],), after=last, before=rest, name=called, meta=meta)
        shape = spec["shape"] and [math.prod(f if isinstance(f, int) else sizes[f] for f in factors(s)) for s in spec["shape"]]
        dtype = floating if spec["dtype"] is None else getattr(torch, str(spec["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise SpecError(f"input '{name}': no dtype '{spec['dtype']}'; float32 or int64, for example")
        own = {str(n.target): n for n in placeholders}
        expected, text = _expected(node, p, spec, own, sizes, alone)
        like = next((n for n in placeholders if "shape" in n.meta), None)
        args = (node, called, expected, text, spec["default"] is None, None if shape is None else dtype, like)
        after = max([find_last_input(graph), *(n for n in graph.nodes if n.target in CHECKS)])
        check = insert(graph, "call_function", ops.check_added, args, after=after, meta={**meta, "effect": True})
        meta |= {"port": Port("", "in", (called,)), "index": len(placeholders), "pass": {**made_by, "region": True}}
        edge = insert(graph, "call_function", ops.edge, (check,), after=check, name=f"in_{called}", meta=meta)
        if shape is not None:
            for n in (node, check, edge):
                n.meta.update(shape=tuple(shape), dtype=dtype)


def _expected(
    node: fx.Node, p: Pass, spec: Mapping[str, Any], own: Mapping[str, fx.Node], sizes: Mapping[str, int], alone: set[str]
) -> tuple[tuple[Any, ...] | None, str]:
    """Return the sizes an input must have: numbers, None for any size, (input, dimension, factor) for sizes of another input.

    A name of those `alone` that no earlier input has may be any size; from then on this input determines it.
    """
    if spec["shape"] is None:
        return None, ""
    bound = {
        size: (own[name], dim)
        for name in p.inputs.keys() & own.keys()
        for dim, size in enumerate(p.inputs[name]["shape"] or ())
        if isinstance(size, str)
    }
    found: list[Any] = []
    for dim, size in enumerate(spec["shape"]):
        if size in alone and size not in bound:
            found.append(None)
            bound[size] = (node, dim)
            continue
        names = [f for f in factors(size) if f in bound]
        factor = math.prod(f if isinstance(f, int) else sizes[f] for f in factors(size) if f not in bound)
        if not names:
            found.append(factor)
        elif len(names) == 1:
            found.append((*bound[names[0]], factor))
        else:
            found.append(None)
    known = {k: v for k, v in sizes.items() if k not in bound}
    shown = ["*".join(str(known.get(str(f), f)) for f in factors(s)) for s in spec["shape"]]
    return tuple(found), f"[{', '.join(shown)}]"


class _Arguments:
    """What a network is called with, as values of one graph."""

    def __init__(self, gm: TracedModule, graph: Graph, p: Pass, name: str, module: nn.Module) -> None:
        self.gm, self.p, self.name, self.module = gm, p, name, module
        self.regions = Regions(graph, gm)
        self.spec = p.networks[name].get("args") or {}

    def bound(self) -> inspect.BoundArguments:
        signature = inspect.signature(self.module.forward)
        args = [self.value(item) for item in self.spec] if not isinstance(self.spec, Mapping) else []
        kwargs = {k: self.value(item) for k, item in self.spec.items()} if isinstance(self.spec, Mapping) else {}
        taken = {*kwargs, *itertools.islice(signature.parameters, len(args))}
        for name, parameter in signature.parameters.items():
            if name in taken or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            found = self.of_host(name)
            if found is not None:
                kwargs[name] = found
        try:
            return signature.bind(*args, **kwargs)
        except TypeError as error:
            kind = type(self.module).__name__
            raise SpecError(
                f"network '{self.name}' ({kind}) cannot be called: {error}; it takes {', '.join(signature.parameters)}, and "
                f"the pass gives {', '.join([*map(str, self.spec), *(k for k in kwargs if k not in self.spec)]) or 'nothing'}"
            ) from None

    def of_host(self, name: str) -> Any:
        """Return the model's own input of that name, with its members."""
        rows = [port for port, _, _ in self.regions.by_key[""].inputs if port.keys[0] == name]
        if rows:
            return self.nodes(list_member_ports(self.regions, Port("", "in", (name, WHOLE))))
        return self.regions.constants.get(name)

    def value(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return tuple(self.value(part) for part in item)
        if not isinstance(item, str):
            return item
        if item in get_own_inputs(self.gm, self.p):
            return find_source(self.regions, Port("", "in", (name_input(self.gm, self.p, item),)))
        port = parse_port(expand_address(item, self.p))
        if is_pattern(port.path):
            paths = select(port.path, self.regions.candidates(port.path))
            if not paths:
                raise MatchError(f"network '{self.name}': '{item}' matches nothing")
            return tuple(self.at(Port(path, port.side, port.keys)) for path in paths)
        return self.at(port)

    def at(self, port: Port) -> Any:
        if port.each:
            return tuple(self.at(one) for one in expand_ports(self.regions, port))
        return self.nodes(list_member_ports(self.regions, port)) if port.with_members else find_source(self.regions, port)

    def nodes(self, ports: Any) -> Any:
        if isinstance(ports, Port):
            return find_source(self.regions, ports)
        if isinstance(ports, Mapping):
            return {k: self.nodes(v) for k, v in ports.items()}
        return tuple(map(self.nodes, ports)) if isinstance(ports, tuple) else ports

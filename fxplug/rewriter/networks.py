"""What a pass brings beside its blocks: new inputs of the model, and networks traced into the same graph."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..capture.fake_tensors import quiet
from ..errors import ClashError, FxplugError, MatchError, SpecError, TraceError, did_you_mean
from ..files.reading import read_json
from ..ir import ops
from ..ir.regions import Regions, each, members, source
from ..ir.traced_module import Container, Graph, TracedModule, copy_graph, shell
from ..spec.addresses import WHOLE, Port, is_pattern, parse_port, select
from ..spec.import_path import import_target
from ..spec.rules import Pass, is_target
from .graft import Graft, head, traced

GATES = "gates"  # the network that a pass with slots brings
DEFAULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes that new tensors may have by default
TRIES = [8, 4, 2, 16, 1, 32]  # what a size that nothing binds may be: how much larger a condition is than a latent


def check_traced(gm: Any) -> None:
    """Raises SpecError for what passes cannot be applied to: a lowered module would be saved without them."""
    if not isinstance(gm, TracedModule):
        raise SpecError(f"apply takes a traced module, not {type(gm).__name__}: fxplug.trace(model, inputs) makes one")
    if "source" in gm.meta:
        raise SpecError("this module is lowered already: apply passes to what it was made from, meta['source'], and lower that")


def _with_gates(gm: TracedModule, p: Pass) -> Pass:
    """A pass with slots as one whose network `gates` says what each sample takes of them; each block gets its result.

    Raises SpecError where the pass's banks differ in their rank, or the model has no input with samples.
    """
    if not p.slots or GATES in p.networks:
        return p
    ranks = {rule.options.get("rank_max") or rule.options.get("rank", 8) for rule in p.rules}
    if len(ranks) > 1:
        raise SpecError(f"the rules of a pass with slots have one rank, not {sorted(ranks)}", where=p.where)
    rank = ranks.pop()
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise SpecError(f"{p.name}: rank_max must be a whole number, 1 or more, not {rank!r}", where=p.where)
    samples = next((str(port) for port, _, node in Regions(gm.graph, gm).by_key[""].inputs if node.meta.get("shape")), None)
    if samples is None:
        raise SpecError(f"{p.name}: no input of the model is a tensor with samples, and slots are chosen by sample")
    gates = {"use": "fxplug.blocks:Gates.of", "options": {"slots": p.slots, "rank": rank}, "args": [samples], "neutral": True}
    rules = []
    for rule in p.rules:
        part = 1 if rule.place == "param" else 0
        rules.append(replace(rule, args=(*rule.args, f"{GATES}:out[{part}]")))
    return replace(p, networks={**p.networks, GATES: gates}, rules=rules)


def joined(gm: TracedModule, p: Pass) -> tuple[TracedModule, Pass]:
    """`gm` with the inputs and networks of a pass in its graph and module tree; `gm` itself when the pass has none.

    The pass comes back with the network that its slots need. Raises SpecError, MatchError or TraceError for an input or
    network that does not fit the model.
    """
    if p.parallel:
        given = "".join(f", {key}={value!r}" for key, value in p.parallel.items() if value not in (1, None))
        raise SpecError(
            f"{p.name}: its places are found by running the model: plan = fxplug.parallel_plan(gm, args, kwargs{given}), "
            "then fxplug.parallelize(gm, plan), after the last other pass"
        )
    p = _with_gates(gm, p)
    if not p.inputs and not p.networks:
        return gm, p
    modules = {name: _module(gm, p, name, spec) for name, spec in p.networks.items()}
    failed: TraceError | None = None
    tried = []
    differences = "".join(_differences(gm, name, module) for name, module in modules.items())
    bound, free = _sizes(gm, p)
    search = _tries(free)
    deep = None
    with contextlib.suppress(StopIteration):
        while True:
            sizes = {**bound, **search.send(deep)}
            try:
                with quiet():
                    return _joined(gm, p, modules, sizes), p
            except (MatchError, SpecError) as error:
                raise type(error)(f"{p.name}: {getattr(error, 'finding', error)}") from None
            except TraceError as error:
                failed, deep = failed or error, _deep(error)
                tried.append(", ".join(f"{k}={v}" for k, v in sizes.items()))
            if differences:
                break  # of another architecture: no size will do
    assert failed is not None
    more = f"\n  no size fits; tried {'; '.join(tried)}" if len(tried) > 1 else ""
    if differences:
        raise TraceError(f"{p.name}: the network is made for another model:{differences}\n  {failed}") from failed
    raise TraceError(f"{p.name}: {failed}{more}") from failed


def _differences(gm: TracedModule, name: str, module: nn.Module) -> str:
    """The weights that a network and the model have under one name, in other shapes."""
    host = {key: list(value.shape) for key, value in gm.state_dict().items()}
    rows = [
        f"\n  {key} is {list(value.shape)} in '{name}' and {host[key]} in the model"
        for key, value in module.state_dict().items()
        if key in host and host[key] != list(value.shape)
    ]
    return "".join(rows[:3]) + (f"\n  ... and {len(rows) - 3} more" if len(rows) > 3 else "")


def input_name(gm: TracedModule, p: Pass, name: str) -> str:
    """What an input of a pass is called in the model: with the pass's name before it where another pass has the name."""
    taken = {str(n.target).lstrip("*"): n for n in gm.graph.nodes if n.op == "placeholder"}
    if name not in taken or ("pass" in taken[name].meta and taken[name].meta["pass"]["name"] == p.name):
        return name
    if "pass" not in taken[name].meta:
        return name  # one of the model's own: its description binds sizes
    return f"{p.name}_{name}"


def own_inputs(gm: TracedModule, p: Pass) -> dict[str, Any]:
    """The inputs that a pass adds, without those entries that describe the model's own."""
    taken = {str(n.target).lstrip("*") for n in gm.graph.nodes if n.op == "placeholder" and "pass" not in n.meta}
    for name, spec in p.inputs.items():
        if name in taken and spec["shape"] is None:
            raise ClashError(f"{p.name}: the model has an argument '{name}' already; give the input another name")
    return {name: spec for name, spec in p.inputs.items() if name not in taken}


# --- sizes


def _factors(size: int | str) -> list[int | str]:
    if isinstance(size, int):
        return [size]
    return [int(part) if part.isdigit() else part for part in re.split(r"\s*\*\s*", size.strip())]


def _number(factor: int | str, sizes: Mapping[str, int]) -> int:
    return sizes[factor] if isinstance(factor, str) else factor


def _sizes(gm: TracedModule, p: Pass) -> tuple[dict[str, int], dict[str, list[int]]]:
    """What the names in the shapes of a pass's inputs stand for; and what those that nothing binds may stand for."""
    own = own_inputs(gm, p)
    bound: dict[str, int] = {}
    placeholders = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
    for name in p.inputs.keys() - own.keys():
        shape, wanted = placeholders[name].meta.get("shape"), p.inputs[name]["shape"]
        if shape is None or len(shape) != len(wanted):
            found = "no tensor" if shape is None else f"of shape {list(shape)}"
            raise SpecError(f"{p.name}: the model's input '{name}' is {found}; the pass wants {wanted}")
        for size, known in zip(wanted, shape, strict=True):
            if isinstance(size, str) and size.isidentifier():
                bound[size] = int(known)
    free: dict[str, list[int]] = {}
    for spec in own.values():
        for factor in (f for size in spec["shape"] or () for f in _factors(size) if isinstance(f, str)):
            if factor not in bound:
                free.setdefault(factor, spec["try"].get(factor) or TRIES)
    return bound, free


Depth = tuple[int, ...]


def _deep(error: BaseException | None) -> Depth:
    """How far a trace came before an error: the number of the network, and of the nodes that it had written by then."""
    found: Depth = ()
    while error is not None:
        found = (*found, *getattr(error, "fxplug_at", ()))
        error = error.__cause__
    return found


def _tries(free: Mapping[str, Sequence[int]]) -> Generator[dict[str, int], Depth | None, None]:
    """Sizes to try, until one fits. Each is answered with how far the trace came.

    One name is changed at a time, and a size that leads further is kept: names that do not depend on each other take as many
    tries as they have sizes. All combinations come last, for those that do.
    """
    at = {name: values[0] for name, values in free.items()}
    seen = [at]
    best = yield at
    while best is not None:
        for name, size in ((name, size) for name, values in free.items() for size in values):
            if (one := {**at, name: size}) in seen:
                continue
            seen.append(one)
            found = yield one
            if found is not None and found > best:
                at, best = one, found
                break
        else:
            break
    for choice in itertools.product(*free.values()):
        if (one := dict(zip(free, choice, strict=True))) not in seen:
            yield one


# --- modules


def _module(gm: TracedModule, p: Pass, name: str, spec: Mapping[str, Any]) -> nn.Module:
    """The module of a network: given as such, a diffusers folder or configuration, or made from the host."""
    use, options = spec["use"], spec.get("options") or {}
    what = f"{p.name}: network '{name}'"
    if isinstance(use, nn.Module):
        return use
    if isinstance(use, Mapping) and "_class_name" in use:
        with _like(gm):
            return _kind(str(use["_class_name"]), what).from_config(dict(use))  # type: ignore[no-any-return]
    if isinstance(use, Path) or (isinstance(use, str) and not is_target(use)):
        return _from_folder(Path(use), what)
    if not isinstance(use, str):
        raise SpecError(f"{what} is a {type(use).__name__}; it can be a module, a folder, or 'package.module:function'")
    make: Any = import_target(use, p.where)
    if "." in use.partition(":")[2] and not isinstance(import_target(use.rpartition(".")[0], p.where), type):
        raise SpecError(f"{what}: '{use}' must be a function, a class or a classmethod")
    try:
        with _like(gm):
            made = make(gm, **options)
    except FxplugError as error:
        raise SpecError(f"{what}: {getattr(error, 'finding', error)}") from error
    except Exception as error:  # the network's constructor, diffusers' or anybody's
        raise SpecError(f"{what}: {use} could not make it from this model: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise SpecError(f"{what}: {use} gave a {type(made).__name__}, no nn.Module")
    return made


@contextmanager
def _like(gm: TracedModule) -> Iterator[None]:
    """New modules lie where the model does, in its dtype."""
    near = next((t for t in gm.parameters() if t.dtype in DEFAULTS), torch.empty(0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(near.dtype)
    try:
        with torch.device(near.device):
            yield
    finally:
        torch.set_default_dtype(before)


def _from_folder(folder: Path, what: str) -> nn.Module:
    folder = folder.parent if folder.name == "config.json" else folder
    if not (folder / "config.json").is_file():
        parts = sorted(f.parent.name for f in folder.glob("*/config.json"))
        hint = f"; it is a pipeline's folder: name one of its models, {', '.join(parts)}" if parts else ""
        raise SpecError(f"{what}: '{folder}' has no config.json{hint}")
    file = folder / "config.json"
    read = read_json(file, lambda finding: SpecError(f"{what}: '{file}' {finding}"))
    name = read.get("_class_name") if isinstance(read, dict) else None
    if not isinstance(name, str):
        raise SpecError(f"{what}: '{file}' is no configuration of a diffusers model: it has no '_class_name'")
    kind = _kind(name, what)
    try:
        return kind.from_pretrained(folder, local_files_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # the network's constructor, diffusers' or anybody's
        raise SpecError(f"{what}: '{folder}' cannot be read as {name}: {error}") from error


def _kind(name: str, what: str) -> Any:
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        known = [n for n in dir(diffusers) if n.endswith(("Model", "Adapter", "2D"))]
        raise SpecError(f"{what}: diffusers has no model class '{name}'{did_you_mean(name, known)}")
    return kind


# --- into the graph


def _joined(gm: TracedModule, p: Pass, modules: Mapping[str, nn.Module], sizes: Mapping[str, int]) -> TracedModule:
    tree = shell(gm)
    graphs = {mode: copy_graph(graph) for mode, graph in gm.graphs.items()}
    for graph in graphs.values():
        _add_inputs(gm, graph, p, sizes)
    for number, (name, module) in enumerate(modules.items()):
        first = next(iter(graphs.values()))
        given = _Arguments(gm, first, p, name, module).bound()
        try:
            sub = traced(module, given.args, given.kwargs, f"network '{name}' ({type(module).__name__})")
        except TraceError as error:
            error.fxplug_at = (number,)  # type: ignore[attr-defined]
            raise
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
    tree._modules[owner]._modules[name] = shell(sub).train(training)  # type: ignore[union-attr]


def _add_inputs(gm: TracedModule, graph: Graph, p: Pass, sizes: Mapping[str, int]) -> None:
    """New arguments of the model, each with a check and an edge, as its own inputs have them."""
    floating = next((n.meta["dtype"] for n in graph.nodes if n.op == "placeholder" and _floating(n)), torch.float32)
    for name, spec in own_inputs(gm, p).items():
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        called = input_name(gm, p, name)
        if called in {str(n.target).lstrip("*") for n in placeholders}:
            raise ClashError(f"{p.name}: the model has an argument '{called}' already; give the pass another name")
        last = placeholders[-1]
        place = graph.inserting_before(last) if str(last.target).startswith("**") else graph.inserting_after(last)
        with place:
            node = graph.create_node("placeholder", called, (spec["default"],), {}, name=called)
        shape = None if spec["shape"] is None else [math.prod(_number(f, sizes) for f in _factors(s)) for s in spec["shape"]]
        made_by = {"name": p.name}
        stack = placeholders[0].meta["nn_module_stack"]
        node.meta.update({"pass": made_by, "nn_module_stack": stack})
        dtype = floating if spec["dtype"] is None else getattr(torch, str(spec["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise SpecError(f"input '{name}': no dtype '{spec['dtype']}'; float32 or int64, for example")
        own = {str(n.target): n for n in placeholders}
        with graph.inserting_after(_last_check(graph)):
            expected, text = _expected(graph, p, spec, own, sizes)
            like = next((n for n in placeholders if "shape" in n.meta), None)
            args = (node, called, expected, text, spec["default"] is None, None if shape is None else dtype, like)
            check = graph.call_function(ops.check_added, args)
            check.meta.update({"pass": made_by, "nn_module_stack": stack, "effect": True})
        with graph.inserting_after(check):
            edge = graph.create_node("call_function", ops.edge, (check,), {}, name=f"in_{called}")
        edge.meta.update(port=Port("", "in", (called,)), index=len(placeholders), nn_module_stack=stack)
        edge.meta["pass"] = {**made_by, "region": True}
        if shape is not None:
            for n in (node, check, edge):
                n.meta.update(shape=tuple(shape), dtype=dtype)


def _floating(node: fx.Node) -> bool:
    return "dtype" in node.meta and node.meta["dtype"].is_floating_point


def _last_check(graph: fx.Graph) -> fx.Node:
    """The last of the nodes at a graph's head: placeholders and what looks at them."""
    last = head(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (ops.check_inputs, ops.same, ops.check_added):
            last = max(last, node)
    return last


def _expected(
    graph: Graph, p: Pass, spec: Mapping[str, Any], own: Mapping[str, fx.Node], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...] | None, str]:
    """The sizes an input must have: numbers, None where any will do, (input, dimension, factor) where another input says."""
    if spec["shape"] is None:
        return None, ""
    bound = {
        size: (own[name], dim)
        for name in p.inputs.keys() & own.keys()
        for dim, size in enumerate(p.inputs[name]["shape"] or ())
        if isinstance(size, str)
    }
    found: list[Any] = []
    for size in spec["shape"]:
        names = [f for f in _factors(size) if f in bound]
        factor = math.prod(f if isinstance(f, int) else sizes[f] for f in _factors(size) if f not in bound)
        if not names:
            found.append(factor)
        elif len(names) == 1:
            found.append((*bound[names[0]], factor))
        else:
            found.append(None)
    known = {k: v for k, v in sizes.items() if k not in bound}
    shown = ["*".join(str(known.get(str(f), f)) for f in _factors(s)) for s in spec["shape"]]
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
                f"network '{self.name}' ({kind}) cannot be called: {error}; it takes {', '.join(signature.parameters)}, and is "
                f"given {', '.join([*map(str, self.spec), *(k for k in kwargs if k not in self.spec)]) or 'nothing'}"
            ) from None

    def of_host(self, name: str) -> Any:
        """The model's own input of that name, with its members."""
        rows = [port for port, _, _ in self.regions.by_key[""].inputs if port.keys[0] == name]
        if rows:
            return self.nodes(members(self.regions, Port("", "in", (name, WHOLE))))
        return self.regions.constants.get(name)

    def value(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return tuple(self.value(part) for part in item)
        if not isinstance(item, str):
            return item
        if item in own_inputs(self.gm, self.p):
            return source(self.regions, Port("", "in", (input_name(self.gm, self.p, item),)))
        port = parse_port(local(item, self.p))
        if is_pattern(port.path):
            paths = select(port.path, self.regions.candidates(port.path))
            if not paths:
                raise MatchError(f"network '{self.name}': '{item}' matches nothing")
            return tuple(self.at(Port(path, port.side, port.keys)) for path in paths)
        return self.at(port)

    def at(self, port: Port) -> Any:
        if port.each:
            return tuple(self.at(one) for one in each(self.regions, port))
        return self.nodes(members(self.regions, port)) if port.whole else source(self.regions, port)

    def nodes(self, ports: Any) -> Any:
        if isinstance(ports, Port):
            return source(self.regions, ports)
        if isinstance(ports, Mapping):
            return {k: self.nodes(v) for k, v in ports.items()}
        return tuple(map(self.nodes, ports)) if isinstance(ports, tuple) else ports


def local(address: str, p: Pass) -> str:
    """An address with the name of one of the pass's networks in full: `cn:out[0]` is `controlnet.cn:out[0]`."""
    first = re.split(r"[.:]", address, maxsplit=1)[0]
    return f"{p.name}.{address}" if first in p.networks else address

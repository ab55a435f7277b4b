"""Passes put into a traced module, one after the other: each on a copied graph, with blocks made for each of its sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from .. import extensions, quantised
from ..capture.fake_tensors import allow_writes, pause_gc
from ..capture.isolation import forbid_mutation
from ..errors import ClashError, FxplugError, SpecError, quote
from ..ir.containers import CodeInGraph, Container
from ..ir.graph import OF_THE_ROOT, Graph, copy_graph
from ..ir.traced_module import TracedModule, check_traced, list_class_names, strip_to_container
from ..spec.pass_file import check_known, check_options, get_arguments, import_target
from ..spec.rules import GATES, Pass, Rule, is_target
from .editor import Editor
from .graft import DiffersBetweenModes, Traces
from .matcher import find
from .sites import Site, Sites, get_own_inputs, name_input


def make_block(
    tree: nn.Module, site: Site, p: Pass, owners: dict[Any, Any], weight: torch.Tensor | None
) -> tuple[str, nn.Module]:
    """Create the block of a site in the module tree; calls of one module share one, other rules and ports do not.

    Sites of one tied parameter share one as well. `weight` gives device and dtype if the site has no weights of its own.
    """
    rule = site.rule
    kind = block_class(rule)
    if rule.place == "param":
        _check_numbers(site, p)
        tied = (id(rule), id(site.parameter))
        if tied in owners:
            return owners[tied], tree.get_submodule(owners[tied])
    first = name = ".".join(filter(None, [p.name, site.name, kind.__name__]))
    owner_key = (id(rule), site.port.side, site.port.keys if not site.node else ())
    number = 2
    while owners.setdefault(name, owner_key) != owner_key:
        name, number = f"{first}_{number}", number + 1
    try:
        return name, tree.get_submodule(name)
    except AttributeError:
        pass
    try:
        _check_options(kind, rule.options)
        at: Any = getattr(kind, "at", None)
        shares = rule.carries and rule.name in owners and "beside" in get_arguments(at, 1).names
        beside = {"beside": owners[rule.name]} if shares else {}
        block = _make(kind, site, weight, beside).train(tree.training)
    except FxplugError as error:
        text = getattr(error, "finding", str(error))
        raise SpecError(f"{p.name}: {site.node or site.path or 'the model'}: {text}", where=rule.where) from error.__cause__
    except Exception as error:  # the block's, which may be the user's
        made = f"{kind.__name__}.at failed: {type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and isinstance(error.obj, Site):
            made += "; a site has x and y, whose shape is known, module, path and, with 'place: param', parameter"
        raise SpecError(f"{p.name}: {site.node or site.path or 'the model'}: {made}", where=rule.where) from error
    owner = tree
    *parents, last = name.split(".")
    for part in parents:
        if part not in owner._modules:
            owner._modules[part] = Container(("Added",))
        owner = owner._modules[part]  # type: ignore[assignment]
    owner._modules[last] = block
    if rule.place == "param":
        owners[tied] = name
    if rule.carries:
        owners[rule.name] = block
    return name, block


def _check_numbers(site: Site, p: Pass) -> None:
    """Raises SpecError for a site whose parameter is packed, or whose layer cannot be opened for another one of it."""
    if quantised.is_packed(site.parameter) or quantised.is_own_layer(site.module):
        raise SpecError(
            f"{p.name}: '{site.path}' is quantised ({quantised.describe_layer(site.module)}), so a pass with 'place: param' "
            f"cannot change its '{site.port.keys[0]}': exclude the layer, or use a pass that adds a block beside it, such as "
            "lora, ia3 or ssf",
            where=site.rule.where,
        )


def block_class(rule: Rule) -> type[nn.Module]:
    """Return the class of a rule's block. Raises SpecError if it is not a block class."""
    assert rule.use is not None
    kind = rule.use if isinstance(rule.use, type) else import_target(rule.use, rule.where)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise SpecError(f"'{rule.use}' is not a module class: a block is an nn.Module", where=rule.where)
    if not callable(getattr(kind, "at", None)):
        raise SpecError(
            f"block class '{kind.__name__}' has no classmethod 'at(site, **options)', which makes a block for a site",
            where=rule.where,
        )
    return kind


def _check_options(kind: Any, options: Mapping[str, Any]) -> None:
    at = get_arguments(kind.at, 1)
    check_options(at, options, kind.__name__, says="takes no option")
    if getattr(kind, "hands_on", False):  # to its constructor, whose other parameters the site gives
        own = get_arguments(kind)
        known = dict.fromkeys([*(name for name in own.names if name not in own.required), *at.names])
        check_known(options, known, f"{kind.__name__} takes no option")


def _make(kind: type[nn.Module], site: Site, weight: torch.Tensor | None, beside: Mapping[str, Any]) -> nn.Module:
    """Create a block on the device and, for floating-point weights, in the dtype of the weights around it."""
    near = next((t for t in site.module.parameters() if t.is_floating_point()), weight)
    device = torch.device("cpu") if near is None else near.device
    with torch.device(device), torch.random.fork_rng(enabled=False):
        block: nn.Module = kind.at(site, **site.rule.options, **beside)  # type: ignore[attr-defined]
    if near is not None:
        block.to(device)
        # a layer of bitsandbytes calculates in a dtype of its own, and gives that of its input
        given = site.x.dtype if quantised.is_own_layer(site.module) and site.x is not None else near.dtype
        dtype = given if given.is_floating_point else near.dtype
        for parameter in block.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    return block


def record(
    gm: TracedModule, p: Pass, sites: list[Site], blocks: Mapping[int, tuple[str, nn.Module]]
) -> dict[str, Any]:
    """Return a module's record of a pass: plain values, saved with it."""
    named = [(s, blocks.get(id(s), ("", None))) for s in sites]
    made_new = all(spec.get("neutral") and is_target(spec["use"]) for spec in p.networks.values())
    return {
        "name": p.name,
        "about": p.about,
        "params": _plain(dict(p.params)),
        "lr": p.lr,
        "weight_decay": p.weight_decay,
        "train": p.train,
        "neutral": made_new and not p.made_for_model and all(getattr(block, "neutral", False) for _, (_, block) in named),
        "sites": [_describe_site(site, name, block) for site, (name, block) in named],
        "slots": p.slots,
        "inputs": [name_input(gm, p, name) for name in get_own_inputs(gm, p)],
        "networks": list(p.networks),
        "rules": None if p.slots else _describe_rules(p),
    }


def _describe_site(site: Site, name: str, block: nn.Module | None) -> dict[str, Any]:
    """Return what a module's record of a pass has of one site, and of the block `name` there."""
    rule = site.rule
    found: dict[str, Any] = {"path": site.node or site.path, "place": rule.place, "block": name}
    one_call = any("@" in pattern for pattern in rule.match.patterns)
    given = tuple(arg for arg in rule.args if not str(arg).startswith(f"{GATES}:"))
    other_inputs = rule.place == "after" and given[:2] not in (("x", "y"), ("y",))
    if one_call or other_inputs:  # no adapter file has such a block
        found["apart"] = True
    mapped = str(site.port.keys[0]) if site.port.side == "param" else "weight"
    param = {} if mapped == "weight" else {"param": mapped}
    found.update(param)
    made: Any = block
    if getattr(block, "slots", 0):
        experts = bool(getattr(block, "experts", 0)) and getattr(site.module, "is_transposed", False) is True
        turned = {"transposed": True} if experts or quantised.is_transposed(site.module) else {}
        found["bank"] = {**made.bank(), **turned, **param}
    if rates := getattr(block, "rates", None):  # settings of parts with a learning rate of their own, or that are frozen
        found["rates"] = {part: dict(given) for part, given in rates.items()}
    return found


def _describe_rules(p: Pass) -> dict[str, Any] | None:
    """Return a pass as the mapping that `load_pass` reads; None if a part is no data, such as a network that is a module."""
    try:
        rules = [_describe_rule(rule) for rule in p.rules]
        return _check_plain({"rules": rules, "inputs": p.inputs, "networks": p.networks})  # type: ignore[no-any-return]
    except TypeError:
        return None


def _describe_rule(rule: Rule) -> dict[str, Any]:
    kept = ("use", "place", "port", "args", "options", "name", "combine")
    made = {key: value for key in kept if (value := getattr(rule, key)) is not None}
    if isinstance(rule.use, type):
        made["use"] = f"{rule.use.__module__}:{rule.use.__qualname__}"
    match = {key: value for key in ("path", "module", "op", "within") if (value := getattr(rule.match, key))}
    for key in ("module", "within"):
        if key in match:
            match[key] = [kind.__name__ if isinstance(kind, type) else kind for kind in match[key]]
    return {"match": match, **made, "expect": "".join(map(str, rule.expect))}


def _check_plain(value: Any) -> Any:
    """Return a value as JSON data. Raises TypeError for other types."""
    if isinstance(value, Mapping):
        return {str(key): _check_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_check_plain(item) for item in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    raise TypeError(f"a {type(value).__name__} is not data")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, (nn.Module, type)):
        return (value if isinstance(value, type) else type(value)).__name__
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def apply(gm: TracedModule, *passes: Pass | Sites) -> TracedModule:
    """Rewrite the graphs of a traced module by passes, on copies: `gm` stays as it was.

    Graph and module tree are copied, weights are shared. The passes run in the order given and each sees what the former
    left; all sites of a pass are found before any edit, or are given as `find` found them. New parameters live under
    `<pass>.<path of the site>.<BlockClass>`. Of a module that `lower` or `parallelize` has made the passes go to what it was
    made from, and that is lowered or split as before.

    It freezes nothing: `requires_grad` of the base stays as it was, where PEFT would freeze it. `fxplug.trainable(new)` is what
    names what trains.

    Args:
        gm: The traced module.
        *passes: Passes, or their sites as `find` gave them. They run in this order and each sees what the former left; all
            sites of a pass are found before any edit.

    Returns:
        The rewritten module, which shares all weights of `gm`.

    Raises:
        MatchError: A rule has no place, or another number than it expects; with the pass's file and line, as all of these.
            Nothing is changed then.
        ClashError: Two passes want one place, or a pass is applied twice.
        SpecError: A block cannot be made, or what was given is no pass.
    """
    check_traced(gm, "apply")
    derivation = extensions.get_derivation(gm)
    if derivation is not None and not (derivation.takes_marks and all(map(_only_marks, passes))):
        return derivation.rebuild(gm, lambda source: apply(source, *passes))
    with pause_gc(), allow_writes():
        for p in passes:
            gm = _apply(gm, p)
            (p.p if isinstance(p, Sites) else p).fill(gm)
    return gm


def _apply(gm: TracedModule, given: Pass | Sites) -> TracedModule:
    if isinstance(given, Sites):
        given.check(gm)
    elif not isinstance(given, Pass):
        raise SpecError(
            f"apply takes passes, or sites as find gave them, not {quote(given)}: fxplug.load_pass reads a pass; to leave "
            "sites out, change the list itself: sites[:] = [...]"
        )
    p = given.p if isinstance(given, Sites) else given
    applied = gm.meta.get("passes", [])
    if p.name in {entry["name"] for entry in applied}:
        raise ClashError(
            f"pass '{p.name}' is already applied here; give the second one a name of its own (name: {p.name}_2) "
            "if both are wanted"
        )
    taken = p.name in OF_THE_ROOT or p.name in vars(gm) or hasattr(type(gm), p.name)
    if taken or p.name in dict(gm.named_children()) or (p.slots and p.name == "adapters"):
        raise ClashError(
            f"the model has a module, method or attribute '{p.name}' of its own; give the pass another name (name: ...)"
        )
    sites = given if isinstance(given, Sites) else find(gm, given)
    host, gm, p = gm, sites.joined, sites.p
    tree = strip_to_container(gm)
    owners: dict[Any, Any] = {}
    first = next((t for t in gm.parameters() if t.is_floating_point()), None)
    # in the order of the model's modules, as other libraries make theirs: one seed draws the same weights
    order = {name: index for index, (name, _) in enumerate(gm.named_modules(remove_duplicate=False))}
    made = sorted(sites, key=lambda site: order.get(site.path.partition("@")[0], len(order)))
    with _forbid_model_mutation(gm, p, sites):
        blocks = {id(site): make_block(tree, site, p, owners, first) for site in made if site.rule.use is not None}
        modes, traces = dict(gm.graphs), Traces()
        try:
            graphs = _edited(modes, tree, gm, p, traces, sites, blocks)
        except DiffersBetweenModes:  # what is put in tells training from evaluation, which the model itself does not
            one = next(iter(modes.values()))
            graphs = _edited({True: one, False: one}, tree, gm, p, traces, sites, blocks)
    new = gm.derived(tree, graphs, passes=[*applied, record(gm, p, sites, blocks)])
    left = {(str(site.port), site.node) for site in sites} if isinstance(given, Sites) else None
    return new.made_by(partial(_apply_to_variant, p, left), host)


def _only_marks(given: Any) -> bool:
    """Return whether a pass inserts only marks for a step cache."""
    rules = getattr(getattr(given, "p", given), "rules", [])
    return bool(rules) and all(r.use is not None and getattr(block_class(r), "is_mark", False) is True for r in rules)


def _apply_to_variant(p: Pass, left: set[tuple[str, str]] | None, gm: TracedModule) -> TracedModule:
    """Apply the same pass to another graph of the model, at the same places. Raises MatchError."""
    sites = find(gm, p)
    if left is not None:
        sites[:] = [site for site in sites if (str(site.port), site.node) in left]
    return _apply(gm, sites)


@contextmanager
def _forbid_model_mutation(gm: TracedModule, p: Pass, sites: list[Site]) -> Iterator[None]:
    """Let blocks look at the model while they are made. Raises SpecError for what they do to it, which is taken back."""
    kinds = dict.fromkeys(block_class(site.rule) for site in sites if site.rule.use is not None)
    if all(kind.__module__.startswith("fxplug.blocks.") for kind in kinds):
        yield
        return
    who = f"{p.name}: {', '.join(kind.__name__ for kind in kinds)}"
    try:
        with forbid_mutation(gm, who, sites[0].rule.where) as before, before:
            yield
    except Exception as error:  # a block's, which may be the user's
        if (called := _called(error)) is None:
            raise
        path = next((k for k, m in gm.named_modules() if m is called), None)
        paths = [path] if path is not None else [k for k, m in gm.named_modules() if list_class_names(m) == called.classes][:3]
        raise SpecError(
            f"{p.name}: a block calls {called.classes[0]}{' (' + paths[0] + ')' if paths else ''}, a part of the model whose "
            f"code is in the graph: keep that part whole when the model is traced, leaf: {paths or '[its path]'}",
            where=sites[0].rule.where,
        ) from error


def _called(error: BaseException | None) -> Container | None:
    """Return the part of a traced model whose call caused an error, or None."""
    while error is not None and not isinstance(error, CodeInGraph):
        error = error.__cause__ or error.__context__
    return error.module if error is not None else None


def _edited(
    modes: Mapping[bool, fx.Graph],
    tree: nn.Module,
    gm: TracedModule,
    p: Pass,
    traces: Traces,
    sites: list[Site],
    blocks: Mapping[int, tuple[str, nn.Module]],
) -> dict[bool, Graph]:
    graphs = {mode: copy_graph(graph) for mode, graph in modes.items()}
    for mode, graph in graphs.items():
        Editor(graph, mode, len(graphs), tree, gm, p, traces).run(sites, blocks)
    return graphs

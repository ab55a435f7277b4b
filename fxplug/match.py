"""Which places of a graph a pass acts on: regions, their ports, and the sites of a rule. Reads graphs, changes none."""

from __future__ import annotations

import difflib
import inspect
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import fx, nn

from . import ops, targets
from .errors import ClashError, MatchError, did_you_mean
from .module import TracedModule, class_names
from .paths import Port, identifier, is_pattern, parse_port, select
from .spec import Match, Pass, Rule

SHOWN = 5  # so many examples are listed in a message


@dataclass(frozen=True)
class Value:
    """A value that a block will be given: its address, and what it was when traced."""

    address: str
    shape: tuple[int, ...] = ()
    dtype: Any = None

    def __str__(self) -> str:
        return f"{self.address} {list(self.shape)}"


@dataclass(frozen=True)
class Site:
    """A place where one rule will act.

    `path` is the region (`blocks.0.attn`, `path@1` for a second call), `module` its module or what stands for it, `caught`
    what `{i}` was, `port` the value that is changed, `args` the values the block is called with; `x` and `y` are the
    region's first argument and its result, None where the region has none or several.
    """

    path: str
    module: nn.Module = field(repr=False)
    classes: tuple[str, ...]
    caught: Mapping[str, str]
    rule: Rule = field(repr=False)
    pass_name: str
    port: Port
    args: tuple[Value, ...]
    x: Value | None = None
    y: Value | None = None
    node: str = ""  # the node, where the rule matches an operation

    @property
    def name(self) -> str:
        """Where the block's parameters live, below the name of the pass."""
        # a call of its own block only where the rule asked for that call, else all calls of a module share one
        own = any("@" in pattern for pattern in self.rule.match.patterns)
        path = self.path.replace("@", "_call") if own else self.path.partition("@")[0]
        operation = self.node.removeprefix(identifier(self.path)).strip("_") if self.node else ""
        return ".".join(filter(None, [path, operation]))

    def __str__(self) -> str:
        shape = f"{list(self.x.shape) if self.x else '?'} -> {list(self.y.shape) if self.y else '?'}"
        caught = "  " + ", ".join(f"{k}={v}" for k, v in self.caught.items()) if self.caught else ""
        return f"{self.node or self.path or '(model)'}  {self.classes[0]}  {shape}{caught}"


@dataclass
class Region:
    """One call of one module in one graph: the nodes at its edges."""

    key: str
    leaf: fx.Node | None = None
    inputs: list[tuple[Port, int, fx.Node]] = field(default_factory=list)
    outputs: list[tuple[Port, fx.Node]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.key.partition("@")[0]


class Regions:
    """The regions of one graph in the order they ran, found in one walk."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self._classes: dict[str, tuple[str, ...]] = {}
        self._passes = {entry["name"] for entry in getattr(root, "meta", {}).get("passes", [])}
        self.by_key: dict[str, Region] = {"": Region("")}
        for node in graph.nodes:
            if "pass" in node.meta:
                continue
            stack = node.meta.get("nn_module_stack")
            if not stack:
                continue
            key = next(reversed(stack))
            port = node.meta.get("port")
            region = self.region(port.path if port is not None else key)
            if node.op == "call_module" and port is not None:
                region.leaf = node
            elif port is not None and port.side == "in":
                region.inputs.append((port, node.meta["index"], node))
            elif port is not None:
                region.outputs.append((port, node))
            elif node.op in ("call_function", "call_method") and getattr(node.target, "__module__", "") != ops.__name__:
                region.nodes.append(node)

    def region(self, key: str) -> Region:
        if key not in self.by_key:
            self.by_key[key] = Region(key)
        return self.by_key[key]

    def in_ports(self, region: Region) -> list[tuple[Port, int, fx.Node]]:
        """The tensors that enter a region: their ports, the position of the argument, and the node that reads it."""
        if region.leaf is None:
            return region.inputs
        names = _argument_names(self.root.get_submodule(region.path))
        found = []
        for index, value in enumerate([*region.leaf.args, *region.leaf.kwargs.values()]):
            positional = index < len(region.leaf.args)
            keyword = None if positional else list(region.leaf.kwargs)[index - len(region.leaf.args)]
            name = keyword or (names[index] if index < len(names) else f"arg{index}")
            if isinstance(value, fx.Node) and "shape" in value.meta:
                found.append((Port(region.key, "in", (name,)), index, region.leaf))
        return found

    def out_ports(self, region: Region) -> list[tuple[Port, fx.Node]]:
        """The tensors that leave a region: their ports and nodes."""
        if region.leaf is None:
            return region.outputs
        if "shape" in region.leaf.meta:
            return [(Port(region.key, "out"), region.leaf)]
        return list(_members(region.leaf, region.key, ()))

    @cached_property
    def ran(self) -> list[str]:
        """Every region that ran, without the model itself."""
        return [key for key in self.by_key if key]

    def classes(self, path: str) -> tuple[str, ...]:
        """The names of a module's class and of its bases."""
        if path not in self._classes:
            self._classes[path] = class_names(self.root.get_submodule(path))
        return self._classes[path]

    def inserted(self, path: str) -> bool:
        """Whether a pass put this module in."""
        return path.partition(".")[0] in self._passes


def _members(node: fx.Node, key: str, keys: tuple[int | str, ...]) -> Iterator[tuple[Port, fx.Node]]:
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem and user.args[0] is node:
            inner = (*keys, user.args[1])
            if "shape" in user.meta:
                yield Port(key, "out", inner), user  # type: ignore[arg-type]
            else:
                yield from _members(user, key, inner)  # type: ignore[arg-type]


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def source(regions: Regions, port: Port) -> fx.Node:
    """The node whose value is at a port. Raises MatchError that names what ports there are."""
    region = regions.by_key.get(port.path)
    if region is None:
        raise MatchError(_no_region(regions, port.path))
    if port.side == "param":
        raise MatchError(f"'{port}': parameters are read by 'place: param' only")
    if port.side == "in":
        hit = find_input(regions, region, port)
        return input_value(hit, region)
    return find_output(regions, region, port)


def find_input(regions: Regions, region: Region, port: Port) -> tuple[Port, int, fx.Node]:
    """The input that `in`, `in[1]` or `in.name` means; without a key the first tensor."""
    ports = regions.in_ports(region)
    if not ports:
        raise MatchError(f"'{region.key or 'the model'}' takes no tensor, so it has no '{port}'")
    if not port.keys:
        return ports[0]
    head, rest = port.keys[0], port.keys[1:]
    for found in ports:
        if (found[1] == head if isinstance(head, int) else found[0].keys[0] == head) and found[0].keys[1:] == rest:
            return found
    listed = ", ".join(f"'{found[0]}'" for found in ports)
    raise MatchError(f"'{port}' is no input of '{region.key or 'the model'}'; there are {listed}")


def find_output(regions: Regions, region: Region, port: Port) -> fx.Node:
    ports = regions.out_ports(region)
    if not ports:
        raise MatchError(f"'{region.key or 'the model'}' returns no tensor, so it has no '{port}'")
    for found, node in ports:
        if found.keys == port.keys:
            return node
    listed = ", ".join(f"'{found}'" for found, _ in ports)
    raise MatchError(f"'{region.key or 'the model'}' has no single result '{port}'; there are {listed}: name one")


def input_value(found: tuple[Port, int, fx.Node], region: Region) -> fx.Node:
    port, index, node = found
    if region.leaf is None:
        return node
    value = [*node.args, *node.kwargs.values()][index]
    assert isinstance(value, fx.Node)
    return value


def find(gm: TracedModule, p: Pass) -> list[Site]:
    """Every site of a pass on a traced module, rule by rule in the order the regions ran. Changes nothing.

    Raises MatchError when a rule matches another number of places than it expects, with the nearest misses; ClashError
    when two rules of the pass want the same place; SpecError for an address that cannot be read.
    """
    views = [Regions(graph, gm) for graph in gm.graphs.values()]
    sites: list[Site] = []
    for rule in p.rules:
        found: dict[tuple[str, str], Site] = {}
        by_mode = [_Finder(regions, p, rule).sites() for regions in views]
        for site in chain(*by_mode):
            found.setdefault((str(site.port), site.node), site)
        counts = [Counter(site.path for site in here if site.node) for here in by_mode]
        for path in counts[0].keys() & counts[-1].keys():
            if counts[0][path] != counts[-1][path]:
                raise MatchError(
                    f"{_at(rule, p.name)}'{path or 'the model'}' has other such operations in training than in evaluation "
                    f"({counts[0][path]} and {counts[-1][path]}), so they cannot be told apart: match a module instead"
                )
        if not rule.admits(len(found)):
            raise MatchError(_wrong_count(views[0], p, rule, list(found.values())))
        sites.extend(found.values())
    _clashes(sites)
    return sites


@dataclass
class Hit:
    """A region that a match admits: what its path caught, the port that the pattern names, and which pattern it was."""

    key: str
    caught: dict[str, str]
    port: Port
    pattern: int


def hits(regions: Regions, match: Match) -> list[Hit]:
    """The regions that a match admits, in the order of its patterns and of the run. `op` is not looked at."""
    found: dict[tuple[str, Port], Hit] = {}
    for number, pattern in enumerate(match.patterns):
        port = parse_port(pattern)
        by_call = "@" in port.path
        names = {k: k if by_call else regions.by_key[k].path for k in regions.ran}
        if match.op and port.path == "**":
            names = {"": "", **names}  # the model's own operations
        caught = select(port.path, dict.fromkeys(names.values())) if port.path else {}
        if not port.path:
            names, caught = {"": ""}, {"": {}}
        for key, name in names.items():
            if name in caught and _is_a(regions, name, match.module):
                found.setdefault((key, port), Hit(key, caught[name], replace(port, path=key), number))
    return list(found.values())


def _is_a(regions: Regions, name: str, classes: Sequence[str | type]) -> bool:
    known = regions.classes(name.partition("@")[0])
    return not classes or any((c if isinstance(c, str) else c.__name__) in known for c in classes)


def operations(region: Region, match: Match) -> list[fx.Node]:
    """The operations of a region that `op` names: by short name, as function or method, or by public name."""
    wanted = {op if isinstance(op, str) else targets.short_name(op) for op in match.op or ()}
    return [n for n in region.nodes if targets.short_name(n.target) in wanted or targets.names().get(n.target) in wanted]


class _Finder:
    """The sites of one rule in one graph."""

    def __init__(self, regions: Regions, p: Pass, rule: Rule) -> None:
        self.regions = regions
        self.rule = rule
        self.pass_name = p.name
        self.given = {*p.inputs, *(r.name for r in p.rules if r.name)}
        self.hits = hits(regions, rule.match)

    def sites(self) -> list[Site]:
        try:
            paired = self.paired()
            found = []
            for order, hit in enumerate(self.hits):
                region = self.regions.by_key[hit.key]
                if self.rule.match.op:
                    found += [self.site(hit, order, paired, node) for node in operations(region, self.rule.match)]
                elif region.leaf is not None or region.inputs or region.outputs:
                    found.append(self.site(hit, order, paired, None))
            return found
        except MatchError as error:
            raise MatchError(f"{_at(self.rule, self.pass_name)}{error}") from None

    def site(self, hit: Hit, order: int, paired: dict[int, list[str]], node: fx.Node | None) -> Site:
        before = self.rule.place == "before"
        if node is not None:
            x = next((a for a in node.all_input_nodes if "shape" in a.meta), None)
            port = Port(hit.key, "in" if before else "out", (node.name,))
            values = {"x": _value("x", x), "y": _value("y", node)}
        else:
            port = self.port(hit)
            values = {side: self.edge(hit.key, side, port) for side in ("x", "y")}
        values["value"] = values["x" if before else "y"]
        path = self.regions.by_key[hit.key].path
        return Site(
            path=hit.key,
            module=self.regions.root.get_submodule(path),
            classes=self.regions.classes(path),
            caught=dict(hit.caught),
            rule=self.rule,
            pass_name=self.pass_name,
            port=port,
            args=tuple(self.argument(hit, i, order, paired, values) for i in range(len(self.rule.args))),
            x=values["x"],
            y=values["y"],
            node=node.name if node is not None else "",
        )

    def port(self, hit: Hit) -> Port:
        """The value that the rule changes: what its pattern names, else the first input or the result."""
        side = "in" if self.rule.place == "before" else "out"
        named = ":" in self.rule.match.patterns[hit.pattern].removeprefix("re:")
        if named and hit.port.side != side:
            place = "before" if hit.port.side == "in" else "after"
            raise MatchError(
                f"'{hit.port}' is the {hit.port.side}put of a region, which place '{self.rule.place}' does not change; "
                f"write place: {place}"
            )
        wanted = replace(hit.port, side=side)
        if side == "in":
            return find_input(self.regions, self.regions.by_key[hit.key], wanted)[0]
        find_output(self.regions, self.regions.by_key[hit.key], wanted)
        return wanted

    def edge(self, key: str, name: str, port: Port) -> Value | None:
        """x or y of a region: the port that is changed, else its first input and its only result, if there is one."""
        side = "in" if name == "x" else "out"
        chosen = port if port.side == side else Port(key, side)
        try:
            return _value(str(chosen), source(self.regions, chosen))
        except MatchError:
            return None

    def argument(
        self, hit: Hit, index: int, order: int, paired: dict[int, list[str]], values: dict[str, Value | None]
    ) -> Value:
        item = self.rule.args[index]
        text = item[hit.pattern] if isinstance(item, tuple) else item
        if text in values:
            value = values[text]
            if value is None:
                raise MatchError(f"'{hit.key}' has no single tensor '{text}'; name a port, such as '{hit.key}:out[0]'")
            return value
        if text in self.given or fill(text, hit.caught) in {fill(g, hit.caught) for g in self.given}:
            return Value(fill(text, hit.caught))
        address = paired[index][order] if index in paired else fill(text, hit.caught)
        found = _value(address, source(self.regions, parse_port(address)))
        assert found is not None
        return found

    def paired(self) -> dict[int, list[str]]:
        """Arguments that are patterns of their own: the regions they match, which pair with the sites by order."""
        named = {name for pattern in self.rule.match.patterns for name in NAMES.findall(pattern)}
        found: dict[int, list[str]] = {}
        for index, item in enumerate(self.rule.args):
            if not isinstance(item, str) or item in ("x", "y", "value") or item in self.given:
                continue
            if not item.startswith("re:") and "*" not in item and set(NAMES.findall(item)) <= named:
                continue
            port = parse_port(item)
            found[index] = [str(replace(port, path=path)) for path in select(port.path, self.regions.ran)]
            if len(found[index]) != len(self.hits):
                raise MatchError(
                    f"'{item}' is {len(found[index])} places and '{self.rule.match.path}' is {len(self.hits)}; they are "
                    f"paired by order, so there must be as many\n  from: {_list(found[index])}\n"
                    f"  to:   {_list([h.key for h in self.hits])}"
                )
        return found


NAMES = re.compile(r"\{(\w+)\}")


def fill(text: str, caught: Mapping[str, str]) -> str:
    """`text` with each `{i}` replaced by what was caught."""
    return NAMES.sub(lambda found: caught.get(found[1], found[0]), text)


def _value(address: str, node: fx.Node | None) -> Value | None:
    return None if node is None else Value(address, tuple(node.meta.get("shape", ())), node.meta.get("dtype"))


def _list(items: Sequence[str]) -> str:
    shown = ", ".join(items[: 2 * SHOWN])
    return shown + (f", ... ({len(items)})" if len(items) > 2 * SHOWN else "") if items else "none"


def _clashes(sites: Sequence[Site]) -> None:
    taken: dict[tuple[str, str], Site] = {}
    gone = {site.path: site for site in sites if site.rule.place == "replace"}
    for site in sites:
        first, parts = taken.setdefault((str(site.port), site.node), site), site.path.split(".")
        around = (".".join(parts[:n]) for n in range(1, len(parts) + (site.rule.place != "replace")))
        clash = first if first is not site else next((gone[path] for path in around if path in gone), None)
        if clash is not None:
            lines = " and ".join(dict.fromkeys(str(s.rule.where) for s in (clash, site) if str(s.rule.where)))
            here = f"{site.rule.place} '{site.node or site.port}'"
            what = f"one rule replaces '{clash.path}' and another puts a block {here}"
            if clash.rule.place == site.rule.place and clash.path == site.path:
                what = f"two rules put a block {here}"
            raise ClashError(f"{site.pass_name}: {what}{f' ({lines})' if lines else ''}; narrow one of them")


# --- why nothing matched


def _at(rule: Rule, name: str) -> str:
    return f"{rule.where}: {name}: " if str(rule.where) else f"{name}: "


def _no_region(regions: Regions, path: str) -> str:
    modules = dict(regions.root.named_modules(remove_duplicate=False))
    if path in modules and not regions.inserted(path):
        for name, place in _replaced(regions.root):
            if f"{path}.".startswith(f"{place}."):
                return f"'{path}' is gone: pass '{name}' replaced '{place}'"
        inner = [k for k in regions.ran if k.startswith(f"{path}.")]
        inside = f"; regions inside it: {_list(inner)}" if inner else ""
        return f"'{path}' ({class_names(modules[path])[0]}) is never called by the model, so it is no region{inside}"
    return f"no region '{path}'{did_you_mean(path, regions.ran)}"


def _replaced(root: nn.Module) -> Iterator[tuple[str, str]]:
    for entry in getattr(root, "meta", {}).get("passes", []):
        yield from ((entry["name"], s["path"].partition("@")[0]) for s in entry["sites"] if s["place"] == "replace")


def _wrong_count(regions: Regions, p: Pass, rule: Rule, found: list[Site]) -> str:
    match = rule.match
    what = f"'{match.path}'" if isinstance(match.path, str) else str(list(match.path))
    op, count = rule.expect
    head = f"{_at(rule, p.name)}{what} matched {len(found)} place{'s' * (len(found) != 1)}, expected {op}{count}"
    if found:
        more = [f"  ... {len(found) - 2 * SHOWN} more"] if len(found) > 2 * SHOWN else []
        return "\n".join([head, *(f"  {s.node or s.path}" for s in found[: 2 * SHOWN]), *more])
    return "\n".join([head, *_misses(regions, match)])


def _misses(regions: Regions, match: Match) -> list[str]:
    """Which condition failed, and what comes nearest."""
    by_path = [h.key for h in hits(regions, Match(match.path))]
    by_class = [h.key for h in hits(regions, Match("**", match.module))] if match.module else []
    if match.module and not by_class:
        classes = sorted({regions.classes(regions.by_key[k].path)[0] for k in regions.ran})
        wanted = [c if isinstance(c, str) else c.__name__ for c in match.module]
        hint = "".join(did_you_mean(w, classes) for w in wanted)
        return [f"  nothing here is a {' or '.join(wanted)}{hint}; the classes here are {', '.join(classes)}"]
    if not by_path:
        return [line for pattern in match.patterns for line in _near_paths(regions, pattern, by_class)]
    if match.module and not set(by_path) & set(by_class):
        rows = [f"    {k} ({regions.classes(regions.by_key[k].path)[0]})" for k in by_path[:SHOWN]]
        what = f"  the class is what fails: {len(by_path)} place{'s' * (len(by_path) != 1)} meet the path, for example"
        return [what, *rows, f"  of the wanted class there are: {_list(by_class)}"]
    everywhere = [n for r in regions.by_key.values() for n in operations(r, match)]
    if everywhere:
        return [f"  the path is what fails: the operation is found at {_list([n.name for n in everywhere])}"]
    known = sorted({targets.short_name(n.target) for r in regions.by_key.values() for n in r.nodes})
    names = [op if isinstance(op, str) else targets.short_name(op) for op in match.op or ()]
    return [f"  no operation {', '.join(names)} here{did_you_mean(names[0], known)}; there are {', '.join(known)}"]


def _near_paths(regions: Regions, pattern: str, by_class: list[str]) -> list[str]:
    path = parse_port(pattern).path
    if not is_pattern(path):
        return [f"  {_no_region(regions, path)}"]
    modules = [name for name, _ in regions.root.named_modules(remove_duplicate=False)]
    uncalled = list(select(path, [m for m in modules if m and not regions.inserted(m)]))
    if uncalled:
        return [f"  {_no_region(regions, uncalled[0])}"]
    pool = by_class or regions.ran
    near = difflib.get_close_matches(path.removeprefix("re:"), pool, n=SHOWN, cutoff=0.0)
    why = f"the path is what fails: {len(pool)} places meet the other conditions" if by_class else f"{len(pool)} regions ran"
    return [f"  {why}, for example", *(f"    {k}" for k in near)]

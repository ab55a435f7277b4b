"""Where a pass acts on a graph: the sites of its rules, all found before any edit. Reads graphs, changes none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from torch import fx

from ..errors import ClashError, MatchError, SpecError
from ..ir.regions import (
    Regions,
    expand_ports,
    find_input,
    find_member,
    find_operand,
    find_output,
    find_regions,
    find_source,
    format_names,
    list_operands,
)
from ..ir.regions import list_member_ports as port_members
from ..ir.traced_module import TracedModule
from ..spec.addresses import SLICE, WHOLE, Port, compile_pattern, expand_names, is_pattern, parse_port, parse_relative, select
from ..spec.rules import Pass, Rule
from .matches import (
    Hit,
    find_composites,
    find_hits,
    find_operations,
    format_prefix,
    is_a,
    is_exact,
    select_parameters,
    without_classes,
)
from .sites import Site, Sites, Value, expand_address, get_own_inputs, list_ports, map_ports, name_input


def find(gm: TracedModule, p: Pass) -> Sites:
    """List every site of a pass on a traced module, rule by rule in the order the regions ran.

    Nothing is changed.

    Args:
        gm: The traced module.
        p: The pass.

    Returns:
        The sites: a list that `apply` takes in the place of the pass, and that prints as a table.

    Raises:
        MatchError: A rule matches another number of places than it expects; with the nearest misses.
        ClashError: Two rules of the pass want the same place.
        SpecError: An address cannot be read, or the module is outlined.
    """
    if "regions" in gm.meta:
        finding = "this module has regions as modules of their own"
        raise SpecError(f"{finding}: apply passes to the one it was made from, and outline that")
    host, p = gm, p.for_model(gm)
    if p.inputs or p.networks or p.slots:
        from .networks import join

        gm, p = join(gm, p)
    if find_composites(gm):
        from .opening import open_for

        gm = open_for(gm, p)
    views = find_regions(gm)
    sites: list[Site] = []
    for rule in p.rules:
        found: dict[tuple[str, str], Site] = {}
        by_mode = [_Finder(regions, gm, p, rule).sites() for regions in views]
        for site in chain(*by_mode):
            found.setdefault((str(site.port), site.node), site)
        counts = [Counter(site.path for site in here if site.node) for here in by_mode]
        for path in counts[0].keys() & counts[-1].keys():
            if counts[0][path] != counts[-1][path]:
                raise MatchError(
                    f"{format_prefix(rule, p.name)}'{path or 'the model'}' has a different number of these operations in "
                    f"training and in evaluation ({counts[0][path]} and {counts[-1][path]}), so they cannot be matched: match "
                    "a module instead"
                )
        if not rule.admits(len(found)) and not (p.expect is not None and not rule.counted):
            from .near_misses import describe_count

            raise MatchError(describe_count(views[0], p, rule, list(found.values())))
        if found and not rule.admits(0) and not (p.expect is not None and p.admits(0)):
            _check_each(gm, p, rule)
        sites.extend(found.values())
    if not p.admits(len(sites)):
        from .near_misses import describe_total

        raise MatchError(describe_total(views[0], p, sites))
    _clashes(sites)
    return Sites(sites, host, gm, p)


@dataclass(frozen=True)
class _Place:
    """One value that a rule changes, before its arguments are known."""

    hit: Hit
    port: Port
    node: fx.Node | None = None


class _Finder:
    """The sites of one rule in one graph."""

    def __init__(self, regions: Regions, gm: TracedModule, p: Pass, rule: Rule) -> None:
        if rule.place == "param":
            read = (name.rpartition(".")[0] for name in regions.readers)
            if unread := [path for path in dict.fromkeys(read) if path not in regions.calls]:
                regions = regions.with_modules(unread)  # whose weights other code reads
        self.regions = regions
        self.rule = rule
        self.p = p
        self.inputs = {name: name_input(gm, p, name) for name in get_own_inputs(gm, p)}
        self.kept = {r.name for r in p.rules if r.name}

    def sites(self) -> list[Site]:
        try:
            found = find_hits(self.regions, without_classes(self.rule.match))
            places = [place for hit in found for place in self.places(hit)]
            if any(parse.each for parse in map(self.wanted, places)):
                places.sort(key=lambda place: self.order(place.port))
            paired = self.paired(places)
            return [self.site(place, order, paired) for order, place in enumerate(places)]
        except MatchError as error:
            raise MatchError(f"{format_prefix(self.rule, self.p.name)}{error}") from None

    # --- the values that are changed

    def wanted(self, place: _Place) -> Port:
        return self.named(place.hit) if self.rule.place != "param" and place.node is None else place.port

    def places(self, hit: Hit) -> list[_Place]:
        region = self.regions.by_key[hit.key]
        before = self.rule.place == "before"
        if self.rule.match.op:
            return [self.at_operation(hit, node, before) for node in find_operations(region, self.rule.match)]
        if self.rule.place == "param":
            return [_Place(hit, port) for port in self.parameters(hit)]
        if region.leaf is None and not region.inputs and not region.outputs:
            return []
        port = self.named(hit)
        if port.each:
            return [_Place(hit, one) for one in expand_ports(self.regions, port)]
        if port.with_members:
            port_members(self.regions, port)
            return [_Place(hit, port)]
        if port.side == "in":
            return [_Place(hit, find_input(self.regions, region, port)[0])]
        find_output(self.regions, region, port)
        return [_Place(hit, port)]

    def at_operation(self, hit: Hit, node: fx.Node, before: bool) -> _Place:
        """Return the tensor that an operation reads, or the result or member of it, that the rule's `port` names."""
        relative = parse_relative(self.rule.port or ("x" if before else "y"), hit.key)
        assert relative is not None
        if before:
            find_operand(node, relative)
        else:
            find_member(node, relative)
        return _Place(hit, replace(relative, keys=(node.name, *relative.keys)), node)

    def named(self, hit: Hit) -> Port:
        """Return the port that a rule names in its path or as its `port`; else the first input or the result."""
        side = "in" if self.rule.place == "before" else "out"
        pattern = self.rule.match.patterns[hit.pattern]
        named = parse_port(pattern)
        explicit = bool(named.keys) or named.side != "out" or pattern.endswith(":out")
        if explicit and hit.port.side != side:
            place = {"in": "before", "out": "after"}.get(hit.port.side, "param")
            kind = {"in": "the input", "out": "the output"}.get(hit.port.side, "a parameter")
            raise MatchError(
                f"'{hit.port}' is {kind} of a region, which place '{self.rule.place}' does not change; write place: {place}"
            )
        relative = parse_relative(self.rule.port, hit.key) if self.rule.port else None
        return relative or replace(hit.port, side=side)

    def parameters(self, hit: Hit) -> list[Port]:
        path = self.regions.by_key[hit.key].path
        named = hit.port.side == "param"
        if not named and ":" in self.rule.match.patterns[hit.pattern].removeprefix("re:").partition("{")[0]:
            raise MatchError(f"'{hit.port}' is not a parameter; write '{path}:param.weight', or only the path and a port")
        if len(hit.port.keys) > 1:
            raise MatchError(f"'{hit.port}' must be one name of a parameter, such as '{path}:param.weight'")
        pattern = str(hit.port.keys[0]) if named and hit.port.keys else self.rule.port or "weight"
        names = select_parameters(self.regions, path, self.rule.match, pattern)
        there = self.regions.parameters(path, "*")
        of_class, of_that_name = is_a(self.regions, path, self.rule.match.module), self.regions.parameters(path, pattern)
        if not names and is_exact(self.rule.match, path, hit.key) and (of_class or (there and not of_that_name)):
            raise MatchError(
                f"'{path or 'the model'}' ({self.regions.classes(path)[0]}) has no parameter '{pattern}'; "
                f"it has {', '.join(there) or 'none of its own'}"
            )
        read = self.regions.by_key[hit.key].leaf is not None
        found = [n for n in names if read or find_reads(self.regions, path, n, mapped=True)]
        if names and not found and is_exact(self.rule.match, path, hit.key):
            raise MatchError(f"the model never reads '{path}.{names[0]}', so the pass would have no effect")
        return [Port(path, "param", (name,)) for name in found]

    def order(self, port: Port) -> fx.Node:
        """Return the node that computes the value at a port: nodes compare by their position in the graph."""
        node = find_source(self.regions, port if not port.with_members else list_ports(port_members(self.regions, port))[0][1])
        region = self.regions.by_key[port.path]
        if port.side == "in" and region.leaf is None:
            given = node.args[0]
            assert isinstance(given, fx.Node)
            return given
        return node

    # --- sites

    def site(self, place: _Place, order: int, paired: dict[int, list[str]]) -> Site:
        hit, port, node = place.hit, place.port, place.node
        path = self.regions.by_key[hit.key].path
        module = self.regions.module(path)
        values = self.edges(hit.key, port) if node is None else self.at_node(node, replace(port, keys=port.keys[1:]))
        if port.side == "param":
            parameter = module._parameters[str(port.keys[0])]
            assert parameter is not None
            values["value"] = Value(str(port), tuple(parameter.shape), parameter.dtype, kind="changed")
        return Site(
            path=hit.key,
            module=module,
            classes=self.regions.classes(path),
            caught=dict(hit.caught),
            rule=self.rule,
            pass_name=self.p.name,
            port=port,
            args=tuple(self.argument(place, i, order, paired, values) for i in range(len(self.rule.args))),
            x=values["x"],
            y=values["y"],
            node=node.name if node is not None else "",
            root=self.regions.root,
            stacked=node is None and path in self.regions.replaced,
        )

    def edges(self, key: str, port: Port) -> dict[str, Value | None]:
        """Return x, a region's first input, y, its only result or the changed one of several, and value, the changed value."""
        if port.with_members:
            return {"x": self.edge(Port(key, "in")), "y": self.edge(Port(key, "out")), "value": self.read(str(port), port)}
        value = None if port.side == "param" else self.edge(port)
        changed = None if value is None else replace(value, kind="changed")
        first = self.edge(Port(key, "in"))
        if changed is not None and port.side == "in" and first is not None:
            region = self.regions.by_key[key]
            same = find_input(self.regions, region, port)[0] == find_input(self.regions, region, Port(key, "in"))[0]
            return {"x": changed if same else first, "y": self.edge(Port(key, "out")), "value": changed}
        return {"x": first, "y": changed or self.edge(Port(key, "out")), "value": changed}

    def edge(self, port: Port) -> Value | None:
        """Return the value at a port; None if there is none or there are several."""
        try:
            return _value(str(port), find_source(self.regions, port), port)
        except MatchError:
            return None

    def at_node(self, node: fx.Node, port: Port) -> dict[str, Value | None]:
        """Return x, the first tensor that an operation reads, y, its result, and value, the changed one of these."""
        given = list_operands((node.args, node.kwargs))
        values = {"x": _value("x", next(iter(given), None), X, "operand"), "y": _value("y", node, Y, "operand")}
        index = find_operand(node, port) if port.side == "in" else None
        found = find_member(node, port) if index is None else given[index]
        changed = _value("value", found, port, "operand")
        assert changed is not None
        changed = replace(changed, kind="changed")
        return values | {"value": changed} | ({"y": changed} if index is None else {"x": changed} if index == 0 else {})

    # --- arguments

    def argument(
        self, place: _Place, index: int, order: int, paired: dict[int, list[str]], values: dict[str, Value | None]
    ) -> Value:
        hit, item = place.hit, self.rule.args[index]
        text = item[hit.pattern] if isinstance(item, tuple) else item
        if text in values:
            value = values[text]
            if value is None:
                raise MatchError(f"'{hit.key}' has no single tensor '{text}'; name a port, such as '{hit.key}:out[0]'")
            return value
        if text in self.inputs:
            port = Port("", "in", (self.inputs[text],))
            found = _value(str(port), find_source(self.regions, port), port)
            assert found is not None
            return found
        if text in self.kept or fill(text, hit.caught) in {fill(g, hit.caught) for g in self.kept}:
            return Value(fill(text, hit.caught), kind="kept")
        if place.node is not None and (relative := parse_relative(text)) is not None:
            return self.operand(place.node, text, relative)
        address = paired[index][order] if index in paired else fill(text, hit.caught)
        relative = parse_relative(address, hit.key)
        return self.read(address, relative or parse_port(expand_address(address, self.p)))

    def operand(self, node: fx.Node, text: str, port: Port) -> Value:
        """Return `x[1]` of an operation, its second tensor, or `x[:]`, all of them in a tuple."""
        given = list_operands((node.args, node.kwargs))
        if port.side == "in" and port.keys == (WHOLE,):
            return Value(text, members=tuple(_value(text, one, port, "operand") for one in given), port=port, kind="operand")
        value = find_member(node, port) if port.side == "out" else given[find_operand(node, port)]
        found = _value(text, value, port, "operand")
        assert found is not None
        return found

    def read(self, address: str, port: Port) -> Value:
        if port.side == "param":
            names = self.regions.parameters(port.path, str(port.keys[0])) if len(port.keys) == 1 else []
            if not names:
                raise MatchError(f"'{address}' is not a parameter")
            shape = self.regions.module(port.path)._parameters[names[0]].shape  # type: ignore[union-attr]
            return Value(str(port), tuple(shape), port=port)
        if port.with_members:
            ports = port_members(self.regions, port)
            members = map_ports(ports, lambda one: _value(str(one), find_source(self.regions, one), one))
            return Value(str(port), members=members, port=port)
        found = _value(str(port), find_source(self.regions, port), port)
        assert found is not None
        return found

    def paired(self, places: list[_Place]) -> dict[int, list[str]]:
        """Return, for arguments with their own patterns, the values they match, which pair with the sites by order."""
        named = {name for pattern in self.rule.match.patterns for name in compile_pattern(parse_port(pattern).path).groupindex}
        found: dict[int, list[str]] = {}
        for index, item in enumerate(self.rule.args):
            if not isinstance(item, str) or item == "value" or item in self.inputs or item in self.kept:
                continue
            relative = parse_relative(item)
            port = relative or parse_port(expand_address(item, self.p))
            names = set(NAMES.findall(_unsliced(port.path))) <= named
            if not port.each and (relative or (names and not is_pattern(NAMES.sub("", port.path)))):
                continue
            if relative is not None:
                raise MatchError(
                    f"'{item}' in args: give the region without a port, since each of its values goes to another site"
                )
            paths = [port.path]
            if is_pattern(NAMES.sub("", port.path)) or not names:
                paths = list(select(port.path, self.regions.candidates(port.path)))
            ports = [replace(port, path=path) for path in paths]
            if port.each:
                ports = [one for p in ports for one in expand_ports(self.regions, p)]
            found[index] = list(map(str, ports))
            if len(found[index]) != len(places):
                targets = [str(p.port) if p.port.keys else p.hit.key for p in places]
                raise MatchError(
                    f"'{item}' matches {len(found[index])} places and '{self.rule.match.path}' {len(places)}; they are paired "
                    "in order, so the numbers must be equal\n"
                    f"  from: {format_names(found[index])}\n"
                    f"  to:   {format_names(targets)}"
                )
        return found


X, Y = Port("", "in"), Port("", "out")  # of an operation
NAMES = re.compile(r"\{([^\W\d]\w*)\}")


def _unsliced(pattern: str) -> str:
    """Return a pattern with `{i=0:12}` as `{i}`, and without the slices that capture nothing."""
    return SLICE.sub(lambda found: f"{{{found['name']}}}" if found["name"] else "0", pattern)


def fill(text: str, caught: Mapping[str, str]) -> str:
    """Return `text` with each `{i}` replaced by its captured value."""
    return NAMES.sub(lambda found: caught.get(found[1], found[0]), text)


def find_reads(regions: Regions, path: str, name: str, mapped: bool = False) -> list[tuple[fx.Node, fx.Node]]:
    """Return the reads of a module's parameter by the graph itself: the node of the value and the one that uses it.

    A block that maps the parameter is no such use, unless with `mapped`. A tied parameter has several names; a use belongs to
    the module whose code it is in, else to the first name.
    """
    module = regions.module(path)
    wanted = module._parameters[name]
    names = regions.names[id(wanted)] if regions.readers else []
    found = []
    for node in (node for n in names for node in regions.readers.get(n, ())):
        for user in node.users:
            if "behind" in user.meta and not mapped:
                continue
            if user.meta.get("behind") == f"param:{path}.{name}":
                found.append((node, user))
                continue
            owner = _owner(user, node, names)
            if owner == (f"{path}.{name}" if path else name):
                found.append((node, user))
    return found


def _owner(user: fx.Node, node: fx.Node, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    stack = user.meta.get("nn_module_stack") or {"": ("", "")}
    rows = [row[0] for row in stack.values()]
    port = user.meta.get("port")
    if port is not None and port.side == "in" and len(rows) > 1:
        rows = rows[:-1]  # an argument is read by the caller
    return next((n for n in names if n.rpartition(".")[0] == rows[-1]), str(node.target))


def _value(address: str, node: fx.Node | None, port: Port, kind: Literal["port", "operand"] = "port") -> Value | None:
    if node is None:
        return None
    return Value(address, tuple(node.meta.get("shape", ())), node.meta.get("dtype"), node=node, port=port, kind=kind)


def _check_each(gm: TracedModule, p: Pass, rule: Rule) -> None:
    """Raise MatchError for a pattern of several, or a name among several in braces, that matches nothing."""
    views = find_regions(gm)
    finders = [_Finder(regions, gm, p, rule) for regions in views]
    plain = not rule.match.op and rule.place != "param"  # then each hit is a place
    known = {hit.pattern for regions in views for hit in find_hits(regions, rule.match)} if plain else set()
    of = f", one of {len(rule.match.patterns)} paths," if len(rule.match.patterns) > 1 else ""
    for number, pattern in enumerate(rule.match.patterns):
        tried = {f"'{pattern}'{of}": pattern} if of and number not in known else {}
        tried |= {f"'{name}' of the braces in '{pattern}'": text for name, text in expand_names(pattern).items()}
        for what, text in tried.items():
            one = replace(rule.match, path=text)
            near = ((finder, hit) for finder in finders for hit in find_hits(finder.regions, without_classes(one)))
            found = ((finder, replace(hit, pattern=number)) for finder, hit in near)
            if not any(finder.places(hit) for finder, hit in found):
                from .near_misses import describe_misses

                head = f"{format_prefix(rule, p.name)}{what} matched 0 places, expected >=1"
                rows = [head, *describe_misses(views[0], one)]
                raise MatchError("\n".join([*rows, "  (with expect: '>=0' it may match nothing)"]))


def _clashes(sites: Sequence[Site]) -> None:
    taken: dict[tuple[str, str], Site] = {}
    gone = {site.path: site for site in sites if site.rule.place == "replace" and not site.node}
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
            raise ClashError(f"{site.pass_name}: {what}{f' ({lines})' if lines else ''}; narrow the pattern of one of them")

"""A site: one place where a rule will act, with the values at its ports; and where a value is written and who reads it."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import fx, nn

from ..errors import ClashError, MatchError, SpecError, cut, format_fields
from ..ir import functions, ops
from ..ir.containers import list_leaves, list_members, map_leaves
from ..ir.graph import move, redirect, replace, rewire, set_argument, set_operand
from ..ir.regions import Regions, find_regions
from ..spec.addresses import Port, make_identifier
from ..spec.rules import Pass, Rule
from .matches import describe_unmatched

if TYPE_CHECKING:
    from ..ir.traced_module import TracedModule


SHOWN = 8  # so many sites are listed in a text


@dataclass(frozen=True)
class Value:
    """A value that a block will be given: its address, and what it was when traced.

    `members` holds the Values of one that has members (a tuple, a record by name), in its structure; `node` gives it. `kind`
    says how it is found again in a graph that is being edited: the value at `port`, the one that the site itself changes, the
    operand at `port` of the operation that is matched, or what another rule of the pass keeps under the name `address`.
    """

    address: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    members: Any = None
    node: fx.Node | None = field(default=None, repr=False, compare=False)
    port: Port | None = field(default=None, repr=False)
    kind: Literal["port", "changed", "operand", "kept"] = field(default="port", repr=False)

    __repr__ = format_fields

    @property
    def path(self) -> str:
        """Path of the region at whose port the value is, `path@1` for a second call; "" for one of the model's own, or of no
        region."""
        return self.port.path if self.port is not None else ""

    def __str__(self) -> str:
        return f"{self.address} {list(self.shape)}"


@dataclass(frozen=True)
class Site:
    """A place where one rule will act.

    `path` is the region (`blocks.0.attn`, `path@1` for a second call), `module` its module or what stands for it, `caught`
    what `{i}` was, `port` the value that is changed, `args` the values the block is called with; `x` and `y` are the
    region's first argument and its result, None where the region has none or several. `root` is the traced module. `stacked`
    says that an earlier pass has replaced the region: a second replacement then combines with that.
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
    root: nn.Module = field(repr=False, compare=False, default_factory=nn.Module)
    stacked: bool = False

    __repr__ = format_fields

    @property
    def name(self) -> str:
        """Path of the block's parameters, below the name of the pass."""
        # a call of its own block only where the rule asked for that call, else all calls of a module share one
        own = any("@" in pattern for pattern in self.rule.match.patterns)
        path = self.path.replace("@", "_call") if own else self.path.partition("@")[0]
        operation = self.node.removeprefix(make_identifier(self.path)).strip("_") if self.node else ""
        return ".".join(filter(None, [path, operation]))

    @property
    def parameter(self) -> nn.Parameter:
        """Parameter that a block with place 'param' maps, with its values."""
        if self.port.side != "param":
            raise SpecError("it does not act on a parameter: set 'place: param' in its rule")
        found = self.module._parameters[str(self.port.keys[0])]
        assert found is not None
        return found

    @property
    def operand(self) -> Port:
        """Value that is changed at an operation: a tensor that it reads, its result, or a member of that."""
        return dataclasses.replace(self.port, keys=self.port.keys[1:])

    @property
    def where(self) -> str:
        """Name for a listing: the region's path, the parameter's address, or the operation's name."""
        return str(self.port) if self.port.side == "param" else self.node or self.path or "(model)"

    @property
    def what(self) -> str:
        """Class of the region, and the shapes of its first argument and result."""
        return f"{self.classes[0]}  {list(self.x.shape) if self.x else '?'} -> {list(self.y.shape) if self.y else '?'}"

    def __str__(self) -> str:
        caught = "  " + ", ".join(f"{k}={v}" for k, v in self.caught.items()) if self.caught else ""
        return f"{self.where}  {self.what}{caught}"


class Sites(list[Site]):
    """The sites of one pass on one traced module, rule by rule: what `apply` takes in the place of the pass.

    What is taken out of the list gets no block. `host` is the module they were found on; `joined` is that with the inputs
    and networks of the pass in it, traced once for finding and applying.
    """

    def __init__(self, sites: Iterable[Site], host: TracedModule, joined: TracedModule, p: Pass) -> None:
        super().__init__(sites)
        self.host, self.joined, self.p = host, joined, p
        self._found = {id(site): site for site in self}

    @property
    def left(self) -> str:
        """Layers similar to the matched ones that the pass left out, with a pattern that matches them too; "" for none."""
        return describe_unmatched(find_regions(self.joined), self.p, [(site.rule, site.path) for site in self])

    @property
    def unreached(self) -> str:
        """Weights that a catch-all pattern leaves out, with the reason, and with what reaches them; "" for none."""
        from .unreached import describe_unreached  # which only a listing needs

        taken = {str(site.port) if site.port.side == "param" else site.path.partition("@")[0] for site in self}
        return describe_unreached(find_regions(self.joined), self.p, taken)

    @property
    def summary(self) -> str:
        """Number of sites, and what was left out."""
        return "; ".join(filter(None, [f"{len(self)} site{'s' * (len(self) != 1)}", self.left, self.unreached]))

    def __str__(self) -> str:
        """Return the first sites and their number as text; `for site in sites` yields all."""
        more = [f"  ... {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([*(f"  {cut(str(site), 120)}" for site in self[:SHOWN]), *more, f"{self.p.name}: {self.summary}"])

    def __repr__(self) -> str:
        return f"<Sites of {self.p.name}: {self.summary}>"

    def check(self, gm: TracedModule) -> None:
        """Raises SpecError for another module than they were found on, for sites that others found, and for one twice."""
        if gm is not self.host:
            raise SpecError(
                f"{self.p.name}: these sites were found in another traced module than the one they are applied to: find them "
                "in this one, or apply the pass"
            )
        if strange := [site for site in self if id(site) not in self._found]:
            raise SpecError(f"{self.p.name}: the site '{strange[0]}' was not found by this pass here")
        if twice := [site for site, times in Counter(map(id, self)).items() if times > 1]:
            raise SpecError(
                f"{self.p.name}: the site '{self._found[twice[0]]}' is in the list twice, and can have one block only: remove "
                "one of the two"
            )


def name_input(gm: TracedModule, p: Pass, name: str) -> str:
    """Return the name of a pass's input in the model: prefixed with the pass's name if another pass has the name."""
    taken = {str(n.target).lstrip("*"): n for n in gm.graph.nodes if n.op == "placeholder"}
    if name not in taken or ("pass" in taken[name].meta and taken[name].meta["pass"]["name"] == p.name):
        return name
    if "pass" not in taken[name].meta:
        return name  # one of the model's own: its description binds sizes
    return f"{p.name}_{name}"


def get_own_inputs(gm: TracedModule, p: Pass) -> dict[str, Any]:
    """Return the inputs that a pass adds, without the entries that describe the model's own."""
    taken = {str(n.target).lstrip("*") for n in gm.graph.nodes if n.op == "placeholder" and "pass" not in n.meta}
    for name, spec in p.inputs.items():
        if name in taken and spec["shape"] is None:
            raise ClashError(f"{p.name}: the model has an argument '{name}' already; give the input another name")
    return {name: spec for name, spec in p.inputs.items() if name not in taken}


def expand_address(address: str, p: Pass) -> str:
    """Return an address with the full name of the pass's network: `cn:out[0]` becomes `controlnet.cn:out[0]`."""
    first = re.split(r"[.:]", address, maxsplit=1)[0]
    return f"{p.name}.{address}" if first in p.networks else address


class ValueUse:
    """A value and its users: all of them, or one argument of one node, and the blocks `beside` that node.

    The argument is at `index` in the call of a layer, or is one of the tensors that an operation reads, `operand`.
    """

    def __init__(
        self,
        value: fx.Node,
        only: fx.Node | None = None,
        index: int | None = None,
        beside: Sequence[fx.Node] = (),
        operand: int | None = None,
    ) -> None:
        self.value = value
        self.only = only
        self.index = index
        self.operand = operand
        self.beside = beside

    def users(self) -> list[fx.Node]:
        """Return the nodes that read the value here."""
        return list(self.value.users) if self.only is None else [self.only, *self.beside]

    def put(self, new: fx.Node, spare: set[fx.Node]) -> None:
        """Let the users read `new` instead."""
        if self.only is None:
            redirect(self.value, new, keep=spare)
        elif self.operand is not None:
            set_operand(self.only, self.operand, new)
        elif self.index is None:
            rewire(self.only, {self.value: new})
        else:
            names = ["" for _ in self.only.args] + list(self.only.kwargs)
            set_argument(self.only, self.index, names[self.index], new)
        for block in self.beside:
            rewire(block, {self.value: new})


def find_beside(value: fx.Node, site: str) -> list[fx.Node]:
    """Return the blocks after a leaf or an operation that read its input, such as a LoRA beside its layer.

    A block inserted before it changes what they read too, as at the edge of a module with its own code: passes mean the same in
    either order.
    """
    made = {"site": site, "place": "after"}
    return [node for node in value.users if made.items() <= node.meta.get("pass", {}).items()]


def find_insertion_point(given: list[fx.Node], slots: list[ValueUse]) -> fx.Node:
    """Return the node after which a block is inserted: the last of its values, or a node that writes into one before it is
    read."""
    last = max(given)
    readers = [slot.only for slot in slots if slot.only is not None]
    node = min(readers).prev if readers else last
    while node > last:
        if writes(node):
            return node
        node = node.prev
    return last


def writes(node: fx.Node) -> bool:
    """Return whether a node changes a value in place."""
    name = functions.get_short_name(node.target) if node.op in ("call_function", "call_method") else ""
    flagged = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    return flagged or (name.endswith("_") and not name.endswith("__")) or name in (*functions.IN_PLACE, "setitem")


def find_needed(inside: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes of a region that the rest of the graph still reads, and those that work on their values."""
    own = set(inside)
    keep: set[fx.Node] = set()
    todo = [n for n in inside if any(u not in own for u in n.users)]
    while todo:
        while todo:
            node = todo.pop()
            if node not in keep:
                keep.add(node)
                todo.extend(a for a in node.all_input_nodes if a in own)
        made = {n for n in keep if n.target is not ops.edge}
        todo = [n for n in own - keep if n.meta.get("effect") and not made.isdisjoint(n.all_input_nodes)]
    return keep


def reaches(starts: list[fx.Node], goal: fx.Node) -> bool:
    """Return whether a value flows from one of these nodes to another."""
    import networkx  # which a tenth of a dry run would wait for

    flow = networkx.DiGraph((node, user) for node in goal.graph.nodes for user in node.users)
    return goal in starts or any(start in flow and goal in networkx.descendants(flow, start) for start in starts)


def find_users(slot: ValueUse, value: fx.Node) -> set[fx.Node]:
    """Return the readers of a slot's value that its replacement is computed from: they keep reading the original.

    That is a network which reads a value and changes it. If the slot is the edge of a region, they read what comes to the edge,
    and the edge moves after them.
    """
    seen, todo = {value}, [value]
    while todo:  # what was computed before the slot's value cannot come from it
        todo.extend(new := [n for n in todo.pop().all_input_nodes if n not in seen and n > slot.value])
        seen.update(new)
    edge = slot.only
    if edge is None or edge.target is ops.edge:
        read = slot.value if edge is None else edge
        move_behind([user for user in read.users if user <= value and user not in seen], value)
    if edge is None:
        return seen.intersection(slot.value.users)
    if edge.target is ops.edge and edge in seen:
        for user in seen.intersection(edge.users):
            rewire(user, {edge: slot.value})
        if all(user > value for user in edge.users):
            move(edge, after=value)
    return set()


def move_behind(readers: list[fx.Node], value: fx.Node) -> None:
    """Put a network's readers of what a value takes the place of, and what it computes from them, behind that value.

    They are for another result of the network, which is computed from the new value. Nothing moves where another part of the
    graph is among them, or where the network changes a value in place.
    """
    late, todo = set(readers), [*readers]
    while todo:
        todo.extend(new := [user for user in todo.pop().users if user not in late and user <= value])
        late.update(new)
    rows = sorted(late)
    node = rows[0] if rows else value
    while node is not value:
        if node.meta.get("pass", {}).get("place") != "network":
            if node in late:
                return
        elif node.meta.get("effect") or writes(node):
            return
        node = node.next
    for node in reversed(rows):
        move(node, after=value)


# --- the order of a graph


def sort_sites(graph: fx.Graph, regions: Regions, sites: list[Site]) -> list[Site]:
    """Sites in the order in which the graph comes by the values that they change; what maps a parameter is first."""
    first = next(iter(graph.nodes))

    def moment(site: Site) -> tuple[fx.Node, bool]:
        if site.rule.place == "param":
            return first, False
        early = site.rule.place == "before"
        if site.node:
            return next(node for node in graph.nodes if node.name == site.node), not early
        region = regions.by_key[site.path]
        edges = region.inputs[:1] if early else region.outputs[-1:]
        return region.leaf or (edges[0][-1] if edges else first), not early

    return sorted(sites, key=moment)


def check_order(site: Site, slot: ValueUse, args: list[Any], late: fx.Node, reading: set[fx.Node]) -> None:
    """Refuse a block whose inputs come from behind the place where its result is used; `reading` goes on as it is."""
    early = [u for u in slot.users() if u <= late and u not in reading]
    if early:
        raise describe_late(site, args, late, f"'{site.port}' runs first", early)


def describe_late(site: Site, args: list[Any], late: fx.Node, first: str, early: list[fx.Node]) -> MatchError:
    """Return the error for an argument, with `late` in it, that is computed after the place where it is needed."""
    index = next((i for i, arg in enumerate(args) if late in list_nodes(arg)), 0)
    where = f"{site.rule.where}: " if str(site.rule.where) else ""
    why = "depends on it" if reaches(early, late) else "is computed after that"
    value = site.args[index].address or site.rule.args[index]
    return MatchError(
        f"{where}{site.pass_name}: the value '{value}' cannot flow to '{site.port}': {first}, and '{value}' {why}, so it would "
        "flow backward; a value can only flow to what runs later"
    )


def check_flow(graph: fx.Graph, name: str) -> None:
    """Refuse a graph in which the pass of this name made something be read before it is there."""
    for node in graph.nodes:
        late = next((a for a in node.all_input_nodes if a > node), None)
        if late is not None:
            place = late.meta.get("pass", {}).get("site") or late.name
            raise MatchError(
                f"{name}: the block at '{place}' needs values that are computed after '{node.name}', which reads its result: a "
                "value can only flow to what runs later"
            )


# --- nested values


def list_nodes(value: Any) -> list[fx.Node]:
    """Return the nodes in a nested value."""
    return [n for n in list_leaves(value) if isinstance(n, fx.Node)]


def list_ports(value: Any, keys: tuple[int | str, ...] = ()) -> list[tuple[tuple[int | str, ...], Port]]:
    """Return the ports in a nested value, each with the keys that lead to it."""
    if isinstance(value, Port):
        return [(keys, value)]
    return [row for key, member in list_members(value) or () for row in list_ports(member, (*keys, key))]


def map_ports(value: Any, function: Any) -> Any:
    """Return a nested value with a function applied to each port."""
    return map_leaves(value, lambda port, _: function(port), kind=Port)


def has_same_structure(result: Any, tree: Any) -> bool:
    """Return whether a result has a tensor wherever the tree of ports has one, with the same nesting; a list may replace a
    tuple."""
    if isinstance(tree, Port):
        return isinstance(result, fx.Node)
    if isinstance(tree, dict):
        alike = isinstance(result, dict) and result.keys() == tree.keys()
        return alike and all(has_same_structure(result[k], tree[k]) for k in tree)
    if isinstance(tree, tuple):
        alike = isinstance(result, (tuple, list)) and len(result) == len(tree)
        return alike and all(map(has_same_structure, result, tree))
    return not isinstance(result, fx.Node) and bool(result == tree)  # a constant of the graph stays what it is


def describe_structure(value: Any) -> str:
    """Return the structure of a nested value in words: (a tensor, (a tensor, a tensor))."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe_structure(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe_structure, value)) + ("," if len(value) == 1 else "") + ")"
    return "a tensor" if isinstance(value, (fx.Node, Port)) else repr(value)


def replace_leaf_uses(leaf: fx.Node, result: Any) -> None:
    """Give the users of a leaf's result its code's result instead."""
    for user in [] if isinstance(result, fx.Node) else list(leaf.users):
        assert user.target is operator.getitem
        replace_leaf_uses(user, result[user.args[1]])
    replace(leaf, result)

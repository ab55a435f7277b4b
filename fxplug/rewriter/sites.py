"""A site: one place where a rule will act, with the values at its ports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import fx, nn

from ..errors import ClashError, SpecError, brief_fields, cut
from ..ir.regions import Regions
from ..spec.addresses import Port, identifier
from ..spec.rules import Pass, Rule
from .left_over import left_over

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

    __repr__ = brief_fields

    @property
    def path(self) -> str:
        """The region at whose port the value is, `path@1` for a second call; "" for one of the model's own, or of no region."""
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

    __repr__ = brief_fields

    @property
    def name(self) -> str:
        """Where the block's parameters live, below the name of the pass."""
        # a call of its own block only where the rule asked for that call, else all calls of a module share one
        own = any("@" in pattern for pattern in self.rule.match.patterns)
        path = self.path.replace("@", "_call") if own else self.path.partition("@")[0]
        operation = self.node.removeprefix(identifier(self.path)).strip("_") if self.node else ""
        return ".".join(filter(None, [path, operation]))

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that a block with place 'param' maps, with its values."""
        if self.port.side != "param":
            raise SpecError("it maps no parameter: its rule must say 'place: param'")
        found = self.module._parameters[str(self.port.keys[0])]
        assert found is not None
        return found

    @property
    def where(self) -> str:
        """What a listing calls it: the region's path, the parameter's address, or the operation's name."""
        return str(self.port) if self.port.side == "param" else self.node or self.path or "(model)"

    @property
    def what(self) -> str:
        """Its class, and the shapes of the region's first argument and result."""
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
        """What the pass left of layers like those it takes, and a pattern that takes them too; an empty text for nothing."""
        return left_over([Regions(graph, self.joined) for graph in self.joined.graphs.values()], self.p, self)

    @property
    def summary(self) -> str:
        """How many sites there are, and what was left."""
        return "; ".join(filter(None, [f"{len(self)} site{'s' * (len(self) != 1)}", self.left]))

    def __str__(self) -> str:
        """The first sites and how many there are; `for site in sites` gives all."""
        more = [f"  ... {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([*(f"  {cut(str(site), 120)}" for site in self[:SHOWN]), *more, f"{self.p.name}: {self.summary}"])

    def __repr__(self) -> str:
        return f"<Sites of {self.p.name}: {self.summary}>"

    def check(self, gm: TracedModule) -> None:
        """Raises SpecError for another module than they were found on, for sites that others found, and for one twice."""
        if gm is not self.host:
            raise SpecError(
                f"{self.p.name}: these sites were found on another traced module than the one they are applied to: find them "
                "on that one, or give the pass"
            )
        if strange := [site for site in self if id(site) not in self._found]:
            raise SpecError(f"{self.p.name}: the site '{strange[0]}' was not found by this pass here")
        if twice := [site for site, times in Counter(map(id, self)).items() if times > 1]:
            raise SpecError(f"{self.p.name}: the site '{self._found[twice[0]]}' stands in the list twice, and takes one block")


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


def local(address: str, p: Pass) -> str:
    """An address with the name of one of the pass's networks in full: `cn:out[0]` is `controlnet.cn:out[0]`."""
    first = re.split(r"[.:]", address, maxsplit=1)[0]
    return f"{p.name}.{address}" if first in p.networks else address

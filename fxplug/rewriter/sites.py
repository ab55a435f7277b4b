"""A site: one place where a rule will act, with the values at its ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ..errors import SpecError
from ..spec.addresses import Port, identifier
from ..spec.rules import Rule


@dataclass(frozen=True)
class Value:
    """A value that a block will be given: its address, and what it was when traced.

    `members` holds the Values of one that has members (a tuple, a record by name), in its structure; `node` gives it.
    """

    address: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    members: Any = None
    node: fx.Node | None = field(default=None, repr=False, compare=False)

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

    def __str__(self) -> str:
        shape = f"{list(self.x.shape) if self.x else '?'} -> {list(self.y.shape) if self.y else '?'}"
        caught = "  " + ", ".join(f"{k}={v}" for k, v in self.caught.items()) if self.caught else ""
        name = str(self.port) if self.port.side == "param" else self.node or self.path or "(model)"
        return f"{name}  {self.classes[0]}  {shape}{caught}"

"""What a page shows, as plain values: all its writers (HTML, JSON, Model Explorer, dot, SVG) tell the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import format_fields

State = Literal["kept", "added", "gone"]


@dataclass
class Box:
    """One thing in a picture of a region.

    `kind` is region, repeat (alike regions in a row, its `members`), layer, block, op, ops (several in a row), weight, in or
    out. `name` is its path in the region, `label` the class or function. `inner` is the kind of a region. `blocks` counts what
    each pass put inside.
    """

    name: str
    kind: str
    label: str
    state: State = "kept"
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    owner: str = ""
    inner: int | None = None
    parameters: int = 0
    added: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    members: list[list[Box]] = field(default_factory=list)

    @property
    def unfolded(self) -> list[Box]:
        """Boxes that it stands for: all of its members for a repeat, else itself."""
        return [one for period in self.members for one in period] if self.kind == "repeat" else [self]


@dataclass
class Arrow:
    """A value that goes from one box to another, by their places in the list."""

    source: int
    target: int
    state: State = "kept"


@dataclass
class GraphLine:
    """One line of a region's graph, in names of its own."""

    text: str
    state: State = "kept"
    owner: str = ""


@dataclass
class RegionKind:
    """What alike regions have in common: the class, the picture and the lines."""

    label: str
    boxes: list[Box]
    arrows: list[Arrow]
    lines: list[GraphLine]
    parameters: int = 0
    added: int = 0
    blocks: dict[str, int] = field(default_factory=dict)


@dataclass
class SiteRow:
    """A place where a pass acts. `path` is of the region or node, `at` of the region whose picture has it."""

    owner: str
    path: str
    label: str
    place: str
    shapes: str
    block: str
    parameters: int
    at: str


@dataclass
class PassRow:
    """An applied pass, and what it adds."""

    name: str
    about: str
    options: dict[str, Any]
    sites: int
    parameters: int
    neutral: bool
    trained: bool
    slots: int
    inputs: list[str]


@dataclass
class Page:
    """All that a page says.

    `kinds` are the distinct regions, `root` is that of the model. `depth` has, for each part of the model in the order of its
    layers, the parameters that each pass adds there. `checks` are what verification found when the rewrite was made, None where
    nothing was kept of it. `tables` are further sections, `run` is of a training, `trouble` why there is no module.
    """

    title: str
    model: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    base: int = 0
    passes: list[PassRow] = field(default_factory=list)
    sites: list[SiteRow] = field(default_factory=list)
    depth: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, str]] | None = None
    kinds: list[RegionKind] = field(default_factory=list)
    root: int = 0
    known_before: bool = True
    tables: list[TableSection] = field(default_factory=list)
    run: dict[str, Any] | None = None
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    trouble: str = ""

    __repr__ = format_fields


@dataclass
class TableSection:
    """A further section: rows of texts under titles."""

    title: str
    about: str
    titles: list[str]
    rows: list[list[str]]

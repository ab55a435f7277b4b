"""The regions of a graph as pictures, before and after at once, alike ones as one kind."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.ir.text import find_patterns
from .contents import Arrow, Box, GraphLine, RegionKind, State
from .records import GraphText, NodeText

WORD = re.compile(r"[A-Za-z_]\w*")
MODEL = ("",)
LONGEST = 12  # so many things at most are one period
LEAST = 3  # so often at least a period is there


@dataclass
class Level:
    """One region while it is put together: its boxes by name, arrows, and the lines in it."""

    key: str
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], State] = field(default_factory=dict)
    rows: list[tuple[NodeText, State]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of values that stand or enter here
    counts: Counter[str] = field(default_factory=Counter)

    def free(self, name: str) -> str:
        """Return a name that is still unused here."""
        self.counts[name] += 1
        return name if self.counts[name] == 1 else f"{name}_{self.counts[name] - 1}"


class Kinds:
    """The distinct regions of a graph. `root` is the place of the model's own in `kinds`."""

    def __init__(
        self,
        after: GraphText,
        before: dict[str, NodeText],
        sizes: dict[str, int],
        added: dict[str, int],
        classes: dict[str, str],
    ) -> None:
        """Build the kinds; `sizes` has the number of parameters below each module path, `added` that of each block by its
        node."""
        self.after, self.before, self.sizes, self.added = after, before, sizes, added
        self.classes = {**classes, **after.classes}
        self.levels: dict[tuple[str, ...], Level] = {MODEL: Level("")}
        self.kinds: list[RegionKind] = []
        self._all = {**before, **after.records}
        self._known: dict[str, int] = {}
        self._standing = {r.behind: r.name for r in after.records.values() if r.behind}
        self._fill()
        self.root = self._kind(MODEL)

    def _fill(self) -> None:
        order = self._order()
        for record, state in order:
            self._stand(record, state)
        arrows: dict[State, set[tuple[tuple[str, ...], str, str]]] = {}
        sides: list[tuple[State, dict[str, NodeText]]] = [("gone", self.before), ("added", self.after.records)]
        for state, records in sides:
            arrows[state] = {found for r in records.values() if r.kind != "note" for found in self._flows(r, records)}
        for level, source, target in sorted(arrows["gone"] | arrows["added"]):
            state = "kept" if all((level, source, target) in side for side in arrows.values()) else (
                "gone" if (level, source, target) in arrows["gone"] else "added")  # fmt: skip
            self.levels[level].arrows[source, target] = state

    def _order(self) -> list[tuple[NodeText, State]]:
        """Return all records in order, removed ones at their former place."""
        waiting: dict[str, list[NodeText]] = defaultdict(list)
        last = ""
        for name, record in self.before.items():
            if name in self.after.records:
                last = name
            else:
                waiting[last].append(record)
        rows: list[tuple[NodeText, State]] = [(r, "gone") for r in waiting[""]]
        for name, record in self.after.records.items():
            rows.append((record, "kept" if name in self.before else "added"))
            rows += [(r, "gone") for r in waiting[name]]
        return rows

    def _stand(self, record: NodeText, state: State) -> None:
        for depth in range(1, len(record.level)):
            outer = self.levels[record.level[:depth]]
            key = record.level[depth]
            if key not in outer.boxes:
                self.levels[record.level[: depth + 1]] = Level(key)
                owner = record.owner if state == "added" else ""
                name = outer.free(_inside(key, outer.key))
                outer.boxes[key] = Box(name, "region", self.classes.get(key, "Module"), state, owner=owner)
            elif outer.boxes[key].state != state:
                outer.boxes[key].state, outer.boxes[key].owner = "kept", ""
        level = self.levels[record.level]
        level.rows.append((record, state))
        level.names[record.name] = self._called(record, level)
        if record.kind in ("note", "output") or record.whole:
            return
        kind = "in" if record.kind == "input" else record.kind
        shape = record.shape
        added = self.added.get(record.name, 0)  # of a block, or of a layer in a pass's network
        level.boxes[record.name] = Box(
            level.names[record.name], kind, record.label, state, shape, record.dtype, record.owner if state == "added" else "",
            parameters=0 if record.owner else self.sizes.get(record.path, 0), added=added,
            blocks={record.owner: 1} if record.kind == "block" and record.path else {},
        )  # fmt: skip

    def _called(self, record: NodeText, level: Level) -> str:
        if record.kind in ("layer", "weight"):
            return level.free(_inside(record.path, level.key.partition("@")[0]))
        if record.kind == "block" and record.path:
            return level.free(f"{record.owner}: {_inside(record.site, level.key) or record.label}")
        return level.free(record.name if record.kind in ("input", "output") else record.label)

    def _flows(self, record: NodeText, records: dict[str, NodeText]) -> Any:
        """Yield the arrows for every value that a record reads, in every region on the way."""
        for name in record.reads:
            value = records[name]
            while value.whole and value.whole in records:
                value = records[value.whole]
            if value.kind == "note" or record.whole:
                continue
            shared = 0
            while shared < min(len(value.level), len(record.level)) and value.level[shared] == record.level[shared]:
                shared += 1
            for depth in range(len(value.level), shared, -1):
                inner = value.level[:depth]
                source = value.name if depth == len(value.level) else value.level[depth]
                if source != value.name:
                    self.levels[inner].names.setdefault(name, self.levels[inner].boxes[source].name)
                yield inner, source, self._port(inner, "out", name, value)
            source = value.name if shared == len(value.level) else value.level[shared]
            target = record.name if shared == len(record.level) else record.level[shared]
            if record.kind == "output":
                target = self._port(record.level, "out", name, value)
            common = self.levels[record.level[:shared]]
            if source != value.name:
                common.names.setdefault(name, common.boxes[source].name)
            yield record.level[:shared], source, target
            for depth in range(shared + 1, len(record.level) + 1):
                inner = record.level[:depth]
                target = record.name if depth == len(record.level) else record.level[depth]
                yield inner, self._port(inner, "in", name, value), target

    def _port(self, at: tuple[str, ...], side: str, name: str, value: NodeText) -> str:
        """Return the box of the port through which a value passes; add it if there is none."""
        level = self.levels[at]
        ports = self.after.ports.get(level.key, {})
        port, seen = ports.get(f"{side}:{name}"), name
        while port is None and seen in self._standing and seen != self._standing[seen]:
            seen = self._standing[seen]
            port = ports.get(f"{side}:{seen}")
            if seen == name:
                break
        if port is None:
            port = value.path if value.kind in ("input", "weight") else "value" if side == "in" else "result"
        box = f"{side}\0{port}"
        if box not in level.boxes:
            records = self.after.records
            shape = records[name].shape if name in records else value.shape
            dtype = records[name].dtype if name in records else value.dtype
            level.boxes[box] = Box(port, side, "", "kept", shape, dtype, value.owner if value.kind == "input" else "")
        if side == "in":
            level.names.setdefault(name, port)
        return box

    # --- one kind for all that are alike

    def _kind(self, at: tuple[str, ...]) -> int:
        level = self.levels[at]
        for key, box in level.boxes.items():
            if box.kind == "region":
                box.inner = self._kind((*at, key))
                inside = self.kinds[box.inner]
                box.parameters, box.added, box.blocks = inside.parameters, inside.added, inside.blocks
                shapes = [b.shape for b in inside.boxes if b.kind == "out"]
                box.shape = shapes[0] if shapes else None
        blocks: Counter[str] = Counter()
        for box in level.boxes.values():
            blocks.update(box.blocks)
        size = self.sizes.get(level.key.partition("@")[0], 0)
        added = sum(box.added for box in level.boxes.values())
        boxes, arrows = _folded(level)
        lines = [
            GraphLine(self._renamed(record, level), state, record.owner if state == "added" else "")
            for record, state in level.rows
            if record.line
        ]
        label = self.classes.get(level.key, "Module")
        kind = RegionKind(label, boxes, arrows, lines, size, added, dict(sorted(blocks.items())))
        text = json.dumps(asdict(kind), sort_keys=True)
        if text not in self._known:
            self._known[text] = len(self.kinds)
            self.kinds.append(kind)
        return self._known[text]

    def _renamed(self, record: NodeText, level: Level) -> str:
        """Return a line with the names that values have in this region. Called functions and modules keep their names."""
        short = {}
        for name in (*record.reads, record.name):
            short[name] = level.names.get(name, self._all[name].label if name in self._all else name).replace(": ", "_")
        head, mark, rest = record.line.partition(" = ")
        if record.kind == "weight":
            return f"{short[record.name]} = {_inside(record.path, level.key.partition('@')[0])}"
        called, bracket, args = rest.partition("(") if mark else ("", "", "")
        if not mark or not head.isidentifier():
            return WORD.sub(lambda m: short.get(m[0], m[0]), record.line)
        if called.isidentifier() or record.kind in ("layer", "block"):
            path = _inside(called, level.key.partition("@")[0])
            if record.kind == "block" and record.path:
                path = ".".join(filter(None, [record.owner, _inside(record.site, level.key), record.label]))
            return f"{short.get(head, head)} = {path}{bracket}{WORD.sub(lambda m: short.get(m[0], m[0]), args)}"
        return f"{short.get(head, head)} = {WORD.sub(lambda m: short.get(m[0], m[0]), rest)}"


def _inside(key: str, outer: str) -> str:
    """Return the path of a region relative to another."""
    outer = outer.partition("@")[0]
    return key[len(outer) + 1 :] if outer and key.startswith(f"{outer}.") else key


def _folded(level: Level) -> tuple[list[Box], list[Arrow]]:
    """Return the boxes and arrows of a region, with repeated parts folded into one box, and chains of plain operations too."""
    rows = [(key, box) for key, box in level.boxes.items() if box.kind not in ("in", "out", "weight")]
    keys = [(re.sub(r"\d+", "{i}", box.name), box.label, box.kind, box.owner, box.state) for _, box in rows]
    order = {key: index for index, (key, _) in enumerate(rows)}
    # else a value may leave what is drawn as one and come back into it
    forward = all(order[a] < order[b] for a, b in level.arrows if a in order and b in order)
    home = {key: key for key in level.boxes}
    made: dict[str, Box] = {}
    for start, period, times in runs(keys) if forward else []:
        inside = [key for key, _ in rows[start : start + period * times]]
        periods = [rows[start + i * period : start + (i + 1) * period] for i in range(times)]
        if not any(box.kind in ("region", "layer") for _, box in periods[0]):
            continue
        name = f"repeat\0{inside[0]}"
        made[name] = _repeat([[box for _, box in each] for each in periods])
        home |= dict.fromkeys(inside, name)
    for chain in _chains(level, home):
        name = f"ops\0{chain[0]}"
        members = [level.boxes[key] for key in chain]
        last = members[-1]
        made[name] = Box(members[0].name, "ops", " · ".join(b.label for b in members), last.state, last.shape, last.dtype,
                         last.owner, members=[[b] for b in members])  # fmt: skip
        home |= dict.fromkeys(chain, name)
    boxes: dict[str, Box] = {}
    for key, box in level.boxes.items():
        boxes.setdefault(home[key], made.get(home[key], box))
    arrows: dict[tuple[str, str], State] = {}
    for (source, target), state in level.arrows.items():
        pair = home.get(source, source), home.get(target, target)
        if pair[0] != pair[1]:
            arrows[pair] = state if arrows.get(pair, state) == state else "kept"
    places = {key: index for index, key in enumerate(boxes)}
    found = [Arrow(places[a], places[b], state) for (a, b), state in arrows.items()]
    return list(boxes.values()), sorted(found, key=lambda arrow: (arrow.source, arrow.target))


def _repeat(periods: list[list[Box]]) -> Box:
    first, last = periods[0], periods[-1]
    main = next(box for box in first if box.kind in ("region", "layer"))
    index = first.index(main)
    blocks: Counter[str] = Counter()
    for box in (box for each in periods for box in each):
        blocks.update(box.blocks)
    each = [box for period in periods for box in period]
    names = find_patterns([period[index].name for period in periods])
    name = names[0].text if len(names) == 1 else main.name
    return Box(
        name, "repeat", main.label, main.state, last[index].shape, last[index].dtype, main.owner,
        parameters=sum(box.parameters for box in each), added=sum(box.added for box in each),
        blocks=dict(sorted(blocks.items())), members=periods,
    )  # fmt: skip


def _chains(level: Level, home: dict[str, str]) -> list[list[str]]:
    """Return chains of plain operations, each of which is read by the next alone."""
    reads: dict[str, list[str]] = defaultdict(list)
    users: dict[str, list[str]] = defaultdict(list)
    for (source, target), _ in level.arrows.items():
        reads[target].append(source)
        users[source].append(target)
    plain = [key for key, box in level.boxes.items() if box.kind == "op" and box.state == "kept" and home[key] == key]
    chains: dict[str, list[str]] = {}  # by their last
    for key in plain:
        before = reads[key]
        follows = len(before) == 1 and users[before[0]] == [key] and level.arrows[before[0], key] == "kept"
        chains[key] = chains.pop(before[0], []) if follows else []
        chains[key].append(key)
    return [chain for chain in chains.values() if len(chain) > 1]


def runs(keys: Sequence[Hashable | None]) -> list[tuple[int, int, int]]:
    """Return the runs in which a period of keys occurs `LEAST` times or more: start, length of the period, and count.

    Runs do not overlap; the one that covers most begins first, of several the one with the shortest period. None equals
    nothing.
    """
    found, start = [], 0
    while start < len(keys):
        best = (0, 0, 0)
        for period in range(1, min(LONGEST, (len(keys) - start) // LEAST) + 1):
            end = start + period
            while end < len(keys) and keys[end] is not None and keys[end] == keys[end - period]:
                end += 1
            times = (end - start) // period
            if times >= LEAST and keys[start] is not None and times * period > best[0] and None not in keys[start:end]:
                best = (times * period, period, times)
        if best[0]:
            found.append((start, best[1], best[2]))
        start += best[0] or 1
    return found

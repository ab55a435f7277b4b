"""HCP-Diffusion's way of naming layers: `re:`, `pre_hook:` and `cls(Name):` before a path or expression. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import SpecError, did_you_mean, prefix_path, quote
from ...core.spec.addresses import compile_expression, select

PREFIXES = ("re", "pre_hook", "prehook", "cls(Name)")
SHOWN = 8  # so many paths are listed in a message


@dataclass(frozen=True)
class LayerPattern:
    """One entry of `layers`, `from_layer` or `to_layer`, or a layer that such an entry names.

    `path` is a module path (the empty one is the model) or, with `regex`, an expression that matches from the start of a
    path as `re.match` does. `pre_hook` takes the layer's input in the place of its output. `kind` is a class name.
    """

    text: str
    path: str
    regex: bool = False
    pre_hook: bool = False
    kind: str | None = None

    @property
    def pattern(self) -> str:
        """Path pattern of fxplug for this layer."""
        return f"re:{self.path}" if self.regex else self.path


def read_layer(text: object) -> LayerPattern:
    """Parse one entry. The prefixes are in any order; `prehook:`, as the guide spells it, is `pre_hook:`. The prefixes stand in
    any order; `prehook:`, as the guide spells it, is `pre_hook:`.

    Raises SpecError for another prefix, which HCP-Diffusion would ignore, and for an expression that does not compile.
    """
    if not isinstance(text, str):
        raise SpecError(f"a layer must be text, not {quote(text)}")
    rest, regex, pre_hook, kind = text, False, False, None
    while ":" in rest:
        head, _, tail = rest.partition(":")
        if head == "re" and not regex:
            regex = True
        elif head in ("pre_hook", "prehook"):
            pre_hook = True
        elif found := re.fullmatch(r"cls\((\w+)\)", head):
            kind = found[1]
        elif regex:  # a colon of the expression itself, as in (?:...)
            break
        else:
            raise SpecError(f"'{text}': no prefix '{head}:'{did_you_mean(head, PREFIXES)}; there are {': '.join(PREFIXES)}:")
        rest = tail
    if regex:
        compile_expression(rest, lambda finding: SpecError(f"'{text}' {finding}"))
    return LayerPattern(text, rest, regex, pre_hook, kind)


def read_layers(entries: object, *path: str) -> list[LayerPattern]:
    """Parse a list of entries, or one, at a path. Raises SpecError."""
    items = [entries] if isinstance(entries, str) else entries
    if not isinstance(items, (list, tuple)) or not items:
        raise SpecError(f"must be a list of layers, not {quote(entries)}", path=path)
    found = []
    for index, item in enumerate(items):
        with prefix_path(*path, index):
            found.append(read_layer(item))
    return found


def read_paths(entries: object, *path: str) -> list[LayerPattern]:
    """Parse a list of paths and expressions, or one, of low-rank updates and weights. Raises SpecError."""
    layers = read_layers(entries, *path)
    for layer in layers:
        if layer.pre_hook or layer.kind:
            raise SpecError(f"'{layer.text}': only the prefix re: is allowed here", path=path)
    return layers


def find_places(layers: Iterable[LayerPattern], classes: Mapping[str, str]) -> list[LayerPattern]:
    """Return the layers that entries name, in HCP-Diffusion's order: by entry, then as modules are registered; each once.

    `classes` has the class name of every module path, in that order. Raises SpecError where HCP-Diffusion says nothing: an
    expression that matches nothing, a layer that is named twice.
    """
    found: dict[str, LayerPattern] = {}
    for layer in layers:
        if layer.regex:
            here = list(select(f"re:{layer.path}", classes))
            if not here:
                raise SpecError(f"'{layer.text}' matches none of {len(classes)} modules{did_you_mean(layer.path, classes)}")
        elif layer.path not in classes:
            raise SpecError(f"'{layer.text}': no module '{layer.path}'{did_you_mean(layer.path, classes)}")
        else:
            here = [layer.path]
        if layer.kind is not None:
            here = _of_kind(here, layer.kind, classes)
            if not here:
                known = sorted(set(classes.values()))
                raise SpecError(f"'{layer.text}': no {layer.kind} there{did_you_mean(layer.kind, known)}")
        for path in here:
            first = found.setdefault(path, layer)
            exact = not layer.regex and not first.regex and layer is not first
            if first.pre_hook != layer.pre_hook or exact:
                raise SpecError(
                    f"'{first.text}' and '{layer.text}' both name '{path or 'the model'}', and HCP-Diffusion drops the second: "
                    "list each layer once"
                )
    return [LayerPattern(layer.text, path, pre_hook=layer.pre_hook) for path, layer in found.items()]


def _of_kind(paths: Sequence[str], kind: str, classes: Mapping[str, str]) -> list[str]:
    """Return those of the paths that are of a class; for the others the layers of that class below them."""
    found: dict[str, None] = {}
    for path in paths:
        below = f"{path}." if path else ""
        own = classes[path] == kind
        inside = [p for p, name in classes.items() if p != path and p.startswith(below) and name == kind]
        found.update(dict.fromkeys([path] if own else inside))
    return list(found)


def pair(sources: Sequence[LayerPattern], targets: Sequence[LayerPattern]) -> list[tuple[LayerPattern, LayerPattern]]:
    """Pair sources and targets by order. Raises SpecError, with both lists, if their numbers differ."""
    if len(sources) != len(targets):
        raise SpecError(
            f"from_layer matches {len(sources)} layers and to_layer {len(targets)}; they are paired in order, so the numbers "
            "must be equal (HCP-Diffusion drops the rest)\n"
            f"  from: {format_paths(sources)}\n"
            f"  to:   {format_paths(targets)}"
        )
    return list(zip(sources, targets, strict=True))


def format_paths(found: Sequence[LayerPattern]) -> str:
    """List paths for a message."""
    shown = ", ".join(p.path or "(the model)" for p in found[:SHOWN])
    return shown + (f", ... ({len(found)})" if len(found) > SHOWN else "") or "none"

"""What a pattern that means everything leaves out: weights that no call of a layer reads, and how a pass reaches them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from ..ir import functions
from ..ir.regions import Regions
from ..spec.rules import Pass, Rule
from .matches import find_composites, is_a, is_catch_all

SHOWN = 3  # so many patterns are listed
# functions that multiply by a weight, and those that give one or a part of it in another form
PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "_grouped_mm",
    "multi_head_attention_forward",
}  # fmt: skip
VIEWS = {
    "getitem", "getattr", "t", "T", "mT", "transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "chunk", "split",
    "unbind", "select", "narrow", "index_select", "edge", "numpy_T", "matrix_H", "adjoint", "swapaxes",
}  # fmt: skip


def describe_unreached(views: Sequence[Regions], p: Pass, taken: Collection[str]) -> str:
    """Say which weights a pass leaves out that are none of the `taken` layers and parameters; empty for none.

    `not reached: 2 Linear in e (TransformerEncoder, one call: name them, at: [...])`. Only of rules with a pattern that
    names no place (`**`, `all-linear`) and admits linear layers.
    """
    for rule in p.rules:
        everything = rule.place in ("after", "param") and not rule.match.op and any(map(is_catch_all, rule.match.patterns))
        if everything and (not rule.match.module or any(_name(one) == "Linear" for one in rule.match.module)):
            found = list(_findings(views, rule, taken))
            return f"not reached: {'; '.join(found)}" if found else ""
    return ""


def _findings(views: Sequence[Regions], rule: Rule, taken: Collection[str]) -> Iterator[str]:
    root = views[0].root
    called = {region.path for regions in views for region in regions.by_key.values() if region.leaf is not None}
    param, pattern = rule.place == "param", rule.port or "weight"
    attentions: dict[str, None] = {}
    for path, module in find_composites(root).items():
        if path not in called:
            continue
        inner = [f"{path}.{name}" if name else path for name, _ in module.named_modules()]
        attentions |= dict.fromkeys(one for one in inner if isinstance(root.get_submodule(one), nn.MultiheadAttention))
        layers = [
            one
            for one in inner
            if one != path and not _of_attention(root, one) and _has_weight(views[0], one, rule, pattern if param else "weight")
        ]
        if layers:
            kind = type(root.get_submodule(layers[0])).__name__
            kinds = kind if all(type(root.get_submodule(one)).__name__ == kind for one in layers) else "layers"
            yield f"{len(layers)} {kinds} in '{path}' ({type(module).__name__}, which is one call): {_named(layers)}"
    weights = [
        f"{path}.{name}"
        for path in attentions
        for name, value in root.get_submodule(path).named_parameters()
        if value.dim() > 1 and f"{path}:param.{name}" not in taken and not name.startswith("bias_")
    ]
    if weights:
        owners = dict.fromkeys(name.rpartition(".")[0] for name in weights)
        names = sorted({name.rpartition(".")[2] for name in weights})
        yield f"{len(weights)} weights that MultiheadAttention reads itself: {_suggest_pass(owners, names)}"
    bare = dict.fromkeys(name for regions in views for name in _multiplied(regions) if _is_left(regions, name, taken))
    if bare:
        owners = dict.fromkeys(name.rpartition(".")[0] for name in bare)
        names = sorted({name.rpartition(".")[2] for name in bare})
        yield f"{len(bare)} parameters that are no layer's weight: {_suggest_pass(owners, names)}"


def _multiplied(regions: Regions) -> Iterator[str]:
    """Yield the parameters that a graph reads itself and multiplies by unchanged."""
    for name, nodes in regions.readers.items():
        todo, seen = list(nodes), set[fx.Node]()
        while todo:
            for user in todo.pop().users:
                short = functions.get_short_name(user.target)
                if short in PRODUCTS and "shape" in user.meta or short == "multi_head_attention_forward":
                    yield name
                    todo.clear()
                    break
                if short in VIEWS and user not in seen:
                    seen.add(user)
                    todo.append(user)


def _is_left(regions: Regions, name: str, taken: Collection[str]) -> bool:
    owner, _, last = name.rpartition(".")
    value = regions.root.get_submodule(owner)._parameters.get(last)
    if value is None or value.dim() < 2 or regions.inserted(owner) or owner in taken:
        return False
    return f"{owner}:param.{last}" not in taken and "Embedding" not in regions.classes(owner)


def _has_weight(regions: Regions, path: str, rule: Rule, pattern: str) -> bool:
    """Return whether a rule would take a module if it were called: the module is of its classes, and has such a parameter."""
    own = regions.root.get_submodule(path)._parameters
    return is_a(regions, path, rule.match.module) and any(v is not None and fnmatchcase(n, pattern) for n, v in own.items())


def _of_attention(root: nn.Module, path: str) -> bool:
    return isinstance(root.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention) or isinstance(
        root.get_submodule(path), nn.MultiheadAttention
    )


def _suggest_pass(owners: Iterable[str], names: Sequence[str]) -> str:
    """Return a suggestion for a pass that reaches parameters of these modules."""
    at = _patterns(owners)
    alike = "'*weight'" if all(name.endswith("weight") for name in names) else " or ".join(names)
    param = f"'{names[0]}'" if len(names) == 1 else alike
    return f"{', '.join(at[:SHOWN])} (use lora_weight with at: {_listed(at)}, param: {param})"


def _named(paths: Iterable[str]) -> str:
    at = _patterns(paths)
    return f"{', '.join(at[:SHOWN])} (name them, at: {_listed(at)})"


def _listed(at: Sequence[str]) -> str:
    return f"[{', '.join(at[:SHOWN])}{', ...' if len(at) > SHOWN else ''}]"


def _patterns(paths: Iterable[str]) -> list[str]:
    """Paths with a star for each number, each once, or their ends where there are many."""
    whole = list(paths)
    starred = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "''" for path in whole)
    return list(starred if len(starred) <= SHOWN else dict.fromkeys(f"**.{path.rpartition('.')[2]}" for path in whole))


def _name(kind: str | type) -> str:
    return kind if isinstance(kind, str) else kind.__name__

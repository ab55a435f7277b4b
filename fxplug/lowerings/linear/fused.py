"""The fuse lowering: linear layers, each with its low-rank update or its bank of them, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...blocks.lokr import Lokr
from ...blocks.lora import Lora
from ...blocks.lora_weight import Dora
from ...core import quantised
from ...core.ir.traced_module import TracedModule, check_traced, copy_graphs, strip_to_container
from . import forms, operators, updated
from .layers import Layer, call_instead, get_argument, list_linear


def fuse(gm: TracedModule, how: str = "auto", *, dtype: torch.dtype | None = None) -> TracedModule:
    """Join each `nn.Linear` and the `Lora` behind it, or the `Dora` or `Lokr` that maps its weight, in one function.

    For faster steps and calls; `gm` stays as it is. Graph and module tree are copied, parameters are shared, so what it trains
    is trained in `gm`: save and export that one. Results and gradients are those of `gm` but for rounding. A layer with a hook,
    of a derived class, or a `Lora` with dropout, a bias, or behind another block, stays as it is, and so does a mapped weight
    that is trained itself. `meta["forms"]` says which form each layer with an update has.

    Args:
        gm: The rewritten module.
        how: A form of `forms.FORMS` for all layers, or "auto": for each layer the form that a rule takes for its sizes and the
            rows of the trace (`forms.choose_form`), and "stock", which leaves it as it is; without gradients and with them,
            each of which may take another form. "triton" is for layers with a `Lora`; other updates take the form of the rule,
            or stay as they are, and what its kernels do not take stays so with a warning that says why.
        dtype: The dtype in which the rule sees the layers, as autocast may have another; None is that of the weights.

    Returns:
        The module with these functions.

    Raises:
        SpecError: `gm` is no traced module, or there is no such form.
    """
    check_traced(gm, "fuse")
    form = forms.find_form(how)
    tree, graphs, chosen = strip_to_container(gm), copy_graphs(gm), dict(gm.meta.get("forms", {}))
    left: dict[str, list[str]] = {}  # why kernels do not take some layers, and their paths
    for graph in graphs.values():
        for layer in list_linear(graph, tree):
            path, taken, text = str(layer.weight_name).rpartition(".")[0], form, form
            if form == "triton" and isinstance(layer.block, Lora):
                taken, text, reason = forms.choose_triton_form(forms.make_case(tree, layer, dtype))
                if reason:
                    left.setdefault(reason, []).append(path)
            elif form == "auto" or form == "triton" and layer.block is not None:
                case = forms.make_case(tree, layer, dtype)
                taken, text = ("stock", "stock") if case is None else forms.choose_forms(case[1], case[0].type)
            if layer.block is not None:
                chosen[path] = text
            if taken != "stock" and (layer.block is not None or "fused" in taken.split(",")):
                function, names, rest = find_function(layer)
                call_instead(graph, tree, layer, function, names, *rest, *(() if taken == "fused" else (taken,)))
        graph.lint()
    if form == "triton":
        _note_others(gm, chosen, left)
    return gm.derived(tree, graphs, **({"forms": chosen} if chosen else {}))


def find_function(layer: Layer) -> tuple[Any, Sequence[str], tuple[Any, ...]]:
    """Return the function for a layer, the names of what it takes of the block, and what comes behind these."""
    block, update, factors = layer.block, layer.update, ("down.weight", "up.weight")
    if update is None:
        return operators.run_linear, (), ()
    if isinstance(block, Dora):
        return updated.run_dora_linear, ("down", "up", "scale", "magnitude"), ()
    if isinstance(block, Lokr):
        return updated.run_lokr_linear, ("scale", *updated.FACTORS), ()
    if block.slots:
        return operators.run_bank_linear, factors, (get_argument(update, 2, "rows"), block.slots, block.batch_dim)
    return operators.run_lora_linear, (*factors, "scale"), ()


def _note_others(gm: TracedModule, chosen: dict[str, str], left: dict[str, list[str]]) -> None:
    """Record that the other layers with a block stay unfused, and warn of those for which that is unexpected."""
    modules = dict(gm.named_modules())
    sites = [site for entry in gm.meta.get("passes", []) for site in entry["sites"] if site["block"]]
    for path in [site["path"].partition("@")[0] for site in sites]:
        if path not in chosen and path in modules and quantised.is_quantised(modules[path]):
            left.setdefault("Triton's kernels read numbers, and its weight is quantised", []).append(path)
        chosen.setdefault(path, "stock")
    if left:
        found = [f"{p[0]}{f' and {len(p) - 1} more' if len(p) > 1 else ''}: {reason}" for reason, p in left.items()]
        forms.warn_once(f"fuse='triton' leaves layers in their stock form: {'; '.join(found)}")

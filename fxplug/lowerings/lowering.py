"""What a lowered module was made from: found again on the weights and with the adapters that the module has."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..core.errors import SpecError
from ..core.extensions import Derivation, get_derivation
from ..core.ir.containers import find_tensor
from ..core.ir.graph import copy_graph
from ..core.ir.traced_module import TracedModule, strip_to_container
from ..core.locks import with_read_lock


class KeptBases(nn.Module):
    """A part of a lowered module that keeps the weights of its source for which others stand in the layers."""

    def bases(self, root: TracedModule) -> dict[int, nn.Parameter]:
        """Give what is kept, by the ids of the tensors of `root` that stand for it."""
        raise NotImplementedError


class LoweredForm(Derivation[TracedModule]):
    """That of a module that was lowered in other ways than by `lower`, or changed since; its source is `meta["source"]`."""

    def saved_form(self, module: TracedModule) -> TracedModule:
        made = undo_lowering(module)
        derivation = get_derivation(made)
        return made if derivation is None else derivation.saved_form(made)

    def rebuild(self, module: TracedModule, change: Callable[[TracedModule], TracedModule]) -> TracedModule:
        raise SpecError(
            "this module is lowered: apply passes to the module it was made from, meta['source'], and lower the result"
        )

    def unrepeatable(self) -> LoweredForm:
        return LoweredForm()


@with_read_lock
def undo_lowering(module: TracedModule) -> TracedModule:
    """Return the module that a lowered module was made from, with its current adapters; return another module unchanged."""
    source = module.meta.get("source")
    if not isinstance(source, TracedModule):
        return module
    source = undo_lowering(source)
    tree = strip_to_container(source)
    tree._modules.update({name: module.get_submodule(name) for name in module.meta.get("banks", [])})
    homes = [part for part in module.modules() if isinstance(part, KeptBases)]
    bases = {key: base for home in homes for key, base in home.bases(module).items()}
    for path, owner in tree.named_modules():  # tensors of a copy, or of one that was moved, are others than the source's
        for table in (owner._parameters, owner._buffers):
            for key in table:
                now = find_source_tensor(module, f"{path}.{key}" if path else key)
                if now is not None:
                    table[key] = bases.get(id(now), now)
    made = source.derived(tree, {mode: copy_graph(graph) for mode, graph in source.graphs.items()})
    made._steps = source._steps
    return made


def find_source_tensor(module: TracedModule, name: str) -> Tensor | None:
    """A parameter or buffer of a lowered module by the name that it has in the state dict of its source."""
    return find_tensor(module, module.meta.get("originals", {}).get(name, name))

"""A model with an adapter in it, in one call: traced, given the pass that the file needs, loaded and in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..core.capture.tracer import trace
from ..core.errors import DEFAULT, ArtifactError, Limits, MatchError, SpecError, quote
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.applying import apply
from .banks import is_finite
from .contents import list_layers
from .file_layouts import list_families, list_published_layers
from .file_metadata import find_base_model
from .file_passes import pass_for
from .files import AdapterFile, Source, read
from .layer_names import guess_family
from .loading import load_adapter
from .slots import Adapters

LOADED = "adapter"  # the name of the pass


def load_adapted(
    model: nn.Module,
    source: Source,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "default",
    strength: float = 1.0,
    slots: int = 1,
    adapter: str | None = None,
    part: str | None = None,
    config: Mapping[str, Any] | None = None,
    partial: bool = False,
    guess: bool = False,
    limits: Limits = DEFAULT,
) -> TracedModule:
    """Return a model with an adapter loaded and in use: `trace`, `pass_for`, `apply` and `adapters.load` in one call.

    It is what `from_pretrained` of a PeftModel is in PEFT, for files of all formats that are read. The model itself is
    left as it was; what is returned shares its weights. `new.adapters` switches the adapter, and loads others that have updates
    at the same layers, of which `slots` says how many.

    Args:
        model: The model, or its traced module.
        source: The adapter, as `adapters.load` takes it: a file, a folder, `user/name` on the hub, or tensors by name.
        args: Example inputs by position, as `trace` takes them; none for a traced module.
        kwargs: Example inputs by name.
        name: What the adapter is called in `new.adapters`.
        strength: How much of it is used.
        slots: How many adapters there is room for; 0 makes no slots: blocks that can be trained on.
        adapter: Which of several adapters in the file.
        part: Which part of a pipeline the model is.
        config: PEFT's adapter configuration, where none is beside the file.
        partial: Whether layers that the model does not have are left out.
        guess: Whether layers may be taken by shape and order.
        limits: Bounds of what is read.

    Returns:
        The rewritten module.

    Raises:
        ArtifactError: The file cannot be read, or does not fit; the error says which family of models it is of, where that can
            be told.
        TraceError: The model cannot be traced.
        SpecError: No example inputs are given, or some for a module that is traced already.
    """
    file = read(source, adapter=adapter, config=config, limits=limits)  # before the trace, which takes longer
    own = bool(file.own)  # passes of fxplug's own, which have no slots
    if not is_finite(strength) or ((own or not slots) and strength != 1):
        needed = "1 where the adapter has no slot" if own or not slots else "a finite number"
        raise SpecError(f"must be {needed}, not {quote(strength)}", path=("strength",))
    gm = _trace(model, args, kwargs)
    if any(entry["name"] == LOADED for entry in gm.meta.get("passes", [])):
        raise SpecError(f"the module has a pass '{LOADED}' already: load another file into it with module.adapters.load, or "
                        "with fxplug.load_adapter where it has no slots")  # fmt: skip
    ways: dict[str, Any] = {"adapter": adapter, "part": part, "partial": partial, "guess": guess, "limits": limits}
    try:
        new = apply(gm, pass_for(file, gm, slots=None if own else slots, name=LOADED, **ways))
        if own or not slots:
            load_adapter(new, source if own else file, config=config, **ways)
        else:
            held = Adapters(new)
            if name in held.names:
                raise SpecError(f"an adapter '{name}' is loaded already: give this one another name", path=("name",))
            held.banks = {LOADED: held.banks[LOADED]}  # of other passes it takes nothing
            held.load(name, file, **ways)
            held.use({name: strength})
    except (ArtifactError, MatchError) as error:
        if hint := describe_family(file, gm):
            raise ArtifactError(f"{error}; {hint}") from error
        raise
    return new


def _trace(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> TracedModule:
    given = bool(kwargs) or not (isinstance(args, (tuple, list)) and not args)
    if isinstance(model, TracedModule):
        if given:
            raise SpecError("args and kwargs have no effect: the module is traced already", path=("args",))
        return model
    if not given:
        raise SpecError("one example call of the model is needed: give its inputs as args or kwargs", path=("args",))
    return trace(model, args, kwargs)


def describe_family(file: AdapterFile, model: nn.Module) -> str:
    """Describe for an error which family of models a file is of, beside that of a model; "" where it cannot be told, and where
    both are the same.

    A family is told by the layers that its models have at their published sizes, else by the names of the file's layers, else
    by what the file's metadata says.
    """
    names = [entry.path for entry in file.entries]
    fitting = list_families(file) if names else []
    known = " or ".join(fitting) or guess_family(names)
    text = f"this file is of {known}" if known else ""
    if not known and names and all(part.startswith("text_encoder") for part in file.parts):
        text = "this file is of a text encoder"
    if said := find_base_model(file.about):
        text += f"{' and says' if text else 'this file says'} that its model is {quote(said)}"
    here = list(_list_same(model)) if known else []
    if not text or {*here} & {*fitting}:
        return ""
    return f"{text}, and the model is {' or '.join(here) or getattr(model, 'classes', [type(model).__name__])[0]}"


def _list_same(model: nn.Module) -> Iterator[str]:
    """Yield the families whose models have just these layers at their published sizes."""
    own = {path: tuple(layer.shape) for path, layer in list_layers(model).items()}
    for family, layers in list_published_layers():
        if layers == own:
            yield family

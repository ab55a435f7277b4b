"""A pipeline whose models are rewritten where they stand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, count
from typing import Any, TypeVar

from ..adapters.file_passes import make_adapter_pass
from ..adapters.files import read
from ..core.errors import ArtifactError, SpecError, did_you_mean, quote
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.applying import apply
from ..core.spec.rules import Pass
from .control import controlnet_of
from .diffusers_types import check_pipeline
from .step_inputs import StepInputs
from .tracing import find_models, trace_parts

P = TypeVar("P", bound=Callable[..., Any])
Passes = Pass | Iterable[Pass]
DENOISERS = "unet", "transformer"
EXAMPLES = {"passes": '{"unet": fxplug.load_pass(...)}', "adapters": '{"ink": "ink.safetensors"}'}
OF_DENOISERS = *DENOISERS, "diffusion_model", ""  # how files call the layers of whichever of them is there


def rewrite_pipeline(
    pipe: P,
    passes: Mapping[str, Passes] | None = None,
    *,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    slots: int | None = None,
    join: bool = False,
    variants: int | None = None,
    **call: Any,
) -> P:
    """Put models that `trace_pipeline(pipe, **call)` has traced, and passes have changed, into a pipeline; return the pipeline.

    `passes` has one pass or several for each model, by its name in the pipeline. `adapters` maps adapter names to files: they
    are put in `slots` of the models that they have layers for (None: as many slots as files), all of them active at full
    strength; a file that does not name its model is for the `unet` or the `transformer`. Afterwards `pipe.set_adapters` and the
    related methods work as usual. The call goes on to a second step, for which the denoiser runs once, and what it is given in
    both is noted for `lower(pipe.transformer, hoist=True)`. `join` and `variants` are those of `trace_pipeline`. Without passes
    and adapters every model that the call calls is traced and put in.

    Args:
        pipe: The pipeline.
        passes: One pass or several for each model, by the name that it has in the pipeline.
        adapters: Files by the names that the adapters shall have: they are put in slots of the models that they have layers
            for, all of them in use, in full; a file that does not say for what its layers are is for the `unet` or the
            `transformer`.
        slots: How many slots there are; None is as many as files.
        join: As in `trace_pipeline`.
        variants: As in `trace_pipeline`.
        **call: The arguments of one call of the pipeline.

    Returns:
        The same pipeline.

    Raises:
        SpecError: Other arguments, and for a pipeline whose call changes attention processors, or has a guider that hooks
            layers; TraceError as `trace_pipeline` does, ArtifactError for a file that cannot be read or has layers for a model
            that is not there, and as `apply` does; the pipeline is then unchanged.
    """
    for what, given in (("passes", passes), ("adapters", adapters)):
        if not isinstance(given, (Mapping, type(None))):
            named = "the models' names" if what == "passes" else "their own names"
            raise SpecError(f"{what} must be a mapping by {named}, not {quote(given)}: {EXAMPLES[what]}")
    check_pipeline(pipe)
    wanted = {name: list(_listed(given, name)) for name, given in (passes or {}).items()}
    for name, files in _by_part(pipe, adapters or {}).items():
        settings = {"files": files, "name": _free(getattr(pipe, name)), **({} if slots is None else {"slots": slots})}
        wanted.setdefault(name, []).append(make_adapter_pass(settings))
    parts = [*wanted, *(["unet"] if join and "unet" not in wanted else [])] or None
    made = trace_parts(pipe, (), call, parts=parts, variants=variants, join=join, inputs=StepInputs())
    for name, own in wanted.items():
        made[name] = apply(made[name], *own)  # type: ignore[arg-type]
    if "controlnet" in made and join:
        made["controlnet"] = controlnet_of(made["unet"])  # type: ignore[arg-type]
    put: Any = getattr(pipe, "update_components", None)  # of a modular pipeline, which keeps the classes of its models
    if put is not None:
        put(**made)
    else:
        for name, model in made.items():
            setattr(pipe, name, model)
    return pipe


def _free(model: Any) -> str:
    """Return a name for a pass of files that is still unused in a model."""
    taken = {entry["name"] for entry in model.meta.get("passes", [])} if isinstance(model, TracedModule) else ()
    return next(name for name in chain(["adapter"], (f"adapter_{n}" for n in count(2))) if name not in taken)


def _listed(given: Any, name: str) -> Iterable[Pass]:
    found = [given] if isinstance(given, Pass) else given
    if isinstance(found, (str, Mapping)) or not isinstance(found, Iterable):
        raise SpecError(f"'{name}' must have passes, such as load_pass returns, not {quote(given)}")
    return found


def _by_part(pipe: Any, adapters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the files of each model, in the form of `adapter:`."""
    models = find_models(pipe)
    found: dict[str, dict[str, Any]] = {}
    for adapter, path in adapters.items():
        if not isinstance(path, (str, os.PathLike)):
            raise SpecError(
                f"adapter {quote(adapter)} must be a file or a folder, not {quote(path)}: for a loaded state dict use "
                "trace_pipeline, pass_for and adapters.load"
            )
        for part in read(path, meta=True).parts:
            names = [part, *(DENOISERS if part in OF_DENOISERS else ())]
            name = next((each for each in names if each in models), None)
            if name is None:
                raise ArtifactError(
                    f"{path} has layers for '{part or 'a denoiser'}', and the pipeline has no such model"
                    f"{did_you_mean(part, models)}; it has {', '.join(models)}"
                )
            found.setdefault(name, {})[adapter] = {"file": os.fspath(path), **({"part": part} if part else {})}
    return found

"""The module of a network: given as such, a diffusers folder or configuration, or made from the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture.isolation import forbid_mutation
from ..errors import FxplugError, SpecError, did_you_mean
from ..ir.traced_module import TracedModule
from ..reading import read_json
from ..spec.pass_file import import_target
from ..spec.rules import Pass, is_target


def make_network(gm: TracedModule, p: Pass, name: str, spec: Mapping[str, Any]) -> nn.Module:
    """Return the module of a network: a given one, a diffusers folder or configuration, or one made from the host.

    A new one is moved to the model's device. Raises SpecError for a given one on a device without any of the model's
    weights.
    """
    use, what = spec["use"], f"{p.name}: network '{name}'"
    network = use if isinstance(use, nn.Module) else _made(gm, p, use, spec.get("options") or {}, what)
    near, there = _near(gm).device, {t.device for t in gm.parameters()} | {torch.device("meta")}
    elsewhere = next((t.device for t in network.parameters() if t.device not in there), None)
    if elsewhere is None or near.type == "meta":
        return network
    if network is use:
        raise SpecError(f"{what} is on {elsewhere} and the model on {near}: move the network first, with .to('{near}')")
    return network.to(near)


def _made(gm: TracedModule, p: Pass, use: Any, options: Mapping[str, Any], what: str) -> nn.Module:
    if isinstance(use, Mapping) and "_class_name" in use:
        with _like(gm):
            return _kind(str(use["_class_name"]), what).from_config(dict(use))  # type: ignore[no-any-return]
    if isinstance(use, Path) or (isinstance(use, str) and not is_target(use)):
        return _from_folder(Path(use), what)
    if not isinstance(use, str):
        raise SpecError(f"{what} must be a module, a folder or 'package.module:function', not a {type(use).__name__}")
    make: Any = import_target(use, p.where)
    if "." in use.partition(":")[2] and not isinstance(import_target(use.rpartition(".")[0], p.where), type):
        raise SpecError(f"{what}: '{use}' must be a function, a class or a classmethod")
    try:
        with forbid_mutation(gm, f"{what}: {use}") as before, _like(gm), before:
            made = make(gm, **options)
    except FxplugError as error:
        finding = getattr(error, "finding", str(error))
        raise SpecError(finding if finding.startswith(what) else f"{what}: {finding}") from error
    except Exception as error:  # the network's constructor, diffusers' or anybody's
        raise SpecError(f"{what}: {use} fails for this model: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise SpecError(f"{what}: {use} gave a {type(made).__name__}, not an nn.Module")
    return made


def _near(gm: TracedModule) -> torch.Tensor:
    """Return a weight of the model, for the device and dtype of new modules."""
    return next((t for t in gm.parameters() if t.dtype in DEFAULTS), torch.empty(0))


@contextmanager
def _like(gm: TracedModule) -> Iterator[None]:
    """Create new modules on the model's device, in its dtype, inside the context."""
    near = _near(gm)
    before = torch.get_default_dtype()
    torch.set_default_dtype(near.dtype)
    try:
        with torch.device(near.device):
            yield
    finally:
        torch.set_default_dtype(before)


def _from_folder(folder: Path, what: str) -> nn.Module:
    folder = folder.parent if folder.name == "config.json" else folder
    if not (folder / "config.json").is_file():
        parts = sorted(f.parent.name for f in folder.glob("*/config.json"))
        hint = f": it is the folder of a pipeline; name one of its models, {', '.join(parts)}" if parts else ""
        raise SpecError(f"{what}: '{folder}' has no config.json{hint}")
    file = folder / "config.json"
    read = read_json(file, lambda finding: SpecError(f"{what}: '{file}' {finding}"))
    name = read.get("_class_name") if isinstance(read, dict) else None
    if not isinstance(name, str):
        raise SpecError(f"{what}: '{file}' is not a configuration of a diffusers model: it has no '_class_name'")
    kind = _kind(name, what)
    try:
        return kind.from_pretrained(folder, local_files_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # the network's constructor, diffusers' or anybody's
        raise SpecError(f"{what}: '{folder}' cannot be read as {name}: {error}") from error


def _kind(name: str, what: str) -> Any:
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        known = [n for n in dir(diffusers) if n.endswith(("Model", "Adapter", "2D"))]
        raise SpecError(f"{what}: diffusers has no model class '{name}'{did_you_mean(name, known)}")
    return kind


DEFAULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes that new tensors may have by default

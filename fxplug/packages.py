"""AOTInductor packages: a module compiled ahead of time, whose adapters stay live.

A package is one `.pt2` file: the machine code that AOTInductor made of a graph, with the weights; the tensors of the passes
once more, as safetensors; and a manifest, as JSON. It runs without the model's Python code and without a compiler. What the
passes added stays apart from the rest: the machine code is given tensors of ours to read it from, so an adapter is changed by
writing into a tensor, and nothing is compiled again.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import platform
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch.export import ExportedProgram

from . import __version__
from .adapting.adapter_files import AdapterFile, read
from .adapting.fitting import Fit
from .adapting.switching import Adapters, Bank, Source
from .errors import ArtifactError, FxplugError, SpecError, did_you_mean
from .signatures import Json, Signature, describe
from .turns import Turns, change, during

FORMAT = 1
MANIFEST, TENSORS = "data/fxplug/manifest.json", "data/fxplug/adapters.safetensors"
LOADER: Any = torch._C._aoti.AOTIModelPackageLoader
# what inductor does to constants otherwise: those of one value are worked out at compile time and whatever they feed with
# them (a new adapter's zeros, and all that is multiplied by them), those of few numbers are written into the code, and weights
# are laid out anew. An adapter that is loaded later would have no effect, or on some layers only.
LIVE = {
    "joint_graph_constant_folding": False,
    "always_keep_tensor_constants": True,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
}
FEATURES = {"AVX2": "avx2", "AVX512": "avx512_f", "AVX512_VNNI": "avx512_vnni", "AMX_TILE": "amx_tile"}


# --- writing


class Unfit(FxplugError):
    """A module whose package would not follow its adapters, however many sizes are free."""


def check_compiler(device: torch.device) -> None:
    """Raises FxplugError where no package can be compiled for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if device.type not in ("cpu", "cuda"):
        raise FxplugError(f"a package runs on cpu or cuda, and the module is on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FxplugError("a package for cuda is compiled on a machine with such a device, and there is none")
    try:
        get_cpp_compiler()
    except Exception as error:
        raise FxplugError(
            "no C++ compiler was found, and AOTInductor needs one to make a package (to run one it does not): install g++, "
            f"or name one in the environment variable CXX ({str(error).strip().splitlines()[0]})"
        ) from error


def write(
    program: ExportedProgram,
    parameters: Mapping[str, inspect.Parameter],
    file: str,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Compile an exported program into a package `file`, and give notes about what it does not check.

    `parameters` are those of the exported `forward`, `tensors` what stays live, by name, `facts` more for the manifest, and
    `options` inductor's own. Raises Unfit when a tensor that has to be live is not.
    """
    from torch._inductor import aoti_compile_and_package

    signature, notes = describe(program, parameters)
    with _quiet(), torch.no_grad():
        aoti_compile_and_package(program, package_path=file, inductor_configs={**(options or {}), **LIVE})
    loader = LOADER(file, "model", False, 1, -1)
    constants = set(loader.get_constant_fqns())
    state = _state(program)
    whole, views = _shared(tensors, {name: tensor for name, tensor in state.items() if name in constants})
    read = _read_by(program) & set(tensors) | set(facts.get("where", {}).values())
    lost = sorted(name for name in read if name not in constants and name not in views)
    if lost:
        raise Unfit(
            f"the compiled program does not read {', '.join(lost[:3])}{' ...' if lost[3:] else ''}, so another adapter would "
            "have no effect there: export the module that this one was lowered from, module.meta['source']"
        )
    # names of adapters and the like are part of the state, and no part of the program
    live = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in whole.items()}
    metadata = loader.get_metadata()
    manifest = {
        "format": FORMAT,
        "fxplug": __version__,
        "torch": torch.__version__,
        "platform": sys.platform,
        "machine": metadata.get("AOTI_MACHINE", ""),
        "device": metadata["AOTI_DEVICE_KEY"],
        "features": metadata.get("AOTI_CPU_ISA", "").split(),
        "capability": list(torch.cuda.get_device_capability()) if metadata["AOTI_DEVICE_KEY"] == "cuda" else None,
        "constants": {name: _facts(tensor) for name, tensor in state.items() if name in constants},
        "operators": _operators(program),
        "views": views,
        "signature": signature,
        **facts,
    }
    with zipfile.ZipFile(file, "a", zipfile.ZIP_STORED) as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{MANIFEST}", json.dumps(manifest, sort_keys=True))
        archive.writestr(f"{root}/{TENSORS}", save_tensors(live))
    return notes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without the log line that torch found no CUDA, which a package for a CPU has no need of."""
    log = logging.getLogger("torch.utils.cpp_extension")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _operators(program: ExportedProgram) -> list[str]:
    """The operators of libraries other than torch that the program may call."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return sorted({f"{t.namespace}::{t._opname}" for t in targets if t.namespace not in ("aten", "prim", "prims")})


def _shared(
    tensors: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """The tensors to keep, and how the others lie in these: a bank that is packed is a part of what the program reads."""
    whole: dict[str, torch.Tensor] = {}
    views: dict[str, Json] = {}
    for name, tensor in tensors.items():
        around = [key for key, other in constants.items() if key != name and _within(tensor, other)]
        owner = max(around, key=lambda key: constants[key].numel(), default=name)
        if owner == name:
            whole[name] = tensor
        else:
            start = tensor.storage_offset() - constants[owner].storage_offset()
            whole[owner] = constants[owner]
            views[name] = {"of": owner, "shape": list(tensor.shape), "stride": list(tensor.stride()), "start": start}
    return {name: tensor for name, tensor in whole.items() if name not in views}, views


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor is a smaller part of another's memory."""
    if not part.numel() < whole.numel() or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    first, start = part.storage_offset(), whole.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    return bool(part.numel() and whole.is_contiguous() and start <= first and last < start + whole.numel())


def _state(program: ExportedProgram) -> dict[str, torch.Tensor]:
    constants = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    return {**program.state_dict, **constants}


def _facts(tensor: torch.Tensor) -> Json:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _read_by(program: ExportedProgram) -> set[str]:
    """The names of the parameters and buffers that a node of the program reads."""
    signature = program.graph_signature
    places = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {places[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in places and n.users}


# --- running


class PackageAdapters(Adapters):
    """The adapters of a package, by name: `load`, `use`, `unload` and `names` as those of a module.

    A change waits until the calls of the package that run are done, and later calls wait for it. Files are read before that.
    """

    def __init__(self, manifest: Json, tensors: dict[str, torch.Tensor], turns: tuple[Turns, ...]) -> None:
        self.banks, self.where = _banks(manifest)
        self.tensors, self.turns = tensors, turns

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[self.where.get(name, name)]

    def shapes(self) -> dict[str, Any]:
        """The weights of the whole model are the program's own."""
        return {}

    def load(self, name: str, source: Source, *, adapter: str | None = None, **options: Any) -> Fit:
        file = source if isinstance(source, AdapterFile) else read(source, adapter=adapter)  # type: ignore[arg-type]
        return super().load(name, file, **options)


class Package:
    """A compiled module: called as the module was, for inference only.

    `adapters` are what is in the slots of its passes. `tensors` are all tensors of its passes, by name, live: the program reads
    them at each call; `update` writes into them, and into every other constant. Calls may come from several threads; a change
    waits until those that run are done, and calls that come later wait for it, so that each call sees one state. On a GPU calls
    and changes belong to one stream.
    """

    def __init__(self, loader: Any, manifest: Json, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        self._loader, self.manifest, self.tensors, self.device = loader, manifest, tensors, device
        self._signature = Signature(manifest["signature"], device)
        self._turns = (Turns(),)
        self._adapters = PackageAdapters(manifest, tensors, self._turns) if manifest.get("banks") else None
        # from here on the program reads these tensors where they lie
        loader.load_constants({k: t for k, t in tensors.items() if k in manifest["constants"]}, False, False, True)

    @property
    def adapters(self) -> PackageAdapters:
        """The adapters in the slots of the passes. Raises SpecError for a package of a module without slots."""
        if self._adapters is None:
            raise SpecError("no pass of this package has slots: apply one with them, load_pass('lora', slots=4), then export")
        return self._adapters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module, without gradients; result classes are dicts of their fields.

        Raises what `Signature.flatten` does, and FxplugError when the program itself fails.
        """
        flat = self._signature.flatten(args, kwargs)
        try:
            out = during(self._turns, self._loader.boxed_run, flat)
        except RuntimeError as error:
            raise FxplugError(f"the package failed in this call: {_first(error)}") from error
        return self._signature.unflatten(out)

    def state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The constants of the program and the tensors of the passes: their names, dtypes and shapes."""
        constants = self.manifest["constants"].items()
        own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return {**{name: (getattr(torch, entry["dtype"]), tuple(entry["shape"])) for name, entry in constants}, **own}

    def update(self, source: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> None:
        """Write other values into constants: adapters, or any weights.

        `source` is a dict of tensors or a safetensors file, by the names of `state()`; what it does not name stays. Values are
        cast to the dtype and moved to the device of the constant. All are checked before the first is written. Raises
        ArtifactError for a file that cannot be read, FxplugError for an unknown name, another shape, or numbers that are not
        finite.
        """
        given = source if isinstance(source, Mapping) else _read_file(Path(source))
        known = self.state()
        ready: dict[str, torch.Tensor] = {}
        for name, value in given.items():
            if name not in known:
                raise FxplugError(f"the package has no constant '{name}'{did_you_mean(name, known)}")
            dtype, shape = known[name]
            if tuple(value.shape) != shape:
                raise FxplugError(f"{name} is {shape} in the package, and {tuple(value.shape)} was given")
            ready[name] = value.detach().to(self.device, dtype).contiguous()
            if dtype.is_floating_point and not bool(torch.isfinite(ready[name]).all()):
                raise FxplugError(f"{name} has values that are not finite")
        with change(self._turns), torch.no_grad():
            for name in self.tensors.keys() & ready.keys():
                self.tensors[name].copy_(ready.pop(name))
            if ready:
                self._loader.load_constants(ready, False, False, False)

    def __repr__(self) -> str:
        names = ", ".join(self.manifest.get("passes", [])) or "no passes"
        return f"Package({self.manifest.get('module')}, {names}, on {self.device})"


def _banks(manifest: Json) -> tuple[dict[str, list[Bank]], dict[str, str]]:
    """The slots as `switching` has them, and the names of their tensors here. Raises ArtifactError for other data."""
    try:
        banks: dict[str, list[Bank]] = {}
        for name, entries in manifest["banks"].items():
            plain: list[dict[str, Any]] = [{k: tuple(v) if isinstance(v, list) else v for k, v in e.items()} for e in entries]
            banks[name] = [Bank(**entry) for entry in plain]
        return banks, dict(manifest.get("where", {}))
    except (TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"the slots in the package cannot be read: {error}") from None


def load_package(path: str | os.PathLike[str], *, device: torch.device | str | None = None, runners: int = 1) -> Package:
    """Load a package that `export(..., to="aoti")` wrote.

    A package is machine code: load only what you would also install. Nothing is unpickled, and the model's own Python code and
    a compiler are not needed. `device` picks one of several GPUs; `runners` is how many calls may run at once, each with
    memory of its own for what lies between the layers (weights are shared).

    Raises ArtifactError for a file that is damaged or no package of fxplug's, for one that another version of torch compiled,
    and for one whose device or instructions this machine does not have.
    """
    file = Path(path)
    manifest, tensors = _read(file)
    where = _device(file, manifest, device)
    _check_machine(file, manifest, where)
    _check_operators(file, manifest.get("operators", []))
    if type(runners) is not int or runners < 1:
        raise FxplugError(f"runners must be a whole number, 1 or more, not {runners!r}")
    try:
        loader = LOADER(str(file.absolute()), "model", False, runners, where.index if where.index is not None else -1)
        missing = sorted(set(manifest["constants"]) - set(loader.get_constant_fqns()))
    except RuntimeError as error:
        raise ArtifactError(f"the program in {file} cannot be loaded: {_first(error)}") from error
    if missing:
        raise ArtifactError(f"{file}: the program does not know {missing[0]}, which its manifest lists")
    # what the program does not read, such as names, is read by us alone
    placed = {name: tensor.to(where) if name in manifest["constants"] else tensor for name, tensor in tensors.items()}
    for name, view in manifest.get("views", {}).items():
        placed[name] = placed[view["of"]].as_strided(view["shape"], view["stride"], view["start"])
    return Package(loader, manifest, placed, where)


def _read(file: Path) -> tuple[Json, dict[str, torch.Tensor]]:
    if not file.is_file():
        raise ArtifactError(f"there is no file {file}")
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
            if bad is not None:
                raise ArtifactError(f"{file} is damaged: {bad} is not as it was written")
            names = archive.namelist()
            root = names[0].partition("/")[0] if names else ""
            if f"{root}/{MANIFEST}" not in names:
                raise ArtifactError(f"{file} is no package of fxplug's: {_kind(names)}")
            manifest = json.loads(archive.read(f"{root}/{MANIFEST}"))
            _check_format(file, manifest)
            tensors = load_tensors(archive.read(f"{root}/{TENSORS}"))
    except ArtifactError:
        raise
    except Exception as error:  # zipfile, json and safetensors raise many kinds for bytes that are not theirs
        raise ArtifactError(f"{file} is damaged or no package: {type(error).__name__}: {_first(error)}") from error
    return manifest, tensors


def _kind(names: list[str]) -> str:
    if any("/data/aotinductor/" in name for name in names):
        return "it has compiled code and no manifest; torch._inductor.aoti_load_package reads such files"
    if any("/models/" in name for name in names):
        return "it is an exported program without compiled code; torch.export.load reads it, and `--to aoti` writes a package"
    return f"it has no {MANIFEST}"


def _check_format(file: Path, manifest: Any) -> None:
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{file}: the manifest has the format {version!r}, which is no version")
    if version > FORMAT:
        raise ArtifactError(
            f"{file} has format {version}, written by fxplug {manifest.get('fxplug')}; this version reads up to {FORMAT}: "
            "update fxplug"
        )
    lacking = [key for key in ("torch", "device", "constants", "signature") if key not in manifest]
    if lacking:
        raise ArtifactError(f"{file}: the manifest says nothing of {', '.join(lacking)}")


def _device(file: Path, manifest: Json, device: torch.device | str | None) -> torch.device:
    kind = str(manifest["device"])
    wanted = torch.device(kind if device is None else device)
    if wanted.type != kind:
        raise ArtifactError(f"{file} was compiled for {kind} and cannot run on {wanted.type}: export it again from there")
    if kind != "cuda":
        return wanted
    if not torch.cuda.is_available():
        raise ArtifactError(f"{file} was compiled for cuda, and this machine has no such device")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def _check_machine(file: Path, manifest: Json, device: torch.device) -> None:
    def release(version: str) -> list[str]:
        return version.partition("+")[0].split(".")[:2]

    made, here = str(manifest["torch"]), torch.__version__
    if release(made) != release(here):
        raise ArtifactError(
            f"{file} was compiled by torch {made}, and this is torch {here}: its code holds for that version only; "
            "export it again with this one"
        )
    system, this = f"{manifest.get('platform')} {manifest.get('machine')}", f"{sys.platform} {platform.machine()}"
    if system != this:
        raise ArtifactError(f"{file} was compiled for {system}, and this is {this}")
    has = dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}
    lacking = [name for name in manifest.get("features", []) if has and name in FEATURES and not has.get(FEATURES[name])]
    if lacking:
        raise ArtifactError(f"{file} was compiled for a processor with {', '.join(lacking)}, which this one does not have")
    made_for = manifest.get("capability")
    if device.type == "cuda" and made_for:
        major, minor = torch.cuda.get_device_capability(device)
        if major != made_for[0] or minor < made_for[1]:
            raise ArtifactError(
                f"{file} was compiled for compute capability {made_for[0]}.{made_for[1]}, and {device} has {major}.{minor}: "
                "export it again on such a device"
            )


def _check_operators(file: Path, names: list[str]) -> None:
    if any(name.startswith("fxplug::") for name in names):
        from .lowerings import kernels, products  # noqa: F401  (which define them)
    for name in names:
        library, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, library), operator):
            raise ArtifactError(f"{file} calls the operator {name}, which is not here: import its library first")


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(file))
    except Exception as error:
        raise ArtifactError(f"{file} cannot be read as safetensors: {type(error).__name__}: {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

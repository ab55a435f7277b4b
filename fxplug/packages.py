"""AOTInductor packages: a module compiled ahead of time, whose adapters stay live.

A package is one `.pt2` file: the machine code that AOTInductor made of a graph, with the weights; the tensors of the passes
once more, as safetensors; and a manifest, as JSON. It runs without the model's Python code and without a compiler. What the
passes added stays apart from the rest: the machine code is given tensors of ours to read it from, so an adapter is changed by
writing into a tensor, and nothing is compiled again.

Machine code can do whatever the process can, and no check of a file changes that: a package is trusted as a program is, or not
loaded. The checks here are for what happens by mistake, and so that no more is trusted than that code.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
import warnings
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch.export import ExportedProgram

from . import __version__
from .adapting.adapter_files import AdapterFile, read
from .adapting.fitting import Fit
from .adapting.switching import Adapters, Source
from .archives import Archive
from .errors import ArtifactError, FxplugError, SpecError, did_you_mean, shown
from .limits import DEFAULT, Limits
from .machines import capabilities, check_machine, check_operators, needed, pick_device
from .packed import CODE, FORMAT, MANIFEST, TENSORS, Packed, check_members, check_slots, place, root, unpack
from .packed import banks as _banks
from .reading import about, opened, reported
from .signatures import Json, Signature, describe
from .sinks import written
from .temporary import Folder, ended_by_exceptions, folder
from .turns import Turns, change, during

LOADER: Any = torch._C._aoti.AOTIModelPackageLoader
TEMPORARY = "fxplug-package-"
# what inductor does to constants otherwise: those of one value are worked out at compile time and whatever they feed with
# them (a new adapter's zeros, and all that is multiplied by them), those of few numbers are written into the code, and weights
# are laid out anew. An adapter that is loaded later would have no effect, or on some layers only.
LIVE = {
    "joint_graph_constant_folding": False,
    "always_keep_tensor_constants": True,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
}


# --- writing


class Unfit(FxplugError):
    """A module whose package would not follow its adapters, however many sizes are free."""


class Refused(Exception):
    """What torch does not take, with as many free sizes as were asked for; its own error is the cause."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Tell errors of torch's export and of its compilers as Refused: another try, with fewer free sizes, may do."""
    try:
        yield
    except (FxplugError, OSError):
        raise
    except Exception as error:  # torch's, and the module's: they raise many kinds
        raise Refused(str(error).strip() or type(error).__name__) from error


def check_compiler(device: torch.device) -> None:
    """Raises FxplugError where no package can be compiled for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if device.type not in ("cpu", "cuda"):
        raise FxplugError(f"a package runs on cpu or cuda, and the module is on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FxplugError("a package for cuda is compiled on a machine with such a device, and there is none")
    try:
        get_cpp_compiler()
    except Exception as error:  # inductor's
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
    with _quiet(), torch.no_grad(), written(file) as sink, refusing():
        aoti_compile_and_package(program, package_path=sink, inductor_configs={**(options or {}), **LIVE})
    constants, metadata = _compiled(file)
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
    manifest = {
        "format": FORMAT,
        "fxplug": __version__,
        "torch": torch.__version__,
        "platform": sys.platform,
        "machine": metadata.get("AOTI_MACHINE", ""),
        "device": metadata["AOTI_DEVICE_KEY"],
        "features": needed(metadata.get("AOTI_CPU_ISA", "").split(), capabilities(), _march(options) in (None, "native")),
        "capability": list(torch.cuda.get_device_capability()) if metadata["AOTI_DEVICE_KEY"] == "cuda" else None,
        "constants": {name: _facts(tensor) for name, tensor in state.items() if name in constants},
        "operators": _operators(program),
        "views": views,
        "signature": signature,
        **facts,
    }
    with open(file, "r+b") as out:
        with zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as archive:
            start = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{start}/{MANIFEST}", json.dumps(manifest, sort_keys=True))
            archive.writestr(f"{start}/{TENSORS}", save_tensors(live))
        out.flush()
        os.fsync(out.fileno())
    return notes


def _compiled(file: str) -> tuple[set[str], dict[str, str]]:
    """The names of the constants that a compiled program reads, and what AOTInductor says of it."""

    def unfit(finding: str) -> Unfit:
        return Unfit(f"AOTInductor wrote what is no package: it {finding}; leave out the options that ask for it")

    with opened(file, raises=unfit) as handle, folder(TEMPORARY) as work:
        archive = Archive(handle, unfit)
        check_members(archive.members, root(archive), unfit)
        unpack(archive, work)
        loader = _loader(work, 1, -1)
        return set(loader.get_constant_fqns()), dict(loader.get_metadata())


def _march(options: Mapping[str, Any] | None) -> str | None:
    """For which processors the compiler works, as its option `-march` has them: None or "native" for the one here."""
    from torch._inductor import config

    set_here = (options or {}).get("cpp.march")
    return set_here if set_here is not None else getattr(config.cpp, "march", None)


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


def load_package(
    path: str | os.PathLike[str],
    *,
    trusted: bool = False,
    device: torch.device | str | None = None,
    runners: int = 1,
    limits: Limits = DEFAULT,
) -> Package:
    """Load a package that `export(..., to="aoti")` wrote: `load_package("model.aoti.pt2", trusted=True)`.

    A package is machine code and runs with all rights of this process: load only what you would also install, and say so by
    `trusted=True`. Nothing is unpickled, nothing is written but into a temporary folder, and neither the model's own Python
    code nor a compiler is needed. `device` picks one of several GPUs; `runners` is how many calls may run at once, each with
    memory of its own for what lies between the layers (weights are shared). `limits` bounds what is read beside the code.

    Raises ArtifactError for a file that is not said to be trusted, that is damaged or no package of fxplug's, that another
    version of torch compiled, and for one whose device or instructions this machine does not have.
    """
    file = Path(path)
    if trusted is not True:
        raise ArtifactError(
            f"{file} holds machine code, which can do whatever you can: load only what you would also install as a program, "
            "and say so: load_package(path, trusted=True)"
        )
    if type(runners) is not int or runners < 1:
        raise FxplugError(f"runners must be a whole number, 1 or more, not {runners!r}")
    with _named(file), opened(file) as handle, ended_by_exceptions():
        packed = Packed(handle, file, limits)
        manifest = packed.manifest
        where = pick_device(file, manifest["device"], device)
        check_machine(file, manifest, where)
        check_operators(file, manifest["operators"])
        Signature(manifest["signature"], where, limits)
        with reported(about(file), "cannot be unpacked into a temporary folder"):
            work = Folder(TEMPORARY)
        try:
            with reported(about(file), f"cannot be unpacked into {work.path}"):
                packed.unpack(work.path)
            loader = _loader(work.path, runners, where.index if where.index is not None else -1)
            missing = sorted(set(manifest["constants"]) - set(loader.get_constant_fqns()))
            if missing:
                raise ArtifactError(f"the program does not know {shown(missing[0])[1:-1]}, which its manifest lists")
            package = Package(loader, manifest, place(manifest, packed.tensors, where), where)
            if manifest["banks"]:
                check_slots(package.adapters)
        except BaseException:  # an interrupt, too: the folder goes, the error is raised again
            work.remove()
            raise
        if where.type == "cpu":
            work.remove()  # its code lies in memory by now
        else:
            weakref.finalize(package, work.remove)  # kernels are read when they are first called
    return package


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Whatever goes wrong with a file is an error that names it."""
    try:
        yield
    except ArtifactError as error:
        raise error if str(file) in str(error) else ArtifactError(f"{file}: {error}") from None
    except RuntimeError as error:  # RecursionError is one
        raise ArtifactError(f"the program in {file} cannot be loaded: {_first(error)}") from error
    except MemoryError:
        raise ArtifactError(f"{file} is damaged, or larger than the memory of this machine") from None


def _loader(code: Path, runners: int, index: int) -> Any:
    """The program whose files lie below a folder."""
    try:
        return LOADER(str(code.absolute()), "model", False, runners, index)
    except RuntimeError as error:
        if "zip archive" not in str(error):
            raise
    # before torch 2.15 the loader takes nothing but an archive
    archive = code / "model.pt2"
    with zipfile.ZipFile(archive, "w") as out:
        for path in sorted((code / CODE).iterdir()):
            out.write(path, f"model/{CODE}{path.name}")
    return LOADER(str(archive.absolute()), "model", False, runners, index)


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(file))
    except Exception as error:  # safetensors'
        raise ArtifactError(f"{file} cannot be read as safetensors: {type(error).__name__}: {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

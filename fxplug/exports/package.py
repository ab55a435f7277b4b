"""A compiled package as a callable: its adapters stay live."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..adapters.contents import ModelLayer, has_dora
from ..adapters.slots import Adapters
from ..adapters.writing import About
from ..blocks.base import describe_other_batch, read_count
from ..core import weight_files
from ..core.artifacts.value_json import decode
from ..core.errors import (
    DEFAULT,
    LONGEST,
    ArtifactError,
    FxplugError,
    Limits,
    SpecError,
    cut,
    did_you_mean,
    get_first_line,
    quote,
)
from ..core.locks import StateLock, call_with_read_lock, write_lock
from ..core.reading import make_reporter, open_regular_file, report_errors
from ..core.torch_internals.exporting import LOADER
from ..core.writing import Folder, raise_on_sigterm
from .call_signature import Json, Signature
from .machines import check_machine, check_operators, pick_device
from .package_file import CODE, PackageFile, check_slots
from .package_file import make_banks as _banks

TEMPORARY = "fxplug-package-"


# --- running


class PackageAdapters(Adapters):
    """The adapters of a package, by name: `load`, `use`, `unload` and `names` as those of a module.

    A change waits until the calls of the package that run are done, and later calls wait for it. Files are read before that.
    """

    def __init__(self, manifest: Json, tensors: dict[str, torch.Tensor], locks: tuple[StateLock, ...]) -> None:
        self.banks, self.where = _banks(manifest)
        self.tensors, self.locks, self.kind = tensors, locks, str(manifest.get("module", ""))

    def there(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(self.where.get(name, name))

    def passes_of(self, lock: StateLock) -> list[str]:
        return list(self.banks)

    def shapes(self) -> dict[str, Any]:
        """Return nothing: the weights of the whole model belong to the program."""
        return {}

    def check_bases(self, names: Collection[str]) -> None:
        """Raise FxplugError where weights of these names are to be written, and gains in the slots were made of them."""
        for bank in (bank for rows in self.banks.values() for bank in rows if bank.has_gain):
            if made := {f"{bank.path}.weight", f"{bank.path}.bias"}.intersection(names):
                tensors = {key: self.tensor(name) for key, name in bank.names.items()}
                slots = ({key: bank.views(key, value, slot) for key, value in tensors.items()} for slot in range(bank.slots))
                if any(map(has_dora, slots)):
                    raise FxplugError(f"an adapter in the slots has DoRA, whose gain was made of {min(made)}: unload it first")

    def about(self) -> About:
        rows = [bank for banks in self.banks.values() for bank in banks]
        layers = {bank.path: ModelLayer("" if bank.is_stacked else bank.kind, bank.shape, bank.groups) for bank in rows}
        return About(layers, (self.kind,))


class ExportedModel:
    """What a package and an ONNX model have in common: a manifest, tensors that stay live, and the adapters in the slots."""

    noun = "package"

    def __init__(self, manifest: Json, tensors: dict[str, torch.Tensor], signature: Signature) -> None:
        """Store the parts. Raises ArtifactError for slots whose tensors are missing or too small."""
        self.manifest, self.tensors, self._signature = manifest, tensors, signature
        self._locks = (StateLock(),)
        self._adapters = PackageAdapters(manifest, tensors, self._locks) if manifest["banks"] else None
        self._tables: list[tuple[torch.Tensor, dict[str, Any]]] = []
        if self._adapters is not None:
            check_slots(self._adapters)
            self._tables = [(self._adapters.tensor(f"{p}.gates.table.entries"), {}) for p in self._adapters.banks]

    @property
    def adapters(self) -> PackageAdapters:
        """Adapters in the slots of the passes. Raises SpecError for a module without slots."""
        if self._adapters is None:
            how = "apply one that has, load_pass('lora', slots=4), then export"
            raise SpecError(f"no pass of this {self.noun} has slots: {how}")
        return self._adapters

    def check_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the errors that a call with these arguments raises before it computes anything."""
        self._check_samples(self._signature.flatten(args, kwargs))

    def _check_samples(self, flat: Sequence[torch.Tensor]) -> None:
        """Raise SpecError if adapters were chosen per sample, and no input has that batch size."""
        for table, known in self._tables:
            sizes = [tensor.shape[0] for tensor in flat if tensor.dim()]
            if (entries := read_count(table, known)) and sizes and entries not in sizes:
                raise SpecError(describe_other_batch(entries, sizes[0]))

    def _described(self, more: str) -> str:
        names = cut(", ".join(self.manifest["passes"]), LONGEST // 2) or "no passes"
        return f"{type(self).__name__}({self.manifest['module']}, {names}, {more})"


class Package(ExportedModel):
    """A compiled module: called as the module was, for inference only.

    `adapters` are what is in the slots of its passes. `tensors` are all tensors of its passes, by name, live: the program reads
    them at each call; `update` writes into them, and into every other constant. Calls may come from several threads; a change
    waits until those that run are done, and calls that come later wait for it, so that each call sees one state. On a GPU calls
    and changes belong to one stream. `config`, `dtype` and other plain attributes of the model are those of the package, as a
    pipeline asks for them.
    """

    def __init__(
        self, loader: Any, manifest: Json, tensors: dict[str, torch.Tensor], device: torch.device, runners: int = 1
    ) -> None:
        self._loader, self.device = loader, device
        # a call that waits within the loader for a free runner keeps Python's lock, which the one that runs may need
        self._runners = threading.Semaphore(runners)
        self._attributes = {name: decode(value) for name, value in manifest["attributes"].items()}
        super().__init__(manifest, tensors, Signature(manifest["signature"], device))
        # from here on the program reads these tensors where they lie
        loader.load_constants({k: t for k, t in tensors.items() if k in manifest["constants"]}, False, False, True)

    def __getattr__(self, name: str) -> Any:
        known = vars(self).get("_attributes", {})
        if name in known:
            return known[name]
        raise AttributeError(f"a package has no attribute '{name}': change the model before you export it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module, without gradients; result classes are dicts of their fields.

        Raises the errors of `Signature.flatten`, SpecError if adapters were chosen for another number of samples, and
        FxplugError when the program itself fails.
        """
        flat = self._signature.flatten(args, kwargs)
        try:
            out = call_with_read_lock(self._locks, self._run, flat)
        except RuntimeError as error:
            raise FxplugError(f"the package failed in this call: {get_first_line(error)}") from error
        return self._signature.unflatten(out)

    def _run(self, flat: list[torch.Tensor]) -> Any:
        self._check_samples(flat)
        with self._runners:
            return self._loader.boxed_run(flat)

    def state(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """List the constants of the program and the tensors of the passes: their names, dtypes and shapes."""
        constants = self.manifest["constants"].items()
        own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return {**{name: (getattr(torch, entry["dtype"]), tuple(entry["shape"])) for name, entry in constants}, **own}

    def update(self, source: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> None:
        """Write other values into constants: adapters, or any weights.

        Values are cast to the dtype and moved to the device of the constant. All are checked before the first is written.

        Args:
            source: A dict of tensors or a file of weights, by the names of `state()`; what it does not name stays.

        Raises:
            ArtifactError: The file cannot be read.
            FxplugError: A name is unknown, a shape is another, or numbers are not finite.
        """
        given = source if isinstance(source, Mapping) else weight_files.read(source)[0]
        if not isinstance(given, Mapping) or not all(isinstance(value, torch.Tensor) for value in given.values()):
            raise ArtifactError(f"{source} must contain a dict of tensors")
        known = self.state()
        ready: dict[str, torch.Tensor] = {}
        for name, value in given.items():
            if name not in known:
                raise FxplugError(f"the package has no constant '{name}'{did_you_mean(name, known)}")
            dtype, shape = known[name]
            if tuple(value.shape) != shape:
                raise FxplugError(f"{name} has the shape {shape} in the package, not {tuple(value.shape)}")
            ready[name] = value.detach().to(self.device, dtype).contiguous()
            if dtype.is_floating_point and not bool(torch.isfinite(ready[name]).all()):
                raise FxplugError(f"{name} has values that are not finite")
        if self._adapters is not None:
            self._adapters.check_bases(ready)
        with write_lock(self._locks), torch.no_grad():
            for name in self.tensors.keys() & ready.keys():
                self.tensors[name].copy_(ready.pop(name))
            if ready:
                self._loader.load_constants(ready, False, False, False)

    def __repr__(self) -> str:
        return self._described(f"on {self.device}")


def load_package(
    path: str | os.PathLike[str],
    *,
    trusted: bool = False,
    device: torch.device | str | None = None,
    runners: int = 1,
    limits: Limits = DEFAULT,
) -> Package:
    """Load a package that `export(..., to="aoti")` wrote: `load_package("model.aoti.pt2", trusted=True)`.

    A package is machine code and runs with all rights of this process: load only what you would also install. Nothing is
    unpickled, nothing is written but into a temporary folder, and neither the model's own Python code nor a compiler is needed.

    Args:
        path: The file.
        trusted: True says that you trust the code.
        device: Which of several GPUs; None is the one of the export.
        runners: How many calls may run at once, each with memory of its own for what is between the layers (weights are
            shared).
        limits: Bounds of what is read beside the code.

    Returns:
        A function of the model's inputs, with `adapters`.

    Raises:
        ArtifactError: The file is not said to be trusted, is damaged or no package of fxplug's, was compiled by another version
            of torch, or is for a device or instructions that this machine does not have.
    """
    file = Path(path)
    if trusted is not True:
        raise ArtifactError(
            f"{file} contains machine code, which runs with all your rights: if you trust its source, use load_package(path, "
            "trusted=True)"
        )
    if type(runners) is not int or runners < 1:
        raise FxplugError(f"runners must be a whole number, 1 or more, not {quote(runners)}")
    with _named(file), open_regular_file(file) as handle, raise_on_sigterm():
        packed = PackageFile(handle, file, limits)
        manifest = packed.manifest
        where = pick_device(file, manifest["device"], device)
        check_machine(file, manifest, where)
        check_operators(file, manifest["operators"])
        Signature(manifest["signature"], where, limits)
        with report_errors(make_reporter(file), "cannot be unpacked into a temporary folder"):
            work = Folder(TEMPORARY)
        try:
            with report_errors(make_reporter(file), f"cannot be unpacked into {work.path}"):
                packed.unpack(work.path)
            loader = _loader(work.path, runners, where.index if where.index is not None else -1)
            missing = sorted(set(manifest["constants"]) - set(loader.get_constant_fqns()))
            if missing:
                raise ArtifactError(f"the program does not have {quote(missing[0])[1:-1]}, which its manifest lists")
            # what the program does not read, such as names, is read by us alone
            read = {name: tensor.to(where) for name, tensor in packed.tensors.items() if name in manifest["constants"]}
            package = Package(loader, manifest, {**packed.tensors, **read}, where, runners)
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
    """Re-raise any error with the file's path."""
    try:
        yield
    except ArtifactError as error:
        raise error if str(file) in str(error) else ArtifactError(f"{file}: {error}") from None
    except RuntimeError as error:  # RecursionError is one
        raise ArtifactError(f"the program in {file} cannot be loaded: {get_first_line(error)}") from error
    except MemoryError:
        raise ArtifactError(f"{file} is damaged, or larger than the memory of this machine") from None


def _loader(code: Path, runners: int, index: int) -> Any:
    """Return the loader of the program whose files are below a folder."""
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

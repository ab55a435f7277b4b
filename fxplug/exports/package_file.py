"""What a package and an ONNX model hold beside their code: a manifest, and the tensors of their passes, held to each other.

A package is machine code and trusted as such; of it no more is checked than tells damage, and another tool's file, from ours.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar
from zipfile import ZipFile

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..adapters.banks import Bank
from ..adapters.slots import Adapters
from ..blocks import list_update_kinds
from ..blocks.gathered import GatheredDora
from ..core.errors import DEFAULT, ArtifactError, Limits, quote
from ..core.reading import Raises, check_format, make_reporter, open_archive, parse_json, read_member
from ..core.weight_files import read_header, read_tensors
from .call_signature import Json

FORMAT = 1
MANIFEST, TENSORS = "data/fxplug/manifest.json", "data/fxplug/adapters.safetensors"
CODE = "data/aotinductor/model/"
OPERATOR = r"^\w+::[\w.]+$"
LARGEST = 1 << 62

Count = Annotated[int, Field(gt=0, lt=LARGEST)]


class ManifestEntry(BaseModel):
    """What is read of a described thing: each entry of its own kind, and others left as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


def _parameter(name: str) -> str:
    if name not in GatheredDora.gains and not any(name in kind.tensors for kind in list_update_kinds().values()):
        raise ValueError(f"{quote(name)} is not a parameter of a slot")
    return name


class BankFacts(ManifestEntry):
    """A bank of slots, as `Bank.plainly` describes it."""

    model_config = ConfigDict(extra="ignore")
    path: str
    block: str
    kind: str
    slots: Count
    rank: Count
    shape: list[Count]
    groups: Count = 1
    parameters: list[Annotated[str, AfterValidator(_parameter)]] = ["down", "up"]
    param: str = "weight"
    dim: int = 0
    transposed: bool = False
    group: Annotated[int, Field(ge=0)] = 0


class ExportManifest(ManifestEntry):
    """What manifests say of an exported module."""

    format: int
    signature: Json
    views: Annotated[Json, Field(max_length=0)] = {}  # of packed modules of earlier versions
    banks: dict[str, list[BankFacts]] = {}
    where: dict[str, str] = {}
    passes: list[str] = []
    module: str = ""
    mode: str = ""
    torch: str = ""
    fxplug: str = ""


class PackageManifest(ExportManifest):
    """What the manifest of a package says."""

    torch: str
    device: str
    constants: dict[str, Json]
    platform: str = ""
    machine: str = ""
    features: list[str] = []
    operators: list[Annotated[str, Field(pattern=OPERATOR)]] = []
    attributes: Json = {}
    capability: list[int] | None = None


Kind = TypeVar("Kind", bound=ExportManifest)


def check_manifest(manifest: Any, kind: type[Kind], raises: Raises) -> Json:
    """Return a manifest with all its entries, validated. Raises what `raises` makes."""
    check_format(manifest, FORMAT, raises)
    try:
        return kind.model_validate(manifest).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{quote(where)[1:-1]} in its manifest is not valid: {first['msg']}"
        raise raises(f"cannot be read: {what}") from None


class PackageFile:
    """An opened package: its `manifest`, its `tensors` by name, and its code, to be unpacked.

    Raises ArtifactError with the file's name for what is damaged or no package.
    """

    def __init__(self, file: BinaryIO, path: Path, limits: Limits = DEFAULT) -> None:
        raises = make_reporter(path)
        self.path, self._archive = path, open_archive(file, raises)
        start, names = root(self._archive), self._archive.namelist()
        for name in (MANIFEST, TENSORS):
            if start + name not in names:
                raise raises(
                    f"is not a package that fxplug exported: {_kind([each.removeprefix(start) for each in names], name)}"
                )
        data = read_member(self._archive, start + MANIFEST, raises, limits.json)
        manifest = parse_json(data, make_reporter(f"{path}: {MANIFEST}"), limits)
        self.manifest = check_manifest(manifest, PackageManifest, raises)
        held, inside = io.BytesIO(read_member(self._archive, start + TENSORS, raises)), make_reporter(f"{path}: {TENSORS}")
        self.tensors = dict(read_tensors(held, read_header(held, inside, limits), inside))
        check_places(self.manifest, self.tensors, raises)

    def unpack(self, folder: Path) -> None:
        """Write the code into a folder, laid out as AOTInductor's loader expects it."""
        unpack(self._archive, folder, make_reporter(self.path))


def root(archive: ZipFile) -> str:
    """Return the top folder of an archive."""
    return next(iter(archive.namelist()), "").partition("/")[0] + "/"


def unpack(archive: ZipFile, folder: Path, raises: Raises) -> None:
    """Write the code files to a place below a folder."""
    target = folder / CODE
    target.mkdir(parents=True)
    for name in archive.namelist():
        if name.startswith(root(archive) + CODE):
            (target / PurePosixPath(name).name).write_bytes(read_member(archive, name, raises))


def _kind(names: list[str], missing: str) -> str:
    if any(name.startswith("data/aotinductor/") for name in names):
        return "it has compiled code and no manifest; torch._inductor.aoti_load_package reads such files"
    if any(name.startswith("models/") for name in names):
        return "it is an exported program without compiled code; torch.export.load reads it, and `--to aoti` writes a package"
    return f"it has no {missing}"


def check_places(manifest: Json, tensors: Mapping[str, Any], raises: Raises) -> None:
    """Raise what `raises` makes for a tensor of the slots whose listed place does not exist."""
    for name, there in manifest["where"].items():
        if there not in tensors:
            raise raises(f"cannot be read: {quote(name)} is at {quote(there)}, which is not among its tensors")


# --- slots


def make_banks(manifest: Json) -> tuple[dict[str, list[Bank]], dict[str, str]]:
    """Return the slots of a checked manifest, by pass, and the names of their tensors here."""

    def bank(entry: Json) -> Bank:
        plain: Json = {key: tuple(value) if type(value) is list else value for key, value in entry.items()}
        return Bank(**plain)

    return {name: list(map(bank, entries)) for name, entries in manifest["banks"].items()}, dict(manifest["where"])


def check_slots(adapters: Adapters) -> None:
    """Raise ArtifactError for slots whose tensors are missing or too small."""
    try:
        for name, rows in adapters.banks.items():
            names, weights, entries = (adapters.tensor(f"{name}.gates.table.{row}") for row in ("names", "weights", "entries"))
            slots = {bank.slots for bank in rows}
            right = slots == {names.shape[0]} == {weights.shape[1]} and (names.dim(), weights.dim(), entries.dim()) == (2, 2, 0)
            right = right and weights.is_floating_point() and (names.dtype, entries.dtype) == (torch.uint8, torch.int64)
            which = adapters.there(f"{name}.gates.table.which")  # of per_sample
            if right and which is not None:
                right = (which.dtype, which.dim(), len(which)) == (torch.int64, 2, len(weights))
                right = right and bool(((which >= 0) & (which < len(names))).all())
            if not right:
                raise ValueError(f"the table of {quote(name)} must have {sorted(slots)} slots")
            for bank in rows:
                for key, each in bank.names.items():
                    tensor = adapters.tensor(each)
                    part = bank.views(key, tensor, 0)
                    inner = not bank.is_stacked and key in ("down", "up")
                    room = part.shape[1] == bank.rank if inner else key == "bias" or tensor.shape[0] == bank.slots
                    if not room or not part.is_floating_point() or not part.numel():
                        raise ValueError(f"{quote(each)} must have {bank.slots} slots of rank {bank.rank}")
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"the slots in the package cannot be read: {type(error).__name__}: {error}") from None

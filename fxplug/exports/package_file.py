"""What a package holds beside its code: the manifest and the tensors of its passes, read from the file and held to each other.

The code itself cannot be checked. What is here is: which members a package has, what its manifest may say, and that each tensor
is one that the manifest describes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch

from ..adapters.banks import RANKS, Bank
from ..adapters.slots import Adapters
from ..errors import ArtifactError, shown
from ..files.reading import Raises, about, check_format, open_archive, parse_json, read_member
from ..files.weight_files import header, tensors
from ..limits import DEFAULT, Limits
from .call_signature import DTYPES, Json

FORMAT = 1
MANIFEST, TENSORS = "data/fxplug/manifest.json", "data/fxplug/adapters.safetensors"
CODE = "data/aotinductor/model/"
# what torch writes into every such file, and what AOTInductor writes for a model: sources, metadata, machine code, weights
KNOWN = {"archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id", MANIFEST, TENSORS}
KINDS = (".cpp", ".h", ".json", ".so", ".cubin", ".fatbin", ".blob")
FILE = re.compile(r"\w[\w.\-]*\Z", re.ASCII)
OPERATOR = re.compile(r"\w+::[\w.]+\Z", re.ASCII)
# what the manifest says, and what stands for an entry that is not there
ENTRIES: dict[str, tuple[type, Any]] = {
    "torch": (str, None), "device": (str, None), "constants": (dict, None), "signature": (dict, None), "platform": (str, ""),
    "machine": (str, ""), "features": (list, []), "operators": (list, []), "passes": (list, []), "views": (dict, {}),
    "banks": (dict, {}), "where": (dict, {}), "module": (str, ""), "mode": (str, ""), "fxplug": (str, ""),
    "attributes": (dict, {}),
}  # fmt: skip
BANK = {"path": str, "block": str, "kind": str, "slots": int, "rank": int, "groups": int, "shape": tuple, "parameters": tuple}
BANK |= {"param": str, "dim": int, "transposed": bool}
LARGEST = 1 << 62


class Packed:
    """An opened package whose members are what `export` writes: `manifest`, `tensors` by name, and the code to be unpacked.

    Whatever else is in it, and whatever contradicts itself, raises ArtifactError with the file's name.
    """

    def __init__(self, file: BinaryIO, path: Path, limits: Limits = DEFAULT) -> None:
        raises = about(path)
        self.path, self._archive = path, open_archive(file, raises)
        self._root, names = root(self._archive), self._archive.namelist()
        inside = [each.removeprefix(self._root) for each in names]
        if MANIFEST not in inside:
            raise raises(f"is no package of fxplug's: {_kind(inside)}")
        check_members(names, self._root, raises)
        for name in KNOWN - {MANIFEST, TENSORS}:
            if self._root + name in names:
                read_member(self._archive, self._root + name, raises, limits.text)
        data = read_member(self._archive, self._root + MANIFEST, raises, limits.json)
        self.manifest = check_manifest(parse_json(data, about(f"{path}: {MANIFEST}"), limits), raises)
        self.tensors = self._read_tensors(raises, limits)
        check_tensors(self.manifest, self.tensors, raises)

    def _read_tensors(self, raises: Raises, limits: Limits) -> dict[str, torch.Tensor]:
        if self._root + TENSORS not in self._archive.NameToInfo:
            raise raises(f"has no {TENSORS}")
        file, inside = io.BytesIO(read_member(self._archive, self._root + TENSORS, raises)), about(f"{self.path}: {TENSORS}")
        return dict(tensors(file, header(file, inside, limits), inside))

    def unpack(self, folder: Path) -> None:
        """Write the code into a folder, laid out as AOTInductor's loader expects it."""
        unpack(self._archive, folder, about(self.path))


def root(archive: ZipFile) -> str:
    """The folder in an archive that everything is below."""
    return next(iter(archive.namelist()), "").partition("/")[0] + "/"


def unpack(archive: ZipFile, folder: Path, raises: Raises) -> None:
    """Write the files of the code, whose names were checked, to a place below a folder."""
    target = folder / CODE
    target.mkdir(parents=True)
    start = root(archive) + CODE
    for name in archive.namelist():
        if name.startswith(start):
            (target / name.removeprefix(start)).write_bytes(read_member(archive, name, raises))


def _kind(names: list[str]) -> str:
    if any(name.startswith("data/aotinductor/") for name in names):
        return "it has compiled code and no manifest; torch._inductor.aoti_load_package reads such files"
    if any(name.startswith("models/") for name in names):
        return "it is an exported program without compiled code; torch.export.load reads it, and `--to aoti` writes a package"
    return f"it has no {MANIFEST}"


def check_members(names: Sequence[str], root: str, raises: Raises) -> None:
    """Raises what `raises` makes for members that no export writes: all are below one folder, and known, or code's files."""
    code = []
    for name in names:
        inside = name.removeprefix(root)
        file = inside.removeprefix(CODE)
        if not name.startswith(root) or root in ("/", "./", "../") or "\\" in root or not root.isprintable():
            raise raises(f"has a member {shown(name)}, which is not below the folder of the others")
        if inside in KNOWN:
            continue
        if file == inside or not FILE.match(file) or not file.endswith(KINDS):
            raise raises(f"has a member {shown(inside)}, which export does not write")
        code.append(file)
    programs = [name for name in code if name.endswith(".so")]
    if len(programs) != 1:
        raise raises(f"has {len(programs) or 'no'} files of machine code in {CODE}, and a package has one")


def check_manifest(manifest: Any, raises: Raises) -> Json:
    """A manifest with all its entries, each of the kind that it should be. Raises what `raises` makes."""
    check_format(manifest, FORMAT, raises)
    missing = [key for key, (_, default) in ENTRIES.items() if default is None and key not in manifest]
    if missing:
        raise raises(f"cannot be read: the manifest says nothing of {', '.join(missing)}")
    full: Json = {"capability": None, **{key: default for key, (_, default) in ENTRIES.items()}, **manifest}

    def check(holds: bool, key: str) -> None:
        if not holds:
            raise raises(f"cannot be read: the manifest's {key} is {shown(full[key])}, which export does not write")

    for key, (kind, _) in ENTRIES.items():
        check(type(full[key]) is kind, key)
    for key in ("features", "operators", "passes"):
        check(all(type(value) is str for value in full[key]), key)
    check(all(OPERATOR.match(name) for name in full["operators"]), "operators")
    check(all(type(value) is str for value in full["where"].values()), "where")
    check(full["capability"] is None or _is_shape(full["capability"]) and len(full["capability"]) == 2, "capability")
    check(all(map(_is_constant, full["constants"].values())), "constants")
    check(all(map(is_view, full["views"].values())), "views")
    return full


def _is_constant(entry: Any) -> bool:
    right = type(entry) is dict and entry.keys() == {"dtype", "shape"}
    return right and type(entry["dtype"]) is str and entry["dtype"] in DTYPES and _is_shape(entry["shape"])


def is_view(entry: Any) -> bool:
    """Whether this says how a tensor is a part of another."""
    right = type(entry) is dict and entry.keys() == {"of", "shape", "stride", "start"} and type(entry["of"]) is str
    right = right and _is_shape(entry["shape"]) and _is_shape(entry["stride"]) and _is_shape([entry["start"]])
    return right and len(entry["shape"]) == len(entry["stride"])


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= 64 and all(type(n) is int and 0 <= n < LARGEST for n in value)


def check_tensors(manifest: Json, tensors: dict[str, torch.Tensor], raises: Raises) -> None:
    """Raises what `raises` makes for tensors that the manifest describes otherwise, and for views beyond their tensor."""
    constants = manifest["constants"]
    shapes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    for name, view in manifest["views"].items():
        owner = tensors.get(view["of"])
        last = view["start"] + sum((n - 1) * step for n, step in zip(view["shape"], view["stride"], strict=True))
        if owner is None or name in tensors or 0 in view["shape"] or not last < owner.numel():
            raise raises(f"cannot be read: {shown(name)} is no part of {shown(view['of'])}")
        shapes[name] = (owner.dtype, view["shape"])
    for name, (dtype, shape) in shapes.items():
        if name in constants and (DTYPES[constants[name]["dtype"]], constants[name]["shape"]) != (dtype, shape):
            raise raises(
                f"cannot be read: {shown(name)} is {dtype} {shown(shape)}, and the program reads {shown(constants[name])}"
            )
    for name, there in manifest["where"].items():
        if there not in shapes:
            raise raises(f"cannot be read: {shown(name)} is at {shown(there)}, which is not among its tensors")


def place(manifest: Json, tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors on a device, with those that are parts of others."""
    # what the program does not read, such as names, is read by us alone
    placed = {name: tensor.to(device) if name in manifest["constants"] else tensor for name, tensor in tensors.items()}
    for name, view in manifest["views"].items():
        placed[name] = placed[view["of"]].as_strided(view["shape"], view["stride"], view["start"])
    return placed


# --- slots


def banks(manifest: Json) -> tuple[dict[str, list[Bank]], dict[str, str]]:
    """The slots as `switching` has them, and the names of their tensors here. Raises ArtifactError for other data."""
    found: dict[str, list[Bank]] = {}
    try:
        for name, entries in manifest["banks"].items():
            plain: list[dict[str, Any]] = [{k: tuple(v) if type(v) is list else v for k, v in e.items()} for e in entries]
            found[name] = [Bank(**entry) for entry in plain]
            for entry in plain:
                wrong = [key for key, value in entry.items() if type(value) is not BANK[key]]
                wrong += [key for key in ("slots", "rank", "groups") if not 0 < entry.get(key, 1) < LARGEST]
                wrong += [] if all(type(n) is int and n > 0 for n in entry["shape"]) else ["shape"]
                wrong += [] if all(n in RANKS for n in entry.get("parameters", ())) else ["parameters"]
                if wrong:
                    raise ValueError(f"{wrong[0]} is {shown(entry[wrong[0]])}")
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ArtifactError(f"the slots in the package cannot be read: {shown(str(error), 300)[1:-1]}") from None
    return found, dict(manifest["where"])


def check_slots(adapters: Adapters) -> None:
    """Raises ArtifactError for slots whose tensors are not there, or have no room for them."""
    try:
        for name, rows in adapters.banks.items():
            names, weights, entries = (adapters.tensor(f"{name}.gates.table.{row}") for row in ("names", "weights", "entries"))
            slots = {bank.slots for bank in rows}
            right = slots == {names.shape[0]} == {weights.shape[1]} and (names.dim(), weights.dim(), entries.dim()) == (2, 2, 0)
            right = right and weights.is_floating_point() and (names.dtype, entries.dtype) == (torch.uint8, torch.int64)
            if not right:
                raise ValueError(f"the table of {shown(name)} has not {sorted(slots)} slots")
            for bank in rows:
                for key, each in bank.names.items():
                    tensor = adapters.tensor(each)
                    part = bank.views(key, tensor, 0)
                    room = tensor.shape[0] == bank.slots if bank.maps else part.shape[1] == bank.rank
                    if not room or not part.is_floating_point() or not part.numel():
                        raise ValueError(f"{shown(each)} has not {bank.slots} slots of rank {bank.rank}")
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"the slots in the package cannot be read: {type(error).__name__}: {error}") from None

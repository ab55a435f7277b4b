"""The documents of an artifact: the records of graph.json and manifest.json, checked when read, and its files at one moment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import torch
from pydantic import FailFast, Field

from ..errors import DEFAULT, ArtifactError, Limits, SpecError, make_printable, quote
from ..hub_names import resolve_link
from ..reading import check_format, get_size, guess_kind, make_reporter, open_regular_file, parse_json, report_errors
from ..spec.yaml_source import Section, validate
from ..weight_files import PIECE, read_header, read_tensors
from ..writing import find_whole_folder

FORMAT = 1
MANIFEST = "manifest.json"
FIXED = ("model.safetensors", "graph.json", "graph.txt", "config.yaml", "config.json")
CODE = {".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".sh"}
PASS_NAME = re.compile(r"^[A-Za-z_][\w\-]*\Z", re.ASCII)
R = TypeVar("R", bound=Section)


def check_record(kind: type[R], data: Any, where: str) -> R:
    """Validate JSON, or plain values, as a record of this kind. Raises ArtifactError, which begins with `where`."""
    try:
        return validate(kind, data)
    except SpecError as error:
        raise ArtifactError(f"{where}: {error}") from None


class ModuleRecord(Section):
    """A module: none, the `same` as one before, a container, or one of a class, made by `arguments`, else of what it holds.

    `parameters` and `buffers` say by name whether there is a tensor; `fixed` has the attributes that forward may have read.
    """

    kind: Literal["none", "same", "container", "module", "block", "leaf"]
    same: str = Field("", alias="as")
    classes: list[str] = Field([], min_length=1)
    cls: str = Field("", alias="class")
    arguments: dict[str, Any] | None = None
    attributes: dict[str, Any] = {}
    fixed: list[str] | None = None
    parameters: dict[str, bool] = {}
    buffers: dict[str, bool] = {}


class PartRecord(Section):
    """A plain tensor that a packed one is made of."""

    kind: Literal["parameter", "buffer"]
    shape: list[Annotated[int, Field(ge=0)]]
    dtype: str
    stride: list[Annotated[int, Field(ge=0)]] | None = None


class TensorRecord(PartRecord):
    """A parameter or buffer; a packed one has a class, what that keeps beside its numbers, and parts."""

    persistent: bool = True
    requires_grad: bool = False
    same_as: str | None = None
    stored: bool = True
    cls: str = Field("", alias="class")
    context: Any = None
    parts: dict[str, PartRecord] | None = Field(None, min_length=1, max_length=16)


class ResultRecord(Section):
    """The class of a result, by its import path; a NamedTuple has fields."""

    result: str
    fields: list[str] | None = None


class NodeMeta(Section):
    """What a node keeps in its meta; `stack` is the number of its module stack."""

    index: int = 0
    effect: bool = False
    reads_dtype: bool = False
    behind: str = ""
    constant: bool = False
    port: Annotated[tuple[str, Literal["in", "out", "param"], list[int | str]] | None, Field(strict=False)] = None
    shape: list[int] = []
    dtype: str = ""
    passed: Any = Field(None, alias="pass")
    call: Any = None
    named: Any = None
    stack: Annotated[int, Field(ge=0)] = 0


class NodeRecord(Section):
    """A node of a graph; its values are encoded."""

    name: Any = None
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    target: Any = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    meta: NodeMeta = NodeMeta.model_validate({})


class Graphs(Section):
    """The graphs of a module, of one mode or of both."""

    eval: Annotated[list[NodeRecord], FailFast()] = []
    train: Annotated[list[NodeRecord], FailFast()] = []


class Variant(Section):
    """The graphs of another form of call."""

    twin_error: str | None = None
    graphs: Graphs


class Document(Variant):
    """All of graph.json."""

    format: int
    classes: list[str]
    training: bool
    modes: Annotated[list[str], FailFast()]
    meta: dict[str, Any]
    extras: dict[str, Any]
    tensors: dict[str, TensorRecord]
    modules: dict[str, ModuleRecord]
    stacks: Annotated[list[list[Annotated[tuple[str, str, str], Field(strict=False)]]], FailFast()]
    variants: list[Variant] = []


class Free(Section):
    """A record that may have more keys than are looked at."""

    model_config = {"extra": "ignore"}


class BankRecord(Free):
    """What `apply` writes down of a block for several adapters."""

    kind: str
    slots: int
    rank: int
    shape: Any


class SiteRecord(Free):
    """What `apply` writes down of a place that a pass changed."""

    path: str
    place: str
    block: str
    bank: Annotated[BankRecord, Field()] = None  # type: ignore[assignment]


class AppliedPass(Free):
    """What `apply` writes down of a pass."""

    name: str
    params: dict[str, Any]
    train: bool
    neutral: bool
    sites: list[SiteRecord]
    inputs: list[Any]
    networks: list[Any]


def check_counts(document: Mapping[str, Any], limits: Mapping[str, int]) -> None:
    """Raise ArtifactError for an object of graph.json with more members than `limits` has for it."""
    for key, most in limits.items():
        if isinstance(found := document.get(key, ()), (dict, list)) and len(found) > most:
            raise ArtifactError(f"graph.json has {len(found)} {key}; the limit is {most}")


# --- the files, by the manifest: what is hashed is what is read


@contextlib.contextmanager
def convert_errors(finding: str) -> Iterator[None]:
    """Raise any error in reading foreign data as an ArtifactError about the data."""
    try:
        yield
    except ArtifactError:
        raise
    except RecursionError:
        raise ArtifactError(f"{finding}: it is nested too deeply") from None
    except MemoryError:
        raise ArtifactError(f"{finding}: there is not enough memory for it") from None
    except Exception as error:  # of torch and json, about data that is not ours
        raise ArtifactError(f"{finding}: {type(error).__name__}: {quote(str(error), 300)}") from error


def list_files(folder: Path) -> set[str]:
    """Return the names of the files of the artifact in a folder; all names if there is none."""
    if not (folder / MANIFEST).is_file():
        return set(os.listdir(folder))
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return {*FIXED, *json.loads((folder / MANIFEST).read_bytes())["files"]}
    return set(FIXED)


class FileRecord(Free):
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class Manifest(Free):
    """What manifest.json says of the files of an artifact."""

    files: dict[str, FileRecord]


def list_file_records(data: dict[str, Any], folder: object) -> dict[str, FileRecord]:
    """Return the files of an artifact. Raises ArtifactError."""
    check_format(data, FORMAT, make_reporter(str(folder)))
    files = check_record(Manifest, data, MANIFEST).files
    for name in files:
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            raise ArtifactError(f"{MANIFEST} lists {quote(name)}, which is outside the folder")
        if name not in FIXED and not (name.endswith(".safetensors") and PASS_NAME.match(name.removesuffix(".safetensors"))):
            raise ArtifactError(f"{MANIFEST} lists {quote(name)}, a kind of file that an artifact does not have")
    for name in ("model.safetensors", "graph.json"):
        if name not in files:
            raise ArtifactError(f"{MANIFEST} does not list {name}")
    return files


def parse(data: bytes, name: str = "graph.json", limits: Limits = DEFAULT) -> dict[str, Any]:
    """Parse a JSON object, within the limits. Raises ArtifactError, which names the file `name`."""
    found = parse_json(data, make_reporter(name), limits)
    if type(found) is not dict:
        raise ArtifactError(f"{name} is not a JSON object")
    return found


TRIES = 100  # how often a folder may be replaced while its files are opened


class Snapshot:
    """An artifact whose files are open: a save into its folder that ends later changes nothing here."""

    def __init__(self, files: dict[str, tuple[BinaryIO, str]], limits: Limits, manifest: bytes) -> None:
        self.files, self.limits, self.manifest = files, limits, manifest

    @property
    def digest(self) -> str:
        """What `fxplug.digest` gives of it."""
        return f"sha256:{hashlib.sha256(self.manifest).hexdigest()}"

    @property
    def weights(self) -> list[str]:
        """Names of its safetensors files."""
        return [name for name in self.files if name.endswith(".safetensors")]

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file. Raises ArtifactError."""
        file, digest = self.files[name]
        data = _text(file, name, self.limits)
        _check(name, hashlib.sha256(data), digest)
        return parse(data, name, self.limits)

    def check(self, name: str) -> None:
        """Raise ArtifactError for a file that is not as it was written."""
        file, digest = self.files[name]
        found = hashlib.sha256()
        while piece := file.read(PIECE):
            found.update(piece)
        _check(name, found, digest)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield file, name and value of each tensor, on the CPU and in its own memory. Raises ArtifactError.

        The digest of a file is checked after its last tensor.
        """
        for name in self.weights:
            file, digest = self.files[name]
            found = hashlib.sha256()
            head = read_header(file, make_reporter(name), self.limits)
            found.update(head.start)
            yield from ((name, key, value) for key, value in read_tensors(file, head, make_reporter(name), found.update))
            _check(name, found, digest)


@contextlib.contextmanager
def open_snapshot(folder: Path, limits: Limits = DEFAULT) -> Iterator[Snapshot]:
    """Open one version of the artifact in a folder, however often it is replaced meanwhile.

    Raises ArtifactError for what is no artifact, incomplete, newer than this version, or no plain file.
    """
    for left in reversed(range(TRIES)):
        path = find_whole_folder(folder)
        before = _identity(path)
        with contextlib.ExitStack() as stack:
            try:
                found = _open_files(path, stack, limits)
            except ArtifactError:
                if left and _identity(path) != before:
                    continue
                raise
            if left and _identity(path) != before:
                continue  # some of them may be of one version, and some of the next
            yield found
            return


def _identity(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(folder)
        return found.st_dev, found.st_ino
    return None


def _open_files(folder: Path, stack: contextlib.ExitStack, limits: Limits) -> Snapshot:
    if folder.is_file():
        with open_regular_file(folder) as file:
            what = guess_kind(file.read(64))
        raise ArtifactError(f"{folder} is {what or 'a file'}, and load takes a folder that fxplug.save wrote")
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder}")
    with report_errors(make_reporter(folder)):
        names = os.listdir(folder)
    if MANIFEST not in names:
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))[:5]
        more = f"; these in it have one: {', '.join(map(quote, inside))}" if inside else ""
        raise ArtifactError(f"{folder} is not an artifact: it has no {MANIFEST}{more}")

    def open_file(name: str) -> BinaryIO:
        # no link that leads out of the folder, or of the hub's cache, and nothing that waits or does something when opened
        return stack.enter_context(open_regular_file(resolve_link(folder / name), raises=make_reporter(name), links=False))

    manifest = _text(open_file(MANIFEST), MANIFEST, limits)
    files = list_file_records(parse(manifest, MANIFEST, limits), folder)
    found_files = {}
    for name, record in files.items():
        if name not in names:
            raise ArtifactError(f"{name} is missing from {folder}")
        file = open_file(name)
        found = get_size(file)
        if found != record.size:
            what = "truncated: the copy is incomplete" if found < record.size else "longer than when it was saved"
            raise ArtifactError(f"{name} has {found} bytes instead of {quote(record.size)}; it is {what}")
        found_files[name] = (file, record.sha256)
    for name in names:
        # in the hub's cache others may have fetched more of the repository, as links
        if name not in files and Path(name).suffix.lower() in CODE and resolve_link(folder / name) == folder / name:
            raise ArtifactError(
                f"{make_printable(name)} is in the folder of the artifact, and the manifest does not list it: remove it"
            )
    return Snapshot(found_files, limits, manifest)


def _text(file: BinaryIO, name: str, limits: Limits) -> bytes:
    raises, size = make_reporter(name), get_size(file)
    if size > limits.json:
        raise raises(f"has {size} bytes; the limit is {limits.json}; fxplug.Limits can raise it")
    with report_errors(raises):
        data = file.read(size)
    if len(data) < size:
        raise raises("was truncated while it was read")
    return data


def _check(name: str, found: Any, digest: str) -> None:
    if found.hexdigest() != digest:
        raise ArtifactError(f"{name} has changed since it was saved: its SHA-256 differs from the manifest's")

"""The manifest of an artifact: which files belong to it, whole and as they were written; and JSON from strangers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ArtifactError

FORMAT = 1
MANIFEST = "manifest.json"
FIXED = ("model.safetensors", "graph.json", "graph.txt", "config.yaml", "config.json")
CODE = {".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".sh"}
JSON_LIMIT = 512 << 20
HEADER_LIMIT = 100_000_000  # what the safetensors format itself allows
PASS_NAME = re.compile(r"^[A-Za-z_][\w\-]*\Z", re.ASCII)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def wrapped(finding: str) -> Iterator[None]:
    """Whatever goes wrong with data that is not ours is a finding about the data."""
    try:
        yield
    except ArtifactError:
        raise
    except RecursionError:
        raise ArtifactError(f"{finding}: it is nested too deeply") from None
    except Exception as error:
        raise ArtifactError(f"{finding}: {type(error).__name__}: {error}") from error


def check_manifest(folder: Path) -> list[str]:
    """The names of the files of an artifact, each of them whole and as it was written."""
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder}")
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(f"{folder} is no artifact: it has no {MANIFEST}")
    manifest = read_json(folder / MANIFEST)
    version = manifest.get("format")
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{MANIFEST}: the format is {version!r}, which is no version")
    if version > FORMAT:
        raise ArtifactError(
            f"{folder} has format {version}, written by fxplug {manifest.get('fxplug')}; this version reads up to {FORMAT}: "
            "update fxplug"
        )
    files = manifest.get("files")
    if type(files) is not dict:
        raise ArtifactError(f"{MANIFEST} does not list its files")
    for name, entry in files.items():
        _check_file(folder, name, entry)
    for name in ("model.safetensors", "graph.json"):
        if name not in files:
            raise ArtifactError(f"{MANIFEST} does not list {name}")
    for path in folder.iterdir():
        if path.name not in files and path.suffix.lower() in CODE:
            raise ArtifactError(f"{path.name} lies in the artifact and is not listed: code has no place there; remove it")
    return list(files)


def _check_file(folder: Path, name: str, entry: Any) -> None:
    path = folder / name
    if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name or path.is_symlink():
        raise ArtifactError(f"{MANIFEST} lists {name!r}, which leads out of the folder")
    if name not in FIXED and not (name.endswith(".safetensors") and PASS_NAME.match(name.removesuffix(".safetensors"))):
        raise ArtifactError(f"{MANIFEST} lists {name!r}, a kind of file that an artifact does not have")
    if not path.is_file():
        raise ArtifactError(f"{name} is missing from {folder}")
    if type(entry) is not dict or type(entry.get("size")) is not int or type(entry.get("sha256")) is not str:
        raise ArtifactError(f"{MANIFEST} says neither size nor hash of {name}")
    size = path.stat().st_size
    if size != entry["size"]:
        what = "truncated: the copy is incomplete" if size < entry["size"] else "longer than it was"
        raise ArtifactError(f"{name} has {size} bytes instead of {entry['size']}; it is {what}")
    if sha256(path) != entry["sha256"]:
        raise ArtifactError(f"{name} is not as it was written: its SHA-256 differs from the manifest's")
    if name.endswith(".safetensors"):
        _check_header(path, size)


def _check_header(path: Path, size: int) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise ArtifactError(f"{path.name} claims a header of {length} bytes, which a file of {size} bytes cannot have")


def read_json(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > JSON_LIMIT:
        raise ArtifactError(f"{path.name} has {size} bytes; more than {JSON_LIMIT} are not read")
    return parse(path.read_bytes(), path.name)


def parse(data: bytes, name: str = "graph.json") -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ArtifactError(f"{name} says something twice in one object")
        return found

    def refuse(constant: str) -> Any:
        raise ArtifactError(f"{name} holds {constant}, which is no JSON")

    try:
        found = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ArtifactError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise ArtifactError(f"{name} is no JSON: {error}") from None
    if type(found) is not dict:
        raise ArtifactError(f"{name} is no JSON object")
    return found

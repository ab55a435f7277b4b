"""What belongs to an artifact, by its manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, shown
from ..files.reading import about, check_format, parse_json
from ..limits import DEFAULT, Limits

FORMAT = 1
MANIFEST = "manifest.json"
FIXED = ("model.safetensors", "graph.json", "graph.txt", "config.yaml", "config.json")
CODE = {".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".sh"}
PASS_NAME = re.compile(r"^[A-Za-z_][\w\-]*\Z", re.ASCII)


@contextlib.contextmanager
def wrapped(finding: str) -> Iterator[None]:
    """Whatever goes wrong with data that is not ours is a finding about the data."""
    try:
        yield
    except ArtifactError:
        raise
    except RecursionError:
        raise ArtifactError(f"{finding}: it is nested too deeply") from None
    except MemoryError:
        raise ArtifactError(f"{finding}: there is not enough memory for it") from None
    except Exception as error:  # of torch and json, about data that is not ours
        raise ArtifactError(f"{finding}: {type(error).__name__}: {shown(str(error), 300)}") from error


def files_of(folder: Path) -> set[str]:
    """The names in a folder that belong to the artifact there; all of them where there is none."""
    if not (folder / MANIFEST).is_file():
        return set(os.listdir(folder))
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return {*FIXED, *json.loads((folder / MANIFEST).read_bytes())["files"]}
    return set(FIXED)


def listed(manifest: dict[str, Any], folder: object) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file of an artifact. Raises ArtifactError."""
    check_format(manifest, FORMAT, lambda finding: ArtifactError(f"{folder} {finding}"))
    files = manifest.get("files")
    if type(files) is not dict:
        raise ArtifactError(f"{MANIFEST} does not list its files")
    for name, entry in files.items():
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            raise ArtifactError(f"{MANIFEST} lists {shown(name)}, which leads out of the folder")
        if name not in FIXED and not (name.endswith(".safetensors") and PASS_NAME.match(name.removesuffix(".safetensors"))):
            raise ArtifactError(f"{MANIFEST} lists {shown(name)}, a kind of file that an artifact does not have")
        if type(entry) is not dict or type(entry.get("size")) is not int or type(entry.get("sha256")) is not str:
            raise ArtifactError(f"{MANIFEST} says neither size nor hash of {shown(name)}")
    for name in ("model.safetensors", "graph.json"):
        if name not in files:
            raise ArtifactError(f"{MANIFEST} does not list {name}")
    return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}


def parse(data: bytes, name: str = "graph.json", limits: Limits = DEFAULT) -> dict[str, Any]:
    """The object of a JSON text, within the limits. Raises ArtifactError, which names the file `name`."""
    found = parse_json(data, about(name), limits)
    if type(found) is not dict:
        raise ArtifactError(f"{name} is no JSON object")
    return found

"""What an ONNX file of ours holds beside its graph: metadata, the tensors of its slots, and a seal, held to each other.

The seal is the last entry of the model's metadata, the SHA-256 of all bytes before it; the metadata has that of the weights
that lie beside. They tell a file that was damaged or changed from what was exported, not who exported it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import AfterValidator, Field, model_validator

from ..blocks.base import NAME
from ..core.errors import DEFAULT, Limits, quote
from ..core.reading import Raises, get_size, make_reporter, open_regular_file, parse_json
from ..core.weight_files import parse_onnx, read_onnx_tensor
from .package_file import ExportManifest, ManifestEntry, check_manifest, check_places

FORMAT = 1
METADATA, SEAL = "fxplug", "fxplug.sha256"
INSTALL = "pip install 'fxplug[onnx]'"
LARGEST = 1 << 31  # bytes of a model: protobuf's own limit


def _name(text: str) -> str:
    if len(text.encode(errors="replace")) > NAME or not (text.isascii() or text.isprintable()):
        raise ValueError("it is not the name of an adapter")
    return text


class ExternalData(ManifestEntry):
    """The file of weights beside a model."""

    name: Annotated[str, Field(pattern=r"^[^/\\]{1,255}\.data$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class OnnxManifest(ExportManifest):
    """What the metadata of a model says."""

    inputs: list[str]
    outputs: list[str]
    checks: list[str] = []
    live: list[str] = []
    names: dict[str, list[Annotated[str, AfterValidator(_name)]]] = {}
    opset: int = 0
    data: ExternalData | None = None

    @model_validator(mode="after")
    def _agreed(self) -> OnnxManifest:
        if self.names.keys() != self.banks.keys() or len(self.checks) > len(self.outputs):
            raise ValueError("its slots or its results have no names")
        return self


def seal(model: bytes) -> bytes:
    """Append the seal to a model's bytes: one more entry of its metadata, which protobuf accepts at the end."""
    return model + _seal(hashlib.sha256(model).hexdigest())


def _seal(digest: str) -> bytes:
    key, value = SEAL.encode(), digest.encode()
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(value)]) + value
    return b"\x72" + bytes([len(entry)]) + entry  # ModelProto.metadata_props


def make_data_name(model: str, digest: str) -> str:
    """Return the name of a model's weight file: it contains a digest, so that a new file never replaces an old one."""
    return f"{model}.{digest[:16]}.data"


def is_data_of(name: str, model: str) -> bool:
    """Return whether a file has such a name."""
    return re.fullmatch(re.escape(model) + r"\.[0-9a-f]{16}\.data", name) is not None


class OnnxFile:
    """An opened model that is as `export` wrote it: its `manifest`, the `tensors` of its slots by name, and its `model`, bytes.

    `folder` is where its weights lie, where they lie beside. Whatever is damaged, was changed since, or contradicts itself,
    raises ArtifactError with the file's name.
    """

    def __init__(self, file: BinaryIO, path: Path, limits: Limits = DEFAULT) -> None:
        raises = make_reporter(path)
        if get_size(file) > LARGEST:
            raise raises(f"has {get_size(file)} bytes, and an ONNX model has at most {LARGEST}")
        self.path, self.folder = path, Path(os.path.realpath(path)).parent
        self.model = file.read()
        model = parse_onnx(self.model, raises)
        found = {entry.key: entry.value for entry in reversed(model.metadata_props)}  # of a key that is there twice, the first
        if METADATA not in found:
            raise raises(
                "is not an ONNX file that fxplug exported: it lacks fxplug's metadata; run it with onnxruntime.InferenceSession"
            )
        self._check_seal(raises)
        text = found[METADATA]
        self.manifest = check_manifest(parse_json(text, make_reporter(f"{path}: its metadata"), limits), OnnxManifest, raises)
        data = self.manifest["data"]
        if data is None:
            self.tensors = self._tensors(model, raises, None)
            return
        beside = self.folder / data["name"]
        with open_regular_file(beside) as opened_beside:
            if hashlib.file_digest(opened_beside, "sha256").hexdigest() != data["sha256"]:  # type: ignore[arg-type]
                why = "has changed since it was exported, is damaged, or belongs to another model: export it again"
                raise make_reporter(beside)(why)
            self.tensors = self._tensors(model, raises, (data["name"], opened_beside))

    def _check_seal(self, raises: Raises) -> None:
        size = len(_seal("0" * 64))
        view = memoryview(self.model)
        if bytes(view[-size:]) != _seal(hashlib.sha256(view[:-size]).hexdigest()):
            raise raises("has changed since it was exported, or is damaged: export it again")

    def _tensors(self, model: Any, raises: Raises, beside: tuple[str, BinaryIO] | None) -> dict[str, torch.Tensor]:
        live = set(self.manifest["live"])
        tensors = {p.name: read_onnx_tensor(p, raises, beside) for p in model.graph.initializer if p.name in live}
        if lost := live - tensors.keys():
            raise raises(f"cannot be read: it has no {quote(min(lost))}, which its metadata lists")
        for name, texts in self.manifest["names"].items():
            rows = [list(text.encode().ljust(NAME, b"\0")) for text in texts]
            tensors[f"{name}.gates.table.names"] = torch.tensor(rows, dtype=torch.uint8)
        check_places(self.manifest, tensors, raises)
        return tensors

"""An ONNX file as a callable, run by onnxruntime: its adapters stay live."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import DEFAULT, ArtifactError, FxplugError, Limits, did_you_mean, get_first_line, quote
from ..core.ir.containers import list_leaves, map_leaves
from ..core.locks import call_with_read_lock
from ..core.reading import open_regular_file
from .call_signature import Json, Signature
from .onnx_file import INSTALL, OnnxFile
from .package import ExportedModel, _named

NOTHING = 4  # of onnxruntime's log: it warns of each weight that can be given anew, and what it says of errors is in them
CPU = ("CPUExecutionProvider",)
BFLOAT16 = 16  # ONNX's TensorProto.DataType


class OnnxModel(ExportedModel):
    """An exported module: called as the module was, for inference only, on the CPU's memory.

    `adapters` are what is in the slots of its passes. `tensors` are those of its slots, by name, live: each call is given them
    as they are, so a change needs no new session, and calls, changes and threads are as for a `Package`. `session` is
    onnxruntime's; who calls it himself gives it these tensors, or has the adapters that were in the module when it was
    exported.
    """

    noun = "model"

    def __init__(self, session: Any, manifest: Json, tensors: dict[str, torch.Tensor], limits: Limits = DEFAULT) -> None:
        self.session = session
        signature = Signature(manifest["signature"], torch.device("cpu"), limits, "model was exported")
        if len(manifest["inputs"]) != len(signature.tensors):
            raise ArtifactError(f"it has {len(manifest['inputs'])} inputs, and its signature {len(signature.tensors)}")
        super().__init__(manifest, tensors, signature)
        # their memory is the tensors' own: what is written there is what the next call reads
        self._live = {name: _bind_tensor(tensors[name]) for name in manifest["live"]}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module, without gradients; result classes are dicts of their fields.

        Arrays may be numpy's or torch's; if all are numpy's, so are the results, except for bfloat16, which numpy does not
        have. Raises the errors of `Signature.flatten`, and FxplugError when the program itself fails.
        """
        given = [value for value in list_leaves((args, kwargs)) if isinstance(value, (np.ndarray, torch.Tensor))]
        arrays = bool(given) and not any(isinstance(value, torch.Tensor) for value in given)
        if any(isinstance(value, np.ndarray) for value in given):
            args, kwargs = map_leaves((args, kwargs), lambda value, _: _tensor(value), kind=np.ndarray)
        flat = self._signature.flatten(args, kwargs)
        out = self._signature.unflatten(call_with_read_lock(self._locks, self._run, flat))
        return map_leaves(out, lambda value, _: value if value.dtype == torch.bfloat16 else value.numpy()) if arrays else out

    def _run(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._check_samples(flat)
        feeds = {name: _bind_tensor(tensor) for name, tensor in zip(self.manifest["inputs"], flat, strict=True)}
        names = self.manifest["outputs"]
        try:
            values = self.session.run_with_ort_values(names, {**self._live, **feeds}) if names else []
        except Exception as error:  # onnxruntime's, of kinds that have no common class
            raise FxplugError(f"the model failed in this call: {get_first_line(error)}") from error
        results = [torch.utils.dlpack.from_dlpack(value) for value in values]
        count = len(results) - len(self.manifest["checks"])
        for holds, text in zip(results[count:], self.manifest["checks"], strict=True):
            if not bool(holds.all()):
                raise FxplugError(f"the model failed in this call: {text}")
        return results[:count]

    def __repr__(self) -> str:
        return self._described(f"opset {self.manifest['opset']}")


def load_onnx(
    path: str | os.PathLike[str],
    *,
    providers: Sequence[str | tuple[str, Mapping[str, Any]]] = CPU,
    options: Any = None,
    limits: Limits = DEFAULT,
) -> OnnxModel:
    """Load a file that `export(..., to="onnx")` wrote, for onnxruntime: `load_onnx("model.onnx")`.

    Nothing in it is code: its graph is run by onnxruntime, and all else is read within `limits`. `providers` are onnxruntime's,
    `options` an `onnxruntime.SessionOptions`. The weights of a large model are in a file beside it.

    Args:
        path: The file.
        providers: onnxruntime's execution providers.
        options: An `onnxruntime.SessionOptions`.
        limits: Bounds of what is read.

    Returns:
        A function of the model's inputs, tensors or numpy arrays, with `adapters`.

    Raises:
        FxplugError: There is no onnxruntime, or no such provider.
        ArtifactError: The file is damaged, is no ONNX file of fxplug's, was changed after it was exported, it or its weights,
            or onnxruntime does not run it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise FxplugError(f"load_onnx needs onnxruntime, which is not installed: {INSTALL}")
    file = Path(path)
    with _named(file), open_regular_file(file) as handle:
        found = OnnxFile(handle, file, limits)
        return OnnxModel(_session(found, providers, options), found.manifest, found.tensors, limits)


def _session(found: OnnxFile, providers: Sequence[Any], options: Any) -> Any:
    """Create an onnxruntime session for the model. Raises ArtifactError if it does not accept it."""
    import onnxruntime

    known = onnxruntime.get_available_providers()
    for name in [each if isinstance(each, str) else each[0] for each in providers]:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise FxplugError(f"onnxruntime has no execution provider {name!r} here{near}; it has {', '.join(known)}")
    settings = options
    if settings is None:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = NOTHING
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(found.folder))
    try:
        session = onnxruntime.InferenceSession(found.model, settings, providers=list(providers), enable_fallback=0)
    except Exception as error:  # onnxruntime's, of kinds that have no common class
        version = onnxruntime.__version__
        raise ArtifactError(
            f"{found.path} cannot be run by onnxruntime {version}: {quote(get_first_line(error), 300)[1:-1]}"
        ) from error
    there = {each.name for each in (*session.get_inputs(), *session.get_overridable_initializers())}
    wanted = {*found.manifest["inputs"], *found.manifest["live"]}
    results, named = {each.name for each in session.get_outputs()}, set(found.manifest["outputs"])
    if there != wanted or results != named:
        odd = min(there ^ wanted | named ^ results)
        raise ArtifactError(f"{found.path} cannot be read: its metadata and its graph differ in {quote(odd)}")
    return session


# --- arrays


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor, on the same memory if it is writable."""
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except (TypeError, ValueError):  # texts, objects; numbers in another order of bytes
        raise FxplugError(f"an array of {array.dtype.str} cannot be converted to a tensor") from None


def _bind_tensor(tensor: torch.Tensor) -> Any:
    """Return a tensor as an OrtValue, on the same memory."""
    from onnxruntime import OrtValue

    if tensor.dtype == torch.bfloat16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint16).numpy(), BFLOAT16)
    return OrtValue.ortvalue_from_numpy(tensor.numpy())


"""What fxplug uses other libraries for, and the versions of them that the tests run on."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Library(NamedTuple):
    """What a library is used for, its module, the oldest and newest release tested, and the extra that installs it."""

    used_for: str
    module: str
    oldest: str | None = None
    newest: str | None = None
    extra: str | None = None


LIBRARIES = {
    "torch": Library("graphs, training, compilation", "torch", "2.13", "2.15"),
    "diffusers": Library("models, pipelines, noise schedules", "diffusers", "0.42", "0.42"),
    "timm": Library("models", "timm", "1.0.27", "1.0.31"),
    "accelerate": Library("training on several processes", "accelerate", "1.13", "1.15", "train"),
    "networkx": Library("questions about graphs", "networkx"),
    "pydantic": Library("configurations", "pydantic"),
    "safetensors": Library("weight files", "safetensors"),
    "tensorboard": Library("curves of a training run", "tensorboard", extra="train"),
    "matplotlib": Library("curves of a training run, and of predicted costs, as a picture", "matplotlib", extra="train"),
    "fast-sugiyama": Library("pictures of graphs in reports", "fast_sugiyama", extra="report"),
    "jinja2": Library("pages of reports", "jinja2", extra="report"),
    "triton": Library("torch.compile on a GPU", "triton"),
    "transformers": Library("text encoders of pipelines", "transformers", "5.17", "5.23", "train"),
    "peft": Library("diffusers' own loading of adapters, comparison", "peft", "0.21", "0.21", "test"),
    "lycoris-lora": Library("comparison", "lycoris", "4.1.0", "4.1.3", "test"),
    "torchao": Library("quantised bases", "torchao", extra="quantised"),
    "bitsandbytes": Library("quantised bases", "bitsandbytes", extra="quantised"),
    "datasets": Library("training data as parquet or from the hub", "datasets", extra="train"),
    "onnx": Library("reading and writing ONNX files", "onnx", extra="onnx"),
    "onnxscript": Library("writing ONNX files", "onnxscript", extra="onnx"),
    "starlette": Library("the endpoints of a server", "starlette", extra="serve"),
    "uvicorn": Library("HTTP", "uvicorn", extra="serve"),
    "httptools": Library("reading HTTP", "httptools", extra="serve"),
    "prometheus-client": Library("the counters of a server", "prometheus_client", extra="serve"),
    "python-multipart": Library("uploads to a server", "python_multipart", extra="serve"),
    "ray": Library("a server on several machines", "ray", "2.60", "2.60", "ray"),
    "onnxruntime": Library("running ONNX files", "onnxruntime", extra="onnx"),
}


def find_extra(module: str) -> str | None:
    """Return the extra of fxplug that installs a module; None if none does."""
    return next((library.extra for library in LIBRARIES.values() if library.module == module.partition(".")[0]), None)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (2, 14, 1) of '2.14.1+cu130'."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def find_version(name: str) -> str | None:
    """Return the installed version of a library, None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_tested(name: str, found: str) -> bool:
    """Return whether a version is in the tested range. A later patch of the newest minor is."""
    library = LIBRARIES[name]
    if library.oldest is None or library.newest is None:
        return True
    newest = _release(library.newest)
    return _release(library.oldest) <= _release(found) and _release(found)[: len(newest)] <= newest


def warn_if_untested(name: str) -> None:
    """Warn (UserWarning) if the installed version of a library is outside the tested range."""
    found, library = find_version(name), LIBRARIES[name]
    if found and not is_tested(name, found):
        tested = f"{library.oldest} to {library.newest}"
        warnings.warn(
            f"{name} {found} is installed, and fxplug is tested with {name} {tested} only: `fxplug doctor` lists all versions",
            stacklevel=3,
        )

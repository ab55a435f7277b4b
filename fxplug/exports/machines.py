"""What compiled code needs of the machine that runs it: the system, the processor's instructions, the device, operators."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ArtifactError, quote
from ..core.torch_internals.tensors import is_operator
from ..lowerings.linear import operators  # noqa: F401  (it defines those of ours)

Json = dict[str, Any]
# AOTInductor's words for the instructions that its own code asks for, in the words of torch.cpu.get_capabilities
ASKED = {"AVX2": "avx2", "AVX512": "avx512_f", "AVX512_VNNI": "avx512_vnni", "AMX_TILE": "amx_tile", "ASIMD": "neon"}
ANY = {"INVALID_VEC_ISA", "ZVECTOR", "VSX"}  # what packages of earlier versions may list, and every processor there has
# instructions that a compiler does not choose by itself, so code has them only where AOTInductor asks
UNCHOSEN = {"aes", "sha", "sha1", "sha2", "pmull", "crc32", "clflush", "clflushopt", "clwb", "sse4a", "lse", "atomics"}
UNCHOSEN_KINDS = ("amx_", "sme")


def list_needed_features(asked: Iterable[str], capabilities: Mapping[str, Any], native: bool) -> list[str]:
    """Return the CPU features that compiled code needs, in the words of torch.cpu.get_capabilities.

    `asked` are the features that AOTInductor used, in its words; `capabilities` are those of the compiling processor, all of
    which the compiler could use if `native`.
    """
    names = {ASKED[name] for name in asked if name in ASKED}
    if native:
        has = {name for name, value in capabilities.items() if value is True}
        names |= {name for name in has - UNCHOSEN if not name.startswith(UNCHOSEN_KINDS)}
    return sorted(names)


def find_missing_features(needs: Iterable[str], capabilities: Mapping[str, Any]) -> list[str]:
    """Return the features that a processor with `capabilities` lacks; none if torch cannot list its features."""
    if not capabilities:
        return []
    return [name for name in needs if name not in ANY and not capabilities.get(ASKED.get(name, name))]


def list_capabilities() -> Mapping[str, Any]:
    """Return the features of this processor as torch reports them; empty if it cannot."""
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}


def check_machine(file: Path, manifest: Json, device: torch.device) -> None:
    """Raise ArtifactError for code of another torch, system, processor or kind of GPU than this machine has."""

    def release(version: str) -> list[str]:
        return version.partition("+")[0].split(".")[:2]

    made, here = manifest["torch"], torch.__version__
    if release(made) != release(here):
        raise ArtifactError(
            f"{file} was compiled by torch {quote(made)[1:-1]}, and this is torch {here}: its code works with that version "
            "only; export it again with this one"
        )
    system, this = f"{manifest['platform']} {manifest['machine']}", f"{sys.platform} {platform.machine()}"
    if system != this:
        raise ArtifactError(f"{file} was compiled for {quote(system)[1:-1]}, and this is {this}")
    missing = find_missing_features(manifest["features"], list_capabilities())
    if missing:
        raise ArtifactError(
            f"{file} was compiled for a CPU with {quote(', '.join(missing))[1:-1]}, which this one does not have: export it "
            f"again here, or for both, with options such as {{'cpp.march': 'x86-64-v3', 'cpp.simdlen': 256}}"
        )
    made_for = manifest["capability"]
    if device.type == "cuda" and made_for:
        major, minor = torch.cuda.get_device_capability(device)
        if major != made_for[0] or minor < made_for[1]:
            raise ArtifactError(
                f"{file} was compiled for compute capability {made_for[0]}.{made_for[1]}, and {device} has {major}.{minor}: "
                "export it again on such a device"
            )


def pick_device(file: Path, kind: str, device: torch.device | str | None) -> torch.device:
    """Return the device that code for `kind` runs on. Raises ArtifactError if there is none, or another one is requested."""
    if kind not in ("cpu", "cuda"):
        raise ArtifactError(
            f"{file} was compiled for {quote(kind)}, which is not a device of a package: there are cpu and cuda"
        )
    wanted = torch.device(kind if device is None else device)
    if wanted.type != kind:
        raise ArtifactError(f"{file} was compiled for {kind} and cannot run on {wanted.type}: export it again from there")
    if kind != "cuda":
        return wanted
    if not torch.cuda.is_available():
        raise ArtifactError(f"{file} was compiled for cuda, and this machine has no CUDA device")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def check_operators(file: Path, names: Iterable[str]) -> None:
    """Raise ArtifactError for an operator that no library has defined here."""
    for name in names:
        if not is_operator(name):
            raise ArtifactError(
                f"{file} calls the operator {quote(name)[1:-1]}, which is not registered: import its library first"
            )

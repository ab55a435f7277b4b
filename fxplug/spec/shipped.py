"""The passes and configurations that come with the package, found in a wheel, an editable install and a bare checkout."""

from __future__ import annotations

from pathlib import Path

from ..errors import SpecError, did_you_mean

HERE = Path(__file__).resolve().parent.parent


def folder(kind: str) -> Path:
    """passes/ or configs/: inside the installed package, or beside it in a checkout."""
    return next((p for p in (HERE / kind, HERE.parent / kind) if p.is_dir()), HERE / kind)


def shipped(kind: str) -> dict[str, Path]:
    """The YAML files that come with fxplug by bare name; `kind` is `passes` or `configs`."""
    top = folder(kind)
    return {p.relative_to(top).with_suffix("").as_posix(): p for p in sorted(top.rglob("*.yaml"))}


def find_file(text: str | Path, kind: str, base: Path | None = None) -> Path:
    """The file of a bare shipped name, or of a path relative to `base` (default: the working folder)."""
    one = "pass" if kind == "passes" else "config"
    if str(text).endswith((".yaml", ".yml", ".json")):
        return (base or Path.cwd()) / text
    known = shipped(kind)
    if str(text) in known:
        return known[str(text)]
    beside = (base or Path.cwd()) / f"{text}.yaml"
    hint = f"; for the file here write '{text}.yaml'" if beside.is_file() else did_you_mean(text, known)
    raise SpecError(f"no {one} named '{text}'{hint}")

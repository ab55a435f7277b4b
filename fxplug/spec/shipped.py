"""The passes and configurations that come with the package, found in a wheel, an editable install and a bare checkout; and the
passes of extensions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .. import extensions
from ..errors import ClashError, SpecError, did_you_mean

HERE = Path(__file__).resolve().parent.parent


def folder(kind: str) -> Path:
    """passes/ or configs/: inside the installed package, or beside it in a checkout."""
    return next((p for p in (HERE / kind, HERE.parent / kind) if p.is_dir()), HERE / kind)


def shipped(kind: str) -> dict[str, Path]:
    """The YAML files of fxplug and its extensions by bare name; `kind` is `passes` or `configs`.

    Raises ClashError where an extension's pass has the name of another.
    """
    top = folder(kind)
    found = {p.relative_to(top).with_suffix("").as_posix(): p for p in sorted(top.rglob("*.yaml"))}
    for name, path in extensions.parts("passes").items() if kind == "passes" and extensions.others() else ():
        if name in found:
            raise ClashError(f"an extension brings the pass '{name}' ({path}), which is one of fxplug's: rename it there")
        package, _, file = path.partition(":")
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SpecError(f"the pass '{name}' of an extension lies beside the module '{package}', which does not exist")
        found[name] = Path(spec.origin).parent / file
    return found


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
    hint += extensions.unusable_note()
    raise SpecError(f"no {one} named '{text}'{hint}")

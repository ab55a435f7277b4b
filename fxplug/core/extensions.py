"""Packages that bring names, verbs, checks, blocks and passes, found by the entry point group `fxplug.extensions`.

An entry point names an `Extension`, a table of import paths. fxplug's own extensions and other people's are found alike, and
what a table names is imported when it is used. An extension that is missing or fails when it is imported is named in the error
of whatever would have used it; all others go on.

What makes modules of traced modules in other ways than passes do overrides `Derivation`, which the core then asks.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import ClashError, FxplugError, SpecError, format_fields

GROUP = "fxplug.extensions"
CONTRACT = 1  # raised when an `Extension` of before no longer works
KINDS = ("names", "verbs", "checks", "accessors", "hooks", "keys", "passes", "sections")


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a package adds to fxplug. Values are import paths, `"package.module:Name"`.

    `names` are public names of `fxplug`; `verbs` functions, or Typer applications, of the command line; `checks` functions that
    `verify` calls, see `fxplug.core.verifier.Subject`; `accessors` classes that are called with a traced module, and are its
    attribute of that name; `passes` YAML files beside a module, `"package.module:file.yaml"`, that `load_pass` takes by name;
    `keys` subclasses of `Pass` with a field of that name, which a pass file with that key becomes; `sections` the keys of a
    configuration, see `fxplug.config.sections.ConfigSection`. `blocks` lists packages whose blocks artifacts may name. `hooks`
    are what fxplug's own extensions put at seams of the core.

    `contract` is the `CONTRACT` that it was written for; `bases` names the extensions that it needs, and `extra` the extra of
    `fxplug[...]` that installs its libraries.
    """

    name: str
    contract: int = CONTRACT
    extra: str = ""
    bases: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    verbs: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    accessors: Mapping[str, str] = field(default_factory=dict)
    passes: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()

    __repr__ = format_fields


@cache
def extensions() -> dict[str, Extension]:
    """Return the usable extensions by name."""
    return _read()[0]


@cache
def find_unusable() -> dict[str, str]:
    """Why each of the others cannot be used, by name."""
    return _read()[1]


@cache
def _read() -> tuple[dict[str, Extension], dict[str, str]]:
    usable: dict[str, Extension] = {}
    failed: dict[str, str] = {}
    for point in _entry_points():
        try:
            extension = point.load()
        except Exception as error:  # whatever another package's import raises
            failed[point.name] = f"importing '{point.value}' failed: {type(error).__name__}: {error}"
            continue
        if not isinstance(extension, Extension):
            failed[point.name] = f"'{point.value}' is a {type(extension).__name__}, not a fxplug.Extension"
        elif extension.contract != CONTRACT:
            failed[point.name] = (
                f"it is written for version {extension.contract} of the extension interface, and this fxplug has {CONTRACT}: "
                "install the matching version of it"
            )
        else:
            usable[point.name] = extension
    while lacking := {name: base for name, one in usable.items() for base in one.bases if base not in usable}:
        for name, base in lacking.items():
            del usable[name]
            failed[name] = f"it needs the extension '{base}', which cannot be used: {failed.get(base, 'it is not installed')}"
    return usable, failed


@cache
def _entry_points() -> list[EntryPoint]:
    """Return the entry points of the group, sorted by name; for a checkout that is not installed, from its setup.cfg."""
    points = {(point.name, point.value): point for point in entry_points(group=GROUP)}
    if not any(value.startswith("fxplug.") for _, value in points):
        config = configparser.ConfigParser()
        config.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
        for line in config.get("options.entry_points", GROUP, fallback="").strip().splitlines():
            name, _, value = (part.strip() for part in line.partition("="))
            points[name, value] = EntryPoint(name, value, GROUP)
    return [points[key] for key in sorted(points)]


def has_others() -> bool:
    """Return whether a package other than fxplug registers an extension. Imports none."""
    return any(not point.value.startswith("fxplug.") for point in _entry_points())


def list_parts(kind: str) -> dict[str, str]:
    """Return everything that the extensions define of a kind, one of `KINDS`, by name. Raises ClashError for a duplicate
    name."""
    found: dict[str, tuple[str, str]] = {}
    for name, extension in extensions().items():
        for key, path in getattr(extension, kind).items():
            if key in found:
                raise ClashError(
                    f"the extensions '{found[key][0]}' and '{name}' both define '{key}' ({kind}): uninstall one of them, or "
                    "rename it there"
                )
            found[key] = name, path
    return {key: path for key, (_, path) in found.items()}


def import_part(kind: str, key: str) -> Any:
    """Import and return what the extensions define under a name; None if none does. Raises FxplugError if the import fails."""
    path = list_parts(kind).get(key)
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        owner = next(one for one in extensions().values() if path == getattr(one, kind).get(key))
        install = f": pip install 'fxplug[{owner.extra}]'" if owner.extra and isinstance(error, ImportError) else ""
        raise FxplugError(f"'{key}' of the extension '{owner.name}' cannot be imported ({error}){install}") from error


def need_hook(key: str, owner: str) -> Any:
    """Return the hook of that name. Raises SpecError, which names the extension that defines it, if there is none."""
    hook = import_part("hooks", key)
    if hook is None:
        raise SpecError(f"this needs fxplug.{owner}{describe_unusable(owner) or f' (pip install fxplug[{owner}])'}")
    return hook


def describe_unusable(name: str | None = None) -> str:
    """Return a clause for errors about the extensions that cannot be used and why; "" if all can."""
    rows = {key: why for key, why in find_unusable().items() if name in (None, key)}
    return "".join(f"; the extension '{key}' cannot be used: {why}" for key, why in rows.items())


def list_block_packages() -> Iterator[str]:
    """Yield the packages of extensions whose blocks an artifact may name."""
    for extension in extensions().values():
        yield from extension.blocks


# --- modules that extensions make of others

DERIVATION = "derivation"  # the key in a module's `meta`, which what is made of the module has, too
M = TypeVar("M")


class Derivation(Generic[M]):
    """How a traced module was made of another one, its source, by more than passes: what changes and `save` then go by.

    Whoever makes such modules overrides it, and puts it into their `meta[DERIVATION]`, or among their parts, which files keep.
    """

    takes_marks = False  # whether marks of a step cache, which change no value, can be put into the module itself

    def saved_form(self, module: M) -> M:
        """Return the module that `save` writes, on the tensors and with the adapters that `module` has now.

        Raises ArtifactError where they are not all here.
        """
        return module

    def rebuild(self, module: M, change: Callable[[M], M]) -> M:
        """Change the source of `module`, and make of that again what `module` is. Raises SpecError where that is impossible."""
        raise NotImplementedError

    def unrepeatable(self) -> Derivation[M]:
        """Return that of a module that was changed since, in what `rebuild` would lose."""
        return self


class DistributedPart(Derivation[M]):
    """A part of a module that exchanges tensors with the same part in other processes, which run the module together."""

    takes_marks = True

    def as_first_rank(self) -> AbstractContextManager[None]:
        """Run as the first process for a time, with nothing travelling."""
        raise NotImplementedError

    def without_exchange(self) -> AbstractContextManager[None]:
        """Run as this process for a time, with nothing travelling: of what others would send the sizes alone are right."""
        raise NotImplementedError

    def get_ranks(self) -> dict[str, int]:
        """Return this process's rank along each axis of the processes that run the module."""
        raise NotImplementedError

    def before_call(self, root: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check before each call of the module `root` that all processes call it alike. Raises GuardError."""
        raise NotImplementedError

    def everywhere(self, x: Any) -> Any:
        """Return a small tensor of every process: stacked, in one order, the same in each."""
        raise NotImplementedError


def get_derivation(module: M) -> Derivation[M] | None:
    """Return the derivation of a module; None for one that was traced, and rewritten by passes."""
    gm: Any = module
    found: Derivation[M] | None = gm.meta.get(DERIVATION)
    return found or next((part for part in gm.modules() if isinstance(part, Derivation)), None)


def note_unrepeatable(module: Any) -> None:
    """Note that a module was changed in what its derivation would lose, if it were repeated."""
    if (found := module.meta.get(DERIVATION)) is not None:
        module.meta[DERIVATION] = found.unrepeatable()

"""What lies in a folder of adapters: read once from the headers of files, kept on disk, and read again where files change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..adapters.banks import check_name
from ..adapters.file_tools import cut_rank
from ..adapters.files import AdapterFile, Fit, read
from ..adapters.loading import fit_to
from ..adapters.slots import Adapters
from ..adapters.state import Prepared
from ..core.errors import ArtifactError, FxplugError
from ..core.reading import get_stamp, read_json
from ..core.writing import write_text

INDEX, FORMAT = ".fxplug-index.json", 2
LAST = ".safetensors"
CONFIG = "adapter_config.json"
Stamp = tuple[int, ...]  # see `get_stamp`


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of an adapter in a folder, from the header of its file.

    `kind` is "lora", "dora", or several in a list as text; `ranks` are those of its layers, rising. `coverage` has by the name
    of a model the share of the file's layers for it that are there, 0 for one without slots. `in_slot` says whether it is in a
    slot now. Where it cannot be used, `error` says why.
    """

    name: str
    kind: str = ""
    ranks: tuple[int, ...] = ()
    coverage: Mapping[str, float] = field(default_factory=dict)
    in_slot: bool = False
    error: str = ""


@dataclass(frozen=True)
class FolderEntry:
    """An adapter's file or folder, how it looked when it was indexed, and what was found."""

    path: Path
    stamp: Stamp
    info: AdapterInfo


class AdapterIndex:
    """The adapters of a folder, for models with slots."""

    def __init__(self, folder: Path, models: Mapping[str, Adapters], resize: bool, partial: bool) -> None:
        self.folder, self.models, self.resize, self.partial = folder, models, resize, partial
        self.entries: dict[str, FolderEntry] = {}
        banks = sorted(f"{m} {p} {b.plainly()}" for m, s in models.items() for p, rows in s.banks.items() for b in rows)
        options = [FORMAT, *sorted(models), *banks, resize, partial]
        self.models_key = hashlib.blake2b(repr(options).encode(), digest_size=16).hexdigest()
        self._known = self._load()
        self.refresh()

    def refresh(self) -> bool:
        """Look at the folder again, and index what is new or has changed.

        Returns:
            Whether anything was.

        Raises:
            ArtifactError: For a folder that cannot be read.
        """
        made: dict[str, FolderEntry] = {}
        for name, path, stamp in self._list():
            old = self.entries.get(name)
            if name in made:
                twice = f"'{made[name].path.name}' and '{path.name}' are both adapters '{name}': rename one"
                made[name] = FolderEntry(path, (*made[name].stamp, *stamp), AdapterInfo(name, error=twice))
            elif old is not None and (old.path, old.stamp) == (path, stamp):
                made[name] = old
            else:
                info = self._known.get((path.name, stamp)) or self._describe(name, path)
                made[name] = FolderEntry(path, stamp, info)
        changed = made != self.entries
        self.entries, self._known = made, {}
        if changed:
            self._save()
        return changed

    def has_file(self, name: str) -> bool:
        """Tell whether there is a file for a name now, indexed or not.

        Args:
            name: What a request names.

        Returns:
            Whether there is.
        """
        plain = isinstance(name, str) and os.path.basename(name) == name and not name.startswith(".") and "\0" not in name
        return plain and any(os.path.isfile(self.folder / file) for file in (f"{name}{LAST}", f"{name}/{CONFIG}"))

    def _list(self) -> Iterator[tuple[str, Path, Stamp]]:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError as error:
            raise ArtifactError(f"the folder of adapters '{self.folder}' cannot be read: {error.strerror}") from None
        for file in names:
            path = self.folder / file
            if file.startswith("."):
                continue
            try:
                if file.endswith(LAST) and path.is_file():
                    yield file.removesuffix(LAST), path, read_stamp(path)
                elif (path / CONFIG).is_file():
                    yield file, path, read_stamp(path)
            except OSError:  # gone meanwhile
                continue

    def _describe(self, name: str, path: Path) -> AdapterInfo:
        """Describe an adapter from its header."""
        try:
            file = read(path, meta=True)
        except Exception as error:  # whatever a broken file makes of its reader
            return AdapterInfo(name, error=f"{path} cannot be read: {error}")
        kind = ", ".join(dict.fromkeys(entry.kind for entry in file.entries))
        info = AdapterInfo(name, kind, tuple(sorted({entry.rank for entry in file.entries})))
        try:
            for slots in self.models.values():
                check_name(name, slots.tensor(f"{next(iter(slots.banks))}.gates.table.names").shape[1])
            fits = self.fit(file)
        except FxplugError as error:
            return replace(info, error=str(error))
        shares = dict.fromkeys(file.parts, 0.0) if len(file.parts) > 1 else {}
        for model, (own, found) in fits.items():
            gone = {*(e.name for e in found.missing), *found.outside.values(), *found.homeless.values()}
            lost = len(gone) + len(found.mismatched)
            shares[model] = 1 - lost / max(len(own.entries), lost, 1)
        return replace(info, coverage={part: share for part, share in shares.items() if part})

    def fit(self, file: AdapterFile) -> dict[str, tuple[AdapterFile, Fit]]:
        """Find out what of a file goes to which model.

        Args:
            file: What was read.

        Returns:
            By model, of those that it has anything for: the part of the file, and where it goes.

        Raises:
            ArtifactError: For one that fits no layer, and without `partial` one with layers that are not there.
        """
        made: dict[str, tuple[AdapterFile, Fit]] = {}
        why = ""
        for model, slots in self.models.items():
            foreign = [] if _is_text(model) else [p for p in file.parts if p not in self.models and not _is_text(p)]
            parts = {model, "", *foreign}
            own = file if file.own else replace(file, entries=tuple(e for e in file.entries if e.part in parts))
            if not own.entries and not own.own:
                continue
            try:
                found = fit_to(own, slots.banks, slots.module, slots.shapes, None, False)
            except ArtifactError as error:
                why = why or str(error)
                continue
            lacks = "; ".join(found.findings())
            if (found.placed or model in file.parts) and lacks and not self.partial:
                raise ArtifactError(f"{file.source} does not fit {model}: {lacks}")
            if found.placed:
                made[model] = own, found
        if not made:
            more = f": {why}" if why else f"; it has layers like '{file.entries[0].name}'" if file.entries else ""
            raise ArtifactError(f"{file.source} fits no layer of {', '.join(self.models)}{more}")
        return made

    @torch.no_grad()
    def prepare(self, name: str) -> tuple[Stamp, dict[str, Prepared]]:
        """Read an adapter, and make it ready for the slots of each model that it has anything for.

        Args:
            name: Its name.

        Returns:
            How the file looked, before and after, and what goes into the slots by model.

        Raises:
            ArtifactError: For a file that cannot be read, does not fit, or was changed while it was read.
            SpecError: For a rank above the slots', unless `resize`, and another kind than theirs.
        """
        entry = self.entries[name]
        file = read(entry.path)
        made: dict[str, Prepared] = {}
        for model, (own, _) in self.fit(file).items():
            slots = self.models[model]
            most = min((b.rank for rows in slots.banks.values() for b in rows if b.rank), default=0)
            if self.resize and most:
                entries = tuple(cut_rank(e, most, f"{own.source}: ") if e.rank > most else e for e in own.entries)
                own = replace(own, entries=entries)
            ready = slots.prepare(name, own, partial=self.partial)
            rows = {p: [(b, key, at, value.clone()) for b, key, at, value in each] for p, each in ready.rows.items()}
            made[model] = replace(ready, rows=rows)  # copies, which a file that is written later does not change
        if read_stamp(entry.path) != entry.stamp:
            raise ArtifactError(f"{entry.path} was changed while it was read: ask again")
        return entry.stamp, made

    # --- on disk

    def _places(self) -> list[Path]:
        given = os.environ.get("XDG_CACHE_HOME", "")
        top = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"))
        key = hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=16).hexdigest()
        return [self.folder / INDEX, top / "fxplug" / "adapters" / f"{key}.json"]

    def _load(self) -> dict[tuple[str, Stamp], AdapterInfo]:
        """Read what an earlier index has found; nothing of one that is for other models or cannot be read."""
        for place in self._places():
            try:
                found = read_json(place)
                if found["models"] == self.models_key:
                    return {(file, tuple(stamp)): _read_info(row) for file, stamp, row in found["adapters"]}
            except (FxplugError, KeyError, TypeError, ValueError):
                continue
        return {}

    def _save(self) -> None:
        rows = [[e.path.name, e.stamp, asdict(e.info)] for e in self.entries.values()]
        text = json.dumps({"models": self.models_key, "adapters": rows})
        for place in self._places():
            try:
                write_text(place, text, ArtifactError)
            except (FxplugError, OSError):
                continue
            return


def _is_text(part: str) -> bool:
    """Tell whether a part of a pipeline is a text encoder; other parts have other names in the files of some tools."""
    return part.startswith("text_encoder")


def _read_info(row: Any) -> AdapterInfo:
    """Read what was found of an adapter. Raises a TypeError, ValueError or KeyError for what an index does not write."""
    info = AdapterInfo(**{**row, "ranks": tuple(row["ranks"]), "in_slot": False})
    texts = (info.name, info.kind, info.error)
    shares = all(isinstance(key, str) and isinstance(value, float) for key, value in info.coverage.items())
    if not shares or not all(isinstance(text, str) for text in texts) or not all(type(rank) is int for rank in info.ranks):
        raise ValueError("not of an index")
    return info


def read_stamp(path: Path) -> Stamp:
    """Read how an adapter looks: the stamp of its file, or of those in its folder.

    Args:
        path: The file or folder.

    Returns:
        The numbers.

    Raises:
        OSError: Where it is gone.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return tuple(n for each in files for n in get_stamp(each.stat()))

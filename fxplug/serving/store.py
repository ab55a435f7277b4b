"""Adapters in files, of which those that requests need are in slots: read in the background, put in as they are asked for."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..adapters.slots import Adapters
from ..adapters.state import Prepared
from ..core.errors import ArtifactError, FxplugError, SpecError, did_you_mean, quote
from .adapter_index import AdapterIndex, AdapterInfo, Stamp
from .joint_calls import get_slots

LOG = logging.getLogger("fxplug.serving")
SCAN = 1.0  # seconds after which the folder is looked at again
PATIENCE = 5.0  # seconds after which nobody waits any more for what was asked for
HOST_BYTES = 2 << 30
Infos = list[AdapterInfo]


@dataclass(eq=False)
class WantedAdapter:
    """An adapter that somebody waits for: since which call of `lease`, and when it was last asked for."""

    order: int
    asked: float


@dataclass(eq=False)
class SlotAdapter:
    """An adapter in slots: which version of its file, of which models, and how many leases there are."""

    stamp: Stamp
    models: tuple[str, ...]
    leases: int = 0


class Lease:
    """Adapters that stay in their slots until `end`."""

    def __init__(self, names: tuple[str, ...], pins: ExitStack) -> None:
        self.names, self._pins = names, pins

    def __repr__(self) -> str:
        return f"Lease({', '.join(self.names)})"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let others have the slots. A second time does nothing."""
        self._pins.close()


class AdapterStore:
    """A folder of adapters for models with slots, any number of them.

    An adapter is a `*.safetensors` file or a folder of PEFT's, and has its name without the ending. What files have is indexed
    once and kept in `.fxplug-index.json` there, or in the user's cache where that cannot be written; new and changed files are
    seen within seconds. One thread reads what is asked for into host memory; `lease` puts it into slots, in the place of those
    that were used longest ago, as S-LoRA does for language models (arXiv 2311.03285).
    """

    def __init__(
        self,
        folder: str | Path,
        modules: Mapping[str, Any],
        *,
        host_bytes: int = HOST_BYTES,
        resize: bool = False,
        partial: bool = False,
    ) -> None:
        """Make a store; the index is complete then.

        Args:
            folder: The folder.
            modules: Traced modules with slots, by the names that files have for them, as `unet`.
            host_bytes: Bytes of adapters that are kept in host memory; those of one request are, whatever they have.
            resize: Whether a rank above the slots' is lowered to it by singular values; else such an adapter is refused.
            partial: Whether layers that are not there are left out; else such an adapter is refused.

        Raises:
            SpecError: For a module without slots, and a number of bytes below 1.
            ArtifactError: For a folder that cannot be read.
        """
        if not isinstance(host_bytes, int) or isinstance(host_bytes, bool) or host_bytes < 1:
            raise SpecError(f"host_bytes must be a whole number, 1 or more, not {quote(host_bytes)}", path=("host_bytes",))
        if not isinstance(modules, Mapping) or not modules:
            raise SpecError(f"modules must be modules with slots by name, not {quote(modules)}", path=("modules",))
        self.folder, self.modules, self.host_bytes = Path(folder), dict(modules), host_bytes
        self._models = {name: get_slots(module) for name, module in modules.items()}
        self._index = AdapterIndex(self.folder, self._models, resize, partial)
        self._lock = threading.RLock()
        self._scanned = time.monotonic()
        self._ready: dict[str, tuple[Stamp, dict[str, Prepared]]] = {}  # in host memory, the last used last
        self._in_slots: dict[str, SlotAdapter] = {}  # in slots, the last used last
        self._wanted: dict[str, WantedAdapter] = {}
        self._faults: dict[tuple[str, Stamp], str] = {}  # of readings, until somebody is told
        self._calls = 0
        self._news = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=_read_on, args=(weakref.ref(self), self._news), name="fxplug store", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"AdapterStore({self.folder}; {len(self._index.entries)} adapters, {len(self._in_slots)} in slots)"

    def __enter__(self) -> AdapterStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread that reads; what is in slots stays there, and `lease` is refused."""
        self._closed = True
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- what there is

    def list(self) -> Infos:
        """List the adapters, by name; those that cannot be used have an `error`."""
        with self._lock:
            return [replace(entry.info, in_slot=name in self._in_slots) for name, entry in self._index.entries.items()]

    def get_path(self, name: str) -> Path:
        """Return the file or folder of an adapter. Raises SpecError for a name that there is not."""
        with self._lock:
            self._get_info(name)
            return self._index.entries[name].path

    def refresh(self) -> None:
        """Look at the folder again now. Raises ArtifactError for one that cannot be read."""
        self._scan()

    def check(self, adapters: Mapping[str, Any]) -> None:
        """Check that a request may name these adapters.

        Args:
            adapters: Their strengths by name.

        Raises:
            SpecError: For a name that there is not, with the nearest one, a file that cannot be used, and more adapters than a
                sample may have.
        """
        self._check_room(adapters, {model: _count_room(slots) for model, slots in self._models.items()}, "per sample")

    def _check_room(self, names: Iterable[str], room: Mapping[str, int], of: str) -> None:
        """Check that adapters are there, and not more for a model than there is room for."""
        with self._lock:
            infos = [self._get_info(name) for name in names]
        for model, most in room.items():
            here = sum(bool(info.coverage.get(model)) for info in infos)
            if here > most:
                raise SpecError(f"{here} adapters for {model}, which has room for {most} {of}: use fewer", path=("adapters",))

    def _get_info(self, name: str) -> AdapterInfo:
        entries = self._index.entries
        if name not in entries and self._index.has_file(name):
            self._scan()
            entries = self._index.entries
        if name not in entries:
            near = did_you_mean(str(name), entries)
            raise SpecError(f"no adapter {quote(name)} in {self.folder}{near}", path=("adapters",), key=str(name))
        if error := entries[name].info.error:
            raise SpecError(error, path=("adapters",), key=name)
        return entries[name].info

    # --- slots

    def lease(self, names: Iterable[str]) -> Lease | None:
        """Put adapters into slots, to stay there until the lease ends. Never waits.

        Args:
            names: Their names.

        Returns:
            The lease; None while one is being read, or no slot is free: ask again.

        Raises:
            SpecError: For a name that there is not, more adapters than slots, and a file that cannot be read or does not fit.
        """
        names = tuple(dict.fromkeys(names))
        with self._lock:
            if self._closed:
                raise SpecError("the store is closed")
            self._check_room(names, {model: slots.slots for model, slots in self._models.items()}, "in its slots")
            for name in names:
                if (fault := self._faults.pop((name, self._index.entries[name].stamp), "")) and name not in self._ready:
                    raise SpecError(fault, path=("adapters",), key=name)
            stamps = {name: self._index.entries[name].stamp for name in names}
            lacking = [name for name in names if not self._is_in_slots(name, stamps[name])]
            self._want([name for name in lacking if self._ready.get(name, ((),))[0] != stamps[name]], lacking)
            if any(self._ready.get(name, ((),))[0] != stamps[name] for name in lacking):
                return None
            if any(self._in_slots[name].leases for name in lacking if name in self._in_slots):
                return None  # an older version is in use
            for name in lacking:
                if not self._put(name, names):
                    return None
            try:
                return self._pin(names)
            except SpecError:  # somebody else has unloaded one since
                return None

    def _is_in_slots(self, name: str, stamp: Stamp) -> bool:
        """Tell whether a version of an adapter is in slots; somebody else may have unloaded what nobody leases."""
        loaded = self._in_slots.get(name)
        return loaded is not None and loaded.stamp == stamp and all(name in self._models[m].names for m in loaded.models)

    def _want(self, missing: Sequence[str], lacking: Sequence[str]) -> None:
        """Note what somebody waits for: what is to be read, and what is ready and shall stay so."""
        self._calls += 1
        now = time.monotonic()
        order = min((self._wanted[name].order for name in lacking if name in self._wanted), default=self._calls)
        for name in lacking:
            self._wanted[name] = WantedAdapter(order, now)
        if missing:
            self._news.set()

    def _put(self, name: str, names: tuple[str, ...]) -> bool:
        """Put an adapter that is ready into slots, and others out of them; tells whether there was room."""
        stamp, parts = self._ready[name]
        if name in self._in_slots:
            self._take_out(name)
        for model, ready in parts.items():
            while not _has_room(self._models[model], ready):
                here = set(self._models[model].names)
                victim = next((n for n, one in self._in_slots.items() if not one.leases and n in here and n not in names), None)
                if victim is None:
                    return False
                self._take_out(victim)
        put = dict.fromkeys(parts, False)
        try:
            for model, ready in parts.items():
                self._models[model].put(ready)
                put[model] = True
        except BaseException:  # all or none, an interrupt, too
            for model in (model for model, done in put.items() if done):
                self._models[model].unload(name)
            raise
        self._in_slots[name] = SlotAdapter(stamp, tuple(parts))
        self._ready[name] = self._ready.pop(name)
        return True

    def _take_out(self, name: str) -> None:
        for slots in self._models.values():
            if name in slots.names:
                slots.unload(name)
        del self._in_slots[name]

    def _pin(self, names: tuple[str, ...]) -> Lease:
        with ExitStack() as pins:
            for name in names:
                loaded = self._in_slots[name] = self._in_slots.pop(name)  # the last used
                loaded.leases += 1
                pins.callback(self._release, loaded)  # after the pins have ended: until then it makes room for nobody
            for model, slots in self._models.items():
                pins.enter_context(slots.pin(*(name for name in names if model in self._in_slots[name].models)))
            for name in names:
                self._wanted.pop(name, None)
            return Lease(names, pins.pop_all())

    def _release(self, loaded: SlotAdapter) -> None:
        with self._lock:
            loaded.leases -= 1

    # --- reading

    def _scan(self) -> None:
        with self._lock:
            self._scanned = time.monotonic()
            if self._index.refresh():
                entries = self._index.entries
                known = {(name, entry.stamp) for name, entry in entries.items()}
                self._faults = {key: fault for key, fault in self._faults.items() if key in known}
                for name in [n for n, (stamp, _) in self._ready.items() if (n, stamp) not in known]:
                    del self._ready[name]

    def _read_next(self) -> bool:
        """Look at the folder where it is time, and read one adapter; tells whether there was one to read."""
        if time.monotonic() - self._scanned >= SCAN:
            try:
                self._scan()
            except ArtifactError as error:  # a folder that is gone for a while: what is read stays
                LOG.warning("%s", error)
        with self._lock:
            now, entries = time.monotonic(), self._index.entries
            self._wanted = {n: w for n, w in self._wanted.items() if now - w.asked < PATIENCE and n in entries}
            stamps = {n: entries[n].stamp for n in self._wanted}
            waiting = [n for n, s in stamps.items() if (n, s) not in self._faults and self._ready.get(n, ((),))[0] != s]
            name = min(waiting, key=lambda n: self._wanted[n].order, default="")
            if not name or not self._make_room(name):
                return False
        try:
            found = self._index.prepare(name)
        except FxplugError as error:
            fault = str(error)
        except Exception as error:  # whatever a broken file makes of its reader
            fault = f"{self._index.entries[name].path if name in self._index.entries else name} cannot be read: {error}"
        else:
            with self._lock:
                self._ready.pop(name, None)
                self._ready[name] = found
                self._make_room(name)
            return True
        with self._lock:
            self._faults[name, stamps[name]] = fault
        return True

    def _make_room(self, name: str) -> bool:
        """Drop what fills the host memory and is used by nobody, or waited for by those who came later; tells whether this
        adapter may be read now."""
        order = self._wanted[name].order if name in self._wanted else self._calls

        def rank(one: str) -> int:
            return self._wanted[one].order if one in self._wanted else self._calls + 1

        while self.used_bytes >= self.host_bytes:
            others = [one for one in self._ready if one != name]
            victim = max(others, key=rank, default=None)  # of equal ones the first, which was used longest ago
            if victim is None or rank(victim) == order:
                return True
            if rank(victim) < order:
                return False
            del self._ready[victim]
        return True

    @property
    def names_in_memory(self) -> frozenset[str]:
        """Names of the adapters in slots or host memory."""
        with self._lock:
            return frozenset({*self._in_slots, *self._ready})

    @property
    def used_bytes(self) -> int:
        """Number of bytes that the adapters in host memory have."""
        return sum(ready.bytes for _, parts in self._ready.values() for ready in parts.values())


def _read_on(store: weakref.ref[AdapterStore], news: threading.Event) -> None:
    """Read what a store wants, until it is closed or gone."""
    torch.set_grad_enabled(False)  # of this thread
    while (one := store()) is not None and not one._closed:
        try:
            more = one._read_next()
        except Exception:  # a mistake of ours: requests wait, and the log says why
            LOG.exception("the thread that reads adapters failed")
            more = False
        del one
        if not more:
            news.wait(SCAN / 4)
            news.clear()


def _count_room(slots: Adapters) -> int:
    """Count the adapters that one sample may have at most."""
    tables = [slots.there(f"{p}.gates.table.which") for p in slots.banks]
    if any(table is None for table in tables):
        return slots.slots
    return sum(table.shape[1] for table in tables if table is not None)


def _has_room(slots: Adapters, ready: Prepared) -> bool:
    """Tell whether each pass that an adapter has anything for has a free slot."""
    for p in ready.rows:
        names = slots.names_of(p)
        if "" not in (names if slots.there(f"{p}.gates.table.which") is None else names[:-1]):
            return False
    return True

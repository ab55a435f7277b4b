"""Traces that are kept on disk from one dry run to the next, in the graph format of artifacts: shapes, and no values.

A trace is kept where nothing but data and installed packages made it, the model's own class among them: what users' files make
is traced each time. It is used again as long as every file of code that was loaded then is as it was, with the same packages,
Python, fxplug, machine and environment, and the same model, inputs, mode, dtype and seed.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArtifactError
from ..files import entries
from ..ir.traced_module import TracedModule
from ..limits import DEFAULT
from .artifact import _build, _document, _dump
from .manifest import parse, wrapped


class KeptTrace:
    """The place of one trace, by what it is made of, plain data: None of it is kept where that is not plain."""

    def __init__(self, made_of: Any) -> None:
        self.name = entries.name_of(made_of)
        self.made_with = entries.environment()  # libraries change variables when they are imported

    def read(self) -> tuple[TracedModule, Any] | None:
        """The traced module, on the meta device, and what `write` was given with it; None where there is none to be used.

        One that is damaged or does not hold any more is ignored, with a warning.
        """
        if self.name is None or entries.users_modules():
            return None
        try:
            if (body := entries.read(self.name, self.made_with, DEFAULT.json, used=True)) is None:
                return None
            with wrapped("it is damaged"):
                document = parse(body, "the trace", DEFAULT)
                beside = document.pop("beside")
                return _build(None, document, [], None, DEFAULT), beside
        except (entries.Stale, ArtifactError) as error:
            entries.not_used(error)
            return None

    def write(self, module: TracedModule, beside: Any) -> None:
        """Keep a traced module with plain data beside it, unless something in it cannot be read back as it is."""
        if self.name is None or entries.users_modules():
            return
        try:
            document, files = _document(module)
        except ArtifactError:
            return
        foreign = any(":" in record.get("class", "") for record in document["modules"].values())
        if foreign or any(files.values()) or module.variants:
            return
        try:
            entries.write(self.name, self.made_with, _dump({**document, "beside": beside}))
        except OSError as error:
            entries.not_kept(error)

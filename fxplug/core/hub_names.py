"""Names of repositories on a hub, where a file or folder is meant: one on this machine goes first. Imports no torch.

What fetches them is an extension's, which overrides `Hub`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from . import extensions
from .errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean, quote
from .writing import find_whole_folder

# user/name, then a revision and a file of the repository where they are given
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[^/@\s]+)?(/[^@\s]+\.safetensors)?\Z", re.ASCII)
FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".json", ".yaml", ".yml", ".py")


class Hub:
    """The hub with the repositories: what is fetched from it lies in a cache on this machine."""

    def fetch_artifact(self, name: str, revision: str | None, limits: Limits) -> Path:
        """Return the folder of a saved rewrite in the cache, fetched if it is not there. Raises ArtifactError."""
        raise NotImplementedError

    def fetch_adapter(self, name: str, revision: str | None, limits: Limits) -> Path:
        """Return the file or folder of an adapter in the cache, fetched if it is not there. Raises ArtifactError."""
        raise NotImplementedError

    def find_cached_file(self, path: Path) -> Path | None:
        """Return the file that a link leads to, if both lie in the cache; None otherwise."""
        raise NotImplementedError


def is_hub_name(source: object, base: str | os.PathLike[str] = "") -> bool:
    """Return whether a text is the name of a repository, and of nothing that is below `base`."""
    if not isinstance(source, str) or not NAME.match(source) or ".." in source.split("/"):
        return False
    if source.count("/") == 1 and source.endswith(FILES):
        return False
    path = Path(base, source)
    return not os.path.lexists(path) and not find_whole_folder(path).exists()


def find_local(
    source: str | os.PathLike[str],
    kind: Literal["artifact", "adapter"],
    revision: str | None = None,
    limits: Limits = DEFAULT,
) -> Path:
    """Return the path of an artifact's folder, or of an adapter; of a repository on the hub, that of its files in the cache.

    Raises ArtifactError for a repository that cannot be fetched, and SpecError for a revision of another path.
    """
    if not isinstance(revision, (str, type(None))) or revision == "":
        raise SpecError(f"revision must be a branch, a tag or a commit as text, not {quote(revision)}")
    if not is_hub_name(source):
        if revision is not None:
            raise SpecError(
                f"revision is for a repository on the hub, 'user/name', and '{source}' is a path on this machine: leave it out"
            )
        return Path(source)
    hub: Hub = extensions.need_hook("hub", "hub")
    try:
        fetch = hub.fetch_artifact if kind == "artifact" else hub.fetch_adapter
        return fetch(str(source), revision, limits)
    except ArtifactError as error:
        path = Path(source)
        near = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else ())
        raise ArtifactError(f"{error}; no file or folder '{source}' exists on this machine either{near}") from error


@contextmanager
def name_repository(source: str | os.PathLike[str], path: Path) -> Iterator[None]:
    """Add to an ArtifactError about files of a repository, at `path` in the cache, which one it is and what to do."""
    try:
        yield
    except ArtifactError as error:
        if path == Path(source):
            raise
        advice = "if the cache is damaged, remove the repository from it, and it is fetched again"
        raise ArtifactError(f"the repository '{source}': {error} ({path}: {advice})") from error


def resolve_link(path: Path) -> Path:
    """Return the file that a link of the hub's cache leads to within that cache; any other path as it is."""
    if not path.is_symlink():
        return path
    hub: Hub | None = extensions.import_part("hooks", "hub")
    return path if hub is None else hub.find_cached_file(path) or path

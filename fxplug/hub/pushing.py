"""A rewrite put into a repository on the hub: what `save` writes, and a card, in one commit."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError

from .. import __version__
from ..core.artifacts.artifact import check_savable, load, save
from ..core.artifacts.document import MANIFEST, Snapshot, list_file_records, open_snapshot, parse
from ..core.errors import DEFAULT, ArtifactError, SpecError, quote
from ..core.hub_names import resolve_link
from ..core.ir.traced_module import TracedModule
from ..core.reading import read_bytes
from ..core.writing import open_temporary_folder as temporary_folder
from .card import make_card
from .errors import report_hub_errors
from .fetching import Repository

CARD = "README.md"
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
BASE = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)  # repositories from before there were users have no user
PUSHED = "cannot be pushed to"


def push(
    module: TracedModule | str | os.PathLike[str],
    name: str,
    base: str | None = None,
    license: str | None = None,
    *,
    allow: Sequence[str] = (),
) -> str:
    """Put a module, or a folder that `save` wrote, into a repository on the Hugging Face Hub, which `load(name)` reads.

    The repository is made where there is none: a public one, unless you make a private one of that name before. At its root are
    the files that `save` writes and a README.md, the model card, with the passes, their diffs and the checks that were made of
    them. Of an earlier push the files that this one lacks are removed; other files stay. It is one commit: `load` gets the old
    one or the new one. Log in first: `hf auth login`, or a token in `HF_TOKEN`.

    Args:
        module: The traced module, or the folder.
        name: The repository, `user/name`.
        base: The model on the hub that was rewritten, for the card: `stabilityai/sdxl-turbo`.
        license: The identifier of a licence, for the card: `apache-2.0`.
        allow: As in `load`, for a folder with blocks or tensors of other packages.

    Returns:
        The commit, 40 hexadecimal digits, which `load(name, revision=...)` takes; the last one where nothing has changed.

    Raises:
        ArtifactError: The module cannot be saved, the folder is no artifact or is damaged, or the hub refuses it.
        SpecError: `name`, `base` or `license` is not text.
    """
    for key, value in (("name", name), ("base", base), ("license", license)):
        if not isinstance(value, str) and (key == "name" or value is not None):
            raise SpecError(f"{key} must be text, not {quote(value)}")
    if not NAME.fullmatch(name):
        raise ArtifactError(f"{quote(name)} is not the name of a repository: write 'user/name', of you or an organization")
    if base is not None and not BASE.fullmatch(base):
        raise SpecError(f"base must be a repository on the hub, such as 'stabilityai/sdxl-turbo', not {quote(base)}")
    with ExitStack() as stack:
        if isinstance(module, TracedModule):
            source = stack.enter_context(temporary_folder("fxplug-push-")) / "pushed" / "module"  # save locks the folder above
            allow = [*allow, *(kind.partition(":")[0] for kind in check_savable(module))]
            save(module, source)
        else:
            source = _checked_folder(module)
        files = stack.enter_context(open_snapshot(source))
        card = make_card(load(source, allow=allow, device="meta", digest=files.digest), name, base, license)
        with report_hub_errors(name, PUSHED):
            additions = [CommitOperationAdd(CARD, card.encode()), *_additions(source, files)]
            api = HfApi(library_name="fxplug", library_version=__version__)
            api.create_repo(name, exist_ok=True)
            removed = _removed(api, name, {*files.files, MANIFEST, CARD})
            commit = api.create_commit(name, [*additions, *removed], commit_message=f"fxplug {__version__}: push")
    return str(commit.oid)


def _checked_folder(given: object) -> Path:
    """Return the folder of an artifact. Raises ArtifactError for one that only has an artifact below it."""
    if not isinstance(given, (str, os.PathLike)):
        raise ArtifactError(
            f"push takes a traced module or the folder of one, not a {type(given).__name__}: fxplug.trace(model, inputs) makes "
            "one"
        )
    path = Path(given)
    if not (path / MANIFEST).exists() and (path / "module" / MANIFEST).is_file():
        raise ArtifactError(f"'{given}' is the folder of a training run: push its module, '{path / 'module'}'")
    return path


def _additions(folder: Path, files: Snapshot) -> list[CommitOperationAdd]:
    """Return the files of an artifact to send, the large ones by path. Raises ArtifactError where one changed since."""
    made = []
    for name, (file, digest) in files.files.items():
        large = name in files.weights
        made.append(CommitOperationAdd(name, str(resolve_link(folder / name)) if large else file.read()))
        if made[-1].upload_info.sha256.hex() != digest:
            raise ArtifactError(f"{name} in {folder} has changed since it was saved: its SHA-256 differs from the manifest's")
    return [*made, CommitOperationAdd(MANIFEST, files.manifest)]


def _removed(api: HfApi, name: str, kept: set[str]) -> list[CommitOperationDelete]:
    """Return the files of the last push that are not among those of this one, to remove."""
    repo = Repository(name)
    try:
        found = repo.look(MANIFEST)
    except RevisionNotFoundError:  # a repository without a commit
        return []
    if found is None:
        return []
    path = repo.at(found.commit_hash).fetch(MANIFEST)  # by its commit: what the cache has as main stays
    try:
        earlier = list_file_records(parse(read_bytes(resolve_link(path), DEFAULT.json), MANIFEST), name)
    except ArtifactError:  # of something else, or of a newer version: what it lists is not ours to remove
        return []
    return [CommitOperationDelete(file) for file in earlier if file not in kept and api.file_exists(name, file)]

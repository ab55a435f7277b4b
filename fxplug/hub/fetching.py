"""What of a repository is fetched: an artifact's manifest and the files it lists, or an adapter's file and configuration.

The files come into the hub's own cache, each of them whole or not at all, and all of one commit.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from huggingface_hub import DryRunFileInfo, HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from ..core.artifacts.document import FIXED, MANIFEST, list_file_records, parse
from ..core.errors import ArtifactError, Limits, quote
from ..core.hub_names import Hub, resolve_link
from ..core.reading import make_reporter, open_regular_file
from ..core.weight_files import PICKLED, SAFE, choose_file
from ..core.writing import replace_file
from .errors import report_hub_errors

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model"  # whose scale only the configuration says
NAME = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<file>.+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
FETCHED = "cannot be fetched"


@dataclass(frozen=True)
class Repository:
    """A repository on the hub at a revision: None is the newest commit of its main branch."""

    name: str
    revision: str | None = None

    def look(self, file: str) -> DryRunFileInfo | None:
        """Return the size (None if the hub does not say it) and the commit of a file; None if the repository has no such file.

        Raises LocalEntryNotFoundError if neither the hub nor the cache can say that.
        """
        try:
            return hf_hub_download(self.name, file, revision=self.revision, dry_run=True)
        except EntryNotFoundError as error:
            cause = error.__cause__  # mirrors answer 404 without the code that says of what
            plain = isinstance(cause, HfHubHTTPError) and cause.response.status_code == 404
            if isinstance(error, LocalEntryNotFoundError) and not plain:
                raise
            return None

    def fetch(self, file: str) -> Path:
        """Return the path in the cache of a file, which is fetched if it is not there.

        Raises ArtifactError where a link there leads out of the cache.
        """
        return _checked(self, Path(hf_hub_download(self.name, file, revision=self.revision)))

    def has(self, file: str) -> Path | None:
        """Return the path in the cache of a file, which is fetched if it is not there; None if the repository has none."""
        return self.fetch(file) if self.look(file) is not None else None

    def at(self, commit: str | None) -> Repository:
        """Return the repository at a commit that an answer named.

        All files are fetched by it: huggingface_hub asks for a file's digest and then for the file, and of a branch that may be
        the next commit's, which would lie in the cache under this one's digest.
        """
        return replace(self, revision=commit) if commit and COMMIT.fullmatch(commit) else self

    def remember(self, pinned: Repository) -> None:
        """Write into the cache which commit the revision is, as huggingface_hub keeps it and reads it offline."""
        revision, folder = self.revision or constants.DEFAULT_REVISION, repo_folder_name(repo_id=self.name, repo_type="model")
        refs = Path(constants.HF_HUB_CACHE, folder, "refs")
        ref = refs / revision
        if pinned == self or not pinned.revision or ".." in ref.parts or refs not in ref.parents:
            return
        with contextlib.suppress(OSError), replace_file(ref) as file:  # a cache that is only read stays as it is
            file.write_text(pinned.revision)


def _checked(repo: Repository, path: Path) -> Path:
    if HUB.find_cached_file(path) is None:
        out = os.path.realpath(path)
        raise ArtifactError(f"{path.name} of '{repo.name}' is a link out of the hub's cache, to {quote(out)}: remove {path}")
    return path


class HuggingFaceHub(Hub):
    """The Hugging Face Hub, by huggingface_hub and its cache."""

    def fetch_artifact(self, name: str, revision: str | None, limits: Limits) -> Path:
        """Fetch the manifest of a saved rewrite and the files that it lists, and return their folder in the cache.

        Nothing else is asked for. Raises ArtifactError for a repository that has no manifest or one that lists something else,
        and for whatever huggingface_hub raises.
        """
        repo, file = _parse(name, revision)
        if file:
            raise ArtifactError(f"'{name}' is a file of a repository, and load takes a whole one: '{repo.name}'")
        with report_hub_errors(repo.name, FETCHED, repo.revision):
            folder = _fetch_listed(repo, limits)
            if folder is None:
                raise ArtifactError(
                    f"the repository '{repo.name}' on the hub is not an artifact: it has no {MANIFEST}, which fxplug.push "
                    "writes. An adapter of another tool goes into a rewritten module with fxplug.load_adapter or "
                    "module.adapters.load"
                )
            return folder

    def fetch_adapter(self, name: str, revision: str | None, limits: Limits) -> Path:
        """Fetch an adapter, and return its file of weights in the cache, or the folder of a saved rewrite.

        Of a repository without a manifest, a file of safetensors is fetched, and the `adapter_config.json` beside it. Raises
        ArtifactError as `fetch_artifact` does, and where there is no such file, or several and no name says which.
        """
        repo, file = _parse(name, revision)
        with report_hub_errors(repo.name, FETCHED, repo.revision):
            if file:
                return _fetch_weights(repo, file)
            try:
                folder = _fetch_listed(repo, limits)
            except LocalEntryNotFoundError:
                return _in_cache(repo)
            if folder is not None:
                return folder
            file = f"{PEFT_WEIGHTS}.safetensors" if repo.look(CONFIG) else "pytorch_lora_weights.safetensors"
            if repo.look(file) is None:
                file = _choose(repo, [entry.path for entry in HfApi().list_repo_tree(repo.name, revision=repo.revision)])
            return _fetch_weights(repo, file)

    def find_cached_file(self, path: Path) -> Path | None:
        """Return the file that a link leads to, if both lie in the hub's cache; None otherwise."""
        cache = os.path.realpath(constants.HF_HUB_CACHE)
        real, folder = os.path.realpath(path), os.path.realpath(path.parent)
        inside = all(os.path.commonpath([cache, one]) == cache for one in (real, folder))
        return Path(real) if inside else None


HUB = HuggingFaceHub()


def _parse(name: str, revision: str | None) -> tuple[Repository, str]:
    """Return the repository and the file, "" if there is none, of `user/name`, `user/name@revision` or `user/name/file`."""
    match = NAME.fullmatch(name)
    assert match is not None  # what is no such name is a path
    if revision is not None and match["revision"]:
        raise ArtifactError(f"'{name}' has a revision, and revision={quote(revision)} is another: give one of them")
    return Repository(match["repo"], revision if revision is not None else match["revision"]), match["file"] or ""


def _fetch_listed(repo: Repository, limits: Limits) -> Path | None:
    """Fetch an artifact's files, once the hub has each of them in the size that the manifest says; None without a manifest."""
    found = repo.look(MANIFEST)
    if found is None:
        return None
    pinned, where = repo.at(found.commit_hash), f"the repository '{repo.name}'"
    if found.file_size is not None and found.file_size > limits.json:
        raise ArtifactError(f"{where}: {MANIFEST} has {found.file_size} bytes; the limit is {limits.json}")
    manifest = pinned.fetch(MANIFEST)
    with open_regular_file(resolve_link(manifest), limits.json, make_reporter(f"{where}: {MANIFEST}"), links=False) as file:
        files = list_file_records(parse(file.read(), MANIFEST, limits), where)
    if len(files) > (most := limits.modules + len(FIXED)):
        raise ArtifactError(f"{where}: {MANIFEST} lists {len(files)} files; the limit is {most}")
    for name, record in files.items():
        at = pinned.look(name)
        if at is None:
            raise ArtifactError(f"{where}: {MANIFEST} lists {name}, which is missing from the repository: push it again")
        if (size := at.file_size) is not None and size != record.size:
            raise ArtifactError(f"{where}: {name} has {size} bytes instead of {quote(record.size)}: push it again")
    for name in files:
        pinned.fetch(name)
    repo.remember(pinned)  # last: what the revision is offline is whole
    return manifest.parent


def _fetch_weights(repo: Repository, file: str) -> Path:
    """Fetch a file of weights and the configuration beside it, that first: without it the file means something else."""
    found = repo.look(file)
    pinned = repo if found is None else repo.at(found.commit_hash)
    pinned.has(str(PurePosixPath(file).with_name(CONFIG)))
    path = pinned.fetch(file)
    repo.remember(pinned)
    return path


def _choose(repo: Repository, names: list[str]) -> str:
    """Return the file of weights among those at the root of a repository. Raises ArtifactError."""
    here = [name for name in names if "/" not in name]
    chosen, files = choose_file([name for name in here if name.endswith(SAFE)])
    if chosen:
        return chosen
    if files:
        raise ArtifactError(
            f"the repository '{repo.name}' has {len(files)} files of weights: give one, as '{repo.name}/{files[0]}'; there are "
            f"{', '.join(files[:6])}"
        )
    pickled = [name for name in here if name.endswith(PICKLED)]
    why = f"{pickled[0]} is pickled, which is not fetched: convert it to safetensors" if pickled else (
        f"give a file below it, as '{repo.name}/FOLDER/FILE.safetensors'"
    )
    raise ArtifactError(f"the repository '{repo.name}' has no .safetensors file and no {MANIFEST}: {why}")


def _in_cache(repo: Repository) -> Path:
    """Return an adapter that the cache has whole, as other libraries leave it there. Raises LocalEntryNotFoundError."""
    folder = Path(snapshot_download(repo.name, revision=repo.revision, local_files_only=True, allow_patterns=[CONFIG]))
    chosen = _choose(repo, [name for name in os.listdir(folder) if name.endswith(SAFE)])
    known = try_to_load_from_cache(repo.name, CONFIG, revision=folder.name)
    if chosen.startswith(PEFT_WEIGHTS) and known is None:
        raise LocalEntryNotFoundError(CONFIG)
    return _checked(repo, folder / chosen)

"""What huggingface_hub raises, as an ArtifactError that names the repository and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..core.errors import ArtifactError, FxplugError, quote
from ..core.reading import get_reason

LOGIN = "log in with 'hf auth login', or set HF_TOKEN"
BUSY = 429


@contextmanager
def report_hub_errors(repo: str, doing: str, revision: str | None = None) -> Iterator[None]:
    """Raise whatever goes wrong in the block as an ArtifactError: `doing` says what was tried ("cannot be fetched")."""
    try:
        yield
    except FxplugError as error:
        if repo in str(error):
            raise
        raise ArtifactError(f"the repository '{repo}' on {_host()} {doing}: {error}") from error
    except Exception as error:  # of huggingface_hub, and of what it sends and writes with
        raise ArtifactError(f"the repository '{repo}' on {_host()} {doing}: {_finding(error, repo, revision)}") from error


def _host() -> str:
    return constants.ENDPOINT.partition("://")[2]


def _finding(error: Exception, repo: str, revision: str | None) -> str:
    """Return what an error means, and what to do."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # of a thread that sends one of the files
        return _finding(error.__cause__, repo, revision)
    if isinstance(error, HFValidationError):
        return f"this is not the name of a repository ({_message(error)}): write 'user/name'"
    if isinstance(error, GatedRepoError):
        return f"its owner gives access on request: ask for it at {constants.ENDPOINT}/{repo}, and {LOGIN}"
    if isinstance(error, DisabledRepoError):
        return "it was disabled: ask its owner"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {quote(revision or constants.DEFAULT_REVISION)}: give a branch, a tag or a full commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is none of this name, or it is private: check the name, or {LOGIN}"
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return _unreached(error)
    if isinstance(error, EntryNotFoundError):
        return f"a file is not there ({_message(error)}): push it again"
    if isinstance(error, HfHubHTTPError):
        return _refused(error, error.response.status_code)
    if isinstance(error, OSError) and error.errno:
        return f"{get_reason(error)}: look at the cache, {constants.HF_HUB_CACHE}, or set HF_HOME to another place"
    if isinstance(error, OSError):  # the size is not that of the file
        return f"the transfer broke off: try again ({_message(error)})"
    if isinstance(error, ValueError):
        return _message(error)
    what = "the transfer broke off" if type(error).__module__.startswith("httpx") else "the hub's answer could not be read"
    return f"{what}: try again ({type(error).__name__}: {_message(error)})"


def _unreached(error: Exception) -> str:
    """Return why a file that is not in the cache cannot be fetched now."""
    if isinstance(cause := error.__cause__, HfHubHTTPError):
        return _refused(cause, cause.response.status_code)
    if constants.is_offline_mode():
        return (
            f"it is not in the cache, {constants.HF_HUB_CACHE}, or not all of it, and HF_HUB_OFFLINE is set: run "
            "once without it"
        )
    why = f" ({_message(cause)})" if cause is not None else ""
    return f"it is not in the cache, {constants.HF_HUB_CACHE}, and the hub is out of reach{why}: try again"


def _refused(error: HfHubHTTPError, status: int) -> str:
    """Return what an answer with an error's status means."""
    if status == 401:
        return f"the hub requires a login: {LOGIN}"
    if status == 403:
        return f"your account has no permission: {LOGIN} of one that has ({_message(error)})"
    if status == BUSY or status >= 500:
        return f"the hub answers with status {status}: try again later"
    return f"the hub refuses it with status {status} ({_message(error)})"


def _message(error: BaseException) -> str:
    """Return the error's own text in one line."""
    server = getattr(error, "server_message", None)
    return quote(" ".join((server or str(error) or type(error).__name__).split()), 200)[1:-1]

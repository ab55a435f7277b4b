"""Who may use a server, and which adapters they see."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ...core.errors import SpecError
from ...core.reading import read_text
from .errors import RequestError

LONGEST = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True)
class ApiKey:
    """A key: a digest of its text, and what it allows.

    `adapters` is the pattern of the names that it sees and uses, and `admin` whether it may add and delete adapters.
    """

    digest: bytes = b""
    adapters: str = "*"
    admin: bool = False

    def sees(self, name: str) -> bool:
        """Return whether the key sees an adapter of this name."""
        return fnmatchcase(name, self.adapters)

    def filter(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that the key sees."""
        return [name for name in names if self.sees(name)]


ANYBODY = ApiKey()  # where no keys are asked for, who may do all but add and delete


def read_keys(path: Path) -> list[ApiKey]:
    """Read a file with a key on each line: `KEY`, `KEY admin` or `KEY adapters=PATTERN`.

    Args:
        path: The file. Empty lines, and those that begin with #, are none.

    Returns:
        The keys.

    Raises:
        SpecError: For a file that cannot be read, another word, a key that is there twice, and a file without keys.
    """
    found: dict[bytes, ApiKey] = {}
    text = read_text(path, LONGEST, lambda finding: SpecError(f"the file of keys '{path}' {finding}", path=("http", "keys")))
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        pattern, admin = "*", False
        for word in words[1:]:
            if word == "admin":
                admin = True
            elif word.startswith("adapters=") and word != "adapters=":
                pattern = word.removeprefix("adapters=")
            else:  # which is not quoted: it may be a part of a key
                finding = "a line has a key, and after it 'admin' or 'adapters=PATTERN'; this one has another word"
                raise SpecError(finding, where=f"{path}:{number}")
        key = ApiKey(_digest(words[0]), pattern, admin)
        if key.digest in found:
            raise SpecError("this key is there twice: give each user another one", where=f"{path}:{number}")
        found[key.digest] = key
    if not found:
        raise SpecError(f"the file of keys '{path}' has no key, so that nobody could use the server", path=("http", "keys"))
    return list(found.values())


def find_key(keys: list[ApiKey] | None, header: str | None) -> ApiKey:
    """Find the key of a request.

    Args:
        keys: Those that there are; None where none is asked for.
        header: The request's `Authorization`.

    Returns:
        The key.

    Raises:
        RequestError: 401, for no key or another one.
    """
    if keys is None:
        return ANYBODY
    kind, _, text = (header or "").partition(" ")
    digest = _digest(text.strip())
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]  # all, so that times say nothing
    if kind.lower() != "bearer" or not found:
        raise RequestError("this server needs a key: send the header 'Authorization: Bearer KEY'", 401, code="invalid_api_key")
    return found[0]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

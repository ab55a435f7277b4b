"""Adapters that clients put into the folder of a server, and take out of it."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...core.errors import FxplugError, quote
from ...core.writing import replace_file
from .errors import RequestError
from .orders import AdapterFolder

LAST = ".safetensors"


def check_file_name(name: str) -> str:
    """Check the name of an adapter that becomes a file.

    Args:
        name: The name, which may have the ending of the file.

    Returns:
        The name without it.

    Raises:
        RequestError: For a path, a hidden file, and what no file system takes.
    """
    name = name.removesuffix(LAST)
    plain = name and name.isprintable() and not name.startswith(".") and not set(name) & set('/\\:*?"<>|')
    if not plain or len(name.encode("utf-8", "ignore")) > 200:
        raise RequestError(f"{quote(name)} cannot be the name of a file", param="name")
    return name


async def add_adapter_file(request: Request, store: AdapterFolder, limit: int, seconds: float, lock: asyncio.Lock) -> str:
    """Put the adapter of a multipart body into the folder of a store, if it fits the models.

    Args:
        request: The request: `file` is the adapter, `name` its name, or the file has it.
        store: The store.
        limit: The most bytes.
        seconds: In which each part of the body must come.
        lock: Is held while the folder is changed.

    Returns:
        The name.

    Raises:
        RequestError: For no file, one that is too large, and a name that is there.
        SpecError: For an adapter that does not fit.
    """
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > limit:
        raise RequestError(f"an upload needs Content-Length, of at most {limit >> 20} MiB", 413, code="body_too_large")
    form = await _read_form(request, seconds)
    try:
        file = form.get("file")
        if file is None or isinstance(file, str):
            raise RequestError("missing field 'file': the adapter, as multipart/form-data", param="file")
        given = form.get("name")
        name = check_file_name(given if isinstance(given, str) else file.filename or "")
        async with lock:
            await asyncio.to_thread(put_file, file.file, name, store)
    finally:
        await form.close()
    return name


async def _read_form(request: Request, seconds: float) -> FormData:
    async def receive() -> Any:
        async with asyncio.timeout(seconds):
            return await request.receive()

    try:
        return await Request(request.scope, receive).form(max_files=1, max_fields=4)
    except TimeoutError:
        raise RequestError(f"no part of the body came for {seconds:g} s", 408, code="timeout") from None
    except (HTTPException, KeyError, ValueError) as error:  # what starlette's reader of forms raises
        raise RequestError(f"the body is not multipart/form-data: {getattr(error, 'detail', error)}") from None


def put_file(file: IO[bytes], name: str, store: AdapterFolder) -> None:
    """Put a file into the folder of a store as an adapter, if it fits the models. Raises as `add_adapter_file`."""
    target = store.folder / f"{name}{LAST}"
    if target.exists() or (store.folder / name).exists():
        raise RequestError(f"there is an adapter {quote(name)} already: delete it, or give another name", 409, param="name")
    try:
        with replace_file(target, FxplugError) as path, path.open("wb") as out:
            shutil.copyfileobj(file, out)
    except (FxplugError, OSError) as error:
        raise RequestError(f"the adapter cannot be written: {error}", 503, code="no_space", retry=60) from None
    try:
        store.check({name: 1.0})
    except FxplugError:  # it does not fit, or nobody could look whether it does
        target.unlink(missing_ok=True)
        with suppress(FxplugError):
            store.refresh()
        raise


def delete_adapter_file(store: AdapterFolder, name: str) -> None:
    """Delete the file or folder of an adapter; requests that use it go on.

    Args:
        store: The store.
        name: The name.

    Raises:
        RequestError: Where it cannot be deleted.
    """
    path: Path = store.get_path(name)
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"the adapter cannot be deleted: {error.strerror}", 503, code="no_space") from None
    with suppress(RequestError):  # without a replica: the next one looks by itself
        store.refresh()

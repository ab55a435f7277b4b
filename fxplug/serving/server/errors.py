"""What a client is told that something is wrong with: OpenAI's object of an error, and the status beside it."""

from __future__ import annotations

from typing import Any

from ...core.errors import FxplugError, SpecError, format_path, make_printable

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {413: "invalid_request_error", 429: "rate_limit_error"}


class RequestError(FxplugError):
    """A request that is refused, with the status of its answer and the field that is at fault.

    Args:
        text: What is wrong.
        status: The status of HTTP.
        param: The field, as a path.
        code: A word for programs.
        retry: Seconds after which it may be tried again; 0 is none.
    """

    def __init__(self, text: str, status: int = 400, *, param: str = "", code: str = "", retry: int = 0) -> None:
        super().__init__(text)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's object of the error."""
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param or None, "code": self.code or None}}


def convert_spec_error(error: SpecError, status: int = 400) -> RequestError:
    """Convert an error about a value to that of a request, with the field's path.

    Args:
        error: The error.
        status: The status of HTTP.

    Returns:
        The error of the request.
    """
    path = format_path([*error.path, *([error.key] if error.key else [])])
    return RequestError(make_printable(error.finding), status, param=path)

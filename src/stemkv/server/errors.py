"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """An answer that is not 200. Its message is one sentence naming the value and the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, message, param=param, code=code)


def server_error(message: str) -> ApiError:
    """A 500: our fault, not the caller's."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def stopping() -> ApiError:
    """A 503 while the server drains."""
    return ApiError(
        503,
        "The server is stopping; send the request again in a few seconds.",
        kind="server_error",
        code="server_stopping",
        headers={"Retry-After": "5", "Connection": "close"},
    )

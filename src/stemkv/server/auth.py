"""Who may ask: Bearer keys from a file, and a check of the Host header where there are none.

All keys of the file belong to one tenant: they share prefixes. Several are for changing keys without a break.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import stat
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stemkv.errors import ConfigError
from stemkv.server.errors import ApiError

SHORTEST_KEY = 16
"""Characters; shorter keys can be guessed."""
TRUSTED = "stemkv.trusted"
"""Scope entry: whether the caller showed a key, or none is needed."""


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys from ``path``, one a line; ``#`` begins a comment line. Raises ConfigError with the file and the remedy."""
    try:
        mode = path.stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{path} can be read by everyone on this machine: chmod 600 it first")
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key file {path} is not text: write one key a line") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"the API key file {path} holds no key: write one key a line")
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not key.isascii() or " " in key:
            raise ConfigError(
                f"key {number} in {path} is no good: a key has at least {SHORTEST_KEY} ASCII characters and no spaces"
            )
    return keys


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) can only be reached from this machine."""
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: 401 without a key where keys are set; else 403 for a Host that is not this machine.

    The Host check is against DNS rebinding: without it any web page that the user visits could talk to the
    server on their loopback. ``/health`` is open, with details only for those who show a key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._wrong_host(headers) if not self._digests else None
        scope[TRUSTED] = not self._digests or self._knows(headers.get("authorization", ""))
        if not scope[TRUSTED] and scope["path"] != "/health":
            error = _no_key()
        if error is not None:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip())
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    @staticmethod
    def _wrong_host(headers: Headers) -> ApiError | None:
        host = headers.get("host", "localhost")
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if is_loopback(name):
            return None
        message = f"Host {name[:100]!r} is not served without an API key; start with --api-key-file to serve it."
        return ApiError(403, message, code="host_not_allowed")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _no_key() -> ApiError:
    return ApiError(
        401,
        "Missing or wrong API key; send 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )

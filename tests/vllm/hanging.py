"""The connector with a file tier that hangs while the file named in HANG_FLAG holds the name of the call."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stemkv.engines import vllm_connector
from stemkv.tiers.file import FileTier

_FLAG = Path(os.environ["HANG_FLAG"])


def _hang(call: str) -> None:
    while _FLAG.exists() and _FLAG.read_text() == call:
        time.sleep(0.02)


def _slowed(name: str) -> Any:
    real = getattr(FileTier, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _hang(name)
        return real(self, *args, **kwargs)

    return call


FileTier.contains = _slowed("contains")  # type: ignore[method-assign]
FileTier.fetch = _slowed("fetch")  # type: ignore[method-assign]
FileTier.put = _slowed("put")  # type: ignore[method-assign]


class HangingConnector(vllm_connector.StemKVConnector):
    """The same."""


class BrokenConnector(vllm_connector.StemKVConnector):
    """One in which everything fails once the engine runs."""

    def on_new_request(self, request: Any) -> None:
        """Break both halves."""
        self._scheduler = _Broken()  # type: ignore[assignment]
        super().on_new_request(request)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The same."""
        self._worker = _Broken()  # type: ignore[assignment]
        super().bind_connector_metadata(connector_metadata)


class _Broken:
    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(name)

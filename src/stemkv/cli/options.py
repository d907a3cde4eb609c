"""What the verbs' options have in common."""

from __future__ import annotations

import argparse
from typing import Any

from stemkv.errors import ConfigError


def typed(kind: Any) -> Any:
    """An argparse type like ``kind``, whose ConfigError becomes a usage error."""

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = getattr(kind, "__name__", "value")
    return convert

"""One frozen settings object, from TOML, the environment and the command line.

Later sources win: defaults, then the TOML file, then ``STEMKV_*`` variables, then command-line values. An unknown
key anywhere is an error. Nothing deeper in stemkv reads the environment.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stemkv.errors import ConfigError
from stemkv.keys import PUBLIC_ROOT
from stemkv.pool import Pool
from stemkv.sealing import Sealer
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
          **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Bytes from ``"2GiB"``, ``"500MB"``, ``"1048576"`` or a number. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write for example 512MiB or 50GiB")
    return int(float(match[1]) * _UNITS[match[2]])


Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting, with its default. ``docs/configuration.md`` is generated from here."""

    store: Annotated[str, Meta(description="Folder of the file tier; empty for none.")] = "~/.cache/stemkv/store"
    store_bytes: Annotated[
        int, Meta(ge=1, description="Most bytes of block files in the folder, all processes together.")
    ] = 20 << 30
    reserve_bytes: Annotated[int, Meta(ge=0, description="Bytes of the file system that are left free.")] = 1 << 30
    memory_bytes: Annotated[
        int, Meta(ge=0, description="Most bytes of blocks in this process's memory; 0 for no memory tier.")
    ] = 1 << 30
    durability: Annotated[
        str, Meta(pattern="^(none|batch|full)$", description="What survives a power cut: none, batch or full.")
    ] = "none"
    queue_bytes: Annotated[
        int,
        Meta(
            ge=0, description="Most bytes of new blocks that wait to be stored; beyond it they are dropped and counted."
        ),
    ] = 512 << 20
    secret_file: Annotated[
        str,
        Meta(description="File with the secret (32 bytes or more) behind keys and tags; empty for a public constant."),
    ] = ""
    seal: Annotated[bool, Meta(description="Encrypt blocks at rest with AES-256-GCM; needs secret_file.")] = False
    generation: Annotated[
        int, Meta(ge=0, description="Raise it to make everything stored so far unreachable at once.")
    ] = 0
    block_tokens: Annotated[int, Meta(ge=1, le=4096, description="Tokens in a block.")] = 64
    host: Annotated[str, Meta(description="Address the server listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port the server listens on; 0 for any free one.")] = 8000
    max_queue: Annotated[
        int, Meta(ge=0, description="Requests that may wait for the model; more are answered 429.")
    ] = 16
    drain_s: Annotated[float, Meta(ge=0, description="Seconds that running requests get to finish after SIGTERM.")] = (
        30.0
    )


SIZES = frozenset({"store_bytes", "reserve_bytes", "memory_bytes", "queue_bytes"})
"""Settings that may be written with a unit."""


def load_settings(
    overrides: Mapping[str, object] | None = None, *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Merge all sources. ``overrides`` with value None are ignored. Raises ConfigError naming the source and key."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_checked(_read_toml(file), str(file)))
    env = os.environ if environ is None else environ
    named = {k[len("STEMKV_") :].lower(): v for k, v in env.items() if k.startswith("STEMKV_")}
    values.update(_checked(named, "environment"))
    values.update(_checked({k: v for k, v in (overrides or {}).items() if v is not None}, "command line"))
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}: see docs/configuration.md") from None


def _checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    for key in values:
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"unknown setting {key!r} ({source}): known are {', '.join(Settings.__struct_fields__)}")
    return {k: parse_size(v) if k in SIZES and isinstance(v, str) else v for k, v in values.items()}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text())
        return values
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def read_secret(settings: Settings) -> bytes:
    """The root that keys and tags derive from. Raises ConfigError; never falls back to the public one."""
    if not settings.secret_file:
        if settings.seal:
            raise ConfigError("seal needs secret_file: name a file with at least 32 random bytes")
        return PUBLIC_ROOT
    path = Path(settings.secret_file).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(f"{path} can be read by everyone on this machine: chmod 600 it first")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read secret_file {path}: {error.strerror}") from None
    if len(secret) < 32:
        raise ConfigError(f"{path} holds {len(secret)} bytes: a secret needs at least 32 random ones")
    return secret


def open_pool(settings: Settings) -> Pool:
    """The pool that ``settings`` describe: memory first, then the folder. Raises ConfigError, StoreError."""
    sealer = Sealer(read_secret(settings), seal=settings.seal)
    tiers: list[Tier] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes))
    if settings.store:
        tiers.append(
            FileTier(
                Path(settings.store).expanduser(),
                max_bytes=settings.store_bytes,
                reserve_bytes=settings.reserve_bytes,
                durability=settings.durability,
            )
        )
    return Pool(tiers, sealer=sealer, queue_bytes=settings.queue_bytes)

"""One frozen settings object, from TOML, the environment and the command line.

Later sources win: defaults, then the TOML file, then ``STEMKV_*`` variables, then command-line values. An unknown
key or a bad value anywhere is an error, also where a later source would win. Nothing deeper in stemkv reads the
environment. The secret itself is never a setting, only the name of its file.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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


_MOST = 2**63 - 1
_SECRET_BYTES = 32
_MOST_SECRET_BYTES = 1 << 16


def parse_size(text: str | int) -> int:
    """Bytes from ``"2GiB"``, ``"500MB"``, ``"1048576"`` or a number; not negative. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]?i?B?)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write for example 512MiB or 50GiB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting, with its default. ``docs/configuration.md`` is generated from here."""

    store: Annotated[str, Meta(description="Folder of the file tier; empty for none.")] = "~/.cache/stemkv/store"
    store_bytes: Annotated[
        int, Meta(ge=1, le=_MOST, description="Most bytes of block files in the folder, all processes together.")
    ] = 20 << 30
    reserve_bytes: Annotated[int, Meta(ge=0, le=_MOST, description="Bytes of the file system that are left free.")] = (
        1 << 30
    )
    memory_bytes: Annotated[
        int, Meta(ge=0, le=_MOST, description="Most bytes of blocks in this process's memory; 0 for no memory tier.")
    ] = 1 << 30
    durability: Annotated[
        Literal["none", "batch", "full"], Meta(description="What survives a power cut: none, batch or full.")
    ] = "none"
    queue_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST,
            description="Most bytes of new blocks that wait to be stored; beyond it they are dropped and counted.",
        ),
    ] = 512 << 20
    secret_file: Annotated[
        str,
        Meta(description="File with the secret (32 bytes or more) behind keys and tags; empty for a public constant."),
    ] = ""
    seal: Annotated[bool, Meta(description="Encrypt blocks at rest with AES-256-GCM; needs secret_file.")] = False
    generation: Annotated[
        int, Meta(ge=0, le=_MOST, description="Raise it to make everything stored so far unreachable at once.")
    ] = 0
    block_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Tokens in a block, the unit of storage; changing it makes everything stored so far a miss.",
        ),
    ] = 64
    repeatable: Annotated[
        bool,
        Meta(description="Same bits with and without a hit for equal prompts; a small forward pass more on a miss."),
    ] = False
    host: Annotated[str, Meta(description="Address the server listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port the server listens on; 0 for any free one.")] = 8000
    max_queue: Annotated[
        int, Meta(ge=0, le=10_000, description="Requests that may wait for the model; more are answered 429.")
    ] = 16
    drain_s: Annotated[
        float, Meta(ge=0, le=86_400, description="Seconds that running requests get to finish after SIGTERM.")
    ] = 30.0


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
    return Settings(**values)


def _checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"unknown setting {key!r} ({source}): known are {', '.join(Settings.__struct_fields__)}")
        try:
            plain = parse_size(value) if key in SIZES and isinstance(value, str) else value
            checked[key] = getattr(msgspec.convert({key: plain}, Settings, strict=False), key)
        except (ConfigError, msgspec.ValidationError) as error:
            why = str(error).removesuffix(f" - at `$.{key}`")
            raise ConfigError(f"{key} = {value!r} ({source}) is not valid: {why}. {_described(key)}") from None
    return checked


def _described(key: str) -> str:
    field = next(f for f in msgspec.structs.fields(Settings) if f.name == key)
    return next(str(m.description) for m in get_args(field.type) if isinstance(m, Meta))


def _path(key: str, text: str) -> Path:
    try:
        if "\0" in text:
            raise ValueError("it has a NUL character")
        return Path(text).expanduser()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{key} = {text!r} is not a path: {error}") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        return values
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # TOML, UTF-8 and path errors all are
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def read_secret(settings: Settings) -> bytes:
    """The root that keys and tags derive from. Raises ConfigError; never falls back to the public one.

    One newline at the end of the file is not part of the secret, everything else is.
    """
    if not settings.secret_file:
        if settings.seal:
            raise ConfigError("seal needs secret_file: name a file with at least 32 random bytes")
        return PUBLIC_ROOT
    path = _path("secret_file", settings.secret_file)
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()))
            secret = file.read(_MOST_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read secret_file {path}: {error.strerror}") from None
    # A binary secret may end in a newline: it is cut only where enough is left.
    if secret.endswith(b"\n") and len(secret) > _SECRET_BYTES:
        secret = secret[:-1]
    if len(secret) < _SECRET_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes: a secret needs at least {_SECRET_BYTES} random ones")
    if len(secret) > _MOST_SECRET_BYTES:
        raise ConfigError(f"{path} is no secret file: it has more than {_MOST_SECRET_BYTES} bytes")
    return secret


def _check_mode(path: Path, status: os.stat_result) -> None:
    """Refuse a secret that others can read.

    As with ssh, the group counts only if the file is ours: Kubernetes mounts secrets as ``root:group 0440``, which
    the process can neither change nor do without.
    """
    refused = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP)
    if status.st_mode & refused:
        raise ConfigError(f"secret_file {path} is open to other users of this machine: run 'chmod 600 {path}' first")


def open_pool(settings: Settings) -> Pool:
    """The pool that ``settings`` describe: memory first, then the folder. Raises ConfigError, StoreError."""
    sealer = Sealer(read_secret(settings), seal=settings.seal)
    tiers: list[Tier] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes))
    if settings.store:
        tiers.append(
            FileTier(
                _path("store", settings.store),
                max_bytes=settings.store_bytes,
                reserve_bytes=settings.reserve_bytes,
                durability=settings.durability,
            )
        )
    return Pool(tiers, sealer=sealer, queue_bytes=settings.queue_bytes)

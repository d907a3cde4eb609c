"""``stemkv vllm-args``: the arguments of ``vllm serve`` that put stemkv behind it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from stemkv.cli.options import typed
from stemkv.config import parse_size
from stemkv.engines._vllm_options import read_options

HELP = """Print the arguments of 'vllm serve' that put stemkv behind it, checked and quoted for a shell.

    vllm serve MODEL $(stemkv vllm-args ...) does not work: the shell splits the JSON. Copy the line, or use --json
    where a file wants the value of --kv-transfer-config (Helm values, SageMaker's option.kv_transfer_config)."""

_OPTIONS = (
    ("--store", "store", str, "DIR", "folder of the store; replicas on one machine that name the same one share it"),
    ("--store-size", "store_bytes", parse_size, "SIZE", "most bytes in the folder, for example 500GiB"),
    ("--memory", "memory_bytes", parse_size, "SIZE", "most bytes of blocks in each worker's memory; default none"),
    ("--queue", "queue_bytes", parse_size, "SIZE", "most bytes of new blocks that wait to be stored"),
    ("--durability", "durability", str, "MODE", "what survives a power cut: none, batch or full"),
    ("--secret-file", "secret_file", str, "FILE", "secret behind keys and tags, at least 32 bytes"),
    ("--generation", "generation", int, "N", "raise it to forget everything stored so far"),
    ("--block-tokens", "block_tokens", int, "N", "tokens in a stored block, a multiple of vLLM's own block"),
    ("--on-error", "on_error", str, "WHAT", "if the cache cannot start: refuse to start vLLM (default), or off"),
    ("--lookup-timeout", "lookup_timeout_s", float, "SECONDS", "how long a request may wait for a lookup (default: 1)"),
    ("--load-timeout", "load_timeout_s", float, "SECONDS", "how long a request may wait for its blocks (default: 10)"),
)
"""Option, key in kv_connector_extra_config, type, what the help shows, and what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", metavar="MODEL", help="print the whole command for this model")
    parser.add_argument("--json", action="store_true", help="print only the value of --kv-transfer-config")
    parser.add_argument("--seal", action="store_true", default=None, help="encrypt the store; needs --secret-file")
    for option, key, kind, shown, text in _OPTIONS:
        parser.add_argument(option, dest=key, type=typed(kind), metavar=shown, help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print the arguments. Raises ConfigError for settings that the connector would refuse."""
    given = {key: getattr(arguments, key) for _, key, *_ in _OPTIONS} | {"seal": arguments.seal}
    settings = {key: value for key, value in given.items() if value is not None}
    for key in ("store", "secret_file"):  # vLLM may be started from another folder
        if settings.get(key):
            settings[key] = str(Path(settings[key]).expanduser().absolute())
    print(line(settings, model=arguments.model, only_json=arguments.json))
    return 0


def line(settings: dict[str, Any], *, model: str | None = None, only_json: bool = False) -> str:
    """The arguments for ``settings``, or the whole command with ``model``. Raises ConfigError."""
    read_options({"stemkv": settings}, environ={})
    config = json.dumps(
        {
            "kv_connector": "StemKVConnector",
            "kv_connector_module_path": "stemkv.engines.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"stemkv": settings},
        }
    )
    if only_json:
        return config
    start = f"vllm serve {shlex.quote(model)} " if model else ""
    return f"{start}--kv-transfer-config {shlex.quote(config)}"

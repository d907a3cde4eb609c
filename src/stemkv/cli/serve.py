"""``stemkv serve MODEL``: an OpenAI-compatible server whose prefixes survive restarts."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

from stemkv.cli.main import version
from stemkv.cli.options import typed
from stemkv.cli.progress import Progress, Steps
from stemkv.config import Settings, load_settings, open_pool, parse_size, read_secret
from stemkv.errors import ConfigError
from stemkv.pool import Pool

HELP = """Serve MODEL with an OpenAI-compatible API. The KV of every prompt is computed once, verified, and kept
in a folder, so that requests that begin the same way start from it: also after a restart.

MODEL is a Hugging Face id, a folder, a GGUF file, or 'smollm2' (the small model that comes with the demo)."""

NEEDED = ("torch", "transformers", "starlette", "uvicorn", "prometheus_client")

_SETTINGS = (
    ("--store", "store", str, "DIR", "folder of the store; '' keeps blocks in memory alone"),
    ("--store-size", "store_bytes", parse_size, "SIZE", "most bytes in the folder, for example 50GiB"),
    ("--memory", "memory_bytes", parse_size, "SIZE", "most bytes of blocks in memory; 0 for none"),
    ("--durability", "durability", str, "MODE", "what survives a power cut: none, batch or full"),
    ("--secret-file", "secret_file", str, "FILE", "secret behind keys and tags, at least 32 bytes"),
    ("--generation", "generation", int, "N", "raise it to forget everything stored so far"),
    ("--block-tokens", "block_tokens", int, "N", "tokens in a block"),
    ("--host", "host", str, "ADDRESS", "address to listen on"),
    ("--port", "port", int, "PORT", "port to listen on; 0 takes a free one"),
    ("--max-queue", "max_queue", int, "N", "requests that may wait; more get 429"),
    ("--drain", "drain_s", float, "SECONDS", "what running requests get to finish after SIGTERM"),
)
"""Options that are settings: option, setting, type, what the help shows, and what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, GGUF file, or smollm2")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; options here win over it")
    parser.add_argument("--model-name", metavar="NAME", help="the name requests use; by default the model's own")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, mps, ...; by default the best there is")
    keys = "keys that callers must send, one a line; needed to listen beyond this machine"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)
    parser.add_argument("--seal", action="store_true", default=None, help="encrypt the store; needs --secret-file")
    repeatable = "same bits with and without a hit; a little slower on a miss"
    parser.add_argument("--repeatable", action="store_true", default=None, help=repeatable)
    parser.add_argument("--quiet", action="store_true", help="no line for each request")
    defaults = Settings()
    for option, name, kind, shown, text in _SETTINGS:
        value = getattr(defaults, name)
        default = size(value) if name.endswith("_bytes") else value
        note = f"{text} (default: {default})" if default != "" else text
        parser.add_argument(option, dest=name, type=typed(kind), metavar=shown, help=note)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Everything that can be wrong is found out before the model is loaded."""
    overrides = {name: getattr(arguments, name) for _, name, *_ in _SETTINGS}
    overrides |= {"seal": arguments.seal, "repeatable": arguments.repeatable}
    settings = load_settings(overrides, file=arguments.config)
    _check_extras()
    from stemkv.server import auth  # noqa: PLC0415
    from stemkv.server import run as running  # noqa: PLC0415

    keys = auth.read_keys(arguments.api_key_file) if arguments.api_key_file else ()
    if not keys and not auth.is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines: name a file with API keys (--api-key-file), "
            "or listen on 127.0.0.1"
        )
    sock = running.bind(settings.host, settings.port)
    _set_up_logging(quiet=arguments.quiet)
    with sock:
        pool = open_pool(settings)
        try:
            return _serve(arguments, settings, sock, pool, keys)
        finally:
            pool.close(0.0)


def _serve(arguments: argparse.Namespace, settings: Settings, sock: Any, pool: Pool, keys: tuple[str, ...]) -> int:
    from stemkv.engines.loading import load_model  # noqa: PLC0415
    from stemkv.server.app import Gateway, build_app  # noqa: PLC0415
    from stemkv.server.prompts import Prompts  # noqa: PLC0415
    from stemkv.server.run import Server, url  # noqa: PLC0415
    from stemkv.server.worker import Worker  # noqa: PLC0415

    print(f"stemkv {version()}: loading {arguments.model} ...", flush=True)
    with Progress("loading the model") as bar:
        loaded = load_model(arguments.model, dtype=arguments.dtype, revision=arguments.revision,
                            device=arguments.device, progress=Steps(bar.update))  # fmt: skip
        bar.update(1, 1)
        engine = _engine(loaded, settings, pool)
    name = arguments.model_name or loaded.name
    worker = Worker(engine, decoder(loaded.tokenizer), max_queue=settings.max_queue)
    prompts = Prompts(loaded.tokenizer, context_length=engine.context_length, vocab_size=engine.vocab_size)
    app = build_app(Gateway(model=name, worker=worker, prompts=prompts, pool=pool), keys=keys)
    server = Server(app, sock, worker, pool, drain_s=settings.drain_s, say=_say)
    stored = server.run(ready=lambda: _introduce(loaded, name, settings, pool, url(sock), keyed=bool(keys)))
    _say("stopped; everything computed is stored" if stored else "stopped; some writes did not finish in time")
    if not worker.join(0.0):  # still inside a long computation that nobody waits for
        sys.stdout.flush()
        os._exit(0)
    return 0


def _engine(loaded: Any, settings: Settings, pool: Pool) -> Any:
    from stemkv.engines.sampling import TextEngine  # noqa: PLC0415
    from stemkv.engines.transformers import PrefixCache  # noqa: PLC0415

    def make_cache(progress: Any) -> Any:
        return PrefixCache(
            loaded.model,
            pool,
            generation=settings.generation,
            weight_files=loaded.weight_files,
            block_tokens=settings.block_tokens,
            progress=progress,
            root=read_secret(settings),
            repeatable=settings.repeatable,
        )

    return TextEngine(loaded, make_cache, _PromptBar())


class _PromptBar:
    """The progress bar of whatever prompt is being computed; it ends when all of it is done."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None and done < total:
            self._bar = Progress(f"computing a prompt of {total:,} tokens")
        if self._bar is not None and done < total:
            self._bar.update(done, total)
        elif self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


def decoder(tokenizer: Any) -> Any:
    """Token ids to text, for the model thread. A copy: a tokenizer must not encode and decode on two threads."""
    import copy  # noqa: PLC0415

    own = copy.deepcopy(tokenizer)
    return lambda ids: own.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _introduce(loaded: Any, name: str, settings: Settings, pool: Pool, address: str, *, keyed: bool) -> None:
    """What a person sees when the server is ready."""
    dtype = str(getattr(loaded.model, "dtype", "")).removeprefix("torch.")
    print(f"  model    {name}, context {loaded.context_length:,} tokens, {dtype} on {loaded.model.device}")
    print(f"  store    {_store_line(settings, pool)}")
    print(f"  address  {address}/v1   (also /health and /metrics; Ctrl-C stops)")
    chat = getattr(loaded.tokenizer, "chat_template", None)
    path = "chat/completions" if chat else "completions"
    body = '{"messages": [{"role": "user", "content": "Hello"}]}' if chat else '{"prompt": "Hello"}'
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    print(f"  try      curl {address}/v1/{path}{key} \\\n             -H 'Content-Type: application/json' -d '{body}'",
          flush=True)  # fmt: skip


def _store_line(settings: Settings, pool: Pool) -> str:
    memory = f"{size(settings.memory_bytes)} in memory" if settings.memory_bytes else ""
    for tier in pool.tiers:
        if tier.name == "file":
            stats = tier.stats()
            used = f"{size(stats.bytes)} of {size(stats.max_bytes)}, {stats.blocks:,} blocks"
            state = "; READ-ONLY, nothing new is stored" if stats.read_only else ""
            return f"{settings.store} ({used}{', and ' + memory if memory else ''}{state})"
    return memory or "none: nothing is kept"


def _check_extras() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing) if len(missing) < 3 else ", ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{names} {verb} not installed: pip install 'stemkv[transformers,server]'")


def _set_up_logging(*, quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress bar may be there
    handler.setFormatter(logging.Formatter(clear + "%(asctime)s  %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("stemkv")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False


def _say(line: str) -> None:
    print(f"stemkv: {line}", file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes for people: ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"

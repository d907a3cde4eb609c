"""A real server on a free loopback port, over an engine that says what the test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemkv.engines.sampling import Lookup, Sampling, TokenLogprob
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.server.app import Gateway, build_app
from stemkv.server.prompts import Prompts
from stemkv.server.run import Server, bind, url
from stemkv.server.worker import Worker
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

MODEL = "tiny"
EOS = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """One token a byte, id = byte value; token 256 ends the answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = _byte_letters()
    assert set(order) == set(letters)
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(order)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    assert tokenizer.eos_token_id == EOS
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers use for each byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + rest.index(b)) for b in range(256)]


Reply = Callable[[str], str | Sequence[int]]


class FakeEngine:
    """Answers with ``reply(prompt)``, one byte a token; remembers prompts as a cache would."""

    vocab_size = 257
    eos_ids = frozenset({EOS})

    def __init__(self, reply: Reply, *, context_length: int = 4096) -> None:
        self.context_length = context_length
        self.reply = reply
        self.token_s = 0.0
        """Seconds each token takes."""
        self.prefill_s = 0.0
        self.seen: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.generated = 0
        self.fail: Exception | None = None
        self.gate = threading.Event()
        """Nothing is generated until this is set."""
        self.gate.set()
        self.busy = 0
        self.most_busy = 0

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        scope: str = "",
        on_lookup: Callable[[Lookup], None],
        on_token: Callable[[int, TokenLogprob | None], bool],
        cancelled: Callable[[], bool],
    ) -> None:
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            self._generate(list(prompt), sampling, on_lookup, on_token, cancelled)
        finally:
            self.busy -= 1

    def _generate(self, prompt: list[int], sampling: Sampling, on_lookup: Any, on_token: Any, cancelled: Any) -> None:
        if self.fail is not None:
            raise self.fail
        on_lookup(self._lookup(prompt))
        self.samplings.append(sampling)
        until = time.monotonic() + self.prefill_s
        while not self.gate.is_set() or time.monotonic() < until:
            if cancelled():
                return
            time.sleep(0.002)
        answer = self.reply(bytes(t for t in prompt if t < 256).decode(errors="replace"))
        tokens = [*answer.encode(), EOS] if isinstance(answer, str) else list(answer)
        for token in tokens[: sampling.max_tokens]:
            if cancelled():
                return
            time.sleep(self.token_s)
            self.generated += 1
            logprob = None if sampling.logprobs is None else TokenLogprob(-0.5, ((token, -0.5),) * sampling.logprobs)
            if on_token(token, logprob):
                return

    def _lookup(self, prompt: list[int]) -> Lookup:
        block, best = 16, 0
        for old in self.seen:
            same = next(
                (i for i, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), min(len(old), len(prompt))
            )
            best = max(best, same // block * block)
        limit = (len(prompt) - 1) // block * block
        best = min(best, limit)
        self.seen.append(prompt)
        miss = None if best == limit and best else Miss(Cause.DIVERGED if best else Cause.UNSEEN)
        return Lookup(len(prompt), best, miss, ("memory",) if best else ())


class Served:
    """A running server and a client for it."""

    def __init__(self, server: Server, address: str, worker: Worker, pool: Pool, engine: Any) -> None:
        self.server, self.address, self.worker, self.pool, self.engine = server, address, worker, pool, engine
        self.client = httpx.Client(base_url=address, timeout=20)
        self.stored: bool | None = None

    def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, **fields})

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def stream(self, path: str, **fields: Any) -> tuple[httpx.Response, list[dict[str, Any]]]:
        """The response and its chunks; checks the framing and the final [DONE]."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]", lines
        return response, [json.loads(line[len("data: ") :]) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over the lines that have these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.partition("{")[0].partition(" ")[0] == name and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total


@contextmanager
def served(
    engine: Any,
    folder: Path | None = None,
    *,
    max_queue: int = 4,
    keys: Sequence[str] = (),
    tokenizer: Any = None,
    drain_s: float = 5.0,
    tiers: Sequence[Tier] | None = None,
) -> Iterator[Served]:
    """Start a server in a thread; stop it, with all it started, at the end."""
    tokenizer = tokenizer or byte_tokenizer()
    if tiers is None:
        tiers = [MemoryTier(1 << 20), *([FileTier(folder, max_bytes=1 << 24)] if folder else [])]
    pool = Pool(tiers)
    decode = byte_tokenizer() if isinstance(engine, FakeEngine) else tokenizer
    worker = Worker(engine, lambda ids: str(decode.decode(list(ids), skip_special_tokens=True)), max_queue=max_queue)
    prompts = Prompts(tokenizer, context_length=engine.context_length, vocab_size=engine.vocab_size)
    app = build_app(Gateway(model=MODEL, worker=worker, prompts=prompts, pool=pool), keys=keys)
    with bind("127.0.0.1", 0) as sock:
        server = Server(app, sock, worker, pool, drain_s=drain_s)
        handle = Served(server, url(sock), worker, pool, engine)
        ready = threading.Event()

        def run() -> None:
            handle.stored = server.run(signals=False, ready=ready.set)

        thread = threading.Thread(target=run, name="test-server")
        thread.start()
        assert ready.wait(10)
        try:
            yield handle
        finally:
            if isinstance(engine, FakeEngine):
                engine.gate.set()
            handle.client.close()
            server.stop()
            thread.join(20)
            assert not thread.is_alive()


def eventually(true: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

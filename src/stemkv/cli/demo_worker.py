"""One process of the demo: loads the model, then answers the demo's prompt each time it is told to.

Speaks JSON lines: reads ``{"run": ...}`` on standard input, writes events on standard output. It is a process of its
own because the demo kills it with SIGKILL.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stemkv.cli.demo_text import QUESTION, policy
from stemkv.cli.progress import Steps
from stemkv.config import Settings, open_pool
from stemkv.errors import StemKVError


class Task(msgspec.Struct, frozen=True):
    """What a demo process is started with, as JSON in its first argument."""

    model: str
    store: str
    prompt_tokens: int
    new_tokens: int


class _FirstToken:
    """A streamer that notes when the first new token arrives."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt_seen = False

    def put(self, value: object) -> None:
        if self._prompt_seen and self.at is None:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        pass


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def prompt_ids(tokenizer: Any, wanted: int) -> Any:
    """The chat prompt with as many policy rules as fit into ``wanted`` tokens; a tensor [1, tokens]."""

    def ids(rules: int) -> Any:
        messages = [{"role": "system", "content": policy(rules)}, {"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    low, high = 1, max(2, wanted // 8)
    while low < high:  # the longest that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids(middle).shape[1] <= wanted else (low, middle - 1)
    return ids(low)


def main() -> int:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    from stemkv.engines.loading import load_model  # noqa: PLC0415 - torch is slow to import; say hello first
    from stemkv.engines.transformers import PrefixCache  # noqa: PLC0415

    try:
        steps = Steps(lambda done, total: emit("loading", done=done, total=total))
        loaded = load_model(task.model, progress=steps)
    except StemKVError as error:
        emit("error", message=str(error))
        return 2
    pool = open_pool(Settings(store=str(Path(task.store))))
    cache = PrefixCache(
        loaded.model,
        pool,
        weight_files=loaded.weight_files,
        repeatable=True,  # the answers are compared
        progress=lambda done, total: emit("computing", done=done, total=total),
    )
    prompt = prompt_ids(loaded.tokenizer, task.prompt_tokens)
    cache.generate(prompt[:, :32], max_new_tokens=1, do_sample=False)  # first-call costs of torch are not the story's
    emit("ready", prompt_tokens=prompt.shape[1], weight_file=str(loaded.weight_files[0]))
    for _ in sys.stdin:
        first, started = _FirstToken(), time.perf_counter()
        output = cache.generate(prompt, max_new_tokens=task.new_tokens, do_sample=False, streamer=first)
        answer = output[0, prompt.shape[1] :].tolist()
        row = cache.last_report.rows[0]
        emit(
            "answer",
            ttft_s=(first.at or time.perf_counter()) - started,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            miss=None if row.miss is None else str(row.miss),
            output_token_ids=answer,
            text=loaded.tokenizer.decode(answer, skip_special_tokens=True).strip(),
        )
    pool.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

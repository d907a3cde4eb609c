"""The llama-cpp-python side of ``ttft.py``, in its own environment. Arguments: GGUF file, runs."""

import json
import random
import sys
import time

from llama_cpp import Llama

TOKENS, NEW = 4096, 16


def main() -> None:
    model, runs = sys.argv[1], int(sys.argv[2])
    llm = Llama(model, n_ctx=TOKENS + 64, n_threads=2, n_batch=512, verbose=False, logits_all=False)
    ids = [random.Random(0).randrange(100, 40_000) for _ in range(TOKENS - NEW)]
    tail = [random.Random(1).randrange(100, 40_000) for _ in range(NEW)]
    started = time.perf_counter()
    llm.eval(ids + tail)
    llm.sample(temp=0.0)
    cold = time.perf_counter() - started
    llm.reset()
    llm.eval(ids)
    state = llm.save_state()
    restore = []
    for _ in range(runs):
        llm.reset()
        started = time.perf_counter()
        llm.load_state(state)
        llm.eval(tail)
        llm.sample(temp=0.0)
        restore.append(time.perf_counter() - started)
    print(json.dumps({"cold_s": cold, "restore_s": restore}))


if __name__ == "__main__":
    main()

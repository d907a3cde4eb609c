"""A real vLLM engine in a process of its own, told what to do by JSON lines. Argument: settings as JSON.

Both halves of the connector are in this one process; ``test_server.py`` has them in two, as ``vllm serve`` does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.lora.request import LoRARequest


def make(settings: dict[str, Any]) -> Any:
    """The engine."""
    arguments: dict[str, Any] = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "block_size": 32,
        "skip_tokenizer_init": True, "disable_log_stats": False, "seed": 0,
    } | settings["arguments"]  # fmt: skip
    if settings["connector"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**settings["connector"])
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
    return LLM(**arguments)


class Engine:
    """What can be asked of the engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, prompts: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers to prompts of token ids, all at once."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs, loras = [], []
        for prompt in prompts:
            salt = {"cache_salt": prompt["salt"]} if prompt.get("salt") else {}
            inputs.append({"prompt_token_ids": prompt["ids"], **salt})
            loras.append(LoRARequest(*prompt["lora"]) if prompt.get("lora") else None)
        given = {"lora_request": loras} if any(loras) else {}
        outputs = self._llm.generate(inputs, params, use_tqdm=False, **given)
        return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens,
                 "reason": o.outputs[0].finish_reason} for o in outputs]  # fmt: skip

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def reset(self) -> bool:
        """The same with the connector's, as after an update of the weights in memory."""
        return bool(self._llm.llm_engine.reset_prefix_cache(reset_connector=True))

    def connector(self) -> dict[str, Any]:
        """The scheduler's half."""
        found = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        return {"off": found.off, "faults": dict(found.faults)}

    def metrics(self) -> dict[str, float]:
        """Counters in Prometheus, by name and labels other than the model's."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                labels = sorted(f"{k}={v}" for k, v in metric.labels.items() if k not in ("model_name", "engine"))
                found["|".join([metric.name, *labels])] = value
        return found


def main() -> None:
    answers = os.fdopen(int(sys.argv[2]), "w")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        engine = Engine(make(json.loads(sys.argv[1])))
    except Exception as error:
        answer(refused=f"{type(error).__name__}: {error}")
        raise
    answer(ready=True)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer(result=getattr(engine, task.pop("do"))(**task))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main()

"""Tiny random models in folders, made once, and SmolLM2 as a folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stemkv.engines.loading import load_model

from .harness import VOCAB

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stemkv-tests"
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 96, "query_pre_attn_scalar": 32, "num_hidden_layers": 6,
                    "layer_types": ["sliding_attention"] * 2 + ["full_attention"]
                    + ["sliding_attention"] * 2 + ["full_attention"]},
}  # fmt: skip


def tiny(folder: Path, family: str = "llama", *, seed: int = 0) -> Path:
    """Write a small random model into ``folder``; the same for the same arguments."""
    config = AutoConfig.for_model(family, **(_COMMON | _FAMILIES[family]))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    # Random models of this size repeat themselves; larger weights make their choices depend on the whole text.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """SmolLM2-135M as vLLM wants it, from the GGUF that comes as a package. Takes a minute once."""
    folder = CACHE / "smollm2"
    if not (folder / "config.json").exists():
        loaded = load_model("smollm2", dtype="bfloat16")
        loaded.tokenizer.save_pretrained(folder)
        loaded.model.save_pretrained(folder)
    return folder

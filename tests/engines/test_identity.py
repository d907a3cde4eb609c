"""Everything that shapes KV is in the identity; nothing else is. A name is never identity."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from stemkv.engines import _groups
from stemkv.engines._identity import config_digest
from stemkv.engines._request import context_length
from stemkv.errors import UnsupportedModelError
from stemkv.identity import HitPolicy

from .conftest import prompt, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # from peft


def run(cache, pool, length=100):
    cache.generate(prompt(length), max_new_tokens=2, do_sample=False)
    pool.flush()
    return str(cache.last_report.miss) if cache.last_report.miss else cache.last_report.cached_tokens


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    return folder


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def test_the_same_files_are_the_same_identity(saved, make, pool):
    first, second = make(loaded(saved)), make(loaded(saved))
    assert first.identity == second.identity
    assert first.identity.weights_source == "files"
    assert run(first, pool) == "unseen"
    assert run(second, pool) == 96


def test_other_weights_under_the_same_name_miss(saved, make, pool):
    run(make(loaded(saved)), pool)
    tiny("llama", seed=1).save_pretrained(saved)
    assert run(make(loaded(saved)), pool) == "identity:weights_digest"


@pytest.mark.parametrize("how", ["in place", "replaced", "data"])
def test_weights_changed_in_memory_miss(how, saved, make, pool):
    model = loaded(saved)
    cache = make(model)
    run(cache, pool)
    layer = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        if how == "in place":
            layer.weight.add_(0.1)
        elif how == "replaced":
            layer.weight = torch.nn.Parameter(layer.weight + 0.1)
        else:
            layer.weight.data = layer.weight.data + 0.1
    assert run(cache, pool) == "identity:weights_digest"
    assert run(make(model), pool) == 96  # a new cache over the changed model sees the same thing


def test_a_model_without_files_is_identified_by_its_memory(make, pool):
    model = tiny("llama")
    cache = make(model)
    assert cache.identity.weights_source == "memory"
    run(cache, pool)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5, 5] += 1
    assert run(cache, pool) == "identity:weights_digest"


def test_other_dtype_misses(saved, make, pool):
    run(make(loaded(saved, dtype=torch.float32)), pool)
    miss = run(make(loaded(saved, dtype=torch.bfloat16)), pool)
    assert miss.startswith("identity:")
    assert "kv_dtype" in miss


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"num_attention_heads": 2}, {"rms_norm_eps": 1e-3}, {"attention_bias": True}, {"hidden_act": "gelu"},
    ],
    ids=str,
)  # fmt: skip
def test_configuration_that_shapes_kv_is_in_the_digest(change):
    assert config_digest(tiny("llama", **change).config) != config_digest(tiny("llama").config)


@pytest.mark.parametrize(
    "change",
    [{"eos_token_id": 5}, {"pad_token_id": 7}, {"use_cache": False}, {"initializer_range": 0.5}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_configuration_that_does_not_shape_kv_is_not(change):
    assert config_digest(tiny("llama", **change).config) == config_digest(tiny("llama").config)


def test_names_and_versions_are_not_in_the_digest():
    model = tiny("llama")
    before = config_digest(model.config)
    model.config._name_or_path = "someone/else"
    model.config.transformers_version = "0"
    assert config_digest(model.config) == before


def test_the_attention_implementation_is_in_the_identity(make, pool):
    model = tiny("llama")
    cache = make(model)
    run(cache, pool)
    model.set_attn_implementation("eager")
    assert run(cache, pool) == "identity:config_digest"


def test_rope_changes_miss(make, pool):
    run(make(tiny("llama")), pool)
    changed = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert run(make(changed), pool) == "identity:config_digest"


def test_a_raised_generation_misses_and_tenants_do_not_share(make, pool, llama):
    cache = make(llama, tenant="a")
    run(cache, pool)
    assert run(make(llama, tenant="b"), pool) == "unseen"
    cache.generate(prompt(100), max_new_tokens=1, tenant="c")
    assert str(cache.last_report.miss) == "unseen"
    assert run(cache, pool) == 96
    cache.generation = 1
    assert str(run(cache, pool)).startswith("generation")


# -- adapters ----------------------------------------------------------------------------------------------------


def lora(model, *names, seed=0, alpha=16):
    config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3)
    return wrapped.eval()


def test_adapters_are_told_apart_and_the_base_model_is_shared(make, pool):
    run(make(tiny("llama")), pool)
    model = lora(tiny("llama"), "first", "second")
    cache, ids = make(model), prompt(100)
    assert run(cache, pool) == "identity:adapters"
    assert run(cache, pool) == 96
    plain = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(cache.generate(ids, max_new_tokens=8, do_sample=False), plain)
    model.set_adapter("second")
    assert run(cache, pool) == "identity:adapters"
    model.set_adapter("first")
    assert run(cache, pool) == 96
    with model.disable_adapter():
        assert run(cache, pool) == 96  # what the base model without any adapter stored


def test_an_adapter_is_its_content_and_scale_not_its_name(make):
    named = make(lora(tiny("llama"), "one")).identity
    assert make(lora(tiny("llama"), "other")).identity == named
    assert make(lora(tiny("llama"), "one", seed=1)).identity != named
    assert make(lora(tiny("llama"), "one", alpha=32)).identity != named


def test_a_merged_adapter_is_another_model(make, pool):
    model = lora(tiny("llama"), "one")
    cache = make(model)
    run(cache, pool)
    model.merge_adapter()
    assert run(cache, pool).startswith("identity:")
    plain = tiny("llama")
    run(make(plain), pool)
    merged = lora(tiny("llama"), "one").merge_and_unload()
    assert run(make(merged), pool).startswith("identity:")  # though nothing in it says "adapter" any more


def test_soft_prompts_are_refused(make):
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING"):
        make(peft.get_peft_model(tiny("llama"), config))


# -- what is refused ---------------------------------------------------------------------------------------------


def test_an_unknown_layer_class_is_refused_by_name(make, monkeypatch):
    class NovelLayer(DynamicLayer):
        pass

    monkeypatch.setitem(DynamicCache.__init__.__globals__["DYNAMIC_LAYER_TYPE_MAPPING"], "full_attention", NovelLayer)
    with pytest.raises(UnsupportedModelError, match="layer 0 in a NovelLayer"):
        make(tiny("llama"))
    monkeypatch.setitem(
        DynamicCache.__init__.__globals__["DYNAMIC_LAYER_TYPE_MAPPING"], "full_attention", DynamicIndexedLayer
    )
    with pytest.raises(UnsupportedModelError, match="DynamicIndexedLayer"):
        make(tiny("llama"))


def test_encoder_decoder_models_are_refused(make):
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        make(model)


def test_models_that_look_ahead_are_refused(make):
    with pytest.raises(UnsupportedModelError, match="depends on the tokens after it"):
        make(tiny("gemma3_text", use_bidirectional_attention=True))


def test_layers_of_different_shapes_are_groups_of_their_own(make):
    parts = [
        _groups._Part(i, (HitPolicy.PREFIX, 0, (("k", "F32", (heads, 16, 8)),))) for i, heads in enumerate([2, 4, 2])
    ]
    assert [spec.layers for spec in _groups._grouped(parts)] == [(0, 2), (1,)]


# -- positions that depend on the length ---------------------------------------------------------------------------


def test_rescaled_positions_are_cached_only_within_the_original_context(make, pool):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    assert context_length(model.config) == (None, 64)
    cache = make(model)
    for length, result in ((60, ["unseen", 48]), (90, ["not-cacheable:rope"] * 2)):
        assert [run(cache, pool, length) for _ in range(2)] == result
        plain = copy.deepcopy(model).generate(prompt(length), max_new_tokens=9, do_sample=False)
        assert torch.equal(cache.generate(prompt(length), max_new_tokens=9, do_sample=False), plain)

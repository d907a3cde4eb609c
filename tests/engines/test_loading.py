"""Loading: every failure is one sentence that names the value and the remedy."""

from __future__ import annotations

import builtins
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemkv.engines.loading import load_model
from stemkv.errors import ModelError

from .conftest import VOCAB, prompt, tiny


@pytest.fixture
def folder(tmp_path):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny("llama").save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def failure(name, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModelError) as caught:
            load_model(str(name), **settings)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_loaded_silently(folder, capfd):
    steps: list[str] = []
    loaded = load_model(str(folder), progress=steps.append)
    assert steps == ["loading transformers", "reading the tokenizer", "reading the weights"]
    assert [path.name for path in loaded.weight_files] == ["model.safetensors"]
    assert (loaded.name, loaded.context_length) == (str(folder), 1024)
    assert not loaded.model.training
    assert loaded.tokenizer.pad_token == "w3"
    assert torch.equal(
        loaded.model.generate(prompt(20), max_new_tokens=3, do_sample=False),
        tiny("llama").generate(prompt(20), max_new_tokens=3, do_sample=False),
    )
    assert capfd.readouterr() == ("", "")


def test_dtypes(folder):
    assert load_model(str(folder)).model.dtype == torch.float32
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    assert "'int3' is not one of auto, float32" in failure(folder, dtype="int3")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./model", "~/model.gguf", "model.safetensors", "", "a b", "a/b/c"]
)
def test_something_that_does_not_exist(name):
    assert f"no model at {name!r}" in failure(name)


def test_a_hub_model_that_is_not_in_the_cache():
    message = failure("nobody/nothing")
    assert "'nobody/nothing' is not in the hub cache" in message
    assert "HF_HUB_OFFLINE" in message


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not one")
    assert "is not a GGUF file" in failure(path)
    assert "is not a GGUF file" in failure(tmp_path)


def test_a_gguf_that_is_cut_off(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 16)
    assert f"cannot load {str(path)!r}" in failure(path)


def test_folders_that_hold_no_model(tmp_path):
    assert "has no weights" in failure(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "no config.json" in failure(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "several GGUF files (a.gguf, b.gguf)" in failure(tmp_path)


def test_broken_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert f"cannot load {str(folder)!r}" in failure(folder)


def test_a_missing_extra_is_named(folder, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **settings):
        if name == "transformers":
            raise ImportError(name=name)
        return real(name, *args, **settings)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "needs transformers, which is not installed: pip install 'stemkv[transformers]'" in failure(folder)

"""What stemkv cannot work with is refused at start-up with one sentence, or switches the cache off if so configured."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stemkv.cli import vllm_args
from stemkv.cli.main import main as stemkv
from stemkv.engines import _vllm_identity
from stemkv.engines._vllm_options import check_version, read_options
from stemkv.engines._vllm_scheduler import SchedulerSide
from stemkv.errors import ConfigError, ModelError, StemKVError, StoreError, UnsupportedModelError

from .harness import EngineProcess, connector, files, prompt


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"store": "/x"}, "unknown key 'store' in kv_connector_extra_config: put stemkv's settings under"),
        ({"stemkv": {"stroe": "/x"}}, r"unknown setting 'stroe' \(kv_connector_extra_config\)"),
        ({"stemkv": "/x"}, "must be a table"),
        ({"stemkv": {"store": ""}}, "store is empty"),
        ({"stemkv": {"seal": True}}, "seal needs secret_file"),
        ({"stemkv": {"port": 80}}, "port is a setting of 'stemkv serve'"),
        ({"stemkv": {"on_error": "ignore"}}, "choose refuse .* or off"),
        ({"stemkv": {"lookup_timeout_s": 0}}, "not a number of seconds above 0"),
        ({"stemkv": {"load_timeout_s": "soon"}}, "not a number of seconds above 0"),
        ({"stemkv": {"store_bytes": "lots"}}, "store_bytes = 'lots'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_options(extra, environ={})
    assert "\n" not in str(caught.value)


def test_sizes_and_the_environment_count() -> None:
    options = read_options({"stemkv": {"store": "/x", "store_bytes": "2GiB"}}, environ={"STEMKV_GENERATION": "3"})
    assert (options.settings.store_bytes, options.settings.generation, options.settings.memory_bytes) == (2 << 30, 3, 0)


@pytest.mark.parametrize("version", ["0.12.0", "0.32.0", "0.33.1rc2.dev5+gabc", "1.0", "dev", "0.1.dev1+gabc"])
def test_new_versions_are_taken(version: str) -> None:
    assert check_version(version) >= (0, 12)


@pytest.mark.parametrize("version", ["0.11.2", "0.8.5", "what"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"{version}.*0\.12 or later, tested with 0\.32\.0"):
        check_version(version)


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as is looked at before there is KV memory."""
    values = {
        "kv_transfer_config.kv_role": "kv_both", "kv_transfer_config.kv_load_failure_policy": "recompute",
        "parallel_config.decode_context_parallel_size": 1, "cache_config.calculate_kv_scales": False,
        "load_config.load_format": "auto", "model_config.runner_type": "generate",
    } | changes  # fmt: skip
    made = SimpleNamespace()
    for path, value in values.items():
        part, _, name = path.partition(".")
        setattr(made, part, getattr(made, part, None) or SimpleNamespace())
        setattr(getattr(made, part), name, value)
    return made


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_transfer_config.kv_role", "kv_producer"),
        ("kv_transfer_config.kv_load_failure_policy", "fail"),
        ("parallel_config.decode_context_parallel_size", 2),
        ("cache_config.calculate_kv_scales", True),
        ("load_config.load_format", "dummy"),
        ("model_config.runner_type", "pooling"),
    ],
)
def test_what_would_have_to_be_guessed_is_refused_by_name(setting: str, value: object) -> None:
    _vllm_identity.check_supported(config())
    with pytest.raises(StemKVError, match=setting.partition(".")[2].replace("runner_type", "pooling")):
        _vllm_identity.check_supported(config(**{setting: value}))


def test_an_unsupported_kind_of_layer_is_named() -> None:
    class MambaSpec:
        block_size = 16

    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=MambaSpec())])
    with pytest.raises(UnsupportedModelError, match="MambaSpec"):
        _vllm_identity.engine_groups(groups)


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weight files of .* are not on this machine"):
        _vllm_identity._files_digest(str(tmp_path), None)


def test_a_store_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = read_options({"stemkv": {"store": str(tmp_path / "file")}}, environ={})
    with pytest.raises(StoreError, match="is a file, not a folder"):
        SchedulerSide(options, SimpleNamespace(speculative_config=None), (0,), (16,))


def test_without_vllm_the_connector_says_what_it_needs() -> None:
    code = "import sys; sys.modules['vllm'] = None\nimport stemkv\nimport stemkv.engines.vllm_connector"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: stemkv.engines.vllm_connector needs vLLM" in done.stderr


def test_a_real_engine_refuses_to_start_with_one_sentence(model: Path, tmp_path: Path) -> None:
    engine = EngineProcess(model, connector(tmp_path / "kv", stroe="x"))
    assert engine.refused.startswith("ConfigError: unknown setting 'stroe'")


def test_a_real_engine_starts_uncached_if_so_configured(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    """The fault shows only when the worker has its memory: 50 is not a multiple of vLLM's 32."""
    with EngineProcess(model, connector(tmp_path / "kv", block_tokens=50, on_error="off")) as engine:
        ids = prompt(1, 200)
        assert engine.one(ids)["tokens"] == plain.one(ids)["tokens"]
        assert "not a multiple of vLLM's block of 32" in engine.ask("connector")["off"]
        assert files(tmp_path / "kv") == []


def test_the_printed_arguments_are_what_the_connector_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert stemkv(["vllm-args", "--model", "a b", "--store", "/x y", "--store-size", "5GiB", "--on-error", "off"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:4] == ["vllm", "serve", "a b", "--kv-transfer-config"]
    read = json.loads(words[4])
    options = read_options(read["kv_connector_extra_config"], environ={})
    assert (options.settings.store, options.settings.store_bytes, options.on_error) == ("/x y", 5 << 30, "off")
    assert read["kv_load_failure_policy"] == "recompute"


def test_arguments_that_would_be_refused_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stemkv(["vllm-args", "--on-error", "maybe"]) == 2
    assert "choose refuse" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        vllm_args.line({"host": "x"})

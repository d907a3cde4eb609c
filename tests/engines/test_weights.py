"""The digest of weight files: content, not names; remembered, but never trusted when it cannot be."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from stemkv.engines import weights
from stemkv.engines.weights import find_weight_files, weights_digest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "xdg"


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    for number, path in enumerate(made):
        path.write_bytes(bytes([number]) * 1000)
    return made


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were really read."""
    names, real = [], weights._hash_file

    def noted(path, advance):
        names.append(path.name)
        return real(path, advance)

    monkeypatch.setattr(weights, "_hash_file", noted)
    return names


@pytest.fixture
def hub(cache_folder):
    """A model in the hub cache, as huggingface_hub lays it out."""
    base = cache_folder / "huggingface/hub/models--some--model"
    blob = hashlib.sha256(b"weights").hexdigest()
    for folder in ("blobs", "refs", "snapshots/abc"):
        (base / folder).mkdir(parents=True)
    (base / "blobs" / blob).write_bytes(b"weights")
    (base / "refs/main").write_text("abc")
    (base / "snapshots/abc/model.safetensors").symlink_to(f"../../blobs/{blob}")
    return base


def test_content_counts_and_names_do_not(files, tmp_path):
    digest, source = weights_digest(files)
    assert source == "files"
    assert len(digest) == 32
    renamed = tmp_path / "renamed.safetensors"
    files[0].rename(renamed)
    assert weights_digest([files[1], renamed]) == (digest, "files")
    renamed.write_bytes(b"\0" * 999 + b"\1")
    assert weights_digest([files[1], renamed])[0] != digest


def test_files_are_read_once(files, hashed, cache_folder):
    digest = weights_digest(files)
    assert sorted(hashed) == ["model-1.safetensors", "model-2.safetensors"]
    assert weights_digest(files) == digest
    assert len(hashed) == 2
    assert list((cache_folder / "stemkv").iterdir()) == [cache_folder / "stemkv/weights.json"]


def test_a_changed_file_is_read_again(files, hashed):
    digest = weights_digest(files)
    status = files[0].stat()
    files[0].write_bytes(b"x" * 1000)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert weights_digest(files) != digest
    assert hashed.count("model-1.safetensors") == 2
    replacement = files[1].with_name("new")
    replacement.write_bytes(b"y" * 1000)  # another inode with the old name, size and time
    os.utime(replacement, ns=(files[1].stat().st_atime_ns, files[1].stat().st_mtime_ns))
    replacement.replace(files[1])
    weights_digest(files)
    assert hashed.count("model-2.safetensors") == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a": 5}', b"[" * 100_000])
def test_an_unreadable_cache_only_means_reading_again(content, files, cache_folder):
    digest = weights_digest(files)
    cache = cache_folder / "stemkv/weights.json"
    if content == b'{"a": 5}':
        content = json.dumps(dict.fromkeys(json.loads(cache.read_bytes()), 5)).encode()
    cache.write_bytes(content)
    assert weights_digest(files) == digest


def test_a_cache_that_cannot_be_written_is_no_error(files, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    assert weights_digest(files)[1] == "files"


def test_hub_blobs_are_taken_at_their_name(hub, hashed):
    found = find_weight_files("some/model")
    assert [path.name for path in found] == ["model.safetensors"]
    digest, source = weights_digest(found)
    assert (source, hashed) == ("hub-blobs", [])
    assert find_weight_files("some/model", revision="abc") == found
    assert find_weight_files("some/model", revision="other") == []
    assert weights_digest([found[0].resolve()]) != (digest, source)


def test_a_link_that_is_not_a_blob_is_read(files, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(files[0])
    assert weights_digest([link]) == weights_digest([files[0]])


def test_progress_reaches_the_total(files):
    seen = []
    weights_digest(files, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2000, 2000)


def test_no_files_and_missing_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no weight files"):
        weights_digest([])
    with pytest.raises(FileNotFoundError):
        weights_digest([tmp_path / "missing"])


def test_weights_are_found_in_the_form_that_is_loaded(tmp_path):
    assert find_weight_files(tmp_path) == []
    assert find_weight_files("no/such-model") == []
    assert find_weight_files("../escape") == []
    names = ["a.gguf", "pytorch_model.bin", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, count in zip(names, (1, 1, 1, 2), strict=True):
        (tmp_path / name).touch()
        assert len(find_weight_files(tmp_path)) == count
        assert find_weight_files(tmp_path)[0].suffix == "." + name.rsplit(".", 1)[1]
    (tmp_path / "consolidated.safetensors").touch()
    index = {"weight_map": {"x": names[2], "y": names[3]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in find_weight_files(tmp_path)] == names[2:]
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in find_weight_files(tmp_path)] == ["model.safetensors"]


def test_importing_it_imports_no_torch():
    code = "import sys, stemkv.engines.weights; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

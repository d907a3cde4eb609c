"""Settings: one precedence, one sentence for every mistake, and the secret stays secret."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv import config
from stemkv.config import SIZES, Settings, load_settings, open_pool, parse_size, read_secret
from stemkv.errors import ConfigError
from stemkv.keys import PUBLIC_ROOT
from stemkv.misses import Cause, Miss
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from . import make


def loaded(overrides: Mapping[str, object] | None = None, toml: str | None = None, **env: str) -> Settings:
    if toml is None:
        return load_settings(overrides, environ=env)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stemkv.toml"
        file.write_text(toml, encoding="utf-8")
        return load_settings(overrides, file=file, environ=env)


def test_defaults_are_those_of_the_record() -> None:
    assert loaded() == Settings()
    assert Settings().host == "127.0.0.1"


def test_later_sources_win() -> None:
    toml, env, cli = 'port = 1\nstore = "a"\nseal = true', {"STEMKV_PORT": "2", "STEMKV_STORE": "b"}, {"port": 3}
    assert loaded(None, toml).port == 1
    assert loaded(None, toml, **env).port == 2
    both = loaded(cli, toml, **env)
    assert (both.port, both.store, both.seal) == (3, "b", True)


def test_overrides_that_are_none_were_not_given() -> None:
    assert loaded({"port": None}, "port = 5").port == 5
    assert loaded({"seal": False}, "seal = true").seal is False
    assert loaded({"store": ""}, 'store = "a"').store == ""


def test_the_real_environment_is_read_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMKV_PORT", "1234")
    assert load_settings().port == 1234
    assert load_settings(environ={}).port == 8000


SOURCES: dict[str, dict[str, Any]] = {
    "environment": {"STEMKV_SOTRE": "x"},
    "stemkv.toml": {"toml": 'sotre = "x"'},
    "command line": {"overrides": {"sotre": "x"}},
}


@pytest.mark.parametrize("source", SOURCES)
def test_an_unknown_setting_is_an_error_that_names_it_its_source_and_the_known_ones(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(**SOURCES[source])
    message = str(caught.value)
    assert "'sotre'" in message
    assert source in message
    assert all(name in message for name in Settings.__struct_fields__)


WRONG: dict[str, list[Any]] = {
    "store": [5, ["a"], True],
    "store_bytes": ["0", 0, -1, "-1", "5 apples", "", "1e9", 2**63, "9" * 30, 1.5, "0x10", "٣"],
    "reserve_bytes": [-1, "many"],
    "memory_bytes": [-1, "1GiBB", "GiB", "1 i"],
    "durability": ["some", "none\n", "", "None"],
    "queue_bytes": [-1],
    "secret_file": [5],
    "seal": ["yes", 2, "", "on"],
    "repeatable": ["maybe", 3],
    "generation": [-1, "two", 2**63, 1.5],
    "block_tokens": [0, 4097, "", "64 tokens"],
    "host": [127],
    "port": [-1, 65536, "http", True],
    "max_queue": [-1, "ten"],
    "drain_s": [-1, "nan", "inf", "soon", float("nan")],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values])
def test_a_wrong_value_is_one_sentence_with_source_name_value_and_meaning(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} = {value!r} (command line) is not valid: ")
    assert config._described(name) in message
    assert "\n" not in message


def test_every_setting_has_wrong_values_in_this_test() -> None:
    assert set(WRONG) == set(Settings.__struct_fields__)


def test_a_wrong_value_is_an_error_even_where_a_later_source_wins() -> None:
    with pytest.raises(ConfigError, match=r"stemkv\.toml"):
        loaded({"port": 1}, 'port = "http"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        (" 50GiB ", 50 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("2kB".replace("k", "K"), 2000),
        ("3TiB", 3 << 40),
        ("7B", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_exactly(text: str, expected: int) -> None:
    assert parse_size(text) == expected
    assert loaded(STEMKV_STORE_BYTES=text).store_bytes == expected


@given(st.integers(1, 2**40), st.sampled_from(["", "B", "KiB", "MB", "GiB"]))
def test_whole_sizes_of_any_unit_are_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * config._UNITS[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError as error:
        message = str(error)
    else:
        message = repr(text) * (size >= 0)
    assert repr(text) in message


@pytest.mark.parametrize("content", [b"port = ", b"= 1", b"\xff\xfe", b"port = 1\nport = 2"])
def test_a_file_that_is_no_toml_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        load_settings(file=file, environ={})


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            load_settings(file=path, environ={})


def test_every_setting_is_documented_and_every_size_is_one() -> None:
    for field in msgspec.structs.fields(Settings):
        assert len(config._described(field.name)) > 20, field.name
        assert not field.required
    assert {n for n in Settings.__struct_fields__ if n.endswith("_bytes")} == SIZES
    assert len(Settings.__struct_fields__) <= 20


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


# The secret


def secret(path: Path, content: bytes, mode: int = 0o600) -> Settings:
    path.write_bytes(content)
    path.chmod(mode)
    return Settings(secret_file=str(path))


def test_without_a_secret_the_public_root_is_used_and_sealing_refused() -> None:
    assert read_secret(Settings()) == PUBLIC_ROOT
    with pytest.raises(ConfigError, match="secret_file"):
        read_secret(Settings(seal=True))
    with pytest.raises(ConfigError, match="secret_file"):
        open_pool(Settings(seal=True, store=""))


@pytest.mark.parametrize("size", [0, 1, 31])
def test_a_short_secret_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds {size} bytes"):
        read_secret(secret(tmp_path / "s", b"\xaa" * size))


def test_a_huge_file_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no secret file"):
        read_secret(secret(tmp_path / "s", bytes(65 << 10)))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o620, 0o602, 0o610, 0o601, 0o666, 0o440])
def test_a_secret_that_others_can_read_or_change_is_refused_with_the_remedy(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"chmod 600 {tmp_path}/s"):
        read_secret(secret(tmp_path / "s", make.SECRET, mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_that_only_its_owner_can_read_is_used(mode: int, tmp_path: Path) -> None:
    assert read_secret(secret(tmp_path / "s", make.SECRET, mode)) == make.SECRET


def test_a_group_readable_secret_of_somebody_else_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts secrets as root:group 0440; the process cannot change that."""
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "s").stat().st_uid + 1)
    assert read_secret(secret(tmp_path / "s", make.SECRET, 0o440)) == make.SECRET
    for mode in (0o460, 0o444):
        with pytest.raises(ConfigError, match="chmod"):
            read_secret(secret(tmp_path / "s", make.SECRET, mode))


@pytest.mark.parametrize("content", [b" " * 32, b"\n" * 32, bytes(31) + b"\n", b"\t" + bytes(31), b"\r" * 33])
def test_binary_secrets_are_used_whole(content: bytes, tmp_path: Path) -> None:
    """Random bytes begin or end with white space about once in twenty times."""
    assert read_secret(secret(tmp_path / "s", content)) == content


def test_the_newline_that_an_editor_adds_is_not_part_of_the_secret(tmp_path: Path) -> None:
    assert read_secret(secret(tmp_path / "s", b"f" * 64 + b"\n")) == b"f" * 64
    assert read_secret(secret(tmp_path / "s", b"f" * 64 + b"\n\n")) == b"f" * 64 + b"\n"


@pytest.mark.parametrize("name", ["missing", "folder", "nul\0", "~nobody-of-this-name/x"])
def test_a_secret_file_that_cannot_be_read_is_an_error_never_the_public_root(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(ConfigError, match="secret_file"):
        read_secret(Settings(secret_file=path))


def test_the_secret_is_never_shown(tmp_path: Path) -> None:
    hidden = b"correct horse battery staple, and then some more of it"
    settings = msgspec.structs.replace(secret(tmp_path / "s", hidden), store="")
    with open_pool(settings) as pool:
        shown = [repr(settings), str(settings), repr(pool), repr(vars(pool)), repr(vars(pool.sealer))]
    for broken in (hidden[:20], hidden * 2000):
        with pytest.raises(ConfigError) as caught:
            read_secret(secret(tmp_path / "s", broken))
        shown.append(str(caught.value))
    assert not any("horse" in text or hidden.hex() in text for text in shown)


# The pool


def test_the_pool_has_memory_first_then_the_folder(tmp_path: Path) -> None:
    with open_pool(Settings(store=str(tmp_path), memory_bytes=5 << 20, store_bytes=7 << 20, reserve_bytes=0)) as pool:
        assert [type(t) for t in pool.tiers] == [MemoryTier, FileTier]
        assert [t.stats().max_bytes for t in pool.tiers] == [5 << 20, 7 << 20]
        make.store(pool, make.chain(2))
        assert make.fetched(pool, make.chain(2)) == (2, None)
    with open_pool(Settings(store="", memory_bytes=0)) as nothing:
        assert nothing.tiers == ()
        assert nothing.match(make.chain(2)).miss is not None


def test_a_sealed_pool_leaves_nothing_readable_in_its_folder(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        secret(tmp_path / "s", make.SECRET), seal=True, store=str(tmp_path / "store"), reserve_bytes=0
    )
    prompt = make.chain(3, ns=make.namespace(tenant="a tenant's name", root=make.SECRET))
    with open_pool(settings) as pool:
        make.store(pool, prompt)
        assert make.fetched(pool, prompt) == (3, None)
    everything = b"".join(p.read_bytes() for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert len(everything) > 3 * 4096
    for plain in [make.content(prompt.ref(0, i)) for i in range(3)] + [b"a tenant's name", make.SECRET]:
        assert plain not in everything
        assert plain.hex().encode() not in everything


def test_a_store_path_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="store"):
        open_pool(Settings(store="~nobody-of-this-name/x"))
    with pytest.raises(ConfigError, match="store"):
        open_pool(Settings(store="a\0b"))


def test_another_secret_shares_nothing(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    for content in (make.SECRET, bytes(32)):
        settings = msgspec.structs.replace(secret(tmp_path / "s", content), store=store, reserve_bytes=0)
        prompt = make.chain(2, ns=make.namespace(root=read_secret(settings)))
        with open_pool(settings) as pool:
            assert make.fetched(pool, prompt) == (0, Miss(Cause.UNSEEN))
            make.store(pool, prompt)
            assert make.fetched(pool, prompt) == (2, None)

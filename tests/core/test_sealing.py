"""Sealed blocks show nothing, unsealed ones are tagged, and neither is ever taken for the other."""

from __future__ import annotations

import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv import block
from stemkv.block import BlockError
from stemkv.identity import GroupSpec, HitPolicy, TensorSpec
from stemkv.keys import PUBLIC_ROOT
from stemkv.misses import CORRUPT, Cause
from stemkv.pool import Pool
from stemkv.sealing import NONCE_BYTES, TAG_BYTES, Sealer
from stemkv.tiers.memory import MemoryTier

from . import make

LARGE = GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("k", "U8", (4, 4096)),))
REF = make.chain(2, ns=make.namespace(LARGE)).ref(0, 1)
SEALERS = {
    "public": Sealer(),
    "one": Sealer(make.SECRET),
    "one, sealed": Sealer(make.SECRET, seal=True),
    "two": Sealer(bytes(32)),
    "two, sealed": Sealer(bytes(32), seal=True),
}


def test_sealing_without_a_secret_is_refused() -> None:
    """Encrypting with a key that everybody has would only look like safety."""
    with pytest.raises(ValueError, match="secret"):
        Sealer(PUBLIC_ROOT, seal=True)


@pytest.mark.parametrize("writer", SEALERS)
@pytest.mark.parametrize("reader", SEALERS)
def test_only_the_same_key_and_mode_can_read(writer: str, reader: str) -> None:
    raw = make.stored(make.record(REF, SEALERS[writer]))
    if writer == reader:
        assert make.reopen(raw, REF, SEALERS[reader]) == make.content(REF)
        return
    with pytest.raises(BlockError) as caught:
        make.reopen(raw, REF, SEALERS[reader])
    assert caught.value.miss.cause is Cause.BAD_SEAL
    assert caught.value.miss.detail == f"key id {SEALERS[writer].key_id}"


def test_key_ids_name_key_and_mode_without_showing_the_key() -> None:
    ids = {s.key_id for s in SEALERS.values()}
    assert len(ids) == len(SEALERS)
    assert Sealer(make.SECRET).key_id == SEALERS["one"].key_id
    assert make.SECRET.hex()[:16] not in ids


def test_a_forged_key_id_does_not_help() -> None:
    """An unsealed record relabelled as sealed, and the other way round, does not verify."""
    pairs = [("one", "one, sealed"), ("one, sealed", "one"), ("two", "one"), ("two, sealed", "one, sealed")]
    for writer, reader in pairs:
        raw = make.stored(make.record(REF, SEALERS[writer]))
        forged = raw.replace(SEALERS[writer].key_id.encode(), SEALERS[reader].key_id.encode())
        with pytest.raises(BlockError) as caught:
            make.reopen(forged, REF, SEALERS[reader])
        assert caught.value.miss.cause in {Cause.BAD_LAYOUT, Cause.BAD_TAG}


def test_blocks_of_another_seal_make_way_for_new_ones() -> None:
    """Switching ``seal`` on must not leave every prompt a miss for ever."""
    assert Cause.BAD_SEAL in CORRUPT
    tier, prompt = MemoryTier(1 << 20), make.chain(3)
    with Pool([tier], sealer=SEALERS["one"]) as before:
        make.store(before, prompt)
        after = Pool([tier], sealer=SEALERS["one, sealed"])
        match, sink = after.match(prompt), make.Collected()
        assert {m.cause for m in after.load(match, sink).values()} == {Cause.BAD_SEAL}
        assert not sink.payloads
        make.store(after, prompt)
        assert make.fetched(after, prompt) == (3, None)


@given(st.binary(min_size=8, max_size=8))
def test_sealed_records_hold_no_plaintext(pattern: bytes) -> None:
    data, payload = block.begin(REF)
    payload[:] = (pattern * (len(payload) // 8))[: len(payload)]
    plain, sealer = bytes(payload), SEALERS["one, sealed"]
    raw = make.stored(block.finish(REF, data, 0.0, sealer))
    cipher = bytes(raw[block.header_bytes(LARGE) :])
    assert pattern not in cipher
    assert sum(a == b for a, b in zip(plain, cipher, strict=True)) < len(plain) // 16
    assert len(zlib.compress(cipher)) > 0.99 * len(cipher), "repeated plaintext must not show"
    assert make.reopen(raw, REF, sealer) == plain


def test_sealing_the_same_block_twice_gives_unrelated_bytes() -> None:
    one, two = (make.stored(make.record(REF, SEALERS["one, sealed"]))[4096:] for _ in range(2))
    same = sum(a == b for a, b in zip(one, two, strict=True))
    assert same < len(one) / 256 + 8 * math.sqrt(len(one) / 256)


def test_nonces_are_random_and_never_derived() -> None:
    nonces = [Sealer.nonce() for _ in range(20_000)]
    assert {len(n) for n in nonces} == {NONCE_BYTES}
    assert len(set(nonces)) == len(nonces)
    for bit in range(8 * NONCE_BYTES):
        ones = sum(n[bit // 8] >> bit % 8 & 1 for n in nonces)
        assert abs(ones - 10_000) < 7 * math.sqrt(5_000)


def test_every_record_gets_a_nonce_of_its_own() -> None:
    used = {block.parse_header(make.record(REF, SEALERS["one"]).data[8:4096])[0].nonce for _ in range(50)}
    assert len(used) == 50


@pytest.mark.parametrize("name", SEALERS)
def test_the_tag_covers_header_and_payload(name: str) -> None:
    sealer, size = SEALERS[name], block.header_bytes(LARGE)
    rec = make.record(REF, sealer)
    nonce = bytes.fromhex(block.parse_header(rec.data[8:size])[0].nonce)
    assert len(rec.tag) == TAG_BYTES
    assert bytes(sealer.open(rec.data, size, nonce, rec.tag) or b"") == make.content(REF)
    for at in (0, 8, size - 1, size, len(rec.data) - 1):
        data = memoryview(bytearray(rec.data))
        data[at] ^= 1
        assert sealer.open(data, size, nonce, rec.tag) is None
    for wrong in (bytes(16), rec.tag[:-1], rec.tag[:-1] + bytes([rec.tag[-1] ^ 1]), b""):
        assert sealer.open(rec.data, size, nonce, wrong) is None
    assert sealer.open(rec.data, size, bytes(12), rec.tag) is None


def test_opening_does_not_change_the_record() -> None:
    for sealer in SEALERS.values():
        rec = make.record(REF, sealer)
        before = bytes(rec.data)
        block.verify(rec.data, rec.tag, REF, sealer)
        assert rec.data == before


def test_no_key_is_shown() -> None:
    for sealer in SEALERS.values():
        shown = repr(sealer) + str(vars(sealer))
        assert make.SECRET.hex() not in shown
        assert repr(make.SECRET)[2:-1] not in shown

"""Keys of blocks that an engine names by its own hash: derivation, vectors in the document, verification."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv import block
from stemkv.block import BlockError
from stemkv.keys import BlockRef, Chain, Namespace, foreign_ref
from stemkv.misses import Cause
from stemkv.sealing import Sealer

from . import make_vectors, reference

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
SCHEME = "vllm/sha256/vllm-none-hash"
DIGEST = make_vectors.sha("a prefix")


def namespace(name: str = "plain") -> Namespace:
    identity, tenant, generation, root = make_vectors.namespaces()[name]
    known = make_vectors.identities()[identity]
    return Namespace(known, tenant=tenant, generation=generation, root=make_vectors.ROOTS[root])


def parts(ref: BlockRef) -> dict[str, str]:
    return {"key": ref.key.hex(), "parent": ref.parent.hex(), "tokens_digest": ref.tokens_digest.hex()}


@pytest.mark.parametrize("name", ["plain", "plain, tenant"])
def test_the_derivation_is_the_one_in_the_document(name: str) -> None:
    identity, tenant, generation, root = make_vectors.namespaces()[name]
    digest = make_vectors.identities()[identity].digest
    ns = reference.namespace(digest, tenant, generation, make_vectors.ROOTS[root])
    message = reference.sized(SCHEME.encode()) + reference.sized(DIGEST)
    own = reference.mac(ns["key"], b"foreign")
    assert parts(foreign_ref(namespace(name), SCHEME, DIGEST)) == {
        "key": reference.mac(own, message).hex(),
        "parent": reference.mac(own, b"root").hex(),
        "tokens_digest": reference.mac(reference.mac(ns["tenant_key"], b"foreign"), message).hex(),
    }


def test_the_document_has_the_vectors_of_this_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.split("### Blocks named by an engine's own hash")[1].split("\n## ")[0]
    found = dict(re.findall(r"^    (\S+) +([0-9a-f]{64})$", section, re.MULTILINE))
    wanted = {"hash": DIGEST.hex()}
    for name in ("plain", "plain, tenant"):
        prefix = "" if name == "plain" else "tenant."
        wanted |= {prefix + part: value for part, value in parts(foreign_ref(namespace(name), SCHEME, DIGEST)).items()}
    assert found == wanted


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.text(), st.text())
def test_equal_exactly_for_the_same_scheme_and_hash(one: bytes, two: bytes, scheme: str, other: str) -> None:
    ns = namespace()
    same = (scheme, one) == (other, two)
    assert (foreign_ref(ns, scheme, one).key == foreign_ref(ns, other, two).key) == same
    assert (foreign_ref(ns, scheme, one).tokens_digest == foreign_ref(ns, other, two).tokens_digest) == same


def test_another_namespace_another_key_but_one_tenant_recognizes_its_text() -> None:
    identity = make_vectors.identities()["plain"]
    made = {
        (tenant, generation): foreign_ref(Namespace(identity, tenant=tenant, generation=generation), SCHEME, DIGEST)
        for tenant in ("", "a")
        for generation in (0, 1)
    }
    assert len({ref.key for ref in made.values()}) == 4
    assert made["", 0].tokens_digest == made["", 1].tokens_digest != made["a", 0].tokens_digest


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_a_hash_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a hash of {size} bytes cannot name a block"):
        foreign_ref(namespace(), SCHEME, bytes(size))


def test_no_chain_of_tokens_has_its_keys() -> None:
    ns = namespace()
    ref = foreign_ref(ns, SCHEME, DIGEST)
    chain = Chain(ns, list(range(64)))
    assert not {ref.key, ref.parent} & {chain.root, *chain.keys}
    assert (ref.index, ref.group, ref.anchor, ref.needs) == (0, 0, ref.key, ref.parent)


def stored(ref: BlockRef) -> tuple[memoryview, bytes]:
    data, payload = block.begin(ref)
    payload[:] = bytes(range(len(payload)))
    record = block.finish(ref, data, 0.0, Sealer())
    return memoryview(bytearray(record.data)), record.tag


def test_a_stored_block_verifies_for_its_hash_and_for_no_other() -> None:
    ref = foreign_ref(namespace(), SCHEME, DIGEST)
    data, tag = stored(ref)
    assert bytes(block.verify(data, tag, ref, Sealer())) == bytes(range(64))
    others: list[tuple[Any, ...]] = [("other scheme", DIGEST), (SCHEME, make_vectors.sha("another prefix"))]
    for scheme, digest in others:
        with pytest.raises(BlockError) as failed:
            block.verify(data, tag, foreign_ref(namespace(), scheme, digest), Sealer())
        assert failed.value.miss.cause is Cause.BAD_KEY

"""The pinned vectors hold for stemkv and for a second implementation that shares no code with it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from safetensors.torch import load_file

from stemkv.identity import DTYPE_BYTES, GroupSpec, HitPolicy, TensorSpec
from stemkv.keys import Chain, Namespace
from stemkv.sealing import Sealer

from . import make, make_vectors, reference

PINNED: dict[str, Any] = json.loads(make_vectors.PATH.read_text(encoding="utf-8"))
BLOCKS = range(len(PINNED["blocks"]))


def test_stemkv_computes_the_pinned_vectors() -> None:
    assert json.loads(json.dumps(make_vectors.vectors())) == PINNED


@pytest.mark.parametrize("name", PINNED["identities"])
def test_reference_computes_the_same_identity(name: str) -> None:
    pinned = PINNED["identities"][name]
    encoding = reference.encode_identity(pinned["fields"])
    assert encoding.hex() == pinned["encoding"]
    assert hashlib.sha256(encoding).hexdigest() == pinned["digest"]


def ref_namespace(name: str) -> tuple[dict[str, bytes], dict[str, Any], bytes]:
    pinned = PINNED["namespaces"][name]
    identity = PINNED["identities"][pinned["identity"]]
    root = bytes.fromhex(PINNED["roots"][pinned["root"]])
    digest = bytes.fromhex(identity["digest"])
    return reference.namespace(digest, pinned["tenant"], pinned["generation"], root), identity["fields"], root


@pytest.mark.parametrize("name", PINNED["namespaces"])
def test_reference_computes_the_same_namespace(name: str) -> None:
    computed, _, _ = ref_namespace(name)
    assert {k: v.hex() for k, v in computed.items()} == {k: PINNED["namespaces"][name][k] for k in computed}
    assert all(len(v) == 32 for v in computed.values())


def ref_chain(number: int) -> tuple[list[bytes], dict[str, bytes], dict[str, Any], bytes]:
    pinned = PINNED["chains"][number]
    ns, identity, root = ref_namespace(pinned["namespace"])
    extras = {int(i): [bytes.fromhex(e) for e in v] for i, v in pinned["extras"].items()}
    return reference.chain(ns, pinned["tokens"], identity["block_tokens"], extras), ns, identity, root


@pytest.mark.parametrize("number", range(len(PINNED["chains"])))
def test_reference_computes_the_same_keys(number: int) -> None:
    pinned = PINNED["chains"][number]
    keys, ns, identity, _ = ref_chain(number)
    assert [k.hex() for k in keys] == [pinned["root"], *pinned["keys"]]
    for group, group_keys in pinned["group_keys"].items():
        assert [reference.group_key(ns, k, int(group)).hex() for k in keys[1:]] == group_keys
    step = identity["block_tokens"]
    digests = [
        reference.tokens_digest(ns, pinned["tokens"][at : at + step], at) for at in range(0, step * len(keys), step)
    ]
    assert [d.hex() for d in digests[: len(keys) - 1]] == pinned["tokens_digests"]


def test_the_same_bytes_framed_otherwise_give_another_key() -> None:
    """The pair that catches missing length prefixes."""
    ab_c, a_bc = PINNED["chains"][1], PINNED["chains"][2]
    assert ["".join(e) for e in ab_c["extras"].values()] == ["".join(e) for e in a_bc["extras"].values()]
    assert ab_c["keys"][0] == a_bc["keys"][0]
    assert ab_c["keys"][1] != a_bc["keys"][1]


def ref_record(number: int) -> bytes:
    """A stored record, built by the reference alone."""
    pinned = PINNED["blocks"][number]
    keys, ns, identity, root = ref_chain(pinned["chain"])
    space = PINNED["namespaces"][PINNED["chains"][pinned["chain"]]["namespace"]]
    tokens, step = PINNED["chains"][pinned["chain"]]["tokens"], identity["block_tokens"]
    index, group = pinned["index"], identity["groups"][pinned["group"]]
    key, key_id = reference.seal_key(root, pinned["sealed"])
    metadata = {
        "format": "stemkv-block/1",
        "key": reference.group_key(ns, keys[index + 1], pinned["group"]).hex(),
        "parent": keys[index].hex(),
        "anchor": keys[index + 1].hex(),
        "namespace": ns["id"].hex(),
        "identity": PINNED["identities"][space["identity"]]["digest"],
        "generation": str(space["generation"]),
        "first_token": str(index * step),
        "tokens": str(step),
        "tokens_digest": reference.tokens_digest(ns, tokens[index * step : (index + 1) * step], index * step).hex(),
        "group": str(pinned["group"]),
        "codec": "raw",
        "codec_params": "",
        "layout": reference.layout(group),
        "created": "1767225600.250",
        "cost": "0.012346",
        "key_id": key_id,
        "nonce": pinned["nonce"],
        "tag": "0" * 32,
    }
    header, plain = reference.header(group, metadata, pinned["sealed"]), bytes.fromhex(pinned["payload"])
    nonce = bytes.fromhex(pinned["nonce"])
    if pinned["sealed"]:
        payload, tag = reference.gcm(key, nonce, plain, header)
    else:
        payload, tag = plain, reference.gcm(key, nonce, b"", header + plain)[1]
    assert key_id == pinned["key_id"]
    return header.replace(b'"tag":"' + b"0" * 32, b'"tag":"' + tag.hex().encode()) + payload


@pytest.mark.parametrize("number", BLOCKS)
def test_reference_writes_the_same_block_file(number: int) -> None:
    pinned, raw = PINNED["blocks"][number], ref_record(number)
    size = pinned["header_bytes"]
    assert raw[8:size].rstrip().decode() == pinned["header"]
    assert raw[size:].hex() == pinned["stored_payload"]
    assert pinned["tag"] in pinned["header"]
    assert hashlib.sha256(raw).hexdigest() == pinned["sha256"]


@pytest.mark.parametrize("number", BLOCKS)
def test_stemkv_reads_what_the_reference_wrote(number: int) -> None:
    pinned = PINNED["blocks"][number]
    name, tokens, extras = make_vectors.chains()[pinned["chain"]]
    identity, tenant, generation, root = make_vectors.namespaces()[name]
    ns = Namespace(
        make_vectors.identities()[identity], tenant=tenant, generation=generation, root=make_vectors.ROOTS[root]
    )
    ref = Chain(ns, tokens, extras).ref(pinned["group"], pinned["index"])
    sealer = Sealer(make_vectors.ROOTS[root], seal=pinned["sealed"])
    assert make.reopen(ref_record(number), ref, sealer).hex() == pinned["payload"]


@pytest.mark.parametrize("number", BLOCKS)
def test_safetensors_opens_block_files(number: int, tmp_path: Path) -> None:
    """Any safetensors reader can open a block file: names, dtypes, shapes, values, and an aligned payload."""
    pinned = PINNED["blocks"][number]
    path = tmp_path / "block.safetensors"
    raw = ref_record(number)
    path.write_bytes(raw)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == json.loads(pinned["header"])["__metadata__"]
        names = set(file.keys())
    assert (8 + struct.unpack("<Q", raw[:8])[0]) % 4096 == 0
    if pinned["sealed"]:
        assert names == {"sealed"}
        assert safetensors.numpy.load_file(path)["sealed"].tobytes().hex() == pinned["stored_payload"]
        return
    tensors = load_file(path)
    whole = torch.cat([tensors[n].contiguous().view(torch.uint8).flatten() for n in ("k", "v")])
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == dict.fromkeys(
        ("k", "v"), (torch.bfloat16, (2, 1, 4, 2))
    )
    assert bytes(whole.tolist()).hex() == pinned["payload"]


def test_safetensors_reads_every_dtype_a_block_may_hold(tmp_path: Path) -> None:
    spec = GroupSpec(HitPolicy.PREFIX, (0,), tuple(TensorSpec(f"t-{n}", n, (2, 4)) for n in DTYPE_BYTES))
    ref = make.chain(1, ns=make.namespace(spec)).ref(0, 0)
    path = tmp_path / "block.safetensors"
    path.write_bytes(make.stored(make.record(ref)))
    with safetensors.safe_open(path, framework="pt") as file:
        got = b"".join(
            np.asarray(file.get_tensor(f"t-{n}").contiguous().view(torch.uint8).flatten()).tobytes()
            for n in DTYPE_BYTES
        )
    assert got == make.content(ref)

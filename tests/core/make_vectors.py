"""Writes ``vectors.json`` from stemkv itself: ``python -m core.make_vectors`` in ``tests/``.

Run once per format version. If a test says that a vector changed, the format changed: see docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from stemkv import block
from stemkv.identity import Adapter, GroupSpec, HitPolicy, Identity, Layout, Shard, TensorSpec
from stemkv.keys import PUBLIC_ROOT, Chain, Namespace
from stemkv.sealing import Sealer

PATH = Path(__file__).with_name("vectors.json")
ROOTS = {"public": PUBLIC_ROOT, "secret": bytes(range(32))}


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def identities() -> dict[str, Identity]:
    kv = (TensorSpec("k", "BF16", (2, 1, 4, 2)), TensorSpec("v", "BF16", (2, 1, 4, 2)))
    plain = Identity(
        weights_digest=sha("weights"),
        weights_source="files",
        config_digest=sha("config"),
        kv_dtype="BF16",
        layout=Layout("transformers", "LHTD", 1),
        groups=(GroupSpec(HitPolicy.PREFIX, (0, 1), kv),),
        block_tokens=4,
    )
    hybrid = Identity(
        weights_digest=sha("other weights"),
        weights_source="hub",
        config_digest=sha("other config"),
        quantization='{"bits":4}',
        adapters=(Adapter(sha("lora"), 0.5), Adapter(sha("lora two"), -2.0)),
        kv_dtype="F16",
        kv_scale_digest=sha("scales"),
        layout=Layout("llama.cpp", "pages", 3, "avx512"),
        shard=Shard(1, 2, 0, 4, 2, 3),
        groups=(
            GroupSpec(HitPolicy.PREFIX, (0, 3), kv),
            GroupSpec(HitPolicy.TRAILING, (1,), (TensorSpec("k", "F16", (1, 8)),), window=4096),
            GroupSpec(HitPolicy.EXACT, (2,), (TensorSpec("conv0", "F32", (1, 3)), TensorSpec("state0", "F32", (1, 2)))),
        ),
        block_tokens=2,
    )
    return {"plain": plain, "hybrid": hybrid}


def as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, msgspec.Struct):
        return {n: as_json(getattr(value, n)) for n in value.__struct_fields__}
    return value.value if isinstance(value, HitPolicy) else value


def namespaces() -> dict[str, tuple[str, str, int, str]]:
    """(identity, tenant, generation, root)"""
    return {
        "plain": ("plain", "", 0, "public"),
        "plain, tenant": ("plain", "tenant-ä", 0, "secret"),
        "hybrid, generation": ("hybrid", "tenant", 2**40 + 7, "secret"),
    }


def vector_of_chain(name: str, tokens: list[int], extras: dict[int, list[bytes]]) -> dict[str, Any]:
    identity, tenant, generation, root = namespaces()[name]
    ns = Namespace(identities()[identity], tenant=tenant, generation=generation, root=ROOTS[root])
    chain = Chain(ns, tokens, extras)
    groups = range(1, len(ns.identity.groups))
    return {
        "namespace": name,
        "tokens": tokens,
        "extras": {str(i): [e.hex() for e in v] for i, v in extras.items()},
        "root": chain.root.hex(),
        "keys": [k.hex() for k in chain.keys],
        "group_keys": {str(g): [k.hex() for k in chain.group_keys(g, range(len(chain)))] for g in groups},
        "tokens_digests": [chain.ref(0, i).tokens_digest.hex() for i in range(len(chain))],
    }


def chains() -> list[tuple[str, list[int], dict[int, list[bytes]]]]:
    return [
        ("plain", [1, 2, 3, 4, 5, 6, 7, 8, 9], {}),
        ("plain", [1, 2, 3, 4, 5, 6, 7, 8, 9], {1: [b"ab", b"c"]}),
        ("plain", [1, 2, 3, 4, 5, 6, 7, 8, 9], {1: [b"a", b"bc"]}),
        ("plain, tenant", [0, 2**32 - 1, 151643, 7], {}),
        ("hybrid, generation", [10, 20, 30, 40], {0: [bytes(range(32))]}),
    ]


def vector_of_block(number: int, group: int, index: int, sealed: bool) -> dict[str, Any]:
    name, tokens, extras = chains()[number]
    identity, tenant, generation, root = namespaces()[name]
    ns = Namespace(identities()[identity], tenant=tenant, generation=generation, root=ROOTS[root])
    ref = Chain(ns, tokens, extras).ref(group, index)
    data, payload = block.begin(ref)
    payload[:] = bytes(i & 0xFF for i in range(len(payload)))
    plain, sealer = bytes(payload), Sealer(ROOTS[root], seal=sealed)
    done = block.finish(ref, data, 0.0123456, sealer, nonce=bytes(range(12)), created=1767225600.25)
    size = block.header_bytes(ref.spec)
    raw = block.with_tag(done) + bytes(done.data[size:])
    return {
        "chain": number,
        "group": group,
        "index": index,
        "sealed": sealed,
        "nonce": bytes(range(12)).hex(),
        "payload": plain.hex(),
        "key_id": sealer.key_id,
        "header_bytes": size,
        "header": raw[8:size].rstrip().decode(),
        "tag": done.tag.hex(),
        "stored_payload": raw[size:].hex(),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def vectors() -> dict[str, Any]:
    out: dict[str, Any] = {"format": block.FORMAT, "roots": {n: r.hex() for n, r in ROOTS.items()}}
    out["identities"] = {
        n: {"fields": as_json(i), "encoding": i.encode().hex(), "digest": i.digest.hex()}
        for n, i in identities().items()
    }
    out["namespaces"] = {}
    for name, (identity, tenant, generation, root) in namespaces().items():
        ns = Namespace(identities()[identity], tenant=tenant, generation=generation, root=ROOTS[root])
        out["namespaces"][name] = {
            "identity": identity,
            "tenant": tenant,
            "generation": generation,
            "root": root,
            "key": ns.key.hex(),
            "id": ns.id.hex(),
            "tenant_key": ns.tenant_key.hex(),
            "tenant_id": ns.tenant_id.hex(),
        }
    out["chains"] = [vector_of_chain(*c) for c in chains()]
    out["blocks"] = [
        vector_of_block(*b) for b in ((0, 0, 1, False), (3, 0, 0, False), (3, 0, 0, True), (4, 2, 1, True))
    ]
    return out


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

"""The format once more, written from ``docs/format.md`` with the standard library only (and AES from cryptography).

It shares no code with ``stemkv``. Identities are plain dictionaries as in ``vectors.json``: bytes are
``{"hex": "..."}``, everything else is itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

PUBLIC_ROOT = b"stemkv public root, no secret\0\0\0"
ORDER = {
    "identity": "schema weights_digest weights_source config_digest quantization adapters kv_dtype kv_scale_digest "
    "layout shard groups block_tokens",
    "adapters": "digest scale",
    "layout": "engine name version isa",
    "shard": "tp_rank tp_size pp_rank pp_size cp_rank cp_size",
    "groups": "policy layers tensors window",
    "tensors": "name dtype shape",
}
METADATA = [
    "format", "key", "parent", "anchor", "namespace", "identity", "generation", "first_token", "tokens",
    "tokens_digest", "group", "codec", "codec_params", "layout", "created", "cost", "key_id", "nonce", "tag",
]  # fmt: skip
WIDTH = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}


def mac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


def sized(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def record(kind: str, value: dict[str, Any]) -> bytes:
    pairs = [b"t" + struct.pack("<I", 2) + scalar(n) + field(n, value[n]) for n in ORDER[kind].split()]
    return b"t" + struct.pack("<I", len(pairs)) + b"".join(pairs)


def field(name: str, value: Any) -> bytes:
    if isinstance(value, dict) and "hex" not in value:
        return record(name, value)
    if isinstance(value, list):
        items = [record(name, v) if isinstance(v, dict) else scalar(v) for v in value]
        return b"t" + struct.pack("<I", len(items)) + b"".join(items)
    return scalar(value)


def scalar(value: Any) -> bytes:
    if isinstance(value, int):
        return b"i" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + sized(value.encode())
    return b"b" + sized(bytes.fromhex(value["hex"]))


def encode_identity(identity: dict[str, Any]) -> bytes:
    names = ORDER["identity"].split()
    pairs = b"".join(scalar(n) + field(n, identity[n]) for n in names)
    return b"stemkv-identity-1" + struct.pack("<I", len(names)) + pairs


def namespace(digest: bytes, tenant: str, generation: int, root: bytes) -> dict[str, bytes]:
    label, number = sized(b"stemkv-ns-1"), sized(struct.pack("<Q", generation))
    key = mac(root, label + sized(digest) + sized(tenant.encode()) + number)
    tenant_key = mac(root, sized(b"stemkv-tenant-1") + sized(tenant.encode()))
    return {"key": key, "id": mac(key, b"id"), "tenant_key": tenant_key, "tenant_id": mac(tenant_key, b"id")}


def chain(ns: dict[str, bytes], tokens: list[int], block_tokens: int, extras: dict[int, list[bytes]]) -> list[bytes]:
    """k_0 .. k_n."""
    keys = [mac(ns["key"], b"root")]
    for i in range(len(tokens) // block_tokens):
        own = b"".join(struct.pack("<I", t) for t in tokens[i * block_tokens : (i + 1) * block_tokens])
        keys.append(mac(ns["key"], keys[-1] + own + b"".join(sized(e) for e in extras.get(i, []))))
    return keys


def group_key(ns: dict[str, bytes], anchor: bytes, group: int) -> bytes:
    return mac(ns["key"], anchor + b"group" + struct.pack("<H", group)) if group else anchor


def tokens_digest(ns: dict[str, bytes], tokens: list[int], first: int) -> bytes:
    return mac(ns["tenant_key"], struct.pack("<Q", first) + b"".join(struct.pack("<I", t) for t in tokens))


def seal_key(root: bytes, seal: bool) -> tuple[bytes, str]:
    key = mac(root, sized(b"stemkv-seal-1") + sized(struct.pack("<Q", int(seal))))
    return key, "public" if root == PUBLIC_ROOT else mac(key, b"id")[:8].hex()


def layout(group: dict[str, Any]) -> str:
    return ";".join(f"{t['name']}:{t['dtype']}:{'x'.join(map(str, t['shape']))}" for t in group["tensors"])


def nbytes(tensor: dict[str, Any]) -> int:
    size = WIDTH[tensor["dtype"]]
    for n in tensor["shape"]:
        size *= n
    return size


def header_bytes(group: dict[str, Any]) -> int:
    """8 bytes of length and the padded JSON."""
    dims = ["x".join(map(str, t["shape"])) for t in group["tensors"]]
    need = 8 + 1536 + sum(128 + 2 * len(t["name"]) + 2 * len(d) for t, d in zip(group["tensors"], dims, strict=True))
    return (need + 4095) // 4096 * 4096


def header(group: dict[str, Any], metadata: dict[str, str], sealed: bool) -> bytes:
    """The canonical header: length, JSON with a zeroed tag, spaces."""
    entries: dict[str, Any] = {}
    at = 0
    for t in group["tensors"]:
        entries[t["name"]] = {"dtype": t["dtype"], "shape": t["shape"], "data_offsets": [at, at + nbytes(t)]}
        at += nbytes(t)
    if sealed:
        entries = {"sealed": {"dtype": "U8", "shape": [at], "data_offsets": [0, at]}}
    meta = {name: metadata[name] for name in METADATA}
    text = json.dumps({"__metadata__": meta, **entries}, separators=(",", ":")).encode()
    size = header_bytes(group) - 8
    return struct.pack("<Q", size) + text.ljust(size)


def gcm(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> tuple[bytes, bytes]:
    """AES-256-GCM from its definition (NIST SP 800-38D): (ciphertext, tag)."""

    def aes(raw: bytes) -> bytes:
        return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(raw)

    def blocks(raw: bytes) -> list[bytes]:
        return [raw[i : i + 16].ljust(16, b"\0") for i in range(0, len(raw), 16)]

    counters = b"".join(nonce + struct.pack(">I", 2 + i) for i in range(len(blocks(plain))))
    cipher = bytes(a ^ b for a, b in zip(plain, aes(counters), strict=False))
    h, y = int.from_bytes(aes(bytes(16)), "big"), 0
    for part in [*blocks(aad), *blocks(cipher), struct.pack(">QQ", 8 * len(aad), 8 * len(cipher))]:
        x, v, y = y ^ int.from_bytes(part, "big"), h, 0
        for bit in range(127, -1, -1):
            y ^= v if x >> bit & 1 else 0
            v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
    first = int.from_bytes(aes(nonce + struct.pack(">I", 1)), "big")
    return cipher, (y ^ first).to_bytes(16, "big")

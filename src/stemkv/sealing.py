"""Tags and encryption of blocks.

Every block carries a 16-byte AES-256-GCM tag over its header and payload. Without sealing the payload stays
plain and the tag is a GMAC; with sealing the payload is encrypted. When no secret is configured the GMAC key is
a public constant: it then catches corruption and mix-ups, not an attacker who can write to the store.

Nonces are 12 random bytes, so one key is good for 2**32 blocks (NIST SP 800-38D); one call takes less than 2**31
bytes, which ``identity.MAX_PAYLOAD_BYTES`` sees to.
"""

from __future__ import annotations

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stemkv.keys import PUBLIC_ROOT, framed

NONCE_BYTES = 12
TAG_BYTES = 16


class Sealer:
    """Tags, seals and opens block records with one key. Stateless after construction, safe to share.

    ``root`` is the operator's secret. Raises ValueError for ``seal`` without one: that would only look like safety.
    """

    def __init__(self, root: bytes = PUBLIC_ROOT, *, seal: bool = False) -> None:
        if seal and root == PUBLIC_ROOT:
            raise ValueError("sealing needs a secret root: the public one is known to everyone")
        key = hmac.digest(root, framed("stemkv-seal-1", int(seal)), "sha256")
        self.key_id = "public" if root == PUBLIC_ROOT else hmac.digest(key, b"id", "sha256")[:8].hex()
        """Names the key in block headers; 16 hex digits, or ``public``. Sealed and unsealed differ also in this."""
        self.seals = seal
        self._aead = AESGCM(key)

    @staticmethod
    def nonce() -> bytes:
        """A fresh random nonce; never derived from a key or content."""
        return os.urandom(NONCE_BYTES)

    def protect(self, record: memoryview, payload_at: int, nonce: bytes) -> bytes:
        """Tag ``record`` (header with a zeroed tag field, then payload); encrypts the payload in place if sealing.

        Returns the tag. Releases the interpreter lock while it works.
        """
        if not self.seals:
            return self._aead.encrypt(nonce, b"", record)
        out = self._aead.encrypt(nonce, record[payload_at:], record[:payload_at])
        record[payload_at:] = memoryview(out)[:-TAG_BYTES]
        return out[-TAG_BYTES:]

    def open(self, record: memoryview, payload_at: int, nonce: bytes, tag: bytes) -> memoryview | None:
        """The verified plain payload, or None if the tag does not fit. Does not change ``record``.

        For an unsealed record the result is a view into ``record``; for a sealed one it is a new buffer.
        """
        try:
            if not self.seals:
                self._aead.decrypt(nonce, tag, record)
                return record[payload_at:]
            # The tag travels in the header; GCM wants it behind the ciphertext.
            sealed = b"".join((record[payload_at:], tag))
            return memoryview(self._aead.decrypt(nonce, sealed, record[:payload_at]))
        except InvalidTag:
            return None

"""The digest of a model's weight files. Imports neither torch nor transformers.

``hub-blobs``: every file is a link into a hub cache's ``blobs/`` folder whose target is named by its sha256, so
nothing has to be read. ``files``: the content is hashed, once; results are remembered by path, size,
modification time and inode in ``$XDG_CACHE_HOME/stemkv/weights.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 4 << 20
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Weight files of a folder, in the order in which transformers prefers them."""

Progress = Callable[[int, int], None]


def weights_digest(paths: Iterable[str | Path], progress: Progress | None = None) -> tuple[bytes, str]:
    """The 32-byte digest of these weight files and how it was obtained (``hub-blobs`` or ``files``).

    For ``files`` only content counts, not names. Blocks while files are read; ``progress`` is called with bytes
    done and in total. Raises OSError if a file cannot be read and ValueError if there are no files.
    """
    files = sorted((Path(p) for p in paths), key=lambda p: p.name)
    if not files:
        raise ValueError("there are no weight files to digest")
    blobs = [_hub_blob(path) for path in files]
    if all(blobs):
        parts = [f"{path.name}\0{blob}\n".encode() for path, blob in zip(files, blobs, strict=True)]
        return hashlib.sha256(b"stemkv-hub-blobs-1\n" + b"".join(parts)).digest(), "hub-blobs"
    digests = sorted(_content_digests(files, progress))
    return hashlib.sha256(b"stemkv-files-1\n" + b"".join(digests)).digest(), "files"


def find_weight_files(name_or_path: str | Path, revision: str | None = None) -> list[Path]:
    """The weight files of a local folder, a file, or a model in the hub cache; empty if there are none.

    Never touches the network.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _hub_snapshot(str(name_or_path), revision)
    if folder is None:
        return []
    for pattern in _PATTERNS:
        found = sorted(folder.glob(pattern))
        if found:
            return _listed_in_index(folder, found)
    return []


def _listed_in_index(folder: Path, found: list[Path]) -> list[Path]:
    """Only the shards that an index names, where there is one: a folder may hold the weights in two forms."""
    index = folder / "model.safetensors.index.json"
    if found[0].suffix != ".safetensors" or not index.is_file():
        single = folder / "model.safetensors"
        return [single] if single in found else found
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return found
    listed = [path for path in found if path.name in names]
    return listed or found


def _hub_snapshot(repo: str, revision: str | None) -> Path | None:
    """The snapshot folder of ``repo`` in the hub cache."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        return None
    base = _hub_cache() / ("models--" + repo.replace("/", "--"))
    revision = revision or "main"
    snapshots = base / "snapshots"
    try:
        commit = (base / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = snapshots / commit
    return folder if folder.is_dir() else None


def _hub_cache() -> Path:
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(  # noqa: PTH118
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(explicit).expanduser() if explicit else Path(home).expanduser() / "hub"


def _hub_blob(path: Path) -> str | None:
    """The sha256 that a hub cache link names, or None if ``path`` is not such a link."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) and target.is_file():
        return target.name
    return None


def _content_digests(files: Sequence[Path], progress: Progress | None) -> list[bytes]:
    cache = _DigestCache()
    stamps = {path: _stamp(path) for path in files}
    known = {path: cache.get(stamps[path]) for path in files}
    unknown = [path for path in files if known[path] is None]
    if unknown:
        total, done = sum(path.stat().st_size for path in unknown), [0] * len(unknown)

        def one(number: int) -> bytes:
            def advance(count: int) -> None:
                done[number] += count
                if progress is not None:
                    progress(sum(done), total)

            return _hash_file(unknown[number], advance)

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            fresh = dict(zip(unknown, threads.map(one, range(len(unknown))), strict=True))
        known.update(fresh)
        # A file that changed while it was read has another stamp now, so its digest is not remembered.
        cache.add({stamps[p]: digest for p, digest in fresh.items() if _stamp(p) == stamps[p]})
    return [digest for digest in known.values() if digest is not None]


def _hash_file(path: Path, advance: Callable[[int], None]) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.digest()


def _stamp(path: Path) -> str:
    """What changes when a file's content does."""
    real = path.resolve()
    status = real.stat()
    return f"{real}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"


class _DigestCache:
    """Digests by stamp in one JSON file. A fault of the file only means that digests are computed again."""

    def __init__(self) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._path = base / "stemkv" / "weights.json"
        self._known = self._read()

    def get(self, stamp: str) -> bytes | None:
        text = self._known.get(stamp)
        return bytes.fromhex(text) if isinstance(text, str) and _SHA256.fullmatch(text) else None

    def add(self, digests: dict[str, bytes]) -> None:
        """Remember ``digests``, keeping what another process wrote meanwhile, at most the newest 1,000."""
        merged = self._read() | {stamp: digest.hex() for stamp, digest in digests.items()}
        text = json.dumps(dict(list(merged.items())[-1000:]), indent=0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".weights-")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).replace(self._path)
        except OSError:
            return

    def _read(self) -> dict[str, str]:
        try:
            data = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}

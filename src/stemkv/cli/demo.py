"""``stemkv demo``: the story of one long prompt, told by real processes on a real model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from stemkv.cli.demo_worker import Task
from stemkv.cli.progress import Progress
from stemkv.errors import ModelError, StemKVError

STEPS = {
    "cold": "first time: everything is computed",
    "warm": "again, same process",
    "restart": "after kill -9 and a new start",
    "second-process": "another process, same folder",
    "other-weights": "other weights, same name",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="hub id, folder or GGUF file (default: smollm2)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default: 4096)")
    parser.add_argument("--new-tokens", type=int, default=24, help="length of the answer (default: 24)")
    parser.add_argument("--out", default="demo.json", help="where the figures go (default: demo.json)")


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="stemkv-demo-") as scratch:
        steps = _Story(args, Path(scratch)).tell()
    Path(args.out).write_text(json.dumps({"steps": [_public(s) for s in steps]}, indent=1) + "\n")
    print(f"\nFigures: {args.out}")
    return 0


class _Story:
    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self._args, self._scratch = args, scratch
        self._steps: list[dict[str, Any]] = []

    def tell(self) -> list[dict[str, Any]]:
        print(f"stemkv demo: one prompt of about {self._args.tokens} tokens, five times, on {self._args.model}\n")
        print(_HEADER)
        first = self._start(self._args.model)
        self._step("cold", first)
        self._step("warm", first)
        first.kill()
        second = self._start(self._args.model)
        self._step("restart", second)
        third = self._start(self._args.model)
        self._step("second-process", third)
        second.close()
        third.close()
        other = self._start(str(self._other_weights(third.weight_file)))
        self._step("other-weights", other)
        other.close()
        answers = {s["name"]: s["output_token_ids"] for s in self._steps if s["name"] != "other-weights"}
        same = all(a == answers["cold"] for a in answers.values())
        print(f"\nThe answer, {'the same each time' if same else 'not the same each time'}: {self._steps[0]['text']!r}")
        return self._steps

    def _start(self, model: str) -> _Process:
        store = self._scratch / "store"
        return _Process(Task(model, str(store), self._args.tokens, self._args.new_tokens))

    def _step(self, name: str, process: _Process) -> None:
        self._steps.append({"name": name, **process.ask()})
        print(table(self._steps)[-1])

    def _other_weights(self, original: Path) -> Path:
        """A copy of the weights under the same file name, with a few values changed."""
        folder = self._scratch / "other"
        copy = folder / original.name
        if original.suffix == ".gguf":
            folder.mkdir()
            shutil.copyfile(original, copy)
        else:
            shutil.copytree(original.parent, folder)
        with copy.open("r+b") as file:
            file.seek(copy.stat().st_size * 3 // 4)
            old = file.read(64)
            file.seek(-len(old), os.SEEK_CUR)
            file.write(bytes(b ^ 0x11 for b in old))
        return copy if copy.suffix == ".gguf" else folder


class _Process:
    """A demo worker and the conversation with it."""

    def __init__(self, task: Task) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stemkv.cli.demo_worker", msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with Progress("loading the model") as bar:
            self.weight_file = Path(self._read("ready", bar)["weight_file"])

    def ask(self) -> dict[str, Any]:
        self._pipe(self._process.stdin).write("run\n")
        self._pipe(self._process.stdin).flush()
        with Progress("computing the prompt") as bar:
            answer = self._read("answer", bar)
        del answer["event"]
        return answer

    def kill(self) -> None:
        """SIGKILL, as a crash or the kernel's out-of-memory killer would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()

    def _read(self, wanted: str, bar: Progress) -> dict[str, Any]:
        for line in self._pipe(self._process.stdout):
            event: dict[str, Any] = json.loads(line)
            if event["event"] == wanted:
                return event
            if event["event"] == "error":
                raise ModelError(event["message"])
            bar.update(event["done"], event["total"])
        raise StemKVError(f"the demo process ended with status {self._process.wait()} before it answered")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise StemKVError("the demo process has no pipe")
        return pipe


def _line(step: str, what: str, ttft: str, faster: str, cached: str, miss: str) -> str:
    return f"  {step:15} {what:36} {ttft:>11} {faster:>6} {cached:>14}   {miss}".rstrip()


_HEADER = _line("", "", "first token", "", "from cache", "why not the rest")


def table(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The demo's table as lines: a header, then one for each step so far."""
    lines = [_HEADER]
    for step in steps:
        faster = steps[0]["ttft_s"] / step["ttft_s"]
        cached = f"{step['cached_tokens']} of {step['prompt_tokens']}"
        speed = f"{faster:.0f}x" if faster >= 1.5 else ""
        lines.append(
            _line(step["name"], STEPS[step["name"]], f"{step['ttft_s']:.2f} s", speed, cached, step["miss"] or "")
        )
    return lines


def _public(step: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in step.items() if k != "text"}

"""Who competes, and the process of each: started, spoken to, stopped while another's turn is measured."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import ROOT
from benchmarks.serving.traces import Outcome, Trace

START_LIMIT = 600.0  # seconds; vLLM compiles for one or two minutes
TRACE_LIMIT = 300.0
BUDGET = 512  # everybody's default


class Unavailable(RuntimeError):
    """A peer that cannot run, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    kind: str  # a key of systems.SYSTEMS
    precision: str
    budget: int = BUDGET  # tokens per forward
    extra: tuple[tuple[str, Any], ...] = ()  # further arguments of ours

    @property
    def name(self) -> str:
        extra = "".join(f" {key}={value}" for key, value in self.extra)
        return f"{self.kind}:{self.precision}{f' budget={self.budget}' if self.budget != BUDGET else ''}{extra}"


def _preload(contender: Contender, python: Path) -> dict[str, str]:
    """vLLM's documentation asks for Intel's OpenMP before everything else; its packages bring it."""
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(openmp)} if contender.kind == "vllm" and openmp.exists() else {}


class Process:
    """A started contender that has answered its first request. Between `awake` blocks it is stopped: an idle peer may spin."""

    def __init__(self, contender: Contender, python: Path, models: Path) -> None:
        """Raises Unavailable."""
        self.contender = contender
        if not python.exists():
            raise Unavailable(f"there is no {python.name} at {python.parent} (`make bench-serve` builds it)")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this)
        options = {
            "kind": contender.kind,
            "models": str(models),
            "precision": contender.precision,
            "budget": contender.budget,
            "spawned": time.monotonic(),
            **dict(contender.extra),
        }
        # The interpreter's own folder goes first: vLLM compiles with tools that were installed beside it.
        path = f"{python.absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.serving.worker", json.dumps(options)],
            cwd=ROOT,
            text=True,
            env={**os.environ, "PATH": path, **quiet, **_preload(contender, python)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            ready = self._answer(START_LIMIT)
        except BaseException:
            self.close()
            raise
        self.facts: Mapping[str, Any] = ready["facts"]
        self.loaded: float = ready["loaded"]  # seconds since the process was started
        self.first_token: float = ready["first_token"]
        self._signal(signal.SIGSTOP)

    def run(self, trace: Trace) -> Outcome:
        with self._awake():
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"trace": [dataclasses.asdict(ask) for ask in trace]}) + "\n")
            self._process.stdin.flush()
            return Outcome.read(self._answer(TRACE_LIMIT))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if ready else ""
        answer: dict[str, Any] = json.loads(line) if line else {}
        if "error" in answer:
            raise Unavailable(answer["error"])
        if not answer:
            raise Unavailable(f"ended without a word: {self._last_words()}" if ready else f"no answer within {limit:.0f} s")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self._process.returncode}; {lines[-1] if lines else 'nothing on stderr'}"


class Fleet:
    """The processes of a leg. A peer that fails is dropped, with the reason; one of ours that fails ends the benchmark."""

    def __init__(self, pythons: Mapping[str, Path], models: Path) -> None:
        self.pythons = pythons
        self.models = models
        self.running: dict[str, Process] = {}
        self.missing: dict[str, str] = {}  # name -> why

    def start(self, contender: Contender) -> Process | None:
        name = contender.name
        if name in self.missing:
            return None
        try:
            process = self.running[name] = Process(contender, self.pythons[contender.kind], self.models)
        except Unavailable as error:
            self._drop(contender, str(error))
            return None
        print(f"  {name}: first token after {process.first_token:.1f} s; {process.facts['kernels']}", flush=True)
        return process

    def run(self, process: Process, trace: Trace) -> Outcome | None:
        try:
            return process.run(trace)
        except Unavailable as error:
            self.running.pop(process.contender.name).close()
            self._drop(process.contender, str(error))
            return None

    def close(self) -> None:
        for process in self.running.values():
            process.close()
        self.running.clear()

    def _drop(self, contender: Contender, why: str) -> None:
        if contender.kind == "ours":
            raise SystemExit(f"{contender.name} does not run: {why}")
        why = " ".join(why.split())[:300]
        print(f"  {contender.name}: {why}", flush=True)
        self.missing[contender.name] = why

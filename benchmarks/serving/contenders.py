"""The contenders of serving and their processes, which are stopped while another's turn is measured."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.traces import Outcome, Trace
from benchmarks.worker import ROOT, Failed, Worker
from benchmarks.workloads import has_bf16_instructions

START_LIMIT = 600.0  # seconds; vLLM compiles for one or two minutes
TRACE_LIMIT = 300.0
BUDGET = 512  # tokens per forward, by default


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


# torch multiplies bf16 with plain loops if the CPU has no instructions for it (workloads, [Note: bf16 without bf16 instructions]):
# there vLLM's best setting is fp32, and it runs in bf16 in `solo` only.
BEST = "bf16" if has_bf16_instructions() else "fp32"
OURS, LLAMA = Contender(kind="ours", precision="bf16"), Contender(kind="llama", precision="bf16")
VLLM = Contender(kind="vllm", precision=BEST)
INT8, INT4 = Contender(kind="ours", precision="int8"), Contender(kind="ours", precision="int4")
Q8, Q4 = Contender(kind="llama", precision="q8_0"), Contender(kind="llama", precision="q4_0")
QUANTIZED = (INT8, INT4, Q8, Q4)
BEFORE = {one: replace(one, kind="before") for one in (OURS, INT8)}  # ours, of another checkout
UNSPLIT = replace(OURS, extra=(("split", False),))
UNCACHED = replace(OURS, extra=(("prefix_caching", False),))


def chosen(contenders: Sequence[Contender], only: Sequence[str], quick: bool) -> list[Contender]:
    """Ours and those that `only` names, else all; with --quick neither 8 bits nor engines that take a minute to load."""
    if only:
        return [one for one in contenders if one.kind in ("ours", "before") or one.name.startswith(tuple(only))]
    slow = ("vllm", "int8", "q8_0") if quick else ()
    return [one for one in contenders if one.kind not in slow and one.precision not in slow]


def environment(kind: str, python: Path, before: Path | None = None) -> dict[str, str]:
    """The interpreter's folder comes first on the path: vLLM compiles with tools that are installed there. vLLM's documentation
    asks for Intel's OpenMP before every other library; its packages bring it. `before`: the checkout of the kind of that name."""
    home = python.absolute().parent
    path = f"{home}{os.pathsep}{os.environ.get('PATH', '')}"
    openmp = home.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if kind == "vllm" and openmp.exists() else {}
    source = {"PYTHONPATH": f"{before}/src{os.pathsep}{ROOT}"} if kind == "before" else {}
    return {"PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | preload | source


class Process:
    """A contender that has answered its first request. It is stopped between traces."""

    def __init__(self, contender: Contender, python: Path, models: Path, before: Path | None = None) -> None:
        """Raises Failed."""
        self.contender = contender
        arguments = {
            "kind": contender.kind,
            "models": str(models),
            "precision": contender.precision,
            "budget": contender.budget,
            "spawned": time.monotonic(),
            **dict(contender.extra),
        }
        target = "benchmarks.serving.systems:serve"
        env = environment(contender.kind, python, before)
        self._worker = Worker(target, arguments, name=contender.name, python=python, env=env)
        try:
            self._worker.ready(START_LIMIT)
            self.facts: Mapping[str, Any] = self._worker.call("facts")
        except BaseException:
            self.close()
            raise
        self.loaded: float = self.facts["loaded"]  # seconds since the process was started
        self.first_token: float = self.facts["first_token"]
        self._worker.stop()

    def run(self, trace: Trace) -> Outcome:
        self._worker.resume()
        try:
            return Outcome(**self._worker.call("play", trace=[dataclasses.asdict(ask) for ask in trace], timeout=TRACE_LIMIT))
        finally:
            self._worker.stop()

    def expert_use(self) -> list[int]:
        """The times that an expert was found in memory, and that it was not."""
        self._worker.resume()
        try:
            return list(self._worker.call("expert_use"))
        finally:
            self._worker.stop()

    def memory(self) -> int:
        """Bytes in memory since its packages were imported."""
        self._worker.resume()
        try:
            return int(self._worker.call("memory"))
        finally:
            self._worker.stop()

    def close(self) -> None:
        self._worker.close()


class Fleet:
    """The processes of a leg, as a context. A peer that fails is dropped, with the reason; ours that fails ends the leg."""

    def __init__(self, pythons: Mapping[str, Path], models: Path, before: Path | None = None) -> None:
        self.pythons = pythons
        self.models = models
        self.before = before
        self.running: dict[str, Process] = {}
        self.missing: dict[str, str] = {}  # name -> why

    def start(self, contender: Contender) -> Process | None:
        name = contender.name
        if name in self.missing:
            return None
        try:
            process = self.running[name] = Process(contender, self.pythons[contender.kind], self.models, self.before)
        except Failed as error:
            self._drop(contender, error)
            return None
        print(f"  {name}: first token after {process.first_token:.1f} s; {process.facts['kernels']}", flush=True)
        return process

    def run(self, process: Process, trace: Trace) -> Outcome | None:
        try:
            return process.run(trace)
        except Failed as error:
            self.running.pop(process.contender.name).close()
            self._drop(process.contender, error)
            return None

    def close(self) -> None:
        for process in self.running.values():
            process.close()
        self.running.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self, contender: Contender, error: Failed) -> None:
        if contender.kind in ("ours", "before"):
            raise error
        print(f"  {error}", flush=True)
        self.missing[contender.name] = error.reason

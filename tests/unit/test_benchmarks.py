"""What the benchmark command does around its legs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as command
from benchmarks.memory import Slope
from benchmarks.peers import Peers


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--quick", "--out"]])
def test_quick_runs_leave_the_results_alone(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leg(*args: Any, **options: Any) -> str:
        return "a figure"

    default, chosen = tmp_path / "RESULTS.md", tmp_path / "chosen.md"
    monkeypatch.setattr(command, "RESULTS", default)
    monkeypatch.setattr(command, "prepare", lambda python: Peers(python=None))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.wire, "run", leg)
    given = [*arguments, *([str(chosen)] if "--out" in arguments else [])]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "wire", *given])
    command.main()
    assert default.exists() == (not arguments)
    assert chosen.exists() == ("--out" in arguments)


def test_memory_is_judged_by_the_larger_count() -> None:
    assert Slope(8.0, None, 0.0).most == 8.0
    assert Slope(8.0, 8.5, 0.0).most == 8.5
    assert Slope(8.0, 7.5, 0.0).most == 8.0

"""What `make train` shows: curves in a terminal, lines in a log, and a report that a browser draws at any width."""

from __future__ import annotations

import importlib
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.observe import report_page
from tests.inference.test_page import MISSING, browser

__all__ = ["browser"]  # a fixture

PRETRAIN = Path(__file__).parents[2] / "examples" / "pretrain"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("tokenizers", reason="the examples extra is not installed")
    monkeypatch.syspath_prepend(PRETRAIN)
    before = {name: sys.modules.pop(name, None) for name in ("report", "data")}
    yield importlib.import_module("report")
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """Column and row, from the left and from above, of each dot of braille characters."""
    places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))  # by bit
    return {
        (2 * i + column, 4 * j + row)
        for j, line in enumerate(lines)
        for i, character in enumerate(line)
        for bit, (column, row) in enumerate(places)
        if (ord(character) - 0x2800) >> bit & 1
    }


def test_a_curve_goes_through_its_points(report: Any) -> None:
    width, height, total = 20, 3, 40
    values = {x: math.sin(x / 5) for x in range(1, 31)}  # the highest at 8, the lowest at 24
    drawn = dots(report.curve([*values.items(), (31, math.nan)], total, width, height))
    column = {x: x * (2 * width - 1) // total for x in values}
    assert {x for x, _ in drawn} == set(range(column[1], column[30] + 1)), "no gap, and nothing after the last step"
    for x, y in values.items():
        assert (column[x], round((1 - y) / 2 * (4 * height - 1))) in drawn
    empty = [chr(0x2800) * width] * height
    assert report.curve([], total, width, height) == empty == report.curve([(1, math.inf)], total, width, height)
    assert {row for _, row in dots(report.curve([(1, 5.0), (40, 5.0)], total, width, height))} == {0}, "a constant is one line"


def shown(report: Any, console: Console, rank: int = 0) -> str:
    with report.display(console, rank=rank, start=0, total=20) as display:
        for step in (5, 10, 20):
            display.show(
                report.Moment(
                    step=step,
                    loss=10 / step,
                    validation_loss=1.25,
                    tokens_per_second=3000.0,
                    memory=[1 << 30, 1 << 29],
                    grad_norm=1.5,
                )
            )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_curves_and_a_log_gets_lines(report: Any) -> None:
    text = shown(report, Console(file=io.StringIO(), force_terminal=True, width=90, height=24))
    for figure in (
        "loss 0.500",
        "0.500 to 2.000",
        "tokens/s 3,000",
        "gradient norm 1.5",
        "memory of a rank 1,024 MiB",
        "val 1.250",
    ):
        assert figure in text
    assert "step 20/20" in text and "\x1b[" in text and any("\u2801" <= character <= "\u28ff" for character in text)
    assert shown(report, Console(file=io.StringIO()), rank=1) == ""
    for console in (
        Console(file=io.StringIO()),
        Console(file=io.StringIO(), force_terminal=True, color_system=None, _environ={"TERM": "dumb"}),
    ):
        lines = shown(report, console).splitlines()
        assert lines[-1] == "step 20/20  loss 0.500  val 1.250  norm 1.5  3,000 tok/s  1024/512 MiB" and len(lines) == 3


@pytest.mark.alone
@pytest.mark.skipif(bool(MISSING), reason=f"the page's test needs {', '.join(MISSING)}")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_the_report(browser: Any, tmp_path: Path, width: int) -> None:
    points = [(2 * i, math.exp(-i / 50)) for i in range(1, 201)]
    series: report_page.Series = {"Train/Samples/train_loss": points, "validation_loss": points[::50]}
    series |= {f"Train/Samples/{name}": points for name in ("grad_norm", "tokens_per_s", "memory_bytes", "a_very_long_name" * 5)}
    series |= {f"expert_load/layers.{i}.moe/{j}": [(x, 1.0) for x, _ in points] for i in range(2) for j in range(4)}
    path = tmp_path / "report.html"
    path.write_text(report_page.page("A title without spaces:" + "x" * 100, series, {"Settings": "a line\n" + "wide " * 60}))
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    wide, room, seen = browser.execute_script(
        "const e = document.documentElement; return [e.scrollWidth, e.clientWidth, innerWidth]"
    )
    assert wide <= room and seen == width, "nothing scrolls sideways"
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12, "legible"
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.plot')].map(e => {"
        "const b = e.getBoundingClientRect(), c = e.querySelector('.curve').getBoundingClientRect();"
        "return [b.width, b.height, c.left - b.left, b.right - c.right, c.top - b.top, b.bottom - c.bottom]})"
    )
    assert len(drawn) == 5 and all(across > 200 and down > 150 for across, down, *_ in drawn)
    assert all(min(margins) >= -2 for _, _, *margins in drawn), "each curve is inside its chart"
    picture = browser.execute_script("const m = document.querySelector('.map'); return [m.naturalWidth, m.naturalHeight]")
    assert picture == [200, 8]
    read = browser.execute_script(
        "const p = document.querySelector('.plot'), b = p.getBoundingClientRect();"
        "p.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + b.width / 2}));"
        "return [p.closest('.chart').querySelector('.at').textContent, p.closest('.chart').querySelector('.key b').textContent]"
    )
    middle = round((points[0][0] + points[-1][0]) / 2)
    assert read[0] == f"{middle} samples" and float(read[1]) == pytest.approx(math.exp(-middle / 100), rel=0.02)
    assert browser.get_log("browser") == []

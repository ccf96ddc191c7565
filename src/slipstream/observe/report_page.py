"""A run as one self-contained HTML page: curves, the newest figures, and texts such as the settings.

series   tag -> points (samples so far, value), in order. Tags whose last part is a number (`expert_load/layers.0/3`) are rows
         of one map; the others are curves, several per chart where `_CHARTS` says so.

The page also holds the points as JSON, so that a run that continues from a checkpoint continues the same curves.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Point = tuple[int, float]
Series = dict[str, list[Point]]

MOST_POINTS = 4000  # per tag; beyond it, neighbors are averaged
EVERY_S = 60.0  # seconds between writes of the page while the run continues
_PREFIX = "Train/Samples/"


class _Chart(NamedTuple):
    title: str
    tags: str  # a pattern for the last part of the tag
    unit: str = ""
    is_rough: bool = True  # drawn with a smoothed curve, and on a logarithmic axis if the values are far apart
    in_tiles: bool = True


_CHARTS = (
    _Chart("Loss", r"(\w+_)?loss"),
    _Chart("Tokens per second", "tokens_per_s"),
    _Chart("Samples per second", "samples_per_s"),
    _Chart("Gradient norm before clipping", "grad_norm"),
    _Chart("Memory", "memory_bytes", "B", is_rough=False),
    _Chart("Learning rate", "lr", is_rough=False, in_tiles=False),
    _Chart("FLOP per second", "flops_per_s"),
    _Chart("Time of a step's parts, ms", r"elapsed_time_ms_\w+", in_tiles=False),
)
_COLORS = ("#2f6fdb", "#e2711d", "#2a9d5c", "#b5408f", "#7a5cc2", "#8a7a1f")


@dataclass(slots=True)
class Curve:
    """A bounded number of points, each the mean of `stride` values."""

    points: list[Point]
    stride: int = 1  # values per point
    held: list[Point] = field(default_factory=list)  # values of the next point

    def add(self, samples: int, value: float) -> None:
        self.held.append((samples, value))
        if len(self.held) == self.stride:
            self.points.append(_mean(self.held))
            self.held.clear()
        if len(self.points) >= MOST_POINTS:
            self.points = [_mean(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self.stride *= 2

    def shown(self) -> list[Point]:
        return self.points + ([_mean(self.held)] if self.held else [])


def _mean(points: Sequence[Point]) -> Point:
    return points[-1][0], sum(value for _, value in points) / len(points)


class Report:
    """The backend `report` of monitors.py. sections: title -> text."""

    def __init__(self, path: str, title: str, sections: Mapping[str, str] | None = None) -> None:
        self.path, self.title, self.sections = Path(path), title, dict(sections or {})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.curves: dict[str, Curve] = {}
        self.is_first = True
        self.written = time.monotonic()

    def write(self, events: Sequence[tuple[str, float, int]]) -> None:
        if self.is_first and events:
            self.is_first, first = False, min(samples for _, _, samples in events)
            before = {tag: [point for point in points if point[0] < first] for tag, points in read_series(self.path).items()}
            self.curves = {tag: Curve(points) for tag, points in before.items() if points}
        for tag, value, samples in events:
            if math.isfinite(value):
                self.curves.setdefault(tag, Curve([])).add(samples, value)
        if time.monotonic() - self.written > EVERY_S:
            self._save()

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(
            page(self.title, {tag: curve.shown() for tag, curve in self.curves.items()}, self.sections), encoding="utf-8"
        )
        os.replace(beside, self.path)
        self.written = time.monotonic()


def read_series(path: Path) -> Series:
    """The points of a page; empty if the page does not exist."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r'<script type="application/json" id="series">(.*?)</script>', text, re.DOTALL)
    read = json.loads(found[1].replace(r"<\/", "</")) if found else {}
    return {tag: [(samples, value) for samples, value in points] for tag, points in read.items()}


def page(title: str, series: Series, sections: Mapping[str, str]) -> str:
    curves = {tag: points for tag, points in series.items() if points and not tag.rpartition("/")[2].isdigit()}
    charts = _charts(curves)
    parts = [_chart(chart, {tag: curves[tag] for tag in tags}) for chart, tags in charts]
    maps: dict[str, Series] = {}
    for tag in series.keys() - curves.keys():
        maps.setdefault(tag.partition("/")[0], {})[tag] = series[tag]
    parts += [_map(name, rows) for name, rows in sorted(maps.items()) if any(rows.values())]
    texts = [
        f"<details{' open' if i == 0 else ''}><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for i, (name, text) in enumerate(sections.items())
    ]
    data = json.dumps(series, separators=(",", ":")).replace("</", r"<\/")
    last = max((points[-1][0] for points in series.values() if points), default=0)
    head = f"{last:,} samples · {time.strftime('%Y-%m-%d %H:%M')}"
    return _PAGE.format(
        title=html.escape(title),
        head=head,
        style=_STYLE,
        tiles="".join(_tiles(charts, curves)),
        charts="".join(parts) or "<p>No figures yet.</p>",
        texts="".join(texts),
        data=data,
        script=_SCRIPT,
    )


def _charts(curves: Series) -> list[tuple[_Chart, list[str]]]:
    """The charts and their tags, in the order of the page."""
    left, charts = dict.fromkeys(curves), list[tuple[_Chart, list[str]]]()
    for chart in _CHARTS:
        tags = [tag for tag in left if re.fullmatch(chart.tags, tag.rpartition("/")[2])]
        if tags:
            charts.append((chart, tags))
        for tag in tags:
            del left[tag]
    return charts + [(_Chart(tag.removeprefix(_PREFIX), "", in_tiles=False), [tag]) for tag in left]


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential moving average, corrected for the bias of its start."""
    means, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        means.append(total / norm)
    return means


def short(value: float, unit: str = "") -> str:
    """A number in a few characters: 12.3k, 1.25e-05, or bytes in MiB."""
    base, names = (1024.0, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1e3, ("", "k", "M", "G", "T", "P"))
    if abs(value) < (1 if unit else 999.5):
        return f"{value:.3g}"
    power = min(int(math.log(abs(value), base) + 1e-9), len(names) - 1)
    scaled = f"{value / base**power:.3g}" if abs(value) / base**power < 999.5 else f"{value / base**power:.0f}"
    return f"{scaled} {names[power]}{unit}" if unit else f"{scaled}{names[power]}"


def _tiles(charts: Iterable[tuple[_Chart, list[str]]], curves: Series) -> Iterable[str]:
    """The newest figures, speeds as medians."""
    for chart, tags in charts:
        for tag in tags if chart.in_tiles else ():
            values = [value for _, value in curves[tag]]
            name, value = tag.rpartition("/")[2].replace("_", " "), smoothed(values)[-1] if "train" in tag else values[-1]
            if "per second" in chart.title:
                name, value = f"{chart.title.lower()}, median", sorted(values)[len(values) // 2]
            elif chart.unit == "B":
                name, value = "most memory, rank 0", max(values)
            yield f"<div class=tile><b>{short(value, chart.unit)}</b><span>{html.escape(name)}</span></div>"


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Round values inside a range."""
    if is_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // 5)]
    raw = (high - low) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _chart(chart: _Chart, curves: Series) -> str:
    """Curves in coordinates from 0 to 1000, which the page stretches to its width; labels are text beside them."""
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    is_log = chart.is_rough and min(ys) > 0 and max(ys) > 100 * min(ys)
    low, high = min(ys), max(ys)
    if high == low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    if is_log:
        low, high = low / 1.1, high * 1.1
    else:
        margin = 0.04 * (high - low)
        low, high = (0.0 if low >= 0 and low < margin * 5 else low - margin), high + margin
    left, right = min(xs), max(max(xs), min(xs) + 1)

    def across(x: float) -> float:
        return 1000 * (x - left) / (right - left)

    def down(y: float) -> float:
        part = math.log(y / low) / math.log(high / low) if is_log else (y - low) / (high - low)
        return 1000 * (1 - part)

    ticks = [(down(y), short(y, chart.unit)) for y in _ticks(low, high, is_log)]
    lines = [f'<path class=grid d="M0 {at:.1f}H1000"/>' for at, _ in ticks]
    legend = []
    for (tag, points), color in zip(curves.items(), _COLORS * (1 + len(curves) // len(_COLORS)), strict=False):
        values = [value for _, value in points]
        drawn = [("", values)]
        if chart.is_rough and len(points) > 40:  # the mean of both directions does not lag
            both = zip(smoothed(values), reversed(smoothed(values[::-1])), strict=True)
            drawn = [("raw", values), ("", [(ahead + back) / 2 for ahead, back in both])]
        for kind, heights in drawn:
            path = "L".join(f"{across(x):.1f} {down(y):.1f}" for (x, _), y in zip(points, heights, strict=True))
            dot = "h0" if len(points) == 1 else ""
            lines.append(f'<path class="curve {kind}" stroke="{color}" d="M{path}{dot}"/>')
        name = html.escape(tag.removeprefix(_PREFIX))
        legend.append(f'<span class=key data-tag="{html.escape(tag)}" data-unit="{chart.unit}">')
        legend.append(f'<i style="background:{color}"></i>{name} <b>{short(values[-1], chart.unit)}</b></span>')
    marks = "".join(f'<span style="top:{at / 10:.2f}%">{text}</span>' for at, text in ticks)
    scale = " <small>logarithmic</small>" if is_log else ""
    return (
        f"<section class=chart><h2>{html.escape(chart.title)}{scale}</h2><div class=legend>{''.join(legend)}</div>"
        f'<div class=frame><div class=marks>{marks}</div><div class=plot data-left="{left}" data-right="{right}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role=img aria-label="{html.escape(chart.title)}">'
        f"{''.join(lines)}</svg><div class=cursor></div></div></div>"
        f"<div class=ends><span>{left:,}</span><span class=at>samples</span><span>{right:,}</span></div></section>"
    )


def _by_number(tag: str) -> list[tuple[int, str]]:
    """Sorts layers.10 after layers.2."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", tag)]


def _map(name: str, rows: Series) -> str:
    """Values from 0 to 2 times their mean of 1, as colors: a picture with a row per tag."""
    numbered = sorted(rows, key=_by_number)
    width = max(len(rows[tag]) for tag in numbered)
    lines = [[value for _, value in rows[tag]] for tag in numbered]
    picture = _png([[_color(line[min(i * len(line) // width, len(line) - 1)]) for i in range(width)] for line in lines])
    first, last = (min(rows[tag][0][0] for tag in numbered), max(rows[tag][-1][0] for tag in numbered))
    groups = list(dict.fromkeys(tag.rpartition("/")[0].partition("/")[2] for tag in numbered))
    return (
        f"<section class=chart><h2>{html.escape(name.replace('_', ' ').capitalize())}</h2><div class=legend>"
        f"<span>{len(numbered)} rows, top to bottom: {html.escape(', '.join(groups))}; "
        f"dark is 0, teal the mean, yellow twice the mean"
        f'</span></div><img class=map alt="{html.escape(name)}" src="data:image/png;base64,{picture}">'
        f"<div class=ends><span>{first:,}</span><span>samples</span><span>{last:,}</span></div></section>"
    )


_STOPS = ((0x44, 0x01, 0x54), (0x3B, 0x52, 0x8B), (0x21, 0x91, 0x8C), (0x5E, 0xC9, 0x62), (0xFD, 0xE7, 0x25))  # viridis


def _color(value: float) -> bytes:
    at = min(max(value / 2, 0.0), 1.0) * (len(_STOPS) - 1)
    i = min(int(at), len(_STOPS) - 2)
    return bytes(round(a + (at - i) * (b - a)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))


def _png(rows: Sequence[Sequence[bytes]]) -> str:
    """A picture of RGB pixels, in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + b"".join(row) for row in rows))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")).decode()


_STYLE = """
:root{color-scheme:light dark;--back:#f6f7f9;--card:#fff;--text:#1c2330;--soft:#667085;--line:#e3e7ee}
@media(prefers-color-scheme:dark){:root{--back:#12151b;--card:#1b2029;--text:#e6e9ef;--soft:#98a2b3;--line:#2d3440}}
*{box-sizing:border-box}
body{margin:0;overflow-wrap:anywhere;background:var(--back);color:var(--text);font:15px/1.45 system-ui,sans-serif}
main{max-width:1200px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:24px;margin:0}h2{font-size:15px;margin:0 0 2px}small,.head{color:var(--soft);font-weight:400}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:12px;margin:18px 0}
.tile,.chart,details{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:10px 14px}.tile b{display:block;font-size:20px;white-space:nowrap}.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.chart{padding:14px 16px 10px;min-width:0}
.legend{font-size:13px;color:var(--soft);min-height:20px;display:flex;flex-wrap:wrap;gap:2px 14px;margin-bottom:8px}
.legend b{color:var(--text)}
.key i{display:inline-block;width:12px;height:3px;border-radius:2px;vertical-align:middle;margin-right:5px}
.frame{display:flex;height:220px}.marks{position:relative;width:58px;flex:none;font-size:12px;color:var(--soft)}
.marks span{position:absolute;right:8px;transform:translateY(-50%);white-space:nowrap}
.plot{position:relative;flex:1;min-width:0;border-left:1px solid var(--line);border-bottom:1px solid var(--line);touch-action:pan-y}
.plot svg{position:absolute;inset:0;width:100%;height:100%}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.grid{stroke:var(--line);stroke-width:1}.curve{stroke-width:2}.raw{stroke-width:1;opacity:.3}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);display:none}
.ends{display:flex;justify-content:space-between;font-size:12px;color:var(--soft);padding:4px 0 0 58px}
.map{width:calc(100% - 58px);margin-left:58px;height:200px;display:block;image-rendering:pixelated}
details{margin-top:16px;padding:12px 16px}summary{cursor:pointer;font-weight:600}
pre{overflow:auto;font:12px/1.5 ui-monospace,monospace;max-height:560px;margin:10px 0 0}
"""
_SCRIPT = """
const series=JSON.parse(document.getElementById("series").textContent);
const text=(v,unit)=>unit==="B"?(v/2**20).toFixed(0)+" MiB":Number(v.toPrecision(4)).toString();
for(const plot of document.querySelectorAll(".plot")){
  const chart=plot.closest(".chart"),cursor=plot.querySelector(".cursor"),at=chart.querySelector(".at");
  const keys=[...chart.querySelectorAll(".key")],last=keys.map(k=>k.querySelector("b").textContent);
  plot.onpointermove=e=>{
    const box=plot.getBoundingClientRect(),part=Math.min(1,Math.max(0,(e.clientX-box.left)/box.width));
    const x=+plot.dataset.left+part*(plot.dataset.right-plot.dataset.left);
    cursor.style.display="block";cursor.style.left=100*part+"%";at.textContent=Math.round(x).toLocaleString("en")+" samples";
    keys.forEach(k=>{
      const near=series[k.dataset.tag].reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);
      k.querySelector("b").textContent=text(near[1],k.dataset.unit);
    });
  };
  plot.onpointerleave=()=>{
    cursor.style.display="none";at.textContent="samples";keys.forEach((k,i)=>k.querySelector("b").textContent=last[i]);
  };
}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
<h1>{title}</h1><div class="head">{head}</div><div class="tiles">{tiles}</div><div class="charts">{charts}</div>{texts}
</main><script type="application/json" id="series">{data}</script><script>{script}</script></body></html>
"""

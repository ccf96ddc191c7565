"""A picture of curves over time, as an SVG for docs/: a line for each contender, time on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 400, 56, 44, 190, 48
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f", "#7f7f7f")
_STYLE = (
    ".ink{fill:#1f2328}.faint{fill:#59636e}.grid{stroke:#d1d9e0}.ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){.ink{fill:#f0f6fc}.faint{fill:#9198a1}.grid{stroke:#3d444d}.ground{fill:#0d1117}}"
)
Curve = Sequence[tuple[float, float]]


def draw(curves: Mapping[str, Curve], title: str, across: str, up: str) -> str:
    """An SVG of curves of points (x > 0, y); `across` and `up` name the axes."""
    points = [point for curve in curves.values() for point in curve]
    left, right = (limit(math.log10(x) for x, _ in points) for limit in (min, max))
    low, high = (limit(y for _, y in points) for limit in (min, max))
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (math.log10(x) - left) / (right - left) * wide, _TOP + (high - y) / (high - low) * tall

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="ink" x="12" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text class="faint" x="{_LEFT + wide / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>',
        f'<text class="faint" x="12" y="{_TOP - 4}">{escape(up)}</text>',
    ]
    for power in range(math.floor(left), math.ceil(right) + 1):
        for digit in (1, 2, 5):
            if left <= math.log10(digit * 10**power) <= right:
                x, _ = place(digit * 10**power, high)
                parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + tall}"/>')
                parts.append(
                    f'<text class="faint" x="{x:.1f}" y="{_TOP + tall + 16}" text-anchor="middle">{digit * 10**power:g}</text>'
                )
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 1e9) if (high - low) / step <= 8)
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        _, y = place(10**left, i * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        color, key = _COLORS[i % len(_COLORS)], _TOP + 12 + 20 * i
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 14}" y="{key - 10}" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text class="ink" x="{_WIDTH - _RIGHT + 34}" y="{key - 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])

"""Pictures of a pipeline's step, simulated or measured: text for a terminal, SVG for a page. One row per rank."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain

from slipstream.parallel.schedule import Kind, Schedule, Span

_MEANING = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradients of the weights",
}
_COLORS = {Kind.FORWARD: (52, 112, 214), Kind.BACKWARD: (126, 82, 196), Kind.INPUT: (24, 138, 102), Kind.WEIGHT: (190, 104, 22)}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LABEL, _WIDTH, _ROW, _TOP, _BOTTOM = 64, 960, 30, 44, 58  # of the SVG, in pixels
_STYLE = """
.ground{fill:#fff}.track{fill:#eceef1}.ink{fill:#1f2328}.faint{fill:#59636e}.grid{stroke:#c9cfd6;stroke-width:1}.light{fill:#fff}
@media(prefers-color-scheme:dark){.ground{fill:#0d1117}.track{fill:#21262d}.ink{fill:#e6edf3}.faint{fill:#9198a1}.grid{stroke:#3d444d}}
"""


def draw_text(timeline: Schedule | Iterable[Span], width: int = 100, title: str = "") -> str:
    """Return lines of at most `width` characters, `width` >= 40: a title with the idle share, a row for each rank, a legend.

    The shortest action takes up to four columns if that fits, otherwise the step takes all columns. Labels are the kind and the
    micro-batch, in lower case for a rank's second and later chunks; only the kind if there is no room.
    """
    spans, title = _read(timeline, title)
    ranks, begin, end = sorted({span.rank for span in spans}), min(span.start for span in spans), max(span.stop for span in spans)
    names = [f"rank {rank} |" for rank in ranks]
    margin = max(map(len, names))
    room = width - margin - 1
    shortest = min(span.stop - span.start for span in spans)
    units = (end - begin) / shortest if shortest > 0 else math.inf
    scale = min(4, room // units) / shortest if units <= room else room / (end - begin)
    lines = []
    for name, rank in zip(names, ranks, strict=True):
        row = ["."] * round((end - begin) * scale)
        for span in (span for span in spans if span.rank == rank):
            start, stop = round((span.start - begin) * scale), round((span.stop - begin) * scale)
            kind = span.action.kind.lower() if span.action.chunk else str(span.action.kind)
            label = f"{kind}{span.action.micro}"
            row[start:stop] = (label if len(label) <= stop - start else kind).ljust(stop - start, "-")[: stop - start]
        lines.append(f"{name:>{margin}}{''.join(row)}|")
    kinds = [f"{kind} {_MEANING[kind]}" for kind in Kind if any(span.action.kind == kind for span in spans)]
    chunks = ["lower case: a later chunk"] if any(span.action.chunk for span in spans) else []
    return "\n".join([*textwrap.wrap(title, width), *lines, *textwrap.wrap(" | ".join([*kinds, ". idle", *chunks]), width)])


def draw_svg(timeline: Schedule | Iterable[Span], title: str = "") -> str:
    """Return a self-contained SVG: a title with the idle share, a row for each rank, a time axis, a legend.

    The number in an action is its micro-batch; later chunks of a rank are darker. Colors follow the reader's light or dark theme.
    """
    spans, title = _read(timeline, title)
    ranks, begin, end = sorted({span.rank for span in spans}), min(span.start for span in spans), max(span.stop for span in spans)
    scale, floor = (_WIDTH - _LABEL - 16) / (end - begin), _TOP + len(ranks) * _ROW
    top = {rank: _TOP + i * _ROW for i, rank in enumerate(ranks)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {floor + _BOTTOM}" width="{_WIDTH}" '
        f'height="{floor + _BOTTOM}" font-family="system-ui,sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{floor + _BOTTOM}"/>',
        f'<text class="ink" x="12" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    parts += _axis(end - begin, scale, floor)
    for rank, y in top.items():
        parts.append(f'<text class="ink" x="12" y="{y + 17}">rank {rank}</text>')
        parts.append(f'<rect class="track" x="{_LABEL}" y="{y}" width="{(end - begin) * scale:.1f}" height="{_ROW - 6}"/>')
    num_chunks = 1 + max(span.action.chunk for span in spans)
    for span in spans:
        kind, chunk, micro = span.action
        x, y, size = _LABEL + (span.start - begin) * scale, top[span.rank], (span.stop - span.start) * scale
        times = f"{_seconds(span.start - begin)} to {_seconds(span.stop - begin)}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{size - min(0.8, size / 8):.1f}" height="{_ROW - 6}" rx="2" '
            f'fill="{_color(kind, chunk, num_chunks)}"><title>{kind} chunk {chunk} micro-batch {micro}: {times}</title></rect>'
        )
        if size >= 6 + 6.5 * len(str(micro)):
            middle = x + size / 2
            parts.append(f'<text class="light" x="{middle:.1f}" y="{y + 16}" font-size="11" text-anchor="middle">{micro}</text>')
    parts += _legend([kind for kind in Kind if any(span.action.kind == kind for span in spans)], num_chunks, floor + 42)
    return "\n".join([*parts, "</svg>\n"])


def _read(timeline: Schedule | Iterable[Span], title: str) -> tuple[list[Span], str]:
    """The actions in order of time, and the title with the step's time and idle share."""
    if isinstance(timeline, Schedule):
        title = title or f"{timeline.style}, {timeline.num_ranks} ranks, {timeline.num_micro} micro-batches"
        timeline = chain.from_iterable(timeline.spans)
    spans = sorted(timeline, key=lambda span: (span.rank, span.start))
    if not spans:
        raise ValueError("no actions to draw: pass a Schedule or at least one Span")
    step = max(span.stop for span in spans) - min(span.start for span in spans)
    busy, num_ranks = math.fsum(span.stop - span.start for span in spans), len({span.rank for span in spans})
    return spans, f"{title}{': ' if title else ''}step {_seconds(step)}, idle {1 - busy / (num_ranks * step):.1%}"


def _seconds(value: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if value >= unit), _UNITS[-1] if value else _UNITS[0])
    return f"{value / unit:.4g} {name}"


def _color(kind: Kind, chunk: int, num_chunks: int) -> str:
    shade = 1 - 0.42 * chunk / max(1, num_chunks - 1)
    return f"#{''.join(f'{round(value * shade):02x}' for value in _COLORS[kind])}"


def _axis(seconds: float, scale: float, y: int) -> list[str]:
    """Five to ten ticks at round times."""
    digit = 10 ** math.floor(math.log10(seconds / 5))
    step = max(digit * factor for factor in (1, 2, 5) if digit * factor <= seconds / 5)
    parts = []
    for i in range(math.floor(seconds / step * (1 + 1e-9)) + 1):
        x = _LABEL + i * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{y}"/>')
        parts.append(
            f'<text class="faint" x="{x:.1f}" y="{y + 14}" font-size="11" text-anchor="middle">{_seconds(i * step)}</text>'
        )
    return parts


def _legend(kinds: Sequence[Kind], num_chunks: int, y: int) -> list[str]:
    """A color swatch for each chunk of each kind."""
    entries = [([_color(kind, chunk, num_chunks) for chunk in range(num_chunks)], f"{kind} {_MEANING[kind]}") for kind in kinds]
    parts, x = [], float(_LABEL)
    for colors, text in entries:
        for color in colors:
            parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
            x += 14
        parts.append(f'<text class="ink" x="{x + 3:.1f}" y="{y}">{text}</text>')
        x += 20 + 6.5 * len(text)
    parts.append(f'<rect class="track" x="{x:.1f}" y="{y - 10}" width="12" height="12"/>')
    note = "idle; darker: later chunks of the rank" if num_chunks > 1 else "idle"
    return [*parts, f'<text class="ink" x="{x + 17:.1f}" y="{y}">{note}</text>']

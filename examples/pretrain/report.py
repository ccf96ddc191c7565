"""What a person sees of a run: curves while it trains, the loss curve as a picture, the closing figures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from data import Facts


@dataclass(slots=True, kw_only=True)
class History:
    """The run so far, kept in the checkpoint so that a resumed run draws one curve."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # nats per token, mean since the last entry, over all ranks
    validation_steps: list[int] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)  # at each of `steps`: of each layer's experts, over their mean
    tokens: int = 0  # seen by all ranks
    seconds: float = 0.0  # spent on training alone: no evaluation, no saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    step: int
    loss: float
    validation_loss: float | None  # the newest
    tokens_per_second: float
    memory: list[int]  # bytes, by rank
    grad_norm: float  # of the newest step, before clipping


class Display(ABC):
    """Shows moments of a training run while it is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def show(self, moment: Moment) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Silent(Display):
    """Every rank but the first."""

    def show(self, moment: Moment) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Display):
    """One line every `every` steps, for logs."""

    def __init__(self, console: Console, total: int, every: int) -> None:
        self.console, self.total, self.every = console, total, every
        self.due = 0

    def show(self, moment: Moment) -> None:
        if moment.step < self.due and moment.step < self.total:
            return
        self.due = moment.step + self.every
        self.console.print(f"step {moment.step:>{len(str(self.total))}}/{self.total}  {_figures(moment)}", highlight=False)

    def close(self) -> None:
        pass


class Charts(Display):
    """Curves over the steps and a progress bar, for terminals."""

    def __init__(self, console: Console, total: int, start: int) -> None:
        self.console, self.start, self.total = console, start, total
        self.moments: list[Moment] = []
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[validation]}"),
            TimeElapsedColumn(),
            TextColumn("/"),
            TimeRemainingColumn(),
            expand=True,
        )
        self.task = self.progress.add_task("train", total=total, completed=start, validation="")
        self.live = Live(console=console, refresh_per_second=1, get_renderable=self.draw)
        self.live.start()

    def show(self, moment: Moment) -> None:
        self.moments.append(moment)
        self.progress.update(self.task, completed=moment.step, validation=_validation(moment).strip())
        self.live.refresh()

    def draw(self) -> Group:
        """Two charts beside each other, as high as the terminal allows."""
        width, height = self.console.width // 2 - 4, min(8, max(1, (self.console.height - 2) // 2 - 2))
        grid = Table.grid()
        moments = list(self.moments)
        panels = []
        for title, value, text in CURVES:
            points = [(moment.step - self.start, value(moment)) for moment in moments]
            ys = [y for _, y in points]
            panels.append(
                Panel(
                    "\n".join(curve(points, self.total - self.start, width, height)),
                    title=f"{title} {text(ys[-1])}" if ys else title,
                    subtitle=f"{text(min(ys))} to {text(max(ys))}" if ys else None,
                    title_align="left",
                    subtitle_align="right",
                    width=width + 4,
                )
            )
        for pair in zip(panels[::2], panels[1::2], strict=True):
            grid.add_row(*pair)
        return Group(grid, self.progress)

    def close(self) -> None:
        self.live.stop()


# Title of each chart, its value, and the value as text
CURVES: tuple[tuple[str, Callable[[Moment], float], Callable[[float], str]], ...] = (
    ("loss", lambda moment: moment.loss, "{:.3f}".format),
    ("tokens/s", lambda moment: moment.tokens_per_second, "{:,.0f}".format),
    ("gradient norm", lambda moment: moment.grad_norm, "{:.3g}".format),
    ("peak memory of a rank", lambda moment: max(moment.memory) / 2**20, "{:,.0f} MiB".format),
)
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def curve(points: Sequence[tuple[int, float]], total: int, width: int, height: int) -> list[str]:
    """Lines of `width` characters, from the highest value down: a line through points (0 < x <= total, y) whose y is finite."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    cells = [[0] * width for _ in range(height)]
    if points:
        at = np.array([x for x, _ in points]) * (2 * width - 1) // total
        values = np.array([y for _, y in points], dtype=float)
        columns = np.unique(at)
        filled = np.arange(columns[0], columns[-1] + 1)
        heights = np.interp(filled, columns, [values[at == column].mean() for column in columns])
        low, high = heights.min(), heights.max()
        rows = np.rint((high - heights) / ((high - low) or 1.0) * (4 * height - 1)).astype(int).tolist()
        for column, row, before in zip(filled.tolist(), rows, [rows[0], *rows], strict=False):
            for dot in range(min(row, before), max(row, before) + 1):
                cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def display(console: Console, *, rank: int, start: int, total: int) -> Display:
    if rank:
        return Silent()
    if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return Charts(console, total, start)
    return Lines(console, total, every=max(1, total // 30))


def mebibytes(memory: list[int]) -> str:
    return "/".join(f"{nbytes / 2**20:.0f}" for nbytes in memory) + " MiB"


def _validation(moment: Moment) -> str:
    return f"  val {moment.validation_loss:.3f}" if moment.validation_loss is not None else ""


def _figures(moment: Moment) -> str:
    speed, norm = f"{moment.tokens_per_second:,.0f} tok/s", f"norm {moment.grad_norm:.3g}"
    return f"loss {moment.loss:.3f}{_validation(moment)}  {norm}  {speed}  {mebibytes(moment.memory)}"


def bits_per_byte(loss: float, facts: Facts) -> float:
    """Of the validation files: what the model needs to send them, all tokens over all bytes."""
    return loss / math.log(2) * (facts.validation_tokens - 1) / facts.validation_bytes


def gzip_bits_per_byte(facts: Facts) -> float:
    return 8 * facts.validation_gzip_bytes / facts.validation_bytes


def plot(history: History, validation_loss: float, facts: Facts, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if history.loads:
        figure, (axes, below) = pyplot.subplots(2, figsize=(8, 7.5), height_ratios=(3, 2), layout="constrained")
        _plot_loads(figure, below, history)
    else:
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(history.steps, history.losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(history.steps, _smoothed(history.losses), color="tab:blue", label="training")
    axes.plot(history.validation_steps, history.validation_losses, "o-", color="tab:orange", label="validation")
    gzip_loss = gzip_bits_per_byte(facts) / bits_per_byte(1.0, facts)
    label = f"gzip -9 of the validation files ({gzip_bits_per_byte(facts):.2f} bits per byte)"
    axes.axhline(gzip_loss, color="gray", linestyle="--", label=label)
    model_bits = bits_per_byte(validation_loss, facts)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"validation: {validation_loss:.3f} nats per token, {model_bits:.3f} bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_loads(figure: Any, axes: Any, history: History) -> None:
    """Expert by step; the experts of the first layer come first. Steps before the experts were counted are left out."""
    steps = history.steps[-len(history.loads) :]
    columns = list(zip(*history.loads, strict=True))
    between = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0]
    extent = (steps[0] - between, steps[-1], len(columns), 0)  # a column ends at the step that counted it
    picture = axes.imshow(columns, aspect="auto", interpolation="nearest", extent=extent, cmap="viridis", vmin=0, vmax=2)
    axes.set_xlabel("step")
    axes.set_ylabel("expert, layer by layer")
    figure.colorbar(picture, ax=axes, label="load over the mean")


def _smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """An exponential mean without the bias of its start."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def summary(history: History, validation_loss: float, facts: Facts, memory: list[int]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    model_bits, gzip = bits_per_byte(validation_loss, facts), gzip_bits_per_byte(facts)
    rows: list[tuple[str, Any]] = [
        ("training loss", f"{history.losses[0]:.3f} -> {_smoothed(history.losses)[-1]:.3f} nats per token"),
        ("validation loss", f"{validation_loss:.3f} nats per token"),
        ("bits per byte", f"{model_bits:.3f} (gzip -9 on the same files: {gzip:.3f})"),
        ("tokens seen", f"{history.tokens:,} of {facts.train_tokens:,} in the training files"),
        ("speed", f"{history.tokens / history.seconds:,.0f} tokens/s over all ranks"),
        ("memory, peak by rank", mebibytes(memory)),
    ]
    for row in rows:
        table.add_row(*row)
    return table

"""The leg `rows`: a step of a model that is mostly a table of which a batch uses few rows, with sparse and with dense gradients.

Each rank runs in a network namespace of its own, whose interface is limited and counts what it sends (benchmarks/wire.py). The
formula, for stage 0, where only gradients are sent: each rank sends the rows that it has used to their owners, and each owner its
sums to all others, as elements in bf16 and a number of 4 bytes per row; the head's gradients take a ring.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.legs import Options
from benchmarks.ranks import Ranks
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import Failed

if TYPE_CHECKING:
    from benchmarks.worker import Channel

WORLD, LINK = 4, "400mbit"
ROWS, WIDTH, USED, CLASSES = 65_536, 128, 1_310, 16  # 2 % of the rows on each rank
ROW, HEAD = WIDTH * 2 + 4, WIDTH * CLASSES  # bytes of a row and its number; weights of the head
BYTES, FASTER = 1.05, 5.0
FIRST, COUNT = 2, 3


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.rows(ids).mean(1)).float(), targets)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """USED different rows, 10 in each sample."""
    generator = torch.Generator().manual_seed(1 + rank)
    ids = torch.randperm(ROWS, generator=generator)[:USED].view(-1, 10)
    return ids, torch.randint(CLASSES, (len(ids),), generator=generator)


def train(channel: Channel, sparse: bool) -> None:
    """The target of a rank."""
    torch.set_num_threads(1)
    import slipstream

    torch.manual_seed(0)
    inputs = batch(int(os.environ["RANK"]))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(inputs[0]),
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "sparse_gradients": sparse,
        "slipstream": {"transport": "gloo"},
        "steps_per_print": 2**31,
    }
    engine = slipstream.initialize(model=Table(), config=config)[0]

    def steps(count: int) -> dict[str, list[float]]:
        times, losses = [], []
        for _ in range(count):
            start = time.perf_counter()
            loss = engine(*inputs)
            engine.backward(loss)
            engine.step()
            times.append(time.perf_counter() - start)
            losses.append(float(loss))
        return {"times": times, "losses": losses}

    channel.serve({"steps": steps})


def formula() -> float:
    """Bytes per step of the rank that sends most: rows to their owners, and each owner's sums of them to all others."""
    own = [set(batch(rank)[0].flatten().tolist()) for rank in range(WORLD)]
    share, union = ROWS // WORLD, set().union(*own)
    head = 2 * (WORLD - 1) * HEAD // WORLD * 2
    return head + max(
        sum(row // share != rank for row in own[rank]) * ROW + (WORLD - 1) * sum(row // share == rank for row in union) * ROW
        for rank in range(WORLD)
    )


def run(options: Options) -> str:
    names, rounds = {"dense": False, "rows": True}, options.num_rounds(3)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    try:
        with ExitStack() as stack:
            running = {}
            for name, sparse in names.items():
                seat, counters = stack.enter_context(network(WORLD, LINK))
                ranks = stack.enter_context(Ranks("benchmarks.rows:train", {"sparse": sparse}, WORLD, name=name, seat=seat))
                running[name] = ranks, counters
                ranks.call("steps", count=FIRST)
            for turn in range(rounds):
                for name, (ranks, counters) in running.items():
                    before = [int(counter.read_text()) for counter in counters]
                    done = ranks.call("steps", count=COUNT)
                    after = [int(counter.read_text()) for counter in counters]
                    sent[name] = max(b - a for a, b in zip(before, after, strict=True)) / COUNT
                    seconds[name] += [max(rank["times"][i] for rank in done) for i in range(COUNT)]
                    losses[name] += done[0]["losses"]
                    print(f"  rows {turn + 1}/{rounds} {name}: {seconds[name][-1]:.3f} s, {sent[name] / 1e6:.2f} MB", flush=True)
    except NoNetwork as error:
        return f"Not measured: {error}."
    except Failed as error:
        return f"Not measured: {error.reason}."
    if losses["dense"] != losses["rows"]:
        raise RuntimeError(f"rows have other losses than dense gradients: {losses}")
    dense = 2 * (WORLD - 1) / WORLD * (ROWS * WIDTH + HEAD) * 2
    expected = {"dense": dense, "rows": formula()}
    faster = Spread.ratio(seconds["dense"], seconds["rows"])
    cells = [
        [name, *(f"{n / 1e6:.2f}" for n in (expected[name], sent[name])), f"{sent[name] / expected[name]:.3f}", times.show()]
        for name, times in ((name, Spread.of(seconds[name])) for name in names)
    ]
    return "\n\n".join(
        (
            f"A table of {ROWS:,} rows of {WIDTH} and a head of {HEAD:,} weights, bf16, stage 0, {WORLD} ranks with 400 Mbit/s "
            f"each; a rank's batch uses {USED:,} rows (2 %). MB sent per step by the rank that sends most, headers included; "
            f"seconds per step of the slowest rank, median (min-max) of {rounds * COUNT} steps. The losses of all steps are equal.",
            table(["gradients", "formula, MB", "sent, MB", "over it", "s"], cells),
            verdicts(
                [
                    verdict("rows: bytes over the formula", sent["rows"] / expected["rows"], BYTES, digits=3),
                    verdict("rows: times faster than dense", faster.median, FASTER, at_least=True),
                ]
            ),
        )
    )

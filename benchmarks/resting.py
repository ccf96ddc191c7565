"""The leg `experts-resting`: an update of a layer of which tokens use few experts, with and without `rest_unused_experts`.

One process and thread for each contender, in turns. Bytes are those that the kernel counts for the process (/proc/self/io).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

EXPERTS, USED, WIDTH, SIZE = 32, 2, 512, 1024
PER_EXPERT = 3 * WIDTH * SIZE  # weights
STORED = 12  # bytes per weight on disk: masters and two moments
MEMORY, DISK = "memory", "disk"
SLACK = 0.05


def train(channel: Channel, rests: bool, folder: str) -> None:
    """folder: for the states; "": in memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import slipstream
    from slipstream.moe import MoE

    layer = MoE(WIDTH, None, EXPERTS, k=1, expert_size=SIZE)
    with torch.no_grad():
        layer.router.weight.copy_(30 * torch.eye(EXPERTS, WIDTH))  # a token names its expert
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 16,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "expert_parallel": {"enabled": True},
        "slipstream": {"rest_unused_experts": rests},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else {},
        "steps_per_print": 2**31,
    }
    engine = slipstream.initialize(model=layer, config=config)[0]

    def update(used: int) -> dict[str, float]:
        """Bytes and seconds of engine.step() after a batch of so many experts."""
        x = torch.randn(16, WIDTH)
        x[:, :EXPERTS] = torch.nn.functional.one_hot(torch.arange(16) % used, EXPERTS)
        engine.backward(engine(x.bfloat16())[0].float().square().mean())
        before, start = _moved(), time.perf_counter()
        engine.step()
        return {"s": time.perf_counter() - start} | {name: at - before[name] for name, at in _moved().items()}

    channel.serve({"update": update})


def _moved() -> Mapping[str, int]:
    with open("/proc/self/io") as file:
        counts = dict(line.split(": ") for line in file)
    return {name: int(counts[f"{name}_bytes"]) for name in ("read", "write")}


def run(options: Options) -> str:
    rounds, seconds, moved = options.num_rounds(9), dict[str, list[float]](), dict[str, list[float]]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-resting-"))
        workers = {}
        for place in (MEMORY, DISK):
            for rests in (False, True):
                name, arguments = _name(place, rests), {"rests": rests, "folder": folder if place == DISK else ""}
                workers[name] = stack.enter_context(Worker("benchmarks.resting:train", arguments, name=name))
                workers[name].ready()
                for _ in range(2):  # the first pass over a file is slower, and both shapes of an update have run
                    workers[name].call("update", used=16)
                workers[name].call("update", used=USED)
                seconds[name], moved[name] = [], []
        for _ in range(rounds):
            for name, worker in workers.items():
                took = worker.call("update", used=USED)
                seconds[name].append(took["s"])
                moved[name].append(took["read"] + took["write"])
    return "\n\n".join(
        (
            f"A layer of {EXPERTS} gated experts of {WIDTH} x {SIZE} ({EXPERTS * PER_EXPERT / 1e6:.0f} million weights), bf16 with "
            f"fp32 masters and moments, AdamW, one rank and thread. A batch uses {USED} of the experts. `engine.step()`: seconds, "
            f"median (min-max) of {rounds} turns, and MB that the kernel counts as read and written.",
            table(["states in", "s", "MB", "over all experts' bytes"], _rows(seconds, moved)),
            verdicts(_judged(seconds, moved)),
        )
    )


def _name(place: str, rests: bool) -> str:
    return f"{place}, unused experts {'rest' if rests else 'move'}"


def _rows(seconds: Mapping[str, Sequence[float]], moved: Mapping[str, Sequence[float]]) -> list[list[str]]:
    every = 2 * STORED * EXPERTS * PER_EXPERT
    return [
        [name, Spread.of(seconds[name]).show(), f"{Spread.of(moved[name]).median / 1e6:.1f}", f"{max(moved[name]) / every:.3f}"]
        for name in seconds
    ]


def _judged(seconds: Mapping[str, Sequence[float]], moved: Mapping[str, Sequence[float]]) -> list[list[str]]:
    used = 2 * STORED * USED * PER_EXPERT
    ratio = Spread.ratio(seconds[_name(DISK, True)], seconds[_name(DISK, False)]).median
    return [
        verdict("disk: bytes over those of used experts", max(moved[_name(DISK, True)]) / used, 1 + SLACK, digits=3),
        verdict("disk: seconds over those of all experts", ratio, 4 * USED / EXPERTS, digits=3),
    ]

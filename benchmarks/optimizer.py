"""The leg `optimizer`: one AdamW step over a flat range, ours in each recipe beside torch's and DeepSpeed's.

Gradients come in bf16 and are multiplied by one factor (unscale and clip), weights go out in bf16. torch's fused AdamW and
DeepSpeedCPUAdam need passes of their own for that, to an fp32 gradient before and to bf16 weights after, and get the fastest.
All take turns, a step each; DeepSpeed's runs in the peers' interpreter. The floor is a step's bytes over what an in-place pass
over as many bytes reaches in the same round (read, multiply by one, write; the faster of torch's and our own).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peers import Peers
from benchmarks.report import Spread, host, table, verdict, verdicts
from slipstream import ops
from slipstream.ops import Blocks, Stochastic

FACTOR, LR = 0.5, 1e-3
BF16, FP32 = torch.bfloat16, torch.float32
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True, "bias_correction": True}
STREAM, TORCH, DEEPSPEED = "in-place stream", "torch fused AdamW and its casts", "DeepSpeedCPUAdam and its casts"
PLAIN = "fp32 master and moments"
CODES, SIX, FOUR = "fp32 master, 8-bit moments", "bf16 weights at random, bf16 moments", "bf16 weights at random, 8-bit moments"


class Contender(NamedTuple):
    """`moved`: bytes per parameter that a step must read or write; `kept`: of states and weights."""

    run: Callable[[], float]  # a step, in seconds
    moved: float
    kept: float
    weights: Callable[[], list[float]] | None = None  # the first, after all steps


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return once


def stream(numel: int) -> Contender:
    x = torch.ones(numel * 28 // 8)
    ours = timed(lambda: ops.sum_ranks(x, [x], alpha=1.0, accumulate=False))
    torchs = timed(lambda: x.mul_(1.0))
    return Contender(lambda: min(ours(), torchs()), 28, 0)


class Data(NamedTuple):
    master: Tensor
    grad: Tensor
    out: Tensor


def ours(data: Data, master: torch.dtype, moments: torch.dtype | None) -> Contender:
    """AdamW. moments: a dtype, or None for codes. A bf16 master is the weights."""
    numel = data.grad.numel()
    weights = data.master.to(master, copy=True)
    states = [
        Blocks.zeros(numel, codes) if moments is None else torch.zeros(numel, dtype=moments) for codes in (torch.int8, torch.uint8)
    ]
    out = data.out if master is FP32 else None
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        rounding = Stochastic(0, count, 0) if out is None else None
        ops.adamw(weights, data.grad, *states, out, scale=FACTOR, lr=LR, step=count, rounding=rounding, **ADAM)

    width, state = weights.element_size(), 1 + 4 / 256 if moments is None else moments.itemsize
    kept = width + 2 * state + (2 if out is not None else 0)
    moved = 2 * width + 4 * state + 2 + (2 if out is not None else 0)
    return Contender(timed(run), moved, kept, lambda: weights[:4096].bfloat16().tolist())


def others(data: Data) -> dict[str, Contender]:
    """The other rules, in fp32: what a step takes, without peers."""
    numel = data.grad.numel()
    weights, m, v = data.master.clone(), torch.zeros(numel), torch.ones(numel)
    common: dict[str, Any] = {"weight_decay": 0.01}
    lamb = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "eps_inside_sqrt": False, "step": 3, "bias_correction": True, **common}

    def lamb_step() -> None:
        ops.lamb_update(weights, data.grad, m, v, scale=FACTOR, **lamb)
        ops.lamb_apply(weights, m, v, data.out, lr=1e-6, **lamb)

    def sgd() -> None:
        kind: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "first": False, **common}
        ops.sgd(weights, data.grad, m, data.out, scale=FACTOR, lr=1e-6, **kind)

    def lion() -> None:
        ops.lion(weights, data.grad, m, data.out, scale=FACTOR, lr=1e-6, beta1=0.9, beta2=0.99, **common)

    def adagrad() -> None:
        ops.adagrad(weights, data.grad, v, data.out, scale=FACTOR, lr=1e-6, lr_decay=0.0, eps=1e-10, step=3, **common)

    return {
        "Lion": Contender(timed(lion), 20, 10),
        "SGD with momentum": Contender(timed(sgd), 20, 10),
        "Adagrad": Contender(timed(adagrad), 20, 10),
        "LAMB, two passes": Contender(timed(lamb_step), 22 + 18, 14),
    }


def torchs(data: Data) -> Contender:
    weights = torch.nn.Parameter(data.master.clone())
    weights.grad, out = torch.empty_like(weights), torch.empty_like(data.out)
    optimizer = torch.optim.AdamW([weights], lr=LR, weight_decay=0.01, fused=True)

    def run() -> None:
        assert weights.grad is not None
        torch.mul(data.grad, FACTOR, out=weights.grad)
        optimizer.step()
        out.copy_(weights.detach())

    return Contender(timed(run), 28, 14, lambda: out[:4096].tolist())


class DeepSpeed:
    """The other process. It waits in a read while the others run."""

    def __init__(self, peers: Peers, numel: int, threads: int) -> None:
        script = Path(__file__).with_name("optimizer_peer.py")
        command = [str(peers.python), str(script), *map(str, (numel, threads, FACTOR, LR))]
        env = {**os.environ, **peers.environment(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
        env.pop("PYTHONPATH", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise RuntimeError(f"DeepSpeed's process ended: {self.process.communicate()[1].strip().splitlines()[-1:]}")

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.read()

    def contender(self) -> Contender:
        return Contender(lambda: float(self.ask("step")), 28, 14, lambda: json.loads(self.ask("weights")))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure(peers: Peers, numel: int, threads: int, rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables for this number of threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    master = torch.randn(numel)
    data = Data(master, torch.randn(numel).bfloat16(), torch.empty(numel, dtype=BF16))
    contenders = {
        STREAM: stream(numel),
        PLAIN: ours(data, FP32, FP32),
        TORCH: torchs(data),
        CODES: ours(data, FP32, None),
        "fp32 master, bf16 moments": ours(data, FP32, BF16),
        SIX: ours(data, BF16, BF16),
        FOUR: ours(data, BF16, None),
        **others(data),
    }
    peer = DeepSpeed(peers, numel, threads) if peers.python else None
    if peer:
        contenders[DEEPSPEED] = peer.contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for turn in range(rounds + 1):  # the first is not counted
            for name, contender in contenders.items():
                took = contender.run()
                if turn:
                    times[name].append(took)
        wrong = differing(contenders)
    finally:
        if peer:
            peer.close()
    return rows_of(contenders, times, threads, wrong), judged(contenders, times, threads, wrong)


def differing(contenders: dict[str, Contender]) -> set[str]:
    """Those whose fp32 step is not torch's: their figures are void."""
    assert contenders[TORCH].weights is not None
    wanted = torch.tensor(contenders[TORCH].weights())
    wrong = set()
    for name in (PLAIN, DEEPSPEED):
        if name in contenders:
            weights = contenders[name].weights
            assert weights is not None
            if not torch.allclose(torch.tensor(weights()), wanted, rtol=2**-7, atol=1e-5):
                wrong.add(name)
    return wrong


def share(contenders: dict[str, Contender], times: dict[str, list[float]], name: str) -> Spread:
    """The floor over the contender's time, round by round."""
    part = contenders[name].moved / contenders[STREAM].moved
    return Spread.of([part * floor / took for floor, took in zip(times[STREAM], times[name], strict=True)])


def faster(times: dict[str, list[float]], name: str, than: str) -> Spread:
    return Spread.of([b / a for a, b in zip(times[name], times[than], strict=True)])


def rows_of(contenders: dict[str, Contender], times: dict[str, list[float]], threads: int, wrong: set[str]) -> list[list[str]]:
    rows = []
    for name, contender in contenders.items():
        took = Spread.of([seconds * 1e3 for seconds in times[name]])
        row = [name + (" (void: other weights)" if name in wrong else ""), str(threads), took.show(1)]
        row += [f"{contender.moved:.4g}", "" if name == STREAM else f"{contender.kept:.4g}"]
        row += ["" if name == STREAM else share(contenders, times, name).show(2), faster(times, name, PLAIN).show(2)]
        rows.append(row)
    return rows


def judged(contenders: dict[str, Contender], times: dict[str, list[float]], threads: int, wrong: set[str]) -> list[list[str]]:
    said = f"{threads} thread{'s' if threads > 1 else ''}"
    rows = [
        verdict(f"{PLAIN}, faster than {peer}, {said}", faster(times, PLAIN, peer).median, 1.4, at_least=True)
        for peer in (TORCH, DEEPSPEED)
        if peer in times and not {PLAIN, peer} & wrong
    ]
    rows.append(verdict(f"{PLAIN}, of the stream, {said}", share(contenders, times, PLAIN).median, 0.9, at_least=True))
    for name in (CODES, SIX):
        rows.append(verdict(f"{name}, faster than fp32 states, {said}", faster(times, name, PLAIN).median, 1.5, at_least=True))
    return rows


def run(peers: Peers, *, quick: bool) -> str:
    found = next(row for row in ops.report() if row.name == "adamw")
    if not found.implementation.startswith("native"):
        raise SystemExit(f"the optimizer runs as {found.implementation}, not natively: {found.reason}")
    numel, rounds = (8 << 20, 3) if quick else (64 << 20, 9)
    before = torch.get_num_threads()
    try:
        parts = [measure(peers, numel, threads, rounds) for threads in sorted({1, len(os.sched_getaffinity(0))})]
    finally:
        torch.set_num_threads(before)
    who = f"deepspeed {peers.deepspeed}" if peers.python else f"without DeepSpeed: {peers.missing}"
    head = ["contender", "threads", "step, ms", "bytes moved", "bytes kept", "of the stream", "faster than fp32 states"]
    kept = {SIX: 6.0, FOUR: 4 + 8 / 256, CODES: 8 + 8 / 256}
    sizes = [verdict(f"{name}, fewer bytes kept", 14 / size, 2.2, at_least=True) for name, size in kept.items()]
    return "\n\n".join(
        [
            host(who),
            f"{numel:,} parameters, {rounds} rounds in turns, {found.implementation}. Bytes are per parameter: what a step must "
            "move, and what is kept of states and weights. `of the stream`: the floor over the time, where the floor is the bytes "
            "moved at the rate of the in-place stream of the same round. 8-bit codes have a scale for every 256.",
            table(head, [row for rows, _ in parts for row in rows]),
            verdicts([row for _, rows in parts for row in rows] + sizes),
        ]
    )

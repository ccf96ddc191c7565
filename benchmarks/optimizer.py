"""The leg `optimizer`: one AdamW step over a flat range, ours in each recipe, torch's and DeepSpeed's.

Gradients come in bf16 and are multiplied by one factor (unscale and clip), weights go out in bf16. torch's fused AdamW and
DeepSpeedCPUAdam need separate passes for that, to an fp32 gradient before and to bf16 weights after, and get the fastest ones.
All take turns, a step each; DeepSpeed's runs in the peers' interpreter. The floor is a step's bytes at the rate of an in-place
pass over as many bytes in the same round (read, multiply by one, write; the faster of torch's and our own).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import Failed, Worker
from slipstream import ops
from slipstream.ops import Blocks, Stochastic

FACTOR, LR = 0.5, 1e-3
BF16, FP32 = torch.bfloat16, torch.float32
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True, "bias_correction": True}
STREAM, TORCH, DEEPSPEED = "in-place stream", "torch fused AdamW and its casts", "DeepSpeedCPUAdam and its casts"
PLAIN = "fp32 master and moments"
CODES, SIX, FOUR = "fp32 master, 8-bit moments", "bf16 weights at random, bf16 moments", "bf16 weights at random, 8-bit moments"


class Contender(NamedTuple):
    """`moved`: bytes per parameter that a step must read or write; `kept`: bytes of states and weights."""

    seconds: Callable[[], float]  # of a step
    moved: float
    kept: float
    weights: Callable[[], list[float]] | None = None  # the first, after all steps


class Rule(NamedTuple):
    """One of our optimizers on a flat range; `moved` and `kept` as a contender's."""

    step: Callable[[], object]
    moved: float
    kept: float
    weights: Tensor


class Data(NamedTuple):
    master: Tensor
    grad: Tensor
    out: Tensor

    @classmethod
    def random(cls, numel: int) -> Data:
        return cls(torch.randn(numel), torch.randn(numel).bfloat16(), torch.empty(numel, dtype=BF16))


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


def adamw(data: Data, master: torch.dtype, moments: torch.dtype | None) -> Rule:
    """`moments`: a dtype, or None for codes. A bf16 master is the weights."""
    numel = data.grad.numel()
    weights = data.master.to(master, copy=True)

    def state(codes: torch.dtype) -> Any:
        return Blocks.zeros(numel, codes) if moments is None else torch.zeros(numel, dtype=moments)

    first, second = state(torch.int8), state(torch.uint8)
    out = data.out if master is FP32 else None
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        rounding = Stochastic(0, count, 0) if out is None else None
        ops.adamw(weights, data.grad, first, second, out, scale=FACTOR, lr=LR, step=count, rounding=rounding, **ADAM)

    width, moment = weights.element_size(), 1 + 4 / 256 if moments is None else moments.itemsize
    narrow = 0 if out is None else 2
    return Rule(step, 2 * width + 4 * moment + 2 + narrow, width + 2 * moment + narrow, weights)


def rules(data: Data) -> Iterator[tuple[str, Rule]]:
    """AdamW in its recipes, then the other rules with fp32 states."""
    yield PLAIN, adamw(data, FP32, FP32)
    yield CODES, adamw(data, FP32, None)
    yield "fp32 master, bf16 moments", adamw(data, FP32, BF16)
    yield SIX, adamw(data, BF16, BF16)
    yield FOUR, adamw(data, BF16, None)
    weights, m, v = data.master.clone(), torch.zeros_like(data.master), torch.ones_like(data.master)
    common: dict[str, Any] = {"weight_decay": 0.01}
    lamb = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "eps_inside_sqrt": False, "step": 3, "bias_correction": True, **common}
    sgd: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "first": False, **common}
    one: dict[str, Any] = {"scale": FACTOR, "lr": 1e-6}

    def lamb_step() -> None:
        ops.lamb_update(weights, data.grad, m, v, scale=FACTOR, **lamb)
        ops.lamb_apply(weights, m, v, data.out, lr=1e-6, **lamb)

    lion = partial(ops.lion, weights, data.grad, m, data.out, beta1=0.9, beta2=0.99, **one, **common)
    yield "Lion", Rule(lion, 20, 10, weights)
    yield "SGD with momentum", Rule(partial(ops.sgd, weights, data.grad, m, data.out, **one, **sgd), 20, 10, weights)
    adagrad = partial(ops.adagrad, weights, data.grad, v, data.out, lr_decay=0.0, eps=1e-10, step=3, **one, **common)
    yield "Adagrad", Rule(adagrad, 20, 10, weights)
    yield "LAMB, two passes", Rule(lamb_step, 22 + 18, 14, weights)


def torchs(data: Data) -> tuple[Callable[[], object], Tensor]:
    """A step of torch's fused AdamW with its casts, and the weights that it writes."""
    weights = torch.nn.Parameter(data.master.clone())
    weights.grad, out = torch.empty_like(weights), torch.empty_like(data.out)
    optimizer = torch.optim.AdamW([weights], lr=LR, weight_decay=0.01, fused=True)

    def step() -> None:
        assert weights.grad is not None
        torch.mul(data.grad, FACTOR, out=weights.grad)
        optimizer.step()
        out.copy_(weights.detach())

    return step, out


def deepspeed(worker: Worker) -> Contender:
    return Contender(lambda: float(worker.call("step")), 28, 14, lambda: list(worker.call("weights")))


def measure(peers: Peers, numel: int, threads: int, rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables for this number of threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    data = Data.random(numel)
    step, out = torchs(data)

    def first(weights: Tensor) -> Callable[[], list[float]]:
        return lambda: weights[:4096].bfloat16().tolist()

    contenders = {STREAM: stream(numel), TORCH: Contender(timed(step), 28, 14, first(out))}
    for name, rule in rules(data):
        contenders[name] = Contender(timed(rule.step), rule.moved, rule.kept, first(rule.weights))
    failed: list[list[str]] = []
    with ExitStack() as stack:
        if peers.python:
            arguments = {"numel": numel, "threads": threads, "factor": FACTOR, "lr": LR}
            env = peers.env() | {"OMP_NUM_THREADS": str(threads)}
            worker = Worker("benchmarks.optimizer_peer:adam", arguments, name=DEEPSPEED, python=peers.python, env=env)
            stack.enter_context(worker)
            try:
                worker.ready()
                contenders[DEEPSPEED] = deepspeed(worker)
            except Failed as error:
                print(error)
                failed.append([DEEPSPEED, str(threads), error.reason])
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):  # the first is not counted
            for name, contender in contenders.items():
                took = contender.seconds()
                if turn:
                    times[name].append(took)
        wrong = differing(contenders)
    return rows_of(contenders, times, threads, wrong) + failed, judged(contenders, times, threads, wrong)


def differing(contenders: dict[str, Contender]) -> set[str]:
    """The contenders whose fp32 step is not torch's: their figures are void."""
    weights = {name: torch.tensor(one.weights()) for name, one in contenders.items() if one.weights is not None}
    compared = {PLAIN, DEEPSPEED} & weights.keys()
    return {name for name in compared if not torch.allclose(weights[name], weights[TORCH], rtol=2**-7, atol=1e-5)}


def share(contenders: dict[str, Contender], times: dict[str, list[float]], name: str) -> Spread:
    """The floor over the contender's time, round by round."""
    part = contenders[name].moved / contenders[STREAM].moved
    return Spread.ratio([part * floor for floor in times[STREAM]], times[name])


def faster(times: dict[str, list[float]], name: str, than: str) -> Spread:
    return Spread.ratio(times[than], times[name])


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
    how = f"{threads} thread{'s' if threads > 1 else ''}"
    rows = [
        verdict(f"{PLAIN}, faster than {peer}, {how}", faster(times, PLAIN, peer).median, 1.4, at_least=True)
        for peer in (TORCH, DEEPSPEED)
        if peer in times and not {PLAIN, peer} & wrong
    ]
    rows.append(verdict(f"{PLAIN}, of the stream, {how}", share(contenders, times, PLAIN).median, 0.9, at_least=True))
    for name in (CODES, SIX):
        rows.append(verdict(f"{name}, faster than fp32 states, {how}", faster(times, name, PLAIN).median, 1.5, at_least=True))
    return rows


def run(options: Options) -> str:
    peers = prepare(options.peers)
    native = next(row for row in ops.report() if row.name == "adamw")
    if not native.implementation.startswith("native"):
        raise RuntimeError(f"the optimizer runs as {native.implementation}, not natively: {native.reason}")
    numel, rounds = (8 << 20 if options.quick else 64 << 20), options.num_rounds(9)
    before = torch.get_num_threads()
    try:
        parts = [measure(peers, numel, threads, rounds) for threads in sorted({1, len(os.sched_getaffinity(0))})]
    finally:
        torch.set_num_threads(before)
    head = ["contender", "threads", "step, ms", "bytes moved", "bytes kept", "of the stream", "faster than fp32 states"]
    kept = {SIX: 6.0, FOUR: 4 + 8 / 256, CODES: 8 + 8 / 256}
    sizes = [verdict(f"{name}, fewer bytes kept", 14 / size, 2.2, at_least=True) for name, size in kept.items()]
    return "\n\n".join(
        [
            f"{numel:,} parameters, {rounds} rounds, {native.implementation}. {peers}. Bytes are per parameter: those that "
            "a step must move, and those of states and weights. `of the stream`: the floor over the time; the floor is the bytes "
            "moved at the rate of the in-place stream of the same round. 8-bit codes have a scale for every 256.",
            table(head, [row for rows, _ in parts for row in rows]),
            verdicts([row for _, rows in parts for row in rows] + sizes),
        ]
    )

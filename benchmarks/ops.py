"""The native ops beside their peers, interleaved in one process: `python benchmarks/ops.py`.

One thread, as a training rank has. A round runs every contender once, in turn; the table gives the median
time, the spread (interquartile range over median), the ratio to the peer named first in its group, and GB/s
of what each one must at least read and write. adamw's peer is `torch.optim.AdamW(fused=True)`; where the
gradient is bf16 and the weights are too, the peer is the same with the separate passes it then needs (unscale
and widen, step, narrow). The peer of the sum and the streaming copy is a plain memcpy that reads and writes
as many bytes. At the end: what a call costs on 64 elements, and on every instruction set that this machine
has, what each kernel reaches in cache.
"""

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream import ops
from slipstream.ops import cpu

LR, WEIGHT_DECAY = 1e-3, 0.01
adamw = functools.partial(
    ops.adamw,
    scale=0.5,
    lr=LR,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=WEIGHT_DECAY,
    step=10,
    decoupled=True,
    bias_correction=True,
)


class Contender(NamedTuple):
    group: str
    name: str
    nbytes: int
    run: Callable[[], object]


def memcpy(dst: Tensor, src: Tensor) -> None:
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size())


def adamw_pair(numel: int, narrow: bool) -> list[Contender]:
    """Ours and torch's fused AdamW: fp32 throughout, or bf16 gradients in and bf16 weights out."""
    weights = torch.nn.Parameter(torch.randn(numel))
    weights.grad = torch.randn(numel)
    fused = torch.optim.AdamW([weights], lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    master, exp_avg, exp_avg_sq = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    kind = torch.bfloat16 if narrow else torch.float32
    grad = torch.randn(numel).to(kind)
    out = torch.empty(numel, dtype=kind) if narrow else None

    def ours() -> None:
        adamw(master, grad, exp_avg, exp_avg_sq, out)

    def peer() -> None:
        if out is not None:
            assert weights.grad is not None
            torch.mul(grad, 0.5, out=weights.grad)
        fused.step()
        if out is not None:
            out.copy_(weights.detach())

    group = "adamw bf16 in and out" if narrow else "adamw fp32"
    nbytes = numel * 28  # master and both moments read and written, gradient in, weights out
    return [Contender(group, "torch fused AdamW", nbytes, peer), Contender(group, "slipstream", nbytes, ours)]


def copies(numel: int) -> list[Contender]:
    src, dst = torch.randn(numel), torch.empty(numel)
    nbytes = 8 * numel
    return [
        Contender("copy fp32", "memcpy", nbytes, lambda: memcpy(dst, src)),
        Contender("copy fp32", "slipstream", nbytes, lambda: ops.copy_stream(dst, src)),
    ]


def sums(numel: int, num_sources: int) -> list[Contender]:
    """bf16 sources and out. The memcpy moves as many bytes: half of them read, half of them written."""
    sources = [torch.randn(numel).bfloat16() for _ in range(num_sources)]
    out = torch.empty(numel, dtype=torch.bfloat16)
    nbytes = 2 * numel * (num_sources + 1)
    src, dst = torch.zeros(nbytes // 2, dtype=torch.uint8), torch.zeros(nbytes // 2, dtype=torch.uint8)
    group = f"sum of {num_sources} bf16"
    return [
        Contender(group, "memcpy", nbytes, lambda: memcpy(dst, src)),
        Contender(group, "slipstream", nbytes, lambda: ops.sum_ranks(out, sources, alpha=0.5, accumulate=False)),
    ]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(contenders: list[Contender], rounds: int) -> None:
    for contender in contenders:
        contender.run()
    times: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            times[contender].append(seconds(contender.run))
    peer = contenders[0]
    for contender in contenders:
        low, median, high = statistics.quantiles(times[contender], n=4)
        ratio = statistics.median(a / b for a, b in zip(times[contender], times[peer], strict=True))
        print(
            f"{contender.group:<22}{contender.name:<20}{median * 1e3:>9.2f} ms{(high - low) / median:>8.0%}"
            f"{ratio:>8.2f}{contender.nbytes / median / 1e9:>8.1f} GB/s"
        )


def per_call(run: Callable[[], object], calls: int = 2000) -> float:
    """Best of five, in microseconds."""
    return min(seconds(lambda: [run() for _ in range(calls)]) for _ in range(5)) / calls * 1e6


def call_costs() -> None:
    master, exp_avg, exp_avg_sq, grad = (torch.rand(64) for _ in range(4))
    sources = [torch.rand(64) for _ in range(2)]
    word = torch.zeros(1, dtype=torch.int32)
    address = word.data_ptr()
    rows: dict[str, Callable[[], object]] = {
        "sum_ranks, 2 sources": lambda: ops.sum_ranks(grad, sources, alpha=0.5, accumulate=False),
        "adamw": lambda: adamw(master, grad, exp_avg, exp_avg_sq, None),
        "copy_stream": lambda: ops.copy_stream(exp_avg, exp_avg_sq),
        "words.store": lambda: ops.words.store_release_and_wake(address, 1),
        "words.load": lambda: ops.words.load_acquire(address),
        "words.wait, reached": lambda: ops.words.wait_at_least(address, 1, 50, 1000),
    }
    for name, run in rows.items():
        print(f"call cost  {name:<22}{per_call(run):>7.2f} us")


def in_cache(numel: int = 16384) -> None:
    """What the arithmetic alone allows: arrays that stay in the second-level cache."""
    used = cpu.isa()
    for isa in filter(cpu.use_isa, ("avx512", "avx2", "portable")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            master, exp_avg, exp_avg_sq = (torch.rand(numel) for _ in range(3))
            grad, out, other = (torch.rand(numel).to(dtype) for _ in range(3))
            add = functools.partial(ops.sum_ranks, out, [grad, other], alpha=0.5, accumulate=False)
            adam = functools.partial(adamw, master, grad, exp_avg, exp_avg_sq, out)
            ns = [per_call(run, 200) * 1e3 / numel for run in (add, adam)]
            print(f"in cache   {isa:<9}{dtype!s:<15} sum of 2 {ns[0]:.3f}, adamw {ns[1]:.3f} ns/element")
    cpu.use_isa(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements per array (default: 64Mi)")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = ops.report()[0]
    print(f"torch {torch.__version__}, 1 thread, {args.numel:,} elements, {args.rounds} rounds")
    print(f"slipstream: {row.implementation} ({row.reason})\n")
    print(f"{'':<42}{'median':>12}{'spread':>8}{'ratio':>8}")
    compare(adamw_pair(args.numel, narrow=False), args.rounds)
    compare(adamw_pair(args.numel, narrow=True), args.rounds)
    compare(copies(args.numel), args.rounds)
    for num_sources in (2, 4, 8):
        compare(sums(args.numel // 2, num_sources), args.rounds)
    print()
    call_costs()
    in_cache()


if __name__ == "__main__":
    main()

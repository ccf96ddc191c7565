"""The leg `experts-products`: grouped products of experts' rows by the native kernels, over one of torch's for each expert."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.legs import Options
from benchmarks.report import Spread, table
from slipstream.ops import grouped, matmul, pages

FEATURES, SIZE, ROWS = 512, 2048, 2048  # of a token, of an expert, and of all experts together at most
PER_EXPERT = (512, 256, 128, 64, 32, 16, 8)
Products = tuple[str, Callable[[], object], Callable[[], object]]  # ours and torch's


def run(options: Options) -> str:
    torch.set_num_threads(1)
    rows, count = [], options.num_rounds(9)
    matmul.use(True)
    others = f" ({matmul.listed()})" if matmul.listed() else ""
    for dtype in (torch.float32, torch.bfloat16):
        for per in PER_EXPERT[: 2 if options.quick else None]:
            for name, ours, torchs in products(dtype, per):
                times: dict[str, list[float]] = {"ours": [], "torch": []}
                for turn in range(count + 1):
                    for who, call in (("ours", ours), ("torch", torchs))[:: 1 if turn % 2 else -1]:
                        start = time.perf_counter()
                        call()
                        times[who].append(time.perf_counter() - start)
                for values in times.values():
                    del values[0]
                gain = Spread.ratio(times["torch"], times["ours"])
                flop = 2 * per * num_experts(per) * FEATURES * SIZE / 1e9
                rates = [f"{flop / Spread.of(values).median:.0f}" for values in times.values()]
                rows.append([str(dtype).removeprefix("torch."), str(per), name, *rates, gain.show(2)])
    matmul.use(False)
    return "\n\n".join(
        (
            f"Experts of {FEATURES} x {SIZE}, {ROWS:,} rows (or 64 experts), one thread; GFLOP/s by the median of {count} turns. "
            f"torch: a product for each expert into its rows{others}.",
            table(["dtype", "rows of an expert", "product", "ours", "torch", "torch's time over ours"], rows),
        )
    )


def num_experts(per: int) -> int:
    return min(ROWS // per, 64)


def products(dtype: torch.dtype, per: int) -> Iterator[Products]:
    """Outputs, gradients of rows and gradients of weights."""
    num = num_experts(per)
    counts = [per] * num
    x, grad = torch.randn(per * num, FEATURES).to(dtype), torch.randn(per * num, SIZE).to(dtype)
    weight = torch.randn(num, SIZE, FEATURES).to(dtype)

    def each(a: Tensor, b: Tensor, like: Tensor) -> None:
        out = pages.huge(torch.empty_like(like))
        out = out if out.dim() == 3 else split(out)
        for i in range(num):
            torch.mm(a[i], b[i], out=out[i])

    split = functools.partial(torch.unflatten, dim=0, sizes=(num, per))
    yield ("rows times weights", lambda: grouped.grouped_rows(x, weight.mT, counts), lambda: each(split(x), weight.mT, grad))
    yield ("gradient of rows", lambda: grouped.grouped_rows(grad, weight, counts), lambda: each(split(grad), weight, x))
    yield ("gradient of weights", lambda: grouped.grouped_outer(grad, x, counts), lambda: each(split(grad).mT, split(x), weight))

"""The passes of 1-bit optimizers: every implementation gives the same bits, and no error is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.ops import onebit
from tests.unit.test_ops import available, equal_bits, run_as

NUMEL = 2 * 65536 + 3 * 512


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def inverse_of(numel: int = NUMEL) -> Tensor:
    inverse = normal(9, numel).abs() + 0.1
    inverse[512:600] = 0  # a part of a block
    inverse[1024:1536] = 0  # a whole block
    return inverse


def rounds(dtype: torch.dtype, numel: int = NUMEL, steps: int = 3, ranks: int = 3) -> list[Tensor]:
    """Steps of `ranks` workers and one server; returns everything that they leave."""
    inverse = inverse_of(numel)
    ys, scales = [torch.zeros(numel) for _ in range(ranks + 1)], [torch.zeros(numel // 512) for _ in range(ranks + 1)]
    records = [torch.zeros(onebit.nbytes(numel), dtype=torch.uint8) for _ in range(ranks + 1)]
    master, out = normal(8, numel), torch.empty(numel, dtype=dtype)
    for step in range(steps):
        for rank in range(ranks):
            grad = normal(10 * step + rank, numel).to(dtype)
            onebit.worker(grad, inverse, onebit.partly(inverse), ys[rank], scales[rank], records[rank], beta=0.9, factor=0.05)
        onebit.server(records[:ranks], inverse, onebit.partly(inverse), ys[ranks], scales[ranks], records[ranks], alpha=1 / ranks)
        for rank in range(ranks):
            records[rank].copy_(records[ranks])
        onebit.update(master, records[ranks], inverse, onebit.partly(inverse), out, keep=0.99, rate=1e-2)
    return [*ys, *scales, *records, master, out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_implementations_give_the_same_bits(dtype: torch.dtype) -> None:
    results = [run_as(name, lambda: rounds(dtype)) for name in available()]
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one, other) if one.dtype is torch.uint8 else equal_bits(one, other)


def test_what_is_sent_and_what_is_kept_add_up() -> None:
    """y is exactly the sum of what was sent and the error; elements that are never stepped stay 0."""
    inverse, numel = inverse_of(4096), 4096
    y, scales, records = torch.zeros(numel), torch.zeros(8), torch.zeros(onebit.nbytes(numel), dtype=torch.uint8)
    sent = torch.zeros(numel)
    given = torch.zeros(numel)
    for step in range(20):
        grad = normal(step, numel)
        records.zero_()  # no momentum: what is sent is the gradient
        onebit.worker(grad, inverse, onebit.partly(inverse), y, scales, records, beta=0.0, factor=1.0)
        sent += torch.where(inverse > 0, onebit.decode(records), 0.0)
        given += grad * inverse
    error = torch.where(inverse > 0, y - torch.where(y >= 0, 1.0, -1.0) * scales.repeat_interleave(512), 0.0)
    torch.testing.assert_close(sent + error, given, rtol=1e-4, atol=1e-4)
    assert not y[512:600].any() and not y[1024:1536].any()


def test_the_scale_counts_stepped_elements_only() -> None:
    inverse, y, scales = torch.zeros(512), torch.zeros(512), torch.zeros(1)
    inverse[:8] = 1
    records = torch.zeros(onebit.nbytes(512), dtype=torch.uint8)
    onebit.worker(torch.full((512,), 3.0), inverse, onebit.partly(inverse), y, scales, records, beta=0.9, factor=1.0)
    assert scales.item() == 3.0


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 512 elements, which 100"):
        onebit.nbytes(100)
    x, records = torch.zeros(512), torch.zeros(onebit.nbytes(512), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"worker: grad is torch\.float32 of shape \(256,\); pass 512"):
        onebit.worker(x[:256], x, torch.ones(1, dtype=torch.uint8), x, torch.zeros(1), records, beta=0.9, factor=1.0)

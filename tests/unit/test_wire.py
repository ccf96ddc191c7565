"""Codes on the wire: every implementation gives the same bytes; errors are bounded; error feedback loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.ops import wire
from tests.unit.test_ops import available, equal_bits, run_as

SIZES = (0, 1, 15, 16, 255, 256, 257, 1000, 65536 + 300, 2 * 65536)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).exp2()).to(dtype)


def encoded(x: Tensor, bits: int, feedback: wire.Feedback | None = None) -> Tensor:
    out = torch.full((wire.nbytes(x.numel(), bits),), 77, dtype=torch.uint8)
    wire.encode(x, out, bits, feedback)
    return out


def decoded(coded: Tensor, numel: int, bits: int) -> Tensor:
    out = torch.empty(numel)
    wire.sum_coded(out, [coded], bits)
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_implementations_give_the_same_bytes_and_sums(bits: int, dtype: torch.dtype) -> None:
    for numel in SIZES:
        inputs = [values(numel, seed, dtype) for seed in range(3)]
        if numel > 300:
            inputs[0][257] = float("inf")
            inputs[1][numel - 1] = float("nan")
            inputs[2][:256] = 0
        results = []
        for name in available():

            def work() -> tuple[list[Tensor], Tensor, float]:
                error = torch.zeros(wire.nbytes(numel, 8), dtype=torch.uint8)
                codes = [encoded(x, bits) for x in inputs]
                codes += [encoded(x, bits, wire.Feedback(error, 0.25)) for x in inputs] + [error]
                out = torch.ones(numel, dtype=dtype)
                partial = wire.sum_coded(out, codes[:3], bits, alpha=0.3, accumulate=True)
                return codes, out, float(partial.sumsq)

            results.append(run_as(name, work))
        for codes, out, sumsq in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(codes, results[0][0], strict=True)), (numel, bits)
            assert equal_bits(out, results[0][1])
            assert sumsq == pytest.approx(results[0][2], rel=1e-12, nan_ok=True)


@given(st.integers(1, 1200), st.sampled_from([4, 8]), st.integers(0, 1000), st.floats(1e-30, 1e30))
def test_an_element_is_off_by_half_a_code_at_most(numel: int, bits: int, seed: int, size: float) -> None:
    x = values(numel, seed) * size
    error = (decoded(encoded(x, bits), numel, bits) - x).abs()
    for block, wrong in zip(x.split(256), error.split(256), strict=True):
        scale = block.abs().max() / (127 if bits == 8 else 7)
        assert wrong.max() <= scale * (0.5 * 1.008 + 1e-6)  # the scale is rounded up to 8 bits


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_its_neighbors_are_not(bits: int) -> None:
    for bad in (float("inf"), float("nan")):
        x = values(768, 1)
        x[300] = bad
        out = torch.empty(768)
        partial = wire.sum_coded(out, [encoded(x, bits)], bits)
        assert out[256:512].isnan().all() and out[:256].isfinite().all() and out[512:].isfinite().all()
        assert not partial.finite


@pytest.mark.parametrize("bits", [4, 8])
def test_error_feedback_sends_what_earlier_steps_have_lost(bits: int) -> None:
    """After many steps the sum of what was sent differs from the sum of the gradients by one step's rounding, not by all steps'."""
    x, error = values(512, 3) * torch.logspace(-3, 0, 512), torch.zeros(wire.nbytes(512, 8), dtype=torch.uint8)
    sent = sum(decoded(encoded(x, bits, wire.Feedback(error)), 512, bits) for _ in range(50))
    plain = 50 * decoded(encoded(x, bits), 512, bits)
    assert (sent / 50 - x).abs().max() < 0.1 * (plain / 50 - x).abs().max()


def test_the_error_of_a_skipped_step_is_dropped() -> None:
    error = torch.zeros(wire.nbytes(512, 8), dtype=torch.uint8)
    encoded(values(512, 5), 4, wire.Feedback(error))
    x = values(512, 6)
    x[3] = float("inf")
    encoded(x, 4, wire.Feedback(error))
    assert not error[: wire.nbytes(256, 8)].any() and error[wire.nbytes(256, 8) :].any()


def test_errors_follow_the_loss_scale() -> None:
    x, errors = values(600, 8), [torch.zeros(wire.nbytes(600, 8), dtype=torch.uint8) for _ in range(2)]
    encoded(x, 4, wire.Feedback(errors[0]))
    encoded(x * 16, 4, wire.Feedback(errors[1]))
    wire.rescale(errors[0], 16.0)
    assert torch.equal(*errors)


def test_bad_arguments_are_refused_by_name() -> None:
    x = torch.zeros(256)
    with pytest.raises(ValueError, match="4 or 8 bits, not 5"):
        wire.encode(x, torch.zeros(10, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match=r"out is torch\.uint8 of shape .* 256 elements need 130"):
        wire.encode(x, torch.zeros(129, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"encode: values is torch\.int64"):
        wire.encode(x.long(), torch.zeros(130, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"sum_coded: sources\[1\]"):
        wire.sum_coded(x, [torch.zeros(130, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)], 4)

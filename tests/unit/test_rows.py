"""Rows of codes as bytes: the book of NF4, errors bounded, sizes as documented, the native way back and its twin the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.ops.rows import NF4, RowForm, dequantize_rows, in_torch, quantize_rows
from tests.unit.test_ops import available, run_as

# As the paper prints them (QLoRA, appendix E).
PRINTED = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def random(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)


def test_the_book_is_the_paper_s() -> None:
    torch.testing.assert_close(torch.tensor(NF4), torch.tensor(PRINTED), rtol=0, atol=1e-6)


def test_bytes_are_as_documented() -> None:
    assert RowForm(bits=4, columns=4096).row_nbytes / 4096 == 0.53125
    assert RowForm(bits=8, columns=4096).row_nbytes / 4096 == 1.03125
    with pytest.raises(ValueError, match=r"bits \(3\) must be 8 or 4"):
        RowForm(bits=3, columns=64)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.sampled_from([2, 16, 64]), st.sampled_from([4, 8]), st.integers(0, 999))
def test_errors_are_half_a_cell_of_the_block(rows: int, columns: int, block: int, bits: int, seed: int) -> None:
    w, form = random(rows, columns, seed), RowForm(bits=bits, columns=columns, block=block)
    packed = quantize_rows(w, form)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, form.row_nbytes)
    back = dequantize_rows(packed, form, torch.float32)
    largest = torch.nn.functional.pad(w, (0, -columns % block)).view(rows, -1, block).abs().amax(2)
    cell = 0.5 / 127 if bits == 8 else 0.5 * (1 - 0.6961928)  # of a whole number, of NF4's widest
    bound = (largest * 1.01 * cell).repeat_interleave(block, 1)[:, :columns]
    assert ((back - w).abs() <= bound).all()


def test_rows_stand_alone_and_what_codes_can_say_is_exact() -> None:
    w = random(7, 96, 0)
    for bits in (4, 8):
        form = RowForm(bits=bits, columns=96, block=32)
        packed = quantize_rows(w, form)
        assert torch.equal(quantize_rows(w[3:5], form), packed[3:5])
        back = dequantize_rows(packed, form, torch.float32)
        if bits == 4:  # the largest of a block is 1 or -1 times its scale
            assert torch.equal(quantize_rows(back, form), packed)
        assert not dequantize_rows(quantize_rows(torch.zeros(2, 96), form), form, torch.float32).any()


@pytest.mark.parametrize("implementation", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_implementation_gives_the_twin_s_bits(implementation: str, dtype: torch.dtype) -> None:
    for bits in (4, 8):
        for rows, columns in ((0, 5), (1, 1), (3, 15), (5, 64), (9, 177)):
            form = RowForm(bits=bits, columns=columns, block=16)
            packed = quantize_rows(random(rows, columns, rows), form)
            run: Callable[[], Any] = lambda p=packed, f=form: dequantize_rows(p, f, dtype)  # noqa: E731
            assert torch.equal(run_as(implementation, run), in_torch(packed, form, dtype))

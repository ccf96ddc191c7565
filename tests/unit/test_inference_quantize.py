"""Quantized matrices and the paged cache: errors bounded, bytes as documented, what stays unquantized."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.inference.kv_cache import HeadShape, KVCache, bytes_per_block
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp, quantize
from slipstream.ops.matrices import Int4, Int8, dequantize, to_int4, to_int8, unpack

SEEDS = st.integers(0, 999)


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    w[0] = 0
    return w


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 70), SEEDS)
def test_int8_errs_by_half_a_step_of_its_channel(rows: int, columns: int, seed: int) -> None:
    w = random(rows, columns, seed)
    m = to_int8(w)
    assert (m.q.dtype, m.scale.shape) == (torch.int8, (rows,))
    assert ((dequantize(m) - w).abs() <= m.scale[:, None] * 0.501).all()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([32, 64, 128]), SEEDS)
def test_int4_is_no_worse_than_the_whole_range(rows: int, groups: int, group: int, seed: int) -> None:
    w = random(rows, groups * group, seed)
    m = to_int4(w, group)
    assert (m.q.shape, m.scale.shape, m.low.shape) == ((rows, groups * group // 2), (rows, groups), (rows, groups))
    grouped = w.unflatten(1, (groups, group))
    low, high = grouped.aminmax(dim=2, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-30)
    plain = (((grouped - low) / step).round() * step + low - grouped).square().sum()
    assert (dequantize(m) - w).square().sum() <= plain * 1.0001


def test_int4_of_what_it_can_say_is_exact_and_rows_do_not_meet() -> None:
    q = torch.randint(0, 16, (40, 64), dtype=torch.uint8)
    q[:, ::32], q[:, 1::32] = 0, 15
    w = q.float() * 0.25 - 1
    assert torch.equal(unpack(to_int4(w).q), q)
    torch.testing.assert_close(dequantize(to_int4(w)), w)
    flat = torch.full((2, 32), 3.25)
    assert torch.equal(dequantize(to_int4(flat)), flat)
    with pytest.raises(ValueError, match="group 32, input 48"):
        to_int4(torch.zeros(2, 48))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_quantized(kind: str) -> None:
    w, vector = torch.randn(64, 64), torch.randn(64)
    stored = to_int4(w)
    odd = torch.randn(64, 48)
    mlp = Mlp(gate=w, up=w, down=odd)
    layer = LayerWeights(input_norm=vector, mlp_norm=vector, q=stored, k=w, v=w, out=w, experts=[mlp], router=w, shared=mlp)
    before = DecoderWeights(embed=w, final_norm=vector, head=None, layers=[layer])
    after = quantize(before, kind)
    new, matrix = after.layers[0], {"int8": Int8, "int4": Int4}[kind]
    assert new.q is stored  # never twice
    assert all(isinstance(m, matrix) for m in (new.k, new.v, new.out, new.experts[0].gate, new.shared.up))  # type: ignore[union-attr]
    assert isinstance(new.experts[0].down, Int8)  # no group divides 48
    assert isinstance(after.head, Int8)
    assert new.router is w and new.input_norm is vector and after.embed is w and new.mlp is None
    again = quantize(after, kind)
    assert again.layers[0].k is new.k and again.head is after.head
    with pytest.raises(ValueError, match="kind is 'int3'; it must be"):
        quantize(before, "int3")


def test_cache_slots_copies_and_bytes() -> None:
    shapes = [HeadShape(2, 8), HeadShape(1, 4), HeadShape(1, 8, 4)]
    cache = KVCache(shapes, num_blocks=6, block_size=4, dtype=torch.bfloat16)
    assert bytes_per_block(shapes, 4, torch.bfloat16) * 6 == sum(t.nbytes for t in (*cache.keys, *cache.values))
    slots = cache.slots([5, 0, 3], 2, 10)
    assert slots.tolist() == [22, 23, 0, 1, 2, 3, 12, 13]
    for layer, (heads, dim, value_dim) in enumerate(shapes):
        keys, values = (torch.randn(8, heads, size, dtype=torch.bfloat16) for size in (dim, value_dim or dim))
        cache.write(layer, slots, keys, values)
        assert all(torch.equal(a, b) for a, b in zip(cache.read(layer, slots), (keys, values), strict=True))
        assert torch.equal(cache.keys[layer][3, 0], keys[6])
    cache.copy([(5, 1), (0, 2)])
    cache.copy([])
    for tensor in (*cache.keys, *cache.values):
        assert torch.equal(tensor[1], tensor[5]) and torch.equal(tensor[2], tensor[0]) and not tensor[4].any()

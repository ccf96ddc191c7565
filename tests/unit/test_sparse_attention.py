"""Block-sparse attention: kernels and twin against dense attention with a mask, patterns against their definitions."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slipstream
from slipstream import attention
from slipstream.ops import block_sparse, cpu
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

ISAS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")


@pytest.fixture(params=["native", "avx2", "portable", "twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    best = cpu.isa()
    if request.param == "twin":
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
    elif not best:
        pytest.skip("there is no native code")
    elif request.param != "native" and not cpu.use_isa(request.param):
        pytest.skip(f"this machine lacks {request.param}")
    yield request.param
    if best:
        cpu.use_isa(best)


def dense(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *biases: Tensor, keep: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + biases) v in fp64, masked outside of the layout; `keep`: what dropout multiplies with."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).double(), v.repeat_interleave(groups, 1).double()
    allowed = layout.blocks.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    allowed = allowed.tril() if layout.causal else allowed
    score = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    for bias in biases:
        score = score + bias
    score = score.masked_fill(~allowed, -1e38)
    share = torch.softmax(score, -1) * (score > -1e30)
    return (share if keep is None else share * keep) @ v


def some_blocks(heads: int, rows: int) -> Tensor:
    blocks = torch.rand(heads, rows, rows) < 0.4
    blocks[:, rows // 2] = False  # queries without any key
    return blocks


def heads(batch: int, count: int, length: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, count, length, dim).to(dtype).requires_grad_()


CASES = [  # batch, heads, key heads, tokens, features, block, a layout per head, causal, dtype, tolerance
    (2, 4, 2, 128, 64, 16, True, False, torch.float32, 1e-5),
    (1, 2, 2, 256, 64, 64, False, True, torch.float32, 1e-5),
    (1, 3, 1, 192, 40, 32, True, True, torch.float32, 1e-5),
    (1, 1, 1, 64, 256, 16, True, False, torch.float32, 2e-5),
    (2, 2, 2, 128, 128, 64, True, False, torch.bfloat16, 5e-2),
    (1, 2, 1, 128, 80, 16, False, True, torch.float16, 1e-2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_and_gradients_are_those_of_dense_attention(implementation: str, case: tuple[Any, ...], biased: bool) -> None:
    batch, num, kv, length, dim, block, per_head, causal, dtype, tolerance = case
    torch.manual_seed(0)
    layout = BlockLayout(some_blocks(num if per_head else 1, length // block), block, causal=causal)
    inputs = [heads(batch, num, length, dim, dtype), *(heads(batch, kv, length, dim, dtype) for _ in range(2))]
    bias = key_bias = None
    biases: tuple[Tensor, ...] = ()
    if biased:
        bias = torch.randn(1, num, length, length, requires_grad=True)
        key_bias = torch.randn(batch, length)
        key_bias[0, 5:37] = float("-inf")
        biases = (bias, key_bias[:, None, None].double())
    wanted = [*inputs, bias] if bias is not None else inputs
    weight = torch.randn(batch, num, length, dim)
    ours = block_sparse_attention(*inputs, layout, bias=bias, key_bias=key_bias)
    theirs = dense(*inputs, layout, *biases)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    grads = torch.autograd.grad((ours.float() * weight).sum(), wanted)
    for mine, other in zip(grads, torch.autograd.grad((theirs * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_causal_attention_of_any_length_is_torchs(implementation: str, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    q, k, v = (heads(2, count, length, 24, dtype) for count in (4, 2, 2))
    grad = torch.randn(q.shape).to(dtype)
    found = attention.causal_attention(q, k, v, 0.3)
    own = torch.autograd.grad(found, (q, k, v), grad)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, enable_gqa=True)
    close = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 5e-2, "check_dtype": False}
    torch.testing.assert_close(found, expected, **close)
    for one, other in zip(own, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(one, other, **close)


def test_causal_attention_beyond_the_kernels() -> None:
    """Other dtypes and wide heads are torch's; under autocast all are in its dtype; a compiled model has no break in its graph."""
    torch.manual_seed(0)
    for dtype, dim in ((torch.float64, 16), (torch.float32, 300)):
        q, k, v = (heads(1, 2, 20, dim, dtype) for _ in range(3))
        expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(attention.causal_attention(q, k, v), expected)
    q, k, v = heads(1, 2, 20, 16), heads(1, 2, 20, 16), heads(1, 2, 20, 16, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.causal_attention(q, k, v)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
    q, k, v = (heads(1, 2, 20, 16) for _ in range(3))
    compiled = torch.compile(attention.causal_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention.causal_attention(q, k, v))


def test_a_query_without_keys_gets_zeros(implementation: str) -> None:
    layout = BlockLayout(torch.ones(1, 4, 4), 16)
    q, k, v = (heads(1, 1, 64, 16) for _ in range(3))
    out = block_sparse_attention(q, k, v, layout, key_bias=torch.full((1, 64), torch.finfo(torch.float32).min))
    out.sum().backward()
    assert not out.any() and not any(x.grad.any() for x in (q, k, v) if x.grad is not None) and q.grad is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(implementation: str, bad: float) -> None:
    """In the rows that see it, and in no other; a gradient of such a row has no numbers either."""
    layout = BlockLayout(torch.ones(1, 4, 4), 16, causal=True)
    for name, first in (("q", 37), ("k", 41)):
        inputs = {each: heads(1, 1, 64, 16) for each in "qkv"}
        inputs[name].data[0, 0, first] = bad
        out = block_sparse_attention(*inputs.values(), layout)
        spoilt = ~out[0, 0].isfinite().all(1)
        assert spoilt.nonzero().flatten().tolist() == ([first] if name == "q" else list(range(first, 64)))
        out.sum().backward()
        assert inputs["q"].grad is not None and not inputs["q"].grad[0, 0][spoilt].isfinite().any()


def test_dropout_keeps_its_share_and_is_the_same_in_the_backward() -> None:
    if not cpu.isa():
        pytest.skip("there is no native code")
    torch.manual_seed(0)
    layout, rate = BlockLayout(torch.ones(1, 16, 16), 16), 0.25
    q, k, v = (heads(1, 2, 256, 256) for _ in range(3))

    def run(values: Tensor) -> Tensor:
        torch.manual_seed(7)
        return block_sparse_attention(q, k, values, layout, dropout=rate)

    eye = torch.eye(256).expand(1, 2, 256, 256)
    shares, whole = run(eye), block_sparse_attention(q, k, eye, layout)
    keep = (shares / whole).detach().double()
    kept = keep != 0
    assert abs(kept.double().mean().item() - (1 - rate)) < 0.005
    torch.testing.assert_close(keep[kept], torch.full_like(keep[kept], 1 / (1 - rate)), atol=1e-4, rtol=1e-4)
    assert not torch.equal(kept[:, 0], kept[:, 1])
    weight = torch.randn_like(v)
    mine = torch.autograd.grad((run(v) * weight).sum(), (q, k, v))
    twin = torch.autograd.grad((dense(q, k, v, layout, keep=kept / (1 - rate)) * weight).sum(), (q, k, v))
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_spans_are_a_mask(implementation: str) -> None:
    torch.manual_seed(0)
    layout = BlockLayout(some_blocks(2, 8), 16)
    q, k, v = (heads(2, 2, 128, 32) for _ in range(3))
    spans = torch.randint(129, (2, 128, 2)).sort(-1).values
    allowed = (torch.arange(128) >= spans[..., :1]) & (torch.arange(128) < spans[..., 1:])
    out = block_sparse_attention(q, k, v, layout, spans=spans)
    expected = dense(q, k, v, layout, torch.zeros(allowed.shape).masked_fill(~allowed, -1e38)[:, None])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(*(torch.autograd.grad(x.double().square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"spans has shape \(2, 127, 2\)"):
        block_sparse_attention(q, k, v, layout, spans=spans[:, 1:])


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_a_shared_bias_has_one_gradient(implementation: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layout = BlockLayout(some_blocks(1, 4), 16)
    q, k, v = (heads(3, 2, 64, 16) for _ in range(3))
    bias = torch.randn(*shape, 64, 64, requires_grad=True)
    mine, other = (
        torch.autograd.grad(out.double().square().sum(), bias)[0]
        for out in (block_sparse_attention(q, k, v, layout, bias=bias), dense(q, k, v, layout, bias))
    )
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_compiled_models_call_the_kernels() -> None:
    layout = BlockLayout(some_blocks(2, 4), 16)
    q, k, v = (heads(1, 2, 64, 16) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q * 2, k, v, layout).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, other = (torch.autograd.grad(each(q, k, v), (q, k, v)) for each in (compiled, run))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two)
    torch.library.opcheck(block_sparse._forward, (q, k, v, None, None, None, None, *layout.tiles, 0.25, 0.0, False))


def test_bad_arguments_are_named() -> None:
    layout = BlockLayout(torch.ones(1, 4, 4), 16)
    q = torch.randn(1, 2, 64, 16)
    for problem, call in {
        r"48 tokens, and the layout has 64": lambda: block_sparse_attention(*[q[:, :, :48]] * 3, layout),
        r"2 query heads do not divide": lambda: block_sparse_attention(q, *[torch.randn(1, 3, 64, 16)] * 2, layout),
        r"the layout has 3 heads, and q has 2": lambda: block_sparse_attention(
            q, q, q, BlockLayout(torch.eye(4).expand(3, 4, 4) * torch.tensor([1, 1, 0])[:, None, None], 16)
        ),
        r"key_bias has shape \(1, 63\)": lambda: block_sparse_attention(q, q, q, layout, key_bias=torch.zeros(1, 63)),
        r"bias has shape \(63, 64\)": lambda: block_sparse_attention(q, q, q, layout, bias=torch.zeros(63, 64)),
        r"dropout \(1.0\)": lambda: block_sparse_attention(q, q, q, layout, dropout=1.0),
        r"k torch.bfloat16": lambda: block_sparse_attention(q, q.bfloat16(), q, layout),
        r"300 features": lambda: block_sparse_attention(*[torch.randn(1, 2, 64, 300)] * 3, layout),
        r"block \(24\)": lambda: BlockLayout(torch.ones(1, 4, 4), 24),
        r"shape \(4, 4\)": lambda: BlockLayout(torch.ones(4, 4), 16),
        r"100 tokens .* pad the sequence to 112": lambda: attention.FixedSparsityConfig(2).make_layout(100),
        r"must divide num_local_blocks": lambda: attention.FixedSparsityConfig(2, num_local_blocks=4, num_global_blocks=3),
        r"needs different_layout_per_head": lambda: attention.FixedSparsityConfig(2, num_different_global_patterns=2),
        r"horizontal_global_attention": lambda: attention.VariableSparsityConfig(
            2, attention="unidirectional", horizontal_global_attention=True
        ),
        r"global_block_end_indices has 1": lambda: attention.BSLongformerSparsityConfig(2, 16, False, 3, [0, 2], [1]),
        r"attention \('both'\)": lambda: attention.BigBirdSparsityConfig(2, attention="both"),  # type: ignore[arg-type]
        r"2 blocks is shorter": lambda: attention.BigBirdSparsityConfig(2).make_layout(32),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()


# Patterns, each by a definition of its own


def fixed(
    head: int, row: int, column: int, blocks: int, local: int, wide: int, one_way: bool, horizontal: bool, patterns: int
) -> bool:
    if one_way and column > row and row // local != column // local:
        first = local - (1 + head % patterns) * wide
        if not any(start <= column < start + wide and row >= start for start in global_starts(blocks, local, wide, first)):
            return False
    if row // local == column // local and (not one_way or column <= row):
        return True
    for start in global_starts(blocks, local, wide, local - (1 + head % patterns) * wide):
        if start <= column < start + wide and (not one_way or row >= start):
            return True
        if horizontal and start <= row < start + wide:
            return True
    return False


def global_starts(blocks: int, local: int, wide: int, first: int) -> list[int]:
    whole = blocks // local * local
    return [*range(first, whole, local), *([min(whole + first, blocks - wide)] if blocks % local else [])]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), blocks=st.integers(4, 17), one_way=st.booleans(), per_head=st.booleans())
def test_the_fixed_layout(data: st.DataObject, blocks: int, one_way: bool, per_head: bool) -> None:
    wide = data.draw(st.integers(1, 2))
    local = wide * data.draw(st.integers(1, 4))
    if local > blocks:
        return
    patterns = data.draw(st.integers(1, local // wide)) if per_head else 1
    horizontal = data.draw(st.booleans()) and not one_way
    direction: Any = "unidirectional" if one_way else "bidirectional"
    config = attention.FixedSparsityConfig(3, 16, per_head, local, wide, direction, horizontal, patterns)
    layout = config.make_layout(blocks * 16)
    for head, row, column in ((h, r, c) for h in range(3) for r in range(blocks) for c in range(blocks)):
        pattern = head if per_head else 0
        assert bool(layout[head, row, column]) == fixed(pattern, row, column, blocks, local, wide, one_way, horizontal, patterns)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), blocks=st.integers(6, 15), randoms=st.integers(0, 3), wide=st.integers(1, 5), ones=st.booleans())
def test_windows_globals_and_random_blocks(seed: int, blocks: int, randoms: int, wide: int, ones: bool) -> None:
    direction: Any = "unidirectional" if ones else "bidirectional"
    random.seed(seed)
    rows = attention.BigBirdSparsityConfig(2, 16, True, randoms, wide, 2, direction).make_layout(blocks * 16)
    random.seed(seed)
    drawn = [
        [
            random.sample(range(row + 1 if ones else blocks), min(randoms, row + 1 if ones else blocks)) if randoms else []
            for row in range(blocks)
        ]
        for _ in range(2)
    ]
    spans = [(1, 3), (5, 6)]
    long = attention.BSLongformerSparsityConfig(2, 16, False, wide, [1, 5], [3, 6], direction).make_layout(blocks * 16)
    local = attention.LocalSlidingWindowSparsityConfig(2, 16, wide, direction).make_layout(blocks * 16)
    lengths = [2, 3]
    various = attention.VariableSparsityConfig(2, 16, False, 0, lengths, [1, 5], [3, 6], direction).make_layout(blocks * 16)
    window = [0, 0, *(1 + at // 3 for at in range(blocks))]
    for head, row, column in ((h, r, c) for h in range(2) for r in range(blocks) for c in range(blocks)):
        near, late = abs(row - column) <= wide // 2, ones and column > row
        assert bool(rows[head, row, column]) == (not late and (near or min(row, column) < 2 or column in drawn[head][row]))
        in_span = any(start <= at < end for start, end in spans for at in (row, column))
        assert bool(long[head, row, column]) == (not late and (near or in_span))
        assert bool(local[head, row, column]) == (near and not late)
        column_span = any(start <= column < end and (not ones or row >= start) for start, end in spans)
        assert bool(various[head, row, column]) == ((window[row] == window[column] and not late) or column_span)
    assert bool(attention.DenseSparsityConfig(2).make_layout(blocks * 16).all())


def test_random_blocks_of_each_row_are_distinct_and_shared_by_heads() -> None:
    config = attention.VariableSparsityConfig(3, num_random_blocks=2, local_window_blocks=[1], global_block_indices=[])
    layout = config.make_layout(20 * 16)
    assert (layout == layout[:1]).all()
    assert all(int(row.sum()) in (2, 3) for row in layout[0])


def test_a_picture_of_a_layout() -> None:
    layout = attention.LocalSlidingWindowSparsityConfig(2, 16, 3).make_layout(48)
    assert attention.draw(layout) == "█··\n██·\n·██"
    layout[1] = 0
    assert attention.draw(layout) == "█··  ···\n██·  ···\n·██  ···"
    assert attention.draw(layout, "svg").count("<rect") == int(layout.sum()) + 2
    with pytest.raises(ValueError, match="'text' or 'svg'"):
        attention.draw(layout, "png")  # type: ignore[arg-type]


# Modules


def blocks_of(x: Tensor, layout: Tensor, block: int) -> Tensor:
    """The layout's blocks of [B, H, M, N]."""
    head, row, column = layout.nonzero().unbind(1)
    return x.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)[:, head, row, column]


def spread(blocks: Tensor, layout: Tensor, block: int) -> Tensor:
    head, row, column = layout.nonzero().unbind(1)
    out = blocks.new_zeros(len(blocks), layout.shape[0], layout.shape[1], layout.shape[2], block, block)
    out[:, head, row, column] = blocks
    return out.transpose(3, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("block", [16, 32])
def test_products_of_block_sparse_matrices(mode: Any, trans_a: bool, trans_b: bool, block: int) -> None:
    torch.manual_seed(0)
    rows, columns, inner = 3 * block, 5 * block, 48
    layout = (torch.rand(2, 3, 5) < 0.5).long()
    sparse = torch.randn(2, int(layout.sum()), block, block, dtype=torch.double, requires_grad=True)
    whole = spread(sparse, layout, block)

    def turned(x: Tensor, trans: bool) -> Tensor:
        return x.transpose(-1, -2) if trans else x

    if mode == "sdd":
        a, b = torch.randn(2, 2, rows, inner).double(), torch.randn(2, 2, inner, columns).double()
        given, expected = (turned(a, trans_a), turned(b, trans_b)), blocks_of(a @ b, layout, block)
    elif mode == "dsd":
        b = torch.randn(2, 2, rows if trans_a else columns, inner).double()
        given, expected = (sparse, turned(b, trans_b)), turned(whole, trans_a) @ b
    else:
        a = torch.randn(2, 2, inner, columns if trans_b else rows).double()
        given, expected = (turned(a, trans_a), sparse), a @ turned(whole, trans_b)
    out = attention.MatMul(layout, block, mode, trans_a, trans_b)(*given)
    torch.testing.assert_close(out, expected)
    if mode != "sdd":
        weight = torch.randn_like(out)
        mine, other = (torch.autograd.grad((x * weight).sum(), sparse)[0] for x in (out, expected))
        torch.testing.assert_close(mine, other)


def test_operands_that_do_not_fit_a_layout() -> None:
    layout = torch.ones(2, 3, 5).tril().long()
    sparse = torch.randn(1, int(layout.sum()), 16, 16)

    def dense_(*sizes: int, heads: int = 2, batch: int = 1) -> Tensor:
        return torch.randn(batch, heads, *sizes)

    products: list[tuple[str, dict[str, Any], Tensor, Tensor]] = [
        (r"a has shape \(1, 3, 48, 8\); .* of 2 heads", {"mode": "sdd"}, dense_(48, 8, heads=3), dense_(8, 80)),
        (r"a of 1 times \(64, 8\) .* their product \(48, 80\)", {"mode": "sdd"}, dense_(64, 8), dense_(8, 80)),
        (r"a of 1 times \(48, 80\) and b of 1 times \(64, 24\)", {"mode": "dsd"}, sparse, dense_(64, 24)),
        (r"a of 1 times \(80, 48\) and b of 1", {"mode": "dsd", "trans_a": True}, sparse, dense_(80, 24)),
        (r"a of 2 times \(24, 48\) and b of 1", {"mode": "dds"}, dense_(24, 48, batch=2), sparse),
        ("a block-sparse matrix has shape", {"mode": "dds"}, dense_(24, 48), sparse[:, 1:]),
    ]
    for problem, options, a, b in products:
        with pytest.raises(ValueError, match=problem):
            attention.MatMul(layout, 16, **options)(a, b)
    masks: list[tuple[str, dict[str, Any]]] = [
        (r"rpe has shape \(48, 48\)", {"rpe": torch.zeros(48, 48)}),
        (r"key_padding_mask has shape \(1, 48\)", {"key_padding_mask": torch.zeros(1, 48)}),
        (r"attn_mask has shape \(80, 48\); it must be .*, \(48, 80\)", {"attn_mask": torch.zeros(80, 48)}),
        (r"attn_mask_mode \('min'\) must be 'add' or 'mul'", {"attn_mask_mode": "min"}),
    ]
    for problem, options in masks:
        with pytest.raises(ValueError, match=problem):
            attention.Softmax(layout, 16)(sparse, **options)


def test_the_softmax_of_a_block_sparse_matrix() -> None:
    torch.manual_seed(0)
    layout, block = (torch.rand(2, 4, 4) < 0.6).long(), 16
    x = torch.randn(2, int(layout.sum()), block, block, requires_grad=True)
    rpe, keys, mask = torch.randn(2, 64, 64), torch.ones(2, 64), torch.ones(64, 64).tril()
    keys[1, 50:] = 0
    out = attention.Softmax(layout, block)(x, 0.5, rpe, keys, mask, key_padding_mask_mode="mul", attn_mask_mode="mul")
    allowed = spread(torch.ones_like(x), layout, block).bool() & keys.bool()[:, None, None] & mask.bool()
    score = (spread(x, layout, block) * 0.5 + rpe).masked_fill(~allowed, -1e38)
    expected = blocks_of(torch.softmax(score, -1) * allowed, layout, block)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    mine, other = (torch.autograd.grad((each * weight).sum(), x)[0] for each in (out, expected))
    torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


def test_sparse_self_attention_takes_masks_and_positions() -> None:
    torch.manual_seed(0)
    config = attention.BSLongformerSparsityConfig(2, 16)
    module = attention.SparseSelfAttention(config, key_padding_mask_mode="mul", attn_mask_mode="mul", max_seq_length=256)
    q, k, v = (heads(2, 2, 96, 32) for _ in range(3))
    rpe = torch.randn(2, 96, 96, requires_grad=True)
    padding, mask = torch.ones(2, 96), torch.ones(96, 96).tril()
    padding[1, 80:] = 0
    out = module(q, k.transpose(-1, -2), v, rpe=rpe, key_padding_mask=padding, attn_mask=mask)
    layout = BlockLayout(module.master_layout[:, :6, :6], 16, causal=True)
    expected = dense(q, k, v, layout, rpe, torch.zeros(2, 1, 1, 96).masked_fill(padding[:, None, None] == 0, -1e38))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(*(torch.autograd.grad(x.double().square().sum(), (q, k, v, rpe)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    wrong: list[tuple[str, dict[str, Tensor]]] = [
        (r"key_padding_mask has shape \(2, 80\); it must be \[batch, tokens\], \(2, 96\)", {"key_padding_mask": padding[:, :80]}),
        (r"key_padding_mask has shape \(96, 2\)", {"key_padding_mask": padding.t()}),
        (r"attn_mask has shape \(96, 80\); it must broadcast to .*, \(2, 2, 96, 96\)", {"attn_mask": mask[:, :80]}),
        (r"rpe has shape \(3, 96, 96\)", {"rpe": torch.zeros(3, 96, 96), "attn_mask": mask}),
    ]
    for problem, masks in wrong:
        with pytest.raises(ValueError, match=problem):
            module(q, k, v, **masks)
    with pytest.raises(ValueError, match="query has 6 heads, and FixedSparsityConfig has num_heads=4: make it for 6 heads"):
        own = attention.FixedSparsityConfig(4, different_layout_per_head=True)
        attention.SparseSelfAttention(own)(*[torch.randn(1, 6, 64, 8)] * 3)
    shared = attention.SparseSelfAttention(attention.FixedSparsityConfig(4))
    q, k, v = torch.randn(3, 1, 4, 64, 8)
    torch.testing.assert_close(shared(q[:, :2], k[:, :2], v[:, :2]), shared(q, k, v)[:, :2])  # a slice's heads
    q, k, v = torch.randn(3, 2, 2, 96, 32)
    with pytest.raises(ValueError, match="a sequence of 100 tokens"):
        module(*[torch.randn(1, 2, 100, 32)] * 3)
    with pytest.raises(ValueError, match="has no pattern"):
        attention.SparseSelfAttention()(q, k, v)


# Unmodified models


def small(kind: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    if kind == "bert":
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | options
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **options))
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, num_key_value_heads=2, **options))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **options))


def loss_and_gradients(model: Any, **inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


def batch(length: int, padded: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(64, (2, length))
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[1, -padded:], labels[1, -padded:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", ["bert", "llama", "mistral"])
def test_all_blocks_of_an_unmodified_model_are_its_own_attention(kind: str) -> None:
    model = small(kind, **({"sliding_window": 20} if kind == "mistral" else {}))
    inputs = batch(45, padded=9)
    expected = loss_and_gradients(model, **inputs)
    attention.use_sparse_attention(model, {"mode": "dense"})
    ours = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_decoding_with_a_cache_follows_the_pattern() -> None:
    model = small("llama").eval()
    attention.use_sparse_attention(model, {"mode": "bslongformer", "num_sliding_window_blocks": 1})
    ids = batch(75)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        cached = model(ids[:, :70], use_cache=True)
        rest = model(ids[:, 70:], past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 70:], atol=1e-5, rtol=1e-4)
    other = small("llama").eval()
    assert not torch.allclose(whole, other(ids).logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("mode", ["dense", "bslongformer"])
def test_generation_has_the_same_tokens_with_every_cache(kind: str, mode: str) -> None:
    model = small(kind, pad_token_id=0, **({"sliding_window": 20} if kind == "mistral" else {})).eval()
    expected = None
    if mode == "dense":
        ids, mask = batch(37)["input_ids"], torch.ones(2, 37, dtype=torch.long)
        mask[1, :5] = 0
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    attention.use_sparse_attention(model, {"mode": mode})
    ids, mask = batch(37)["input_ids"], torch.ones(2, 37, dtype=torch.long)
    mask[1, :5] = 0
    runs = [
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=cache)
        for cache in ("static", "dynamic")
    ]
    runs.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False))
    assert all(torch.equal(runs[0], run) for run in (*runs, *([] if expected is None else [expected])))


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_numbers_of_a_mask_are_added(kind: str) -> None:
    model, ids = small(kind).eval(), batch(40)["input_ids"]
    mask = torch.randn(2, 1, 40, 40) * 3
    if kind == "llama":
        mask = mask.masked_fill(~torch.ones(40, 40).tril().bool(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        attention.use_sparse_attention(model, {"mode": "dense"})
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, atol=1e-5, rtol=1e-4)
        if kind == "llama":
            cached = model(ids[:, :30], use_cache=True)
            with pytest.raises(ValueError, match="a mask of the caller's"):
                model(ids[:, 30:], past_key_values=cached.past_key_values, attention_mask=mask[:, :, 30:])


def test_packed_samples_and_windows_need_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that start again are samples of their own; the rows of a mask that exist at a time are few."""
    from slipstream.attention import transformers as ours

    monkeypatch.setattr(ours, "_ROWS", 64)
    places = torch.cat([torch.arange(30), torch.arange(15), torch.arange(19)]).expand(2, -1)
    for kind, options in (("llama", {}), ("mistral", {"sliding_window": 11})):
        model, inputs = small(kind, **options), batch(64) | {"position_ids": places, "use_cache": False}
        del inputs["attention_mask"]
        expected = loss_and_gradients(model, **inputs)
        attention.use_sparse_attention(model, {"mode": "dense"})
        seen: list[Any] = []
        monkeypatch.setattr(ours, "block_sparse_attention", lambda *a, **k: (seen.append(k), block_sparse_attention(*a, **k))[1])
        torch.testing.assert_close(loss_and_gradients(model, **inputs), expected, atol=1e-5, rtol=1e-4)
        assert seen and all(k["bias"] is None and k["spans"].shape == (2, 64, 2) for k in seen)


def test_a_layout_that_an_evaluation_made_trains() -> None:
    """Layouts are kept by pattern and length; that of an evaluation in inference mode serves the training after it."""
    model, inputs = small("llama"), batch(96)
    for name in ("bslongformer", "bigbird"):
        attention.use_sparse_attention(model, {"mode": name, "num_sliding_window_blocks": 5})
        with torch.inference_mode():
            loss = float(model(**inputs).loss)
        assert float(loss_and_gradients(model, **inputs)[0]) == pytest.approx(loss, abs=1e-6)


def test_a_saved_model_keeps_its_pattern(tmp_path: Any) -> None:
    import transformers

    model = small("bert").eval()
    attention.use_sparse_attention(model, {"mode": "bigbird", "num_random_blocks": 1})
    ids = batch(96)["input_ids"]
    model.save_pretrained(tmp_path)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="slipstream_sparse").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


PATTERNS: list[dict[str, Any]] = [
    {
        "mode": "fixed",
        "num_local_blocks": 2,
        "num_global_blocks": 1,
        "different_layout_per_head": True,
        "num_different_global_patterns": 2,
    },
    {"mode": "fixed", "attention": "unidirectional"},
    {"mode": "fixed", "num_local_blocks": 2, "horizontal_global_attention": True},
    {
        "mode": "variable",
        "num_random_blocks": 1,
        "local_window_blocks": [1, 2],
        "global_block_indices": [1],
        "global_block_end_indices": [3],
    },
    {"mode": "bigbird", "num_random_blocks": 1, "num_sliding_window_blocks": 1, "block": 32},
    {"mode": "bslongformer", "num_sliding_window_blocks": 1, "global_block_indices": [0, 2]},
    {"mode": "dense"},
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_each_mode_of_the_json(pattern: dict[str, Any]) -> None:
    inputs = batch(128)
    twin = small("bert")
    if pattern["mode"] != "dense":
        attention.use_sparse_attention(twin, pattern)
    expected = loss_and_gradients(twin, **inputs)[0]
    model = small("bert")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "sparse_attention": pattern,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = slipstream.initialize(model=model, config=config)
    loss = engine(**inputs).loss
    engine.backward(loss)
    engine.step()
    assert torch.equal(loss.detach(), expected)
    assert (model.config._attn_implementation == "slipstream_sparse") == (pattern["mode"] != "dense")
    engine.destroy()


def test_a_pattern_that_kernels_cannot_compute_is_refused_before_training() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "sparse_attention": {"mode": "bigbird", "block": 24}}
    for model in (small("bert"), attention.SparseSelfAttention()):
        with pytest.raises(ValueError, match=r"mode 'bigbird': block \(24\) must be a multiple of 16"):
            slipstream.initialize(model=model, config=config)


def test_the_json_reaches_modules_without_a_pattern_of_their_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 96)
            self.attend = attention.SparseSelfAttention()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return self.attend(q, k, v)  # type: ignore[no-any-return]

    x = torch.randn(1, 64, 32)
    for pattern in ({"mode": "dense"}, {"mode": "dense", "block": 32}):
        engine, *_ = slipstream.initialize(model=Own(), config={"train_micro_batch_size_per_gpu": 1, "sparse_attention": pattern})
        q, k, v = engine.module.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        torch.testing.assert_close(engine(x), nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-4)
        engine.destroy()
    model = Own()
    config = {"train_micro_batch_size_per_gpu": 1, "sparse_attention": {"mode": "bslongformer", "num_sliding_window_blocks": 1}}
    engine, *_ = slipstream.initialize(model=model, config=config)
    q, k, v = model.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    blocks = attention.BSLongformerSparsityConfig(2, num_sliding_window_blocks=1).make_layout(64)
    torch.testing.assert_close(engine(x).double(), dense(q, k, v, BlockLayout(blocks, 16)), atol=1e-5, rtol=1e-5)
    engine.destroy()
    with pytest.raises(ValueError, match="Linear has no slipstream"):
        slipstream.initialize(model=nn.Linear(2, 2), config=config)


# Help for BERT


def test_the_attention_of_bert_as_a_module() -> None:
    """Its output and gradients are those of dense attention under the layout, with padding and numbers that are added."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.BertConfig(hidden_size=32, num_attention_heads=4, attention_probs_dropout_prob=0.0)
    module = attention.BertSparseSelfAttention(settings, attention.FixedSparsityConfig(4, num_local_blocks=2))
    x, padding, bias = torch.randn(2, 96, 32, requires_grad=True), torch.zeros(2, 1, 1, 96), torch.randn(2, 1, 96, 96)
    padding[1, ..., 70:] = torch.finfo(torch.float32).min
    out = module(x, padding, bias)
    q, k, v = (each(x).view(2, 96, 4, 8).transpose(1, 2) for each in (module.query, module.key, module.value))
    layout = BlockLayout(attention.FixedSparsityConfig(4, num_local_blocks=2).make_layout(96), 16)
    expected = dense(q, k, v, layout, padding.double(), bias.double()).transpose(1, 2).reshape(2, 96, 32)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    wanted = (x, *module.parameters())
    for mine, other in zip(*(torch.autograd.grad(each.double().square().sum(), wanted) for each in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 1, 80\)"):
        module(x, padding[..., :80])
    with pytest.raises(ValueError, match=r"attn_mask has shape \(2, 1, 96, 80\)"):
        module(x, None, bias[..., :80])
    settings.num_attention_heads = 2
    with pytest.raises(ValueError, match="BertConfig has 2 heads, and FixedSparsityConfig has num_heads=4"):
        attention.BertSparseSelfAttention(settings, attention.FixedSparsityConfig(4))


def test_a_longer_roberta_and_its_tokenizer() -> None:
    """Two rows of RoBERTa's positions are none; sparse layers of all blocks give the outputs of before."""
    import tokenizers
    import transformers

    utils = attention.SparseAttentionUtils
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(max_position_embeddings=66, pad_token_id=1, **sizes)).eval()
    ids, mask = torch.randint(2, 64, (2, 60)), torch.ones(2, 60, dtype=torch.long)
    ids[1, 50:], mask[1, 50:] = 1, 0
    expected = model(ids, attention_mask=mask).logits
    model = utils.extend_position_embedding(model, 160)
    table = model.roberta.embeddings.position_embeddings.weight
    assert model.config.max_position_embeddings == len(table) == 162
    assert torch.equal(table[66:130], table[2:66]) and torch.equal(table[130:162], table[2:34])
    model = utils.replace_model_self_attention_with_sparse_self_attention(model, 160, attention.DenseSparsityConfig(4))
    added, tokens, padded, *_ = utils.pad_to_block_size(16, ids, mask, pad_token_id=1)
    assert tokens is not None and (tokens[:, 60:] == 1).all()
    out = utils.unpad_sequence_output(added, model(tokens, attention_mask=padded).logits)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert model(torch.randint(2, 64, (1, 160))).logits.shape == (1, 160, 64)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<pad>": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=64)
    assert utils.update_tokenizer_model_max_length(tokenizer, 160) is tokenizer and tokenizer.model_max_length == 160
    assert len(tokenizer("a " * 200, truncation=True)["input_ids"]) == 160


def test_a_decoder_of_bert_sees_no_later_token() -> None:
    utils = attention.SparseAttentionUtils
    model = small("bert", is_decoder=True).eval()
    ids = batch(64)["input_ids"]
    expected = model(ids, use_cache=False).logits
    model = utils.replace_model_self_attention_with_sparse_self_attention(model, 64, attention.DenseSparsityConfig(4))
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model(ids)


def test_a_bert_with_longer_positions_and_sparse_layers() -> None:
    utils = attention.SparseAttentionUtils
    model = small("bert", max_position_embeddings=64).eval()
    ids = batch(60, padded=10)
    expected = model(ids["input_ids"], attention_mask=ids["attention_mask"]).logits
    model = utils.extend_position_embedding(model, 160)
    table = model.bert.embeddings.position_embeddings.weight
    assert model.config.max_position_embeddings == len(table) == 160 and torch.equal(table[64:128], table[:64])
    config = attention.DenseSparsityConfig(4)
    model = utils.replace_model_self_attention_with_sparse_self_attention(model, 160, config)
    added, tokens, mask, types, positions, embeds = utils.pad_to_block_size(
        16, ids["input_ids"], ids["attention_mask"], pad_token_id=0
    )
    assert added == 4 and tokens is not None and tokens.shape == (2, 64) and types is positions is embeds is None
    out = utils.unpad_sequence_output(added, model(tokens, attention_mask=mask).logits)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert model(torch.randint(64, (1, 160))).logits.shape == (1, 160, 64)
    packed = torch.block_diag(torch.ones(20, 20), torch.ones(44, 44)).bool().expand(2, 1, 64, 64)
    dense_model = utils.extend_position_embedding(small("bert", max_position_embeddings=64), 160).eval()
    torch.testing.assert_close(
        model(tokens, attention_mask=packed).logits, dense_model(tokens, attention_mask=packed).logits, atol=1e-5, rtol=1e-4
    )
    with pytest.raises(ValueError, match="no BERT or RoBERTa"):
        utils.extend_position_embedding(small("llama"), 9999)
    with pytest.raises(ValueError, match="must be above the 160"):
        utils.extend_position_embedding(model, 160)

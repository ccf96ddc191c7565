"""The ops in every implementation this machine has: torch twin, portable C, AVX2, AVX-512.

What is shown: sums follow an oracle in plain fp32, Adam follows torch's optimizers, all implementations give
the same bits for any size, dtype and alignment, non-finite values stay visible, and wrong arguments are
refused by name.
"""

import functools
import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream import ops
from slipstream.ops import cpu, grid, pages, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 130, 1000, 65536, 65536 + 64, 2 * 65536 + 77)
NATIVE = ("portable", "avx2", "avx512")
HYPER: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
MODE: dict[str, Any] = {"decoupled": True, "bias_correction": True, "step": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def available() -> list[str]:
    """Implementations that run here; the instruction set in use is left as it was."""
    used = cpu.isa()
    names = ["torch", *filter(cpu.use_isa, NATIVE)]
    cpu.use_isa(used)
    return names


def run_as(implementation: str, run: Callable[[], Any]) -> Any:
    used, bound = cpu.isa(), cpu._kernels
    try:
        if implementation == "torch":
            cpu._kernels = lambda: None  # type: ignore[assignment]
        else:
            assert cpu.use_isa(implementation)
        return run()
    finally:
        cpu._kernels = bound
        cpu.use_isa(used)


@pytest.fixture(params=available())
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    return lambda call: run_as(request.param, call)


def test_every_instruction_set_is_here() -> None:
    if missing := set(NATIVE) - set(available()):
        pytest.skip(f"not tested on this machine: {', '.join(sorted(missing))} ({ops.report()[0].reason})")


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Equal elements, signs of zero included; a NaN equals any NaN."""
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def summed(sources: list[Tensor], alpha: float, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The oracle: one IEEE operation after another in fp32, one rounding."""
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source.float()
    total = total * alpha
    return (total if before is None else total + before.float()).to(dtype)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_sum_ranks_follows_the_oracle(run: Callable[..., Any], source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    for numel in SIZES:
        for num_sources, accumulate in ((1, False), (2, True), (5, False)):
            sources = [(torch.randn(numel) * 3).to(source) for _ in range(num_sources)]
            out = torch.randn(numel).to(target)
            expected = summed(sources, 0.3, out if accumulate else None, target)
            partial = run(lambda s=sources, o=out, a=accumulate: ops.sum_ranks(o, s, alpha=0.3, accumulate=a))
            assert equal_bits(out, expected), (numel, num_sources)
            assert partial.finite
            assert partial.sumsq == pytest.approx(float(expected.double().square().sum()), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_ranks_may_write_over_a_source(run: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for position in range(3):
        for accumulate in (False, True):
            sources = [torch.randn(1000).to(dtype) for _ in range(3)]
            out = sources[position]
            expected = summed(sources, 0.5, out if accumulate else None, dtype)
            run(lambda s=sources, o=out, a=accumulate: ops.sum_ranks(o, s, alpha=0.5, accumulate=a))
            assert equal_bits(out, expected)


@pytest.mark.parametrize("target", DTYPES)
def test_sum_ranks_sees_one_bad_element(run: Callable[..., Any], target: torch.dtype) -> None:
    for bad, position in itertools.product((math.nan, math.inf, -math.inf), (0, 64, 1023, 1024)):
        sources = [torch.ones(1025), torch.ones(1025)]
        sources[1][position] = bad
        out = torch.empty(1025, dtype=target)
        partial = run(lambda s=sources, o=out: ops.sum_ranks(o, s, alpha=1.0, accumulate=False))
        assert not partial.finite, (bad, position)
        assert out.isfinite().sum() == 1024, (bad, position)
        assert not out[position].isfinite(), (bad, position)


def test_sum_ranks_reports_what_rounding_made_infinite(run: Callable[..., Any]) -> None:
    out = torch.empty(70, dtype=torch.float16)
    partial = run(lambda: ops.sum_ranks(out, [torch.full((70,), 65520.0)], alpha=1.0, accumulate=False))
    assert not partial.finite
    partial = run(lambda: ops.sum_ranks(out, [torch.full((70,), 65519.0)], alpha=1.0, accumulate=False))
    assert partial == ops.Partial(70 * 65504.0**2, True)


def test_sums_of_squares_cannot_overflow(run: Callable[..., Any]) -> None:
    largest = torch.finfo(torch.float32).max
    out = torch.empty(100)
    partial = run(lambda: ops.sum_ranks(out, [torch.full((100,), largest)], alpha=1.0, accumulate=False))
    assert partial.finite
    assert partial.sumsq == pytest.approx(100 * largest**2, rel=1e-14)


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_widens_exactly_and_comes_back(run: Callable[..., Any], dtype: torch.dtype) -> None:
    halves, wide, back = all_halves(dtype), torch.empty(65536), torch.empty(65536, dtype=dtype)
    run(lambda: ops.sum_ranks(wide, [halves], alpha=1.0, accumulate=False))
    assert equal_bits(wide, halves.float())
    run(lambda: ops.sum_ranks(back, [halves], alpha=1.0, accumulate=False))
    assert equal_bits(back, halves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(run: Callable[..., Any], dtype: torch.dtype) -> None:
    """Random bit patterns, and every half with its surroundings: the midpoints and the floats beside them."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    exact = all_halves(dtype).float()
    exact = exact[exact.isfinite()]
    up = torch.nextafter(exact.to(dtype), torch.tensor(math.inf, dtype=dtype)).float()
    middle = ((exact.double() + up.double()) / 2).float()
    middle = middle[middle.isfinite()]
    infinity = torch.tensor(math.inf)
    around = [middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)]
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, 0x7FC00000], dtype=torch.int32)
    values = torch.cat([patterns.view(torch.float32), *around, payloads.view(torch.float32)])
    out = torch.empty(len(values), dtype=dtype)
    run(lambda: ops.sum_ranks(out, [values], alpha=1.0, accumulate=False))
    assert equal_bits(out, values.to(dtype))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(run: Callable[..., Any], threads: int) -> None:
    torch.manual_seed(0)
    numel = 3 * cpu.THREAD_NUMEL + 12345
    sources = [torch.randn(numel).bfloat16() for _ in range(2)]
    state = [torch.rand(numel) for _ in range(3)]

    def once() -> tuple[Any, ...]:
        out, weights = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
        copy = torch.empty(numel, dtype=torch.bfloat16)
        master, exp_avg, exp_avg_sq = (tensor.clone() for tensor in state)
        partial = ops.sum_ranks(out, sources, alpha=0.5, accumulate=False)
        ops.adamw(master, sources[0], exp_avg, exp_avg_sq, weights, scale=0.5, **HYPER, **MODE)
        ops.copy_stream(copy, sources[1])
        return partial, out, weights, copy, master, exp_avg, exp_avg_sq

    alone = run(once)
    torch.set_num_threads(threads)
    together = run(once)
    assert alone[0] == together[0]
    assert all(torch.equal(a, b) for a, b in zip(alone[1:], together[1:], strict=True))
    assert torch.equal(alone[3], sources[1])


def test_block_sums_are_added_in_order(run: Callable[..., Any]) -> None:
    """The whole is the sum of its 64 Ki blocks: what a shard measures does not depend on its neighbors."""
    torch.manual_seed(0)
    block = 65536
    values = torch.randn(3 * block + 1000)
    result = run(lambda: ops.sum_ranks(torch.empty_like(values), [values], alpha=1.0, accumulate=False))
    total = 0.0
    for part in values.split(block):
        partial = run(lambda p=part: ops.sum_ranks(torch.empty_like(p), [p], alpha=1.0, accumulate=False))
        total += partial.sumsq
    assert result.sumsq == total


@given(
    numel=st.integers(0, 300),
    offset=st.integers(0, 17),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    num_sources=st.integers(1, 4),
    seed=st.integers(0, 1000),
    accumulate=st.booleans(),
    decoupled=st.booleans(),
    bias_correction=st.booleans(),
    own_weights=st.booleans(),
    beta1=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    step=st.integers(1, 10_000),
)
def test_all_implementations_give_the_same_bits(
    numel: int,
    offset: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    num_sources: int,
    seed: int,
    accumulate: bool,
    decoupled: bool,
    bias_correction: bool,
    own_weights: bool,
    beta1: float,
    weight_decay: float,
    step: int,
) -> None:
    """At any size and alignment. Sums of squares too, but for the twin's, which is equal to fp64 rounding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype) -> Tensor:
        spread = torch.randn(numel + offset, generator=generator) * 5
        return (spread.exp2() * torch.randn(numel + offset, generator=generator)).to(dtype)[offset:]

    source, target = dtypes
    sources, before = [draw(source) for _ in range(num_sources)], draw(target)
    state = [draw(torch.float32), draw(source), draw(torch.float32), draw(torch.float32).square_()]

    def both() -> tuple[ops.Partial, list[Tensor]]:
        out = before.clone()
        partial = ops.sum_ranks(out, sources, alpha=0.7, accumulate=accumulate)
        tensors = [tensor.clone() for tensor in state]
        weights = torch.zeros(numel + offset, dtype=target)[offset:] if own_weights else None
        ops.adamw(
            *tensors,
            weights,
            scale=0.3,
            lr=1e-2,
            beta1=beta1,
            beta2=0.95,
            eps=1e-8,
            weight_decay=weight_decay,
            step=step,
            decoupled=decoupled,
            bias_correction=bias_correction,
        )
        return partial, [out, *tensors] if weights is None else [out, *tensors, weights]

    results = {name: run_as(name, both) for name in available()}
    twin_partial, twin = results.pop("torch")
    for name, (partial, tensors) in results.items():
        assert all(equal_bits(a, b) for a, b in zip(tensors, twin, strict=True)), name
        assert partial.finite == twin_partial.finite
        assert not partial.finite or partial.sumsq == pytest.approx(twin_partial.sumsq, rel=1e-13)
    native = [str(partial) for partial, _ in results.values()]
    assert len(set(native)) <= 1


def ulps(a: Tensor, b: Tensor) -> float:
    """Largest distance in units of the last place of the larger."""
    larger = torch.maximum(a.abs(), b.abs())
    unit = torch.nextafter(larger, torch.tensor(math.inf)) - larger
    return float(((a.double() - b.double()).abs() / unit.double()).max())


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.2, 0.9), (0.0, 0.95)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_follows_torch(run: Callable[..., Any], decoupled: bool, betas: tuple[float, float], weight_decay: float) -> None:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.rand(1003) + 0.5)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = kind([weights], lr=1e-3, betas=betas, eps=1e-8, weight_decay=weight_decay)
    master, exp_avg, exp_avg_sq = weights.detach().clone(), torch.zeros(1003), torch.zeros(1003)
    narrow = torch.empty(1003, dtype=torch.bfloat16)
    for step in range(1, 6):
        grad = torch.rand(1003) + 0.1
        weights.grad = grad / 4
        peer.step()
        run(
            lambda g=grad, s=step: ops.adamw(
                master,
                g,
                exp_avg,
                exp_avg_sq,
                narrow,
                scale=0.25,
                lr=1e-3,
                beta1=betas[0],
                beta2=betas[1],
                eps=1e-8,
                weight_decay=weight_decay,
                step=s,
                decoupled=decoupled,
                bias_correction=True,
            )
        )
        assert ulps(master, weights.detach()) <= 2
        assert ulps(exp_avg, peer.state[weights]["exp_avg"]) <= 4
        assert ulps(exp_avg_sq, peer.state[weights]["exp_avg_sq"]) <= 4
        assert equal_bits(narrow, master.bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_adamw_keeps_a_bad_gradient_to_its_element(run: Callable[..., Any], bad: float) -> None:
    """As torch does it; deciding not to step at all is the verdict's, before this is called."""
    weights = torch.nn.Parameter(torch.ones(100))
    weights.grad = torch.ones(100)
    weights.grad[70] = bad
    peer = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    peer.step()
    master, exp_avg, exp_avg_sq = torch.ones(100), torch.zeros(100), torch.zeros(100)
    run(lambda: ops.adamw(master, weights.grad, exp_avg, exp_avg_sq, None, scale=1.0, **HYPER, **MODE))
    for actual, expected in ((master, weights.detach()), (exp_avg, peer.state[weights]["exp_avg"])):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isinf(), expected.isinf())
        assert actual.isfinite().sum() == 99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adamw_takes_narrow_masters_and_moments(run: Callable[..., Any], dtype: torch.dtype) -> None:
    """Computed in fp32 and rounded once: equal to the fp32 step followed by a rounding of each tensor."""
    torch.manual_seed(0)
    master, grad, exp_avg, exp_avg_sq = (torch.rand(20_000).to(dtype) for _ in range(4))
    wide = [tensor.float() for tensor in (master, grad, exp_avg, exp_avg_sq)]
    run(lambda: ops.adamw(*wide, None, scale=0.5, **HYPER, **MODE))
    run(lambda: ops.adamw(master, grad, exp_avg, exp_avg_sq, None, scale=0.5, **HYPER, **MODE))
    assert equal_bits(master, wide[0].to(dtype))
    assert equal_bits(exp_avg, wide[2].to(dtype))
    assert equal_bits(exp_avg_sq, wide[3].to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
def test_copy_stream_copies(run: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for numel in (*SIZES, 300_001):
        for offset in (0, 1, 5):
            src = torch.randint(0, 100, (numel + offset,)).to(dtype)[offset:]
            dst = torch.zeros(numel + 2, dtype=dtype)
            run(lambda d=dst, s=src: ops.copy_stream(d[1:-1], s))
            assert torch.equal(dst[1:-1], src)
            assert dst[0] == dst[-1] == 0


def test_nothing_outside_the_arrays_is_touched(run: Callable[..., Any]) -> None:
    for numel in (1, 17, 63, 65):
        out, guard = torch.zeros(numel + 128), torch.zeros(numel + 128)
        inside = slice(64, 64 + numel)
        run(lambda o=out[inside]: ops.sum_ranks(o, [torch.ones_like(o), torch.ones_like(o)], alpha=1.0, accumulate=False))
        guard[inside] = 2.0
        assert torch.equal(out, guard)


def test_sum_ranks_refuses_by_name(run: Callable[..., Any]) -> None:
    def sum_to(out: Tensor, *sources: Tensor) -> None:
        run(lambda: ops.sum_ranks(out, sources, alpha=1.0, accumulate=False))

    good = torch.zeros(64)
    with pytest.raises(ValueError, match="no sources"):
        sum_to(good)
    with pytest.raises(ValueError, match=r"out is torch.float64.*float32, torch.bfloat16"):
        sum_to(good.double(), good)
    with pytest.raises(ValueError, match=r"sources\[0\] is torch.int64"):
        sum_to(good, good.long())
    with pytest.raises(ValueError, match=r"dtypes differ.*sources\[1\] is torch.bfloat16"):
        sum_to(torch.zeros(64), good, good.bfloat16())
    with pytest.raises(ValueError, match=r"sources\[1\] has numel 63 where out has 64"):
        sum_to(torch.zeros(64), good, good[1:])
    with pytest.raises(ValueError, match=r"out has shape \(8, 8\)"):
        sum_to(torch.zeros(8, 8), good)
    with pytest.raises(ValueError, match=r"sources\[0\] is not contiguous \(stride 2\)"):
        sum_to(good, torch.zeros(128)[::2])
    both = torch.zeros(96)
    with pytest.raises(ValueError, match=r"sources\[1\] .*overlaps out .*128 bytes after it"):
        sum_to(both[32:], good, both[:64])
    with pytest.raises(ValueError, match=r"sources\[0\] .*overlaps out"):
        sum_to(good.view(torch.bfloat16)[:64], good)


def test_adamw_refuses_by_name(run: Callable[..., Any]) -> None:
    def step(*tensors: Tensor | None, **changes: Any) -> None:
        run(lambda: ops.adamw(*tensors, scale=1.0, **{**HYPER, **MODE, **changes}))  # type: ignore[arg-type]

    good = [torch.zeros(64) for _ in range(4)]
    with pytest.raises(ValueError, match=r"grad is torch.int32"):
        step(good[0], good[1].int(), good[2], good[3], None)
    with pytest.raises(ValueError, match=r"exp_avg_sq has numel 32 where master has 64"):
        step(*good[:3], good[3][:32], None)
    with pytest.raises(ValueError, match=r"out is not contiguous"):
        step(*good, torch.zeros(128)[::2])
    with pytest.raises(ValueError, match=r"exp_avg has shape \(64, 1\)"):
        step(good[0], good[1], good[2][:, None], good[3], None)
    with pytest.raises(ValueError, match=r"step \(0\) counts from 1"):
        step(*good, None, step=0)
    with pytest.raises(ValueError, match=r"betas \(1.0, 0.99\)"):
        step(*good, None, beta1=1.0)


def test_copy_stream_refuses_by_name(run: Callable[..., Any]) -> None:
    x = torch.zeros(100)
    with pytest.raises(ValueError, match=r"dtypes differ \(dst is torch.float32, src is torch.float16\)"):
        run(lambda: ops.copy_stream(x, x.half()))
    with pytest.raises(ValueError, match=r"src has numel 99 where dst has 100"):
        run(lambda: ops.copy_stream(x, x[1:]))


def test_native_copy_refuses_overlap() -> None:
    if not cpu.isa():
        pytest.skip(f"torch's own copy handles overlap: {ops.report()[0].reason}")
    x = torch.zeros(101)
    with pytest.raises(ValueError, match=r"overlap: 100 elements, 4 bytes apart"):
        ops.copy_stream(x[1:], x[:-1])


# -- Quantization


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, the first of zeros and the second of one number."""
    generator = torch.Generator().manual_seed(columns)
    w = torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    w[:1], w[1:2] = 0, -3.3
    return w.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 333])
def test_int8_is_its_twin(run: Callable[..., Any], dtype: torch.dtype, columns: int) -> None:
    w = matrix(9, columns, dtype)
    codes, scale = run(lambda: ops.quantize_int8(w))
    assert all(map(torch.equal, (codes, scale), reference.quantize_int8(w)))
    assert torch.equal(run(lambda: ops.dequantize_int8(codes, scale)), codes * scale[:, None])
    transposed = matrix(columns, 9, dtype).T
    assert all(map(torch.equal, run(lambda: ops.quantize_int8(transposed)), reference.quantize_int8(transposed)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(1, 32, 32), (9, 288, 32), (40, 64, 64), (3, 384, 128), (7, 18, 6), (5, 2, 2)]
)
def test_int4_is_its_twin(run: Callable[..., Any], dtype: torch.dtype, rows: int, columns: int, group: int) -> None:
    w = matrix(rows, columns, dtype)
    codes, scale, low = run(lambda: ops.quantize_int4(w, group))
    assert all(map(torch.equal, (codes, scale, low), reference.quantize_int4(w, group)))
    numbers = torch.stack((codes & 15, codes >> 4), 2).view(*scale.shape, group)
    back = (numbers * scale[..., None] + low[..., None]).flatten(1)
    assert torch.equal(run(lambda: ops.dequantize_int4(codes, scale, low)), back)
    assert torch.equal(run(lambda: ops.dequantize_int4(codes, scale.half(), low.half())), back)  # fp16 numbers, all of them


@pytest.mark.parametrize("quantize", [ops.quantize_int8, lambda w: ops.quantize_int4(w, 32)])
def test_threads_quantize_alike(run: Callable[..., Any], quantize: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    w = matrix(1001, 320, torch.bfloat16)
    alone = run(lambda: quantize(w))
    torch.set_num_threads(3)
    assert all(map(torch.equal, run(lambda: quantize(w)), alone))


@pytest.mark.parametrize("implementation", [name for name in available() if name != "torch"])
def test_a_nan_is_on_no_grid(implementation: str) -> None:
    """In the range of other values, as those of activations are; infinities are at its ends."""
    x = torch.randn(3, 37)
    x[1, 2], x[1, 20], x[2, 36] = math.nan, math.inf, -math.inf
    scale, zero = torch.full((1,), 0.25), torch.full((1,), 0.5)
    found = run_as(implementation, lambda: grid.on_grid(x, scale, zero, -8, 7))
    twin = torch.round((x - 0.5) / 0.25).clamp_(-8, 7) * 0.25 + 0.5
    assert found.isnan().sum() == 1 and torch.equal(found.nan_to_num(9), twin.nan_to_num(9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantized_weights_that_are_not_finite_show(run: Callable[..., Any], bad: float) -> None:
    w = matrix(4, 64, torch.float32)
    finite = torch.arange(8) != 5  # groups
    expected = reference.quantize_int4(w, 32)
    w[2, 40] = bad
    scale = run(lambda: ops.quantize_int8(w))[1]
    codes, scales, low = run(lambda: ops.quantize_int4(w, 32))
    assert scale.isfinite().tolist() == [True, True, False, True]
    assert torch.equal(low.flatten().isfinite(), finite)
    for actual, twin in zip((codes, scales, low), expected, strict=True):
        assert torch.equal(actual.view(8, -1)[finite], twin.view(8, -1)[finite])


def test_quantization_refuses_by_name(run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"quantize_int8: w is torch.int8 of shape \(2, 3\)"):
        run(lambda: ops.quantize_int8(torch.zeros(2, 3, dtype=torch.int8)))
    for columns, group in ((48, 32), (33, 33), (512, 256)):
        with pytest.raises(ValueError, match=f"group {group}, input {columns}"):
            run(functools.partial(ops.quantize_int4, torch.zeros(2, columns), group))


@pytest.mark.parametrize("native", [True, False])
def test_checksums_are_zlib_s_and_the_copy_is_exact(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every size around what is folded at once, from and to any address, continued from another."""
    from slipstream.ops import checksum

    if not native:
        monkeypatch.setattr(checksum, "_native", lambda: None)
    rng = random.Random(3)
    for nbytes in [0, 1, 15, 16, 63, 64, 65, 79, 80, 81, 127, 128, 1 << 16, *(rng.randrange(3000) for _ in range(100))]:
        source = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8)[rng.randrange(17) :][:nbytes]
        before, first = rng.randrange(1 << 32), rng.randrange(20)
        target, raw = torch.zeros(nbytes + 40, dtype=torch.uint8), bytes(source.tolist())
        expected = zlib.crc32(raw, before)
        assert checksum.crc32(source, before) == expected
        assert checksum.crc32(source, before, target[first : first + source.numel()]) == expected
        assert target.count_nonzero() == source.count_nonzero() and target[first : first + source.numel()].equal(source)
        block = rng.randrange(1, 1000)
        sums = [zlib.crc32(raw[at : at + block]) for at in range(0, nbytes, block)]
        assert checksum.crc32_blocks(source, block) == sums
        assert checksum.crc32_blocks(source, block, target[first : first + source.numel()].zero_()) == sums
        assert target[first : first + source.numel()].equal(source)
    with pytest.raises(ValueError, match=r"pass contiguous torch.uint8"):
        checksum.crc32(torch.zeros(3))
    with pytest.raises(ValueError, match="cannot copy 3 bytes into 4"):
        checksum.crc32(torch.zeros(3, dtype=torch.uint8), 0, torch.zeros(4, dtype=torch.uint8))


def test_a_pool_hands_out_lines_that_do_not_overlap() -> None:
    pool = pages.Pool()
    sizes = (1, 64, 65, 3 << 20, 80 << 20, 7)
    tensors = [pool.empty(size).fill_(i) for i, size in enumerate(sizes)]
    assert [tensor.nbytes for tensor in tensors] == list(sizes)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    assert len(pool.blocks) == 3 and all(block.data_ptr() % (2 << 20) == 0 for block in pool.blocks)

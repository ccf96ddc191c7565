"""The optimizers' passes: every implementation gives the same bits, in any dtype and in 8 bits, at any size and split; the
formulas are those of the optimizers that they stand for; what rests narrow is right on average; refusals name the tensor.

`tests/unit/test_ops.py` has more of AdamW in fp32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream import ops
from slipstream.ops import Blocks, Stochastic, cpu
from slipstream.optim import rules
from tests.unit.test_ops import DTYPES, available, equal_bits, one_thread, run, run_as  # noqa: F401  # two are fixtures

ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 3, "bias_correction": True}
LAMB: dict[str, Any] = {**ADAM, "eps_inside_sqrt": False, "weight_decay": 0.1}
CODED_RULES = ("adamw", "lion", "sgd")
RULES = (*CODED_RULES, "adagrad", "lamb")
SIGNED, UNSIGNED = torch.int8, torch.uint8  # codes of a first and of a second state
BF16 = torch.bfloat16


def step(
    rule: str,
    master: Tensor,
    grad: Tensor,
    first: Any,
    second: Any,
    out: Tensor | None,
    rounding: Stochastic | None = None,
    beta: float = 0.9,
    weight_decay: float = 0.1,
    flag: bool = False,
    scale: float = 0.3,
) -> Any:
    """One step by any rule; `flag` is whichever the rule has. Returns LAMB's sums."""
    common: dict[str, Any] = {"weight_decay": weight_decay, "rounding": rounding}
    if rule == "adamw":
        return ops.adamw(
            master, grad, first, second, out, scale=scale, lr=1e-2, decoupled=flag, **{**ADAM, **common, "beta1": beta}
        )
    if rule == "lion":
        return ops.lion(master, grad, first, out, scale=scale, lr=1e-2, beta1=beta, beta2=0.5 if flag else 0.99, **common)
    if rule == "sgd":
        kind: dict[str, Any] = {"momentum": beta, "dampening": 0.0 if flag else 0.3, "nesterov": flag, "first": weight_decay == 0}
        return ops.sgd(master, grad, first if beta else None, out, scale=scale, lr=1e-2, **kind, **common)
    if rule == "adagrad":
        return ops.adagrad(master, grad, second, out, scale=scale, lr=1e-2, lr_decay=0.1, eps=1e-10, step=4, **common)
    kind = {**LAMB, **common, "beta1": beta, "eps_inside_sqrt": flag}
    sums = ops.lamb_update(master, grad, first, second, scale=scale, **kind)
    ops.lamb_apply(master, first, second, out, lr=1e-2, **kind)
    return sums


def clone(state: Any) -> Any:
    return Blocks(*map(torch.clone, state)) if isinstance(state, Blocks) else None if state is None else state.clone()


def flat(*states: Any) -> list[Tensor]:
    """All tensors, codes as they are and scales too."""
    parts = [part for state in states for part in (state if isinstance(state, Blocks) else (state,)) if part is not None]
    return [part if part.is_floating_point() else part.to(torch.bfloat16) for part in parts]


@given(
    rule=st.sampled_from(RULES),
    numel=st.one_of(st.integers(0, 70), st.integers(240, 800)),
    skew=st.integers(0, 17),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 5),
    codes=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
    stochastic=st.booleans(),
    own_weights=st.booleans(),
    beta=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    flag=st.booleans(),
    bad=st.sampled_from([None, math.nan, math.inf]),
)
def test_all_implementations_give_the_same_bits(
    rule: str,
    numel: int,
    skew: int,
    dtypes: tuple[torch.dtype, ...],
    codes: tuple[bool, bool],
    seed: int,
    stochastic: bool,
    own_weights: bool,
    beta: float,
    weight_decay: float,
    flag: bool,
    bad: float | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype) -> Tensor:
        """Not aligned, and of very different sizes."""
        spread = (torch.randn(numel + skew, generator=generator) * 5).exp2()
        return (spread * torch.randn(numel + skew, generator=generator)).to(dtype)[skew:]

    def narrowed(dtype: torch.dtype) -> torch.dtype:
        return BF16 if stochastic and dtype is torch.float16 else dtype

    master, grad, first = draw(narrowed(dtypes[0])), draw(dtypes[1]), draw(narrowed(dtypes[2]))
    second = draw(torch.float32).square_().to(narrowed(dtypes[3]))
    if bad is not None and numel:
        grad[numel // 2] = bad
    states = [first, second]
    if rule in CODED_RULES:
        for i, kind in enumerate((SIGNED, UNSIGNED)):
            if codes[i]:
                states[i] = Blocks.of(states[i].float(), kind)  # type: ignore[call-overload]
    rounding = Stochastic(seed, 7, 16 * seed + (1 << 32) - 256) if stochastic else None

    def once() -> tuple[Any, list[Tensor]]:
        p, m, v = clone(master), clone(states[0]), clone(states[1])
        out = torch.zeros(numel + skew, dtype=dtypes[4])[skew:] if own_weights else None
        sums = step(rule, p, grad, m, v, out, rounding, beta, weight_decay, flag)
        return sums, flat(p, m, v, out)

    results = {name: run_as(name, once) for name in available()}
    twin_sums, twin = results.pop("torch")
    for name, (sums, tensors) in results.items():
        assert all(equal_bits(a, b) for a, b in zip(tensors, twin, strict=True)), name
        assert sums is None or sums == pytest.approx(twin_sums, rel=1e-12, nan_ok=True)
    assert len({str(sums) for sums, _ in results.values()}) <= 1


# AdamW's recipes that are compiled by themselves: master, states (None: codes), gradient, weights.
FP32 = torch.float32
RECIPES: dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype, torch.dtype | None]] = {
    "fp32": (FP32, FP32, FP32, None),
    "mixed": (FP32, FP32, BF16, BF16),
    "bf16 states": (FP32, BF16, BF16, BF16),
    "codes": (FP32, None, BF16, BF16),
    "6 bytes": (BF16, BF16, BF16, None),
    "4 bytes": (BF16, None, BF16, None),
}


def in_recipe(recipe: str) -> list[Tensor]:
    """Three steps, the last on what is not finite; all tensors after the second and the third."""
    generator = torch.Generator().manual_seed(0)
    numel, (master, states, kind, weights) = 1003, RECIPES[recipe]
    p = torch.randn(numel, generator=generator).to(master)
    m, v = (Blocks.zeros(numel, codes) if states is None else torch.zeros(numel, dtype=states) for codes in (SIGNED, UNSIGNED))
    out, results = None if weights is None else torch.zeros(numel, dtype=weights), []
    for count in range(3):
        grad = (torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-30, 9, (numel,), generator=generator)).to(kind)
        if count == 2:
            grad[300:302] = torch.tensor([math.nan, math.inf])
        step("adamw", p, grad, m, v, out, Stochastic(3, count, (1 << 36) + 48) if master is BF16 else None, flag=True)
        results += [clone(part) for part in flat(p, m, v, out)] if count else []
    return results


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_compiled_by_itself_gives_the_same_bits(recipe: str) -> None:
    results = {name: run_as(name, lambda: in_recipe(recipe)) for name in available()}
    twin = results.pop("torch")
    for name, tensors in results.items():
        assert all(equal_bits(a, b) for a, b in zip(tensors, twin, strict=True)), name


@pytest.mark.parametrize("rule", RULES)
def test_neither_threads_nor_shards_change_a_bit(run: Callable[..., Any], rule: str) -> None:  # noqa: F811
    """bf16 weights rounded at random, states in 8 bits where the rule has them, and LAMB's sums."""
    torch.manual_seed(0)
    numel = 2 * cpu.THREAD_NUMEL + 12345
    master, grad = torch.randn(numel).to(BF16), torch.randn(numel).to(BF16)
    states = [torch.randn(numel), torch.rand(numel)]
    coded = rule in CODED_RULES
    stored = [Blocks.of(x, kind) if coded else x for x, kind in zip(states, (SIGNED, UNSIGNED), strict=True)]

    def in_one() -> tuple[Any, list[Tensor]]:
        p, m, v = clone(master), *map(clone, stored)
        sums = step(rule, p, grad, m, v, None, Stochastic(1, 2, 1 << 40))
        return sums, flat(p, m, v)

    def cut() -> list[Tensor]:
        p, m, v = clone(master), *map(clone, stored)
        for start, stop in ((0, 512), (512, 300_032), (300_032, numel)):
            part = [x.span(start, stop) if isinstance(x, Blocks) else x[start:stop] for x in (m, v)]
            step(rule, p[start:stop], grad[start:stop], *part, None, Stochastic(1, 2, (1 << 40) + start))
        return flat(p, m, v)

    alone = run(in_one)
    assert all(map(equal_bits, run(cut), alone[1]))
    torch.set_num_threads(3)
    together = run(in_one)
    assert together[0] == alone[0]
    assert all(map(equal_bits, together[1], alone[1]))


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2, in torch's operations."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group, (p,) = self.param_groups[0], self.param_groups[0]["params"]
        m, (beta1, beta2) = self.state[p].setdefault("exp_avg", torch.zeros_like(p)), group["betas"]
        update = m.lerp(p.grad, 1 - beta1).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        m.lerp_(p.grad, 1 - beta2)


class Lamb(torch.optim.Optimizer):
    """arXiv 1904.00962, algorithm 2, in torch's operations."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        defaults = {"eps": 1e-8, "eps_inside_sqrt": False, "bias_correction": True, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "min_coeff": 0.01, "max_coeff": 10.0, **options})
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group, (p,) = self.param_groups[0], self.param_groups[0]["params"]
        m, v = (self.state[p].setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq"))
        self.count += 1
        (beta1, beta2), power = group["betas"], self.count if group["bias_correction"] else math.inf
        m.lerp_(p.grad, 1 - beta1)
        v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        corrected = v / (1 - beta2**power)
        root = (corrected + group["eps"]).sqrt() if group["eps_inside_sqrt"] else corrected.sqrt() + group["eps"]
        update = m / root / (1 - beta1**power) + group["weight_decay"] * p
        p.sub_(update, alpha=group["lr"] * float((p.norm() / update.norm()).clamp(group["min_coeff"], group["max_coeff"])))


def sgd(param: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([param], lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1)


PEERS: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "lion": lambda p: Lion([p], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    "sgd": sgd,
    "nesterov": lambda p: torch.optim.SGD([p], lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD([p], lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad([p], lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "lamb": lambda p: Lamb([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "lamb, eps inside": lambda p: Lamb([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-3, eps_inside_sqrt=True, bias_correction=False),
}


def advance(peer: str, group: dict[str, Any], master: Tensor, grad: Tensor, state: Tensor, out: Tensor, count: int) -> None:
    """Our step with the peer's hyperparameters, on four times its gradient."""
    common: dict[str, Any] = {"weight_decay": group["weight_decay"], "lr": 1e-2}
    if peer == "lion":
        ops.lion(master, grad, state[0], out, scale=0.25, beta1=0.9, beta2=0.99, **common)
    elif peer == "adagrad":
        ops.adagrad(master, grad, state[1], out, scale=0.25, lr_decay=0.1, eps=1e-10, step=count, **common)
    elif "lamb" in peer:
        kind = {name: group[name] for name in ("eps", "eps_inside_sqrt", "bias_correction", "weight_decay")}
        kind |= {"beta1": 0.9, "beta2": 0.95, "step": count}
        halves = [(master[part], grad[part], *state[:, part]) for part in (slice(0, 512), slice(512, 1003))]
        sums = [ops.lamb_update(*half, scale=0.25, **kind) for half in halves]
        lr = 1e-2 * rules.trust_ratio(*map(sum, zip(*sums, strict=True)), group["min_coeff"], group["max_coeff"])
        ops.lamb_apply(master, *state, out, lr=lr, **kind)
    else:
        common |= {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        ops.sgd(master, grad, state[0] if group["momentum"] else None, out, scale=0.25, first=count == 1, **common)


@pytest.mark.parametrize("peer", PEERS)
def test_the_formulas_are_the_peers(run: Callable[..., Any], peer: str) -> None:  # noqa: F811
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1003))
    optimizer = PEERS[peer](param)
    group = optimizer.param_groups[0]
    master, state, out = param.detach().clone(), torch.zeros(2, 1003), torch.zeros(1003, dtype=BF16)
    if peer == "adagrad":
        state[1] = 0.1
    for count in range(1, 6):
        grad = torch.randn(1003)
        param.grad = grad / 4
        optimizer.step()
        run(functools.partial(advance, peer, group, master, grad, state, out, count))
        assert torch.allclose(master, param.detach(), rtol=2e-6, atol=1e-7)
        assert equal_bits(out, master.to(BF16))
    names = ("exp_avg", "exp_avg_sq") if "lamb" in peer else ("momentum_buffer",)
    names = {"lion": ("exp_avg",), "adagrad": ("", "sum")}.get(peer, names)
    for name, actual in zip(names, state, strict=False):
        if name and group.get("momentum") != 0:
            assert torch.allclose(actual, optimizer.state[param][name], rtol=2e-6, atol=1e-7)


def test_codes_are_near_and_no_sum_of_squares_is_lost() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000) * torch.randn(1000).exp2()
    most = torch.cat([part.abs().amax().expand(len(part)) for part in x.split(256)])
    signed, unsigned = Blocks.of(x, SIGNED).float(), Blocks.of(x.square(), UNSIGNED).float()
    assert ((signed - x).abs() <= most / 253).all()
    assert ((unsigned.sqrt() - x.abs()).abs() <= torch.where(x.abs() < most / 255, most / 254, most / 509)).all()
    assert (unsigned > 0).all()
    assert Blocks.of(torch.zeros(300), SIGNED).float().eq(0).all()
    assert Blocks.of(torch.zeros(300), UNSIGNED).float().eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_keeps_to_its_block(run: Callable[..., Any], bad: float) -> None:  # noqa: F811
    first, second, grad = Blocks.zeros(700, SIGNED), Blocks.zeros(700, UNSIGNED), torch.ones(700)
    grad[300] = bad
    run(lambda: step("adamw", torch.ones(700), grad, first, second, None))
    inside = torch.arange(700) // 256 == 1
    for state in (first, second):
        assert torch.equal(state.float().isfinite(), ~inside)


def test_rounding_is_right_on_average(run: Callable[..., Any]) -> None:  # noqa: F811
    """Weights and states that lie between two bf16 numbers or codes, over many elements."""
    numel = 1 << 18
    value, lr = 1.0, 1e-4  # the bf16 number below 1 is 1 - 2**-8
    kind: dict[str, Any] = {"scale": 1.0, "lr": lr, "momentum": 0.5, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    for exact in (1.001, -0.7123):
        master, grad, buffer = torch.full((numel,), value, dtype=BF16), torch.full((numel,), exact), torch.zeros(numel, dtype=BF16)
        run(lambda p=master, g=grad, m=buffer: ops.sgd(p, g, m, None, first=True, rounding=Stochastic(3, 1, 0), **kind))
        for tensor, mean in ((master, value - lr * exact), (buffer, exact)):
            assert len(tensor.unique()) == 2
            assert abs(float(tensor.double().mean()) - mean) < 5 * float(tensor.double().std()) / math.sqrt(numel)
    exact, codes = 0.3017, Blocks.zeros(numel, UNSIGNED)
    grad = torch.full((numel,), exact)
    grad[::256] = 1.0  # makes every block's scale 1
    adam: dict[str, Any] = {**ADAM, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "lr": 0.0, "decoupled": True}
    for first in (Blocks.zeros(numel, SIGNED), codes):
        momentum = first if first is not codes else torch.zeros(numel)
        run(lambda m=momentum: ops.adamw(grad.clone(), grad, m, codes, None, scale=1.0, rounding=Stochastic(3, 1, 0), **adam))
        roots = first.codes[grad < 1].double().abs()
        assert len(roots.unique()) == 2
        mean = exact * (127 if first is not codes else 255)
        assert abs(float(roots.mean()) - mean) < 5 * float(roots.std()) / math.sqrt(numel) + 1e-4


def test_tiny_updates_arrive(run: Callable[..., Any]) -> None:  # noqa: F811
    """300 updates of a hundredth of what bf16 can tell apart: lost to nearest, there on average at random."""
    numel, steps, lr = 4096, 300, 2.0**-8 / 100
    kind: dict[str, Any] = {"scale": 1.0, "lr": lr, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    nearest, random = torch.full((2, numel), 1.0, dtype=BF16)
    grad = torch.ones(numel)

    def train() -> None:
        for count in range(1, steps + 1):
            ops.sgd(nearest, grad, None, None, first=False, **kind)
            ops.sgd(random, grad, None, None, first=False, rounding=Stochastic(0, count, 0), **kind)

    run(train)
    assert (nearest == 1).all()
    assert float((1 - random.double()).mean()) == pytest.approx(steps * lr, rel=0.05)


def test_draws_differ_by_seed_step_and_place() -> None:
    def draw(seed: int, count: int, offset: int, numel: int = 4096) -> Tensor:
        master = torch.ones(numel, dtype=BF16)
        kind: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "first": False}
        ops.sgd(master, torch.ones(numel), None, None, scale=1.0, lr=2.0**-9, rounding=Stochastic(seed, count, offset), **kind)
        return (master < 1).double() * 2 - 1

    draws = [draw(0, 1, 0), draw(1, 1, 0), draw(0, 2, 0), draw(0, 1, 4096), draw(0, 1, 1 << 32), draw(1, 0, 0)]
    correlation = torch.corrcoef(torch.stack(draws)).fill_diagonal_(0)
    assert correlation.abs().max() < 0.08  # 5 standard deviations
    assert torch.equal(draws[0][64:], draw(0, 1, 64)[:-64])
    neighbors = torch.corrcoef(draw(0, 1, 0, 1 << 17).view(-1, 32).T).fill_diagonal_(0)  # of one hash, and of the next
    assert neighbors.abs().max() < 5 / math.sqrt(1 << 12)


def test_refusals_name_the_tensor() -> None:
    x, first, second = torch.zeros(512), Blocks.zeros(512, SIGNED), Blocks.zeros(512, UNSIGNED)

    def refused(match: str, rule: str, *tensors: Any, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            step(rule, *tensors, **changes)

    refused(r"adamw: exp_avg.codes is torch.uint8; it must be torch.int8", "adamw", x, x, second, second, None)
    refused(r"adamw: exp_avg_sq.codes has numel 256 where master has 512", "adamw", x, x, first, second.span(0, 256), None)
    short = Blocks(first.codes, first.scales[:1])
    refused(r"lion: exp_avg.scales is torch.float32 of shape \(1,\); 512 codes need .* \(2,\)", "lion", x, x, short, None, None)
    refused(r"adagrad: a state is in 8-bit codes", "adagrad", x, x, None, second, None)
    refused(r"lamb_update: a state is in 8-bit codes", "lamb", x, x, first, x, None)
    refused(r"sgd: momentum_buffer is torch.int32", "sgd", x, x, x.int(), None, None)
    refused(r"sgd: momentum is 0.9 and momentum_buffer is None", "sgd", x, x, None, None, None)
    refused(r"lion: betas \(1.0, 0.99\)", "lion", x, x, x, None, None, beta=1.0)
    refused(r"adamw: rounding.offset \(8\)", "adamw", x, x, first, second, None, rounding=Stochastic(0, 1, 8))
    refused(r"adamw: exp_avg is torch.float16, which has no stoch", "adamw", x, x, x.half(), x, None, rounding=Stochastic(0, 1, 0))
    with pytest.raises(ValueError, match=r"elements 64 to 512 of 512 cut a block of 256 codes"):
        first.span(64, 512)
    assert first.span(256, 512).scales.numel() == 1

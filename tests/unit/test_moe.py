"""Routing, dispatch and stacks of experts in one process, against plain torch; DeepSpeed's gates against its formulas."""

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.compat import moe as deepspeed_moe
from slipstream.moe import ExpertStack, MoE, gate
from slipstream.moe.dispatch import _Combine, run_experts
from slipstream.moe.grouped import GroupedLinear, grouped_linear
from slipstream.observe.flops import FlopCounter
from slipstream.ops import cpu, grouped


def mixed(x: Tensor, experts: Tensor, weights: Tensor, kept: Tensor | None, matrices: Tensor) -> Tensor:
    """Token by token: the weighted sum of the experts' tanh(x W)."""
    rows = []
    for t, k in itertools.product(range(len(x)), range(experts.shape[1])):
        own = weights[t, k] * torch.tanh(x[t] @ matrices[experts[t, k]])
        rows.append(own if kept is None or kept[t, k] else own * 0)
    return torch.stack(rows).view(len(x), experts.shape[1], -1).sum(1) if rows else x.new_zeros(0, matrices.shape[2])


@given(st.integers(0, 9), st.integers(1, 3), st.integers(3, 5), st.booleans(), st.integers(0, 1000))
def test_tokens_go_to_their_experts_and_back(tokens: int, k: int, num: int, drops: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(num, 4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64, requires_grad=True)
    experts = torch.rand(tokens, num, generator=generator).topk(k, 1).indices
    kept = torch.rand(tokens, k, generator=generator) < 0.6 if drops else None

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.tanh(grouped_linear(rows, matrices.transpose(1, 2), counts))

    out = run_experts(x, experts, weights, kept, num, compute, None)
    expected = mixed(x, experts, weights, kept, matrices)
    torch.testing.assert_close(out, expected)
    inputs = [x, matrices, weights]
    expected = expected + sum((each.sum() * 0 for each in inputs), torch.zeros(()))  # without tokens it has no graph
    grads, wanted = (torch.autograd.grad((each * each).sum(), inputs) for each in (out, expected))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_products_are_those_of_each_expert(counts: list[int], biased: bool, transposed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 6, dtype=dtype, requires_grad=True)
    stored = torch.randn(len(counts), 6, 3, dtype=dtype) if transposed else torch.randn(len(counts), 3, 6, dtype=dtype)
    stored.requires_grad_()
    weight = stored.transpose(1, 2) if transposed else stored
    bias = torch.randn(len(counts), 3, dtype=dtype, requires_grad=True) if biased else None
    out = grouped_linear(x, weight, counts, bias)
    parts = x.split(counts)
    each = [F.linear(part, weight[i], None if bias is None else bias[i]) for i, part in enumerate(parts)]
    inputs = [tensor for tensor in (x, stored, bias) if tensor is not None]
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(torch.cat(each), inputs, upstream)
    torch.testing.assert_close(out, torch.cat(each))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture(params=["avx512bf16", "avx512", "avx2", "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The native kernels of each instruction set, and torch's products."""
    best = cpu.isa()
    if request.param == "torch":
        monkeypatch.setattr(grouped, "fits", lambda *_: False)
    elif not cpu.use_isa(request.param):
        pytest.skip(f"not tested on this machine: {request.param}")
    yield request.param
    if best:
        cpu.use_isa(best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "features"),
    [([3, 0, 70, 300, 1], (64, 96)), ([5, 37], (33, 50)), ([41], (1101, 7)), ([0, 0], (3, 5)), ([2, 0], (0, 20))],
)
def test_grouped_products_of_any_size(products: str, dtype: torch.dtype, rows: list[int], features: tuple[int, int]) -> None:
    torch.manual_seed(0)
    fan_in, fan_out = features
    atol, rtol = (2e-5, 1e-5) if dtype is torch.float32 else (0.05, 0.02)
    x = torch.randn(sum(rows), fan_in).to(dtype).requires_grad_()
    weight = (torch.randn(len(rows), fan_out, fan_in) / fan_in**0.5).to(dtype).requires_grad_()
    bias = torch.randn(len(rows), fan_out).to(dtype).requires_grad_()
    upstream = torch.randn(sum(rows), fan_out).to(dtype)
    results = []
    for stored in (weight, weight.detach().mT.contiguous().mT.requires_grad_()):  # as [out, in], and as [in, out]
        out = grouped_linear(x, stored, rows, bias)
        results.append((out, *torch.autograd.grad(out, (x, stored, bias), upstream)))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    parts = [F.linear(part, w, b) for part, w, b in zip(doubles[0].split(rows), doubles[1], doubles[2], strict=True)]
    exact = torch.cat(parts)
    exact = (exact, *torch.autograd.grad(exact, doubles, upstream.double()))
    for found in results:
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("products", ["avx512bf16", "avx512", "avx2"], indirect=True)
@pytest.mark.usefixtures("products")
def test_bits_of_a_row_do_not_depend_on_others_or_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(700, 600).to(dtype), torch.randn(2, 200, 600).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = grouped_linear(x, weight, [300, 400])
        gradient = grouped.grouped_outer(whole, x, [300, 400])
        torch.set_num_threads(1)
        assert torch.equal(grouped.grouped_outer(whole, x, [300, 400]), gradient)
    finally:
        torch.set_num_threads(threads)
    for row in (0, 299, 300, 699):
        alone = grouped_linear(x[row : row + 1], weight, [1, 0] if row < 300 else [0, 1])
        assert torch.equal(alone[0], whole[row])


def test_flop_of_grouped_products() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 5, 8, requires_grad=True)
    counter = FlopCounter({"": (linear := GroupedLinear(nn.Linear(8, 5, bias=False)))})
    linear.weight, linear.counts = nn.Parameter(weight), [4, 2]
    with counter:
        linear(x).sum().backward()
    assert (counter.counts[""].forward, counter.counts[""].backward) == (2 * 6 * 5 * 8, 4 * 6 * 5 * 8)


# -- DeepSpeed's gates, by one-hot masks and capacity buffers --


def buffered(logits: Tensor, choices: list[Tensor], most: int | None, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, E] probabilities that remain, and the auxiliary loss of the first choices."""
    probs = logits.softmax(1)
    num = logits.shape[1]
    masks = [F.one_hot(choice, num).float() for choice in choices]
    loss = num * (probs.mean(0) * masks[0].mean(0)).sum()
    before, left = torch.zeros(num), []
    for mask in masks:
        places = mask.cumsum(0) - 1 + before
        before = before + mask.sum(0)
        left.append(mask if most is None else mask * (places < most))
    return probs * sum(left, torch.zeros_like(probs)), loss


def dense(routes: gate.Routes, num: int) -> Tensor:
    return torch.zeros(len(routes.experts), num).scatter_add(1, routes.experts, routes.weights)


@given(st.integers(1, 40), st.integers(2, 6), st.integers(0, 100))
def test_top1_and_top2_are_those_of_the_papers(tokens: int, num: int, seed: int) -> None:
    logits = torch.randn(tokens, num, generator=torch.Generator().manual_seed(seed)) * 2
    most = gate.Capacity(1.0, 1.0, 1).of(logits, 1, training=True)
    assert most == max(-(-tokens // num), 1)
    first = logits.argmax(1)
    for limit in (None, most):
        routes = gate.top1(logits, limit, random_selection=False)
        probs, loss = buffered(logits, [first], limit)
        torch.testing.assert_close(dense(routes, num), probs)
        torch.testing.assert_close(routes.loss, loss)
        assert routes.counts.tolist() == torch.bincount(first, minlength=num).tolist()
        second = logits.masked_fill(F.one_hot(first, num).bool(), -torch.inf).argmax(1)
        routes = gate.top2(logits, limit, sampled=False)
        probs, loss = buffered(logits, [first, second], limit)
        torch.testing.assert_close(dense(routes, num), probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps))
        torch.testing.assert_close(routes.loss, loss)
        assert routes.counts.sum() == 2 * tokens


def test_a_capacity_takes_the_likeliest_or_random_tokens() -> None:
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([4.0, 0, 0, 0])
    routes = gate.top_k(logits, 3, 20)
    probs = logits.softmax(1)
    for expert in range(4):
        chosen = (routes.experts == expert).any(1)
        kept = dense(routes, 4)[:, expert] > 0
        assert kept.sum() == min(20, int(chosen.sum()))
        if kept.sum() < chosen.sum():
            assert probs[kept, expert].min() >= probs[chosen & ~kept, expert].max()
    torch.manual_seed(1)
    picks = {tuple(gate.top1(logits, 10).kept.nonzero()[:, 0].tolist()) for _ in range(3)}  # type: ignore[union-attr]
    assert len(picks) == 3
    torch.manual_seed(1)
    again = tuple(gate.top1(logits, 10).kept.nonzero()[:, 0].tolist())  # type: ignore[union-attr]
    assert again in picks
    unused = gate.top1(logits, None, used=torch.arange(64) % 2)
    assert unused.kept is not None and unused.kept[::2].sum() == 0 and unused.counts.sum() == 32


@given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 100))
def test_an_expert_takes_the_first_of_its_queue(t: int, k: int, most: int, ranked: bool, used: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(t, 4, generator=generator).topk(k, 1).indices
    rank = torch.randint(3, (t, k), generator=generator).float() if ranked else None
    mask = torch.rand(t, k, generator=generator) < 0.7 if used else None
    queues: dict[int, list[tuple[float, int, int]]] = {}
    for j, i in itertools.product(range(k), range(t)):
        if mask is None or mask[i, j]:
            queues.setdefault(int(experts[i, j]), []).append((0.0 if rank is None else -float(rank[i, j]), j, i))
    kept = {(i, j) for queue in queues.values() for _, j, i in sorted(queue)[:most]}
    assert {(i, j) for i, j in gate.within(experts, 4, most, rank, mask).nonzero().tolist()} == kept


def test_both_layers_drop_the_same_routes() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + torch.tensor([4.0, 2, 0, 0, 0, 0, 0, 0])
    for ours, theirs in (
        (gate.choose(logits, 3, most=24), gate.top_k(logits, 3, 24)),
        (gate.choose(logits, 2, most=16, drop="position"), gate.top2(logits, 16, sampled=False)),
        (gate.choose(logits, 1, most=8, drop="position", normalize=False), gate.top1(logits, 8, random_selection=False)),
    ):
        assert ours.kept is not None and theirs.kept is not None and torch.equal(ours.kept, theirs.kept)
        assert torch.equal(ours.counts, theirs.counts) and not ours.kept.all()
        torch.testing.assert_close(dense(ours, 8), dense(theirs, 8))
    picks = [gate.choose(logits, 1, most=8, drop="random") for _ in range(3)]
    assert len({tuple(pick.kept[:, 0].tolist()) for pick in picks}) > 1  # type: ignore[index]
    assert {int((pick.kept & (pick.experts == 0)).sum()) for pick in picks} == {8}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("k", "factor", "eval_factor", "least", "train", "test"),
    [(1, 1.0, 2.0, 1, 8, 16), (2, 1.25, 0.5, 1, 20, 8), (3, 1.1, 1.0, 1, 27, 24), (1, 0.1, 0.1, 4, 4, 4)],
)
def test_the_routes_that_an_expert_takes(k: int, factor: float, eval_factor: float, least: int, train: int, test: int) -> None:
    """Of 32 tokens and 4 experts: k T / E x factor, rounded up; in both layers."""
    logits = torch.zeros(32, 4)
    capacity = gate.Capacity(factor, eval_factor, least)
    assert (capacity.of(logits, k, training=True), capacity.of(logits, k, training=False)) == (train, test)
    ours = MoE(8, None, 4, k=k, capacity_factor=factor, eval_capacity_factor=eval_factor, min_capacity=least, expert_size=8)
    theirs = deepspeed_moe.MoE(8, expert(), 4, 1, k, factor, eval_factor, least, top2_2nd_expert_sampling=False)
    nn.init.zeros_(theirs.deepspeed_moe.gate.wg.weight)
    for most in (train, test):
        routes = theirs.deepspeed_moe.gate(torch.randn(32, 8))  # all tokens have the same logits, so k experts have all routes
        assert routes.kept is not None and routes.kept.sum() == k * min(most, 32)
        assert ours.capacity is not None and ours.capacity.of(logits, k, training=ours.training) == most
        ours.eval(), theirs.eval()


def test_a_token_that_is_not_used_goes_to_no_expert() -> None:
    torch.manual_seed(0)
    layer = deepspeed_moe.MoE(8, expert(), 4, k=1, drop_tokens=False)
    x, used = torch.randn(2, 6, 8), torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1]])
    out, _, counts = layer(x, used)
    assert torch.equal((out != 0).any(2), used.bool()) and counts.sum() == used.sum()
    torch.testing.assert_close(out[used.bool()], layer(x)[0][used.bool()])


@pytest.mark.parametrize(("policy", "k"), [("Jitter", 1), ("Jitter", 2), ("RSample", 1), (None, 2)])
def test_noise_of_a_gate_is_that_of_the_seed_and_the_step(policy: str | None, k: int) -> None:
    torch.manual_seed(0)
    others = {"drop_tokens": False, "top2_2nd_expert_sampling": policy is None}  # which draw, too
    layer, x = deepspeed_moe.MoE(8, nn.Linear(8, 8), 8, k=k, noisy_gate_policy=policy, **others), torch.randn(64, 8)

    def steps(seed: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(seed)
        return [layer(x)[:2] for _ in range(2)]

    first, again, other = steps(1), steps(1), steps(2)
    for (out, loss), (same, same_loss) in zip(first, again, strict=True):
        assert out.equal(same) and loss.equal(same_loss)
    for out in (first[1][0], other[0][0], other[1][0]):
        assert not out.equal(first[0][0])
    first[0][0].sum().backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad.any()
    layer.eval()
    assert all(out.equal(steps(1)[0][0]) for out, _ in steps(2))


def test_z_loss_and_residual() -> None:
    torch.manual_seed(0)
    dense_branch = nn.Linear(8, 8)
    layer = MoE(8, None, 4, expert_size=8, z_loss=0.5, residual=dense_branch)
    x = torch.randn(6, 8)
    out, loss, _ = layer(x)
    logits = x @ layer.router.weight.t()
    routes = gate.choose(logits, 2)
    torch.testing.assert_close(loss, routes.loss + 0.5 * logits.logsumexp(1).square().mean())
    shares = layer.coefficient(x).softmax(1)
    torch.testing.assert_close(out, layer.experts(x, routes) * shares[:, :1] + dense_branch(x) * shares[:, 1:])


def test_a_layer_with_a_capacity() -> None:
    """A token whose routes are all dropped gets zeros, and so does its gradient; outside of training another factor counts."""
    torch.manual_seed(0)
    layer = MoE(8, None, 4, k=1, expert_size=8, capacity_factor=0.5, eval_capacity_factor=2.0, min_capacity=1)
    x = torch.randn(32, 8, requires_grad=True)
    for most in (4, 16):  # of 32 tokens and 4 experts
        out, _, counts = layer(x)
        assert int((out != 0).any(1).sum()) == sum(min(int(count), most) for count in counts)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert torch.equal((grad != 0).any(1), (out != 0).any(1))
        layer.eval()
    assert MoE(8, None, 4, capacity_factor=1.0).capacity == gate.Capacity(1.0, 1.0, 4)


def test_noise_draws_as_the_softmax_says() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]]).expand(20000, 3)
    torch.manual_seed(0)
    counts = gate.top1(logits, None, noisy=True).counts / 20000
    torch.testing.assert_close(counts, logits[0].softmax(0), rtol=0, atol=0.02)
    x = gate.jitter(torch.ones(1000))
    assert 0.99 <= x.min() < 0.9905 and 1.0095 < x.max() <= 1.01


def test_groups_limit_the_choice() -> None:
    single = gate.choose(torch.randn(50, 4), 1, num_groups=4, top_groups=1, bias=torch.zeros(4))
    assert single.counts.sum() == 50
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    routes = gate.choose(logits, 3, score="sigmoid", num_groups=4, top_groups=2, bias=torch.zeros(8), scale=2.5)
    assert all(len(set((row // 2).tolist())) <= 2 for row in routes.experts)
    torch.testing.assert_close(routes.weights.sum(1), torch.full((50,), 2.5))
    biased = gate.choose(logits, 1, bias=torch.tensor([10.0, 0, 0, 0, 0, 0, 0, 0]), normalize=False)
    assert (biased.experts == 0).all()
    torch.testing.assert_close(biased.weights[:, 0], logits.softmax(1)[:, 0])


# -- layers --


def expert(dim: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_deepspeeds_layer(k: int, residual: bool) -> None:
    torch.manual_seed(0)
    template = expert()
    layer = deepspeed_moe.MoE(8, template, 4, k=k, use_residual=residual, use_rts=False, top2_2nd_expert_sampling=False)
    x = torch.randn(3, 10, 8)
    out, loss, counts = layer(x)
    tokens = x.view(-1, 8)
    routes = layer.deepspeed_moe.gate(tokens)
    share = dense(routes, 4).sum(1)  # all experts start as copies
    expected = template(tokens) * share[:, None]
    if residual:
        weights = layer.coefficient(tokens).softmax(1)
        expected = expected * weights[:, :1] + template(tokens) * weights[:, 1:]
    torch.testing.assert_close(out.view(-1, 8), expected)
    assert counts.sum() == 30 * k and loss > 0 and layer.deepspeed_moe.l_aux is loss
    assert routes.kept is not None and not routes.kept.all()
    layer.eval()
    assert {name for name, _ in layer.named_parameters() if "mlp" not in name and "coef" not in name} == {
        "deepspeed_moe.gate.wg.weight",
        *(f"deepspeed_moe.experts.stack.expert.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")),
    }


def test_deepspeeds_layer_keeps_its_loss_until_a_backward() -> None:
    layer = deepspeed_moe.MoE(8, expert(), 4)
    x = torch.randn(5, 8)
    value = layer(x)[1].item()  # the caller drops it
    kept = layer.deepspeed_moe.l_aux
    assert kept is not None and kept.item() == value and kept.requires_grad
    kept.backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad.abs().sum() > 0
    kept = layer.deepspeed_moe.l_aux
    assert kept.item() == value and not kept.requires_grad
    with torch.no_grad():
        assert layer(x)[1] is layer.deepspeed_moe.l_aux


def test_a_layer_that_adds_its_own_loss() -> None:
    torch.manual_seed(0)
    layer = MoE(8, None, 4, expert_size=8, z_loss=0.5)
    own = MoE(8, None, 4, expert_size=8, z_loss=0.5, aux_loss_weight=0.3)
    own.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5, 8)
    out, loss, _ = layer(x)
    expected = torch.autograd.grad(out.square().sum() + 0.3 * loss, list(layer.parameters()))
    own = pickle.loads(pickle.dumps(copy.deepcopy(own)))
    out, reported, _ = own(x)
    assert torch.equal(reported, loss) and not reported.requires_grad
    for one, other in zip(torch.autograd.grad(out.square().sum(), list(own.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_groups_for_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), deepspeed_moe.MoE(8, expert(), 4))
    assert deepspeed_moe.has_moe_layers(model) == (True, 4) and deepspeed_moe.has_moe_layers(model[0]) == (False, 0)
    groups = deepspeed_moe.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.5}, max_group_size=50
    )
    assert [(g["name"], g.get("moe"), len(g["params"]), g["lr"]) for g in groups] == [
        ("all", None, 3, 0.5),
        ("ep_size_1", True, 1, 0.5),
        ("ep_size_1", True, 1, 0.5),
        ("ep_size_1", True, 1, 0.5),
        ("ep_size_1", True, 1, 0.5),
    ]
    assert [len(g["params"]) for g in deepspeed_moe.configure_moe_param_groups(list(model.parameters()))] == [3, 4]
    assert deepspeed_moe.configure_moe_param_groups(groups) is groups
    with pytest.raises(TypeError, match="one is a str"):
        deepspeed_moe.configure_moe_param_groups(["a"])


class Parts(nn.Module):
    """A row is cut into two, which one linear layer computes: [rows, 8] -> [2 rows, 4], or [rows, 2, 4]."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.linear, self.dims = nn.Linear(4, 4), dims

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.reshape(-1, 4) if self.dims == 2 else x.reshape(-1, 2, 4))).reshape(len(x), 8)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("dims", [2, 3])
def test_an_expert_that_cuts_its_rows(dims: int, tokens: int) -> None:
    torch.manual_seed(0)
    modules = [Parts(dims) for _ in range(3)]
    layer = MoE(8, iter(modules).__next__, 3, k=2)
    x = torch.randn(tokens, 8)
    state = torch.get_rng_state()
    for _ in range(2):
        out = layer(x)[0]
        routes = gate.choose(layer.logits(x), 2)
        expected = sum((dense(routes, 3)[:, i, None] * module(x) for i, module in enumerate(modules)), torch.zeros(tokens, 8))
        torch.testing.assert_close(out, expected)
    assert torch.equal(torch.get_rng_state(), state)
    out.sum().backward()
    for i, module in enumerate(modules):
        (expected.sum() if i == 0 else torch.zeros((), requires_grad=True)).backward()
        torch.testing.assert_close(layer.experts.stack.expert.linear.weight.grad[i], module.linear.weight.grad)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


REFUSED: dict[str, tuple[Any, str]] = {
    "k": (lambda: MoE(8, None, 4, k=5), r"k \(5\) must lie in 1 to num_experts \(4\)"),
    "groups": (lambda: MoE(8, None, 8, k=3, num_groups=4), "1 of 4 groups of 8 experts do not have k"),
    "score": (lambda: MoE(8, None, 4, score="tanh"), "score 'tanh' is none of 'softmax', 'sigmoid'"),  # type: ignore[arg-type]
    "ep": (lambda: MoE(8, None, 4, ep_size=3), r"4 experts cannot be split over ep_size \(3\)"),
    "none": (lambda: MoE(8, None, 0, k=1), r"num_experts \(0\) must be at least 1"),
    "empty": (lambda: ExpertStack(nn.ReLU(), 2), "ReLU has no parameters"),
    "tied": (lambda: ExpertStack(Twice(), 2), "one parameter under several names"),
    "buffers": (lambda: ExpertStack(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2), "has buffers .*running_mean"),
    "differing": (lambda: ExpertStack(iter([nn.Linear(4, 4), nn.Linear(4, 8)]).__next__, 2), "the same names and shapes"),
    "capacity": (lambda: deepspeed_moe.MoE(8, expert(), 4, eval_capacity_factor=0, min_capacity=0), "leave an expert no token"),
    "our capacity": (lambda: MoE(8, None, 4, capacity_factor=0.0, min_capacity=0), "leave an expert no token"),
    "drop": (lambda: MoE(8, None, 4, drop="last"), "drop 'last' is none of 'score', 'position', 'random'"),  # type: ignore[arg-type]
    "shared": (lambda: MoE(8, None, 4, shared=True), r"shared is True; it must be a module of 8 features"),
    "eval factor": (lambda: MoE(8, None, 4, eval_capacity_factor=1.0), r"eval_capacity_factor \(1.0\) needs a capacity_factor"),
    "no groups": (lambda: MoE(8, None, 8, num_groups=0), "1 of 0 groups of 8 experts"),
    "balance rate": (lambda: MoE(8, None, 4, balance_rate=-1.0), r"balance_rate \(-1.0\) must be positive"),
    "jitter": (lambda: MoE(8, None, 4, jitter=5.0), r"jitter \(5.0\) must lie in \[0, 1\)"),
    "negative jitter": (lambda: MoE(8, None, 4, jitter=-1.0), r"jitter \(-1.0\) must lie"),
    "expert size": (lambda: MoE(8, None, 4, expert_size=0), r"expert_size \(0\) must be at least 1"),
    "factor": (lambda: MoE(8, None, 4, capacity_factor=float("inf")), r"capacity_factor \(inf\) .* must be finite"),
    "negative factor": (lambda: deepspeed_moe.MoE(8, expert(), 4, eval_capacity_factor=-1), r"eval_capacity_factor \(-1\) must be"),
    "input": (lambda: MoE(8, None, 4)(torch.randn(5, 6)), "hidden_size 8 is given tokens of 6 features"),
    "no parameters": (lambda: deepspeed_moe.configure_moe_param_groups([]), "got no parameters"),
    "used tokens": (
        lambda: deepspeed_moe.MoE(8, expert(), 4, k=2)(torch.randn(5, 8), torch.ones(5)),
        r"used_token is for k = 1, and this gate has k \(2\)",
    ),
    "width": (lambda: MoE(8, nn.Linear(8, 6), 4)(torch.randn(5, 8)), "expert Linear returns 6 features for 8"),
    "width, one by one": (
        lambda: MoE(8, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6)), 4)(torch.randn(5, 8)),
        "expert Sequential returns 6 features for 8",
    ),
    "rows": (lambda: grouped_linear(torch.randn(5, 8), torch.randn(2, 3, 8), [2, 2]), r"have 4 rows, .* is given \(5, 8\)"),
    "counts": (lambda: grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), [4]), r"2 experts are given the rows \[4\]"),
    "negative counts": (lambda: grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), [5, -1]), r"the rows \[5, -1\]"),
    "features": (lambda: grouped_linear(torch.randn(4, 7), torch.randn(2, 3, 8), [2, 2]), "with 8 features is given rows of 7"),
    "bias": (
        lambda: grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), [2, 2], torch.randn(2, 1)),
        r"the bias of experts is \[2, 1\] of torch.float32 on cpu; it must be \[2, 3\]",
    ),
    "bias's dtype": (
        lambda: grouped_linear(torch.randn(4, 8), torch.randn(2, 3, 8), [2, 2], torch.randn(2, 3).bfloat16()),
        r"of torch.bfloat16 on cpu; it must be \[2, 3\] of torch.float32",
    ),
    "deepspeed's k": (lambda: deepspeed_moe.MoE(8, expert(), 2, k=3), r"k \(3\) must lie"),
}


def test_an_expert_is_a_module() -> None:
    with pytest.raises(TypeError, match="an expert is a module or a callable that builds one, not 3"):
        MoE(8, 3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", REFUSED)
def test_misfits_are_refused(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("own", [True, False], ids=["ours", "deepspeed's"])
def test_routing_is_fp32_under_autocast(own: bool) -> None:
    """The router's products and the sum over a token's routes; experts compute in autocast's dtype."""
    torch.manual_seed(0)
    layer: Any = MoE(8, expert(), 4, k=2) if own else deepspeed_moe.MoE(8, expert(), 4, k=2, drop_tokens=False)
    x = torch.randn(40, 8)
    _, expected, _ = layer(x)
    rows: list[Tensor] = []
    (layer if own else layer.deepspeed_moe).experts.stack.register_forward_hook(lambda *args: rows.append(args[2]))
    with torch.autocast("cpu", torch.bfloat16):
        out, loss, _ = layer(x)
    assert torch.equal(loss, expected) and rows[0].dtype == out.dtype == torch.bfloat16
    weights, order = torch.rand(40, 2), torch.arange(80)
    sums = (rows[0].view(40, 2, 8).double() * weights[..., None]).sum(1)
    with torch.autocast("cpu", torch.bfloat16):
        combined = _Combine.apply(rows[0].float(), weights, order)
    assert combined.dtype == torch.float32
    torch.testing.assert_close(combined, sums.float(), rtol=1e-5, atol=1e-6)
    with torch.device("meta"):
        meta = MoE(8, None, 4)
        assert meta(torch.randn(3, 8))[0].shape == (3, 8)


@pytest.mark.parametrize("reentrant", [[True], [False], [True, True], [False, True], [True, False]], ids=str)
def test_a_load_counts_tokens_once_in_checkpoints(reentrant: list[bool]) -> None:
    layer = MoE(8, None, 4, k=2, expert_size=8)
    call = lambda x: layer(x)[0]  # noqa: E731
    for kind in reentrant:
        call = functools.partial(checkpoint, call, use_reentrant=kind)
    x = torch.randn(7, 8, requires_grad=True)
    call(x).sum().backward()
    assert layer.meter.routes.sum() == 14


def test_logits_that_are_not_finite_reach_the_loss() -> None:
    layer = MoE(8, None, 4, k=2, expert_size=8)
    x = torch.randn(5, 8)
    x[2] = torch.nan
    out, loss, _ = layer(x)
    assert out[2].isnan().all() and not out[[0, 1, 3, 4]].isnan().any() and loss.isnan()


def test_tokens_travel_outside_of_compiled_graphs() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), Residual(MoE(8, None, 4, expert_size=8, shared=Noting())))
    x = torch.randn(6, 8)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile about its own graph breaks
        Noting.compiled = False
        compiled = torch.compile(layer, backend="aot_eager")
        grads = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    assert Noting.compiled
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other)


class Noting(nn.Linear):
    """A shared expert that notes whether it was part of a compiled graph."""

    compiled = False

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            Noting.compiled = True
        return super().forward(x)


class Residual(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.layer(x)
        return x + out + loss


def test_scripts_tell_experts_parameters_from_dense_ones() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ours = MoE(8, None, 4, ep_size=2, shared=nn.Linear(8, 8))
    marked = {name for name, param in ours.named_parameters() if deepspeed_moe.is_moe_param(param)}
    assert marked == {name for name, _ in ours.named_parameters() if name.startswith("experts.")} and len(marked) == 2
    assert {param.group_name for param in ours.experts.parameters()} == {"ep_size_2"}
    groups = deepspeed_moe.split_params_into_different_moe_groups_for_optimizer({"params": list(ours.parameters()), "name": "x"})
    assert [(group["name"], len(group["params"])) for group in groups] == [("x", 3), ("ep_size_2", 2)]
    foreign = MixtralSparseMoeBlock(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=6))
    assert [deepspeed_moe.has_moe_layers(each) for each in (ours, foreign, nn.Linear(1, 1))] == [(True, 4), (True, 6), (False, 0)]

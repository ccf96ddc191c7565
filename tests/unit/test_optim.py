"""Lion, LAMB and Muon against twins of a few lines, and what they accept."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.moe import GatedMLP, MoE
from slipstream.optim import Lamb, Lion, Muon, attention_heads, muon_groups
from slipstream.optim.muon import orthogonalize
from slipstream.optim.rules import trust_ratio

SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (7,), (5, 3), (0, 4), (64, 130), (3, 4, 5)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    """Steps on random gradients that depend on the seed and the order of the parameters only."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def lion_twin(params: list[Tensor], grads: list[list[Tensor]], lr: float, wd: float) -> None:
    for p, history in zip(params, grads, strict=True):
        m = torch.zeros_like(p)
        for g in history:
            p -= lr * (torch.sign(0.9 * m + 0.1 * g) + wd * p)
            m = 0.99 * m + 0.01 * g


def lamb_twin(params: list[Tensor], grads: list[list[Tensor]], lr: float, wd: float) -> None:
    for p, history in zip(params, grads, strict=True):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t, g in enumerate(history, start=1):
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g * g
            u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + wd * p
            ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else torch.tensor(1.0)
            p -= lr * ratio.clamp(0.01, 10) * u


@pytest.mark.parametrize(
    ("make", "twin"),
    [
        (lambda params: Lion(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), lion_twin),
        (lambda params: Lamb(params, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1), lamb_twin),
    ],
    ids=["lion", "lamb"],
)
def test_equals_twin(make: Callable[[Any], torch.optim.Optimizer], twin: Callable[..., None]) -> None:
    params = parameters(SHAPES)
    expected = [p.detach().clone() for p in params]
    train(make(params), steps=4)
    generator = torch.Generator().manual_seed(1)
    steps = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(4)]
    twin(expected, [list(history) for history in zip(*steps, strict=True)], lr=0.01, wd=0.1)
    for param, reference in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [Lion, Lamb])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_fp32(cls: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    params = parameters(SHAPES, dtype)
    optimizer = cls(params, lr=0.01)  # type: ignore[call-arg]
    train(optimizer, steps=2)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert states
    assert all(value.dtype == torch.float32 for value in states)
    assert all(param.dtype == dtype and param.isfinite().all() for param in params)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lion(p, lr=0.01),
        lambda p: Lamb(p, lr=0.01),
        lambda p: Muon([{"params": p[:2], "use_muon": True}, {"params": p[2:], "use_muon": False}]),
    ],
    ids=["lion", "lamb", "muon"],
)
def test_state_dict_resumes_exactly(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    shapes: list[tuple[int, ...]] = [(8, 4), (3, 6), (5,), (4, 4)]
    straight, saved, resumed = parameters(shapes), parameters(shapes), parameters(shapes)
    unbroken, first = make(straight), make(saved)
    for optimizer in (unbroken, first):
        train(optimizer, steps=3)
    second = make(resumed)
    second.load_state_dict(first.state_dict())
    for target, source in zip(resumed, saved, strict=True):
        target.data.copy_(source.data)
    for optimizer in (unbroken, second):
        train(optimizer, steps=2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_closure_and_missing_gradients() -> None:
    used, unused = parameters([(3, 3), (3,)])
    before = unused.detach().clone()
    optimizer = Lamb([used, unused])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float((parameters([(3, 3)])[0] ** 2).sum().detach()))
    assert torch.equal(unused, before)


def test_autograd_sees_that_weights_changed() -> None:
    for make in (lambda p: Lion([p]), lambda p: Lamb([p]), lambda p: Muon([{"params": [p], "use_muon": False}])):
        (param,) = parameters([(3, 3)])
        loss = (param**2).sum()
        param.grad = torch.ones(3, 3)
        make(param).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", [float, lambda square: torch.tensor(square, dtype=torch.float64)], ids=["cpu", "device"])
def test_trust_ratio_bounds(kind: Callable[[float], Any]) -> None:
    """Of sums of squares."""
    assert trust_ratio(kind(4), kind(1), 0.01, 10) == 2
    assert trust_ratio(kind(4), kind(4e-12), 0.01, 10) == 10
    assert trust_ratio(kind(4), kind(4e12), 0.01, 10) == 0.01
    assert trust_ratio(kind(0), kind(4), 0.01, 10) == trust_ratio(kind(4), kind(0), 0.01, 10) == 1


def test_any_layout_in_memory_and_no_float64() -> None:
    """Weights, gradients and loaded states in channels_last or transposed give the same values."""
    for make in (lambda p: Lion([p]), lambda p: Lamb([p]), lambda p: Muon([{"params": [p], "use_muon": False}])):
        plain, other = (nn.Parameter(torch.arange(48.0).view(2, 3, 4, 2).sin()) for _ in range(2))
        other.data = other.data.to(memory_format=torch.channels_last)
        optimizers = [make(plain), make(other)]
        for i in range(3):
            plain.grad = torch.arange(48.0).add(i).cos().view(2, 3, 4, 2)
            other.grad = plain.grad.to(memory_format=torch.channels_last)
            state = optimizers[1].state_dict()
            for name, value in state["state"].get(0, {}).items():
                state["state"][0][name] = value.to(memory_format=torch.channels_last) if value.dim() else value
            optimizers[1].load_state_dict(state)
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(plain, other) and other.is_contiguous(memory_format=torch.channels_last)
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(ValueError, match=r"lion: master is torch\.float64"):
        Lion([wide]).step()


def test_lamb_without_bias_correction() -> None:
    (param,) = parameters([(6,)])
    before = param.detach().clone()
    param.grad = torch.full((6,), 2.0)
    Lamb([param], lr=0.1, bias_correction=False, betas=(0.5, 0.75), eps=0.0).step()
    update = torch.full((6,), 1.0)  # 0.5 * 2 / sqrt(0.25 * 4)
    ratio = float((before.norm() / update.norm()).clamp(0.01, 10))
    torch.testing.assert_close(param.detach(), before - 0.1 * ratio * update)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Lion(p, lr=-1), "must not be negative"),
        (lambda p: Lion(p, betas=(1.0, 0.9)), "must lie in"),
        (lambda p: Lamb(p, min_coeff=2, max_coeff=1), "min_coeff"),
        (lambda p: Muon(p), "needs names"),
        (lambda p: Muon([{"params": p}]), "Muon needs names"),
        (lambda p: Muon([("w", p[0])], ns_method="cubic"), "not one of"),
        (lambda p: Muon([("w", p[0])], ns_steps=0), "ns_steps"),
    ],
)
def test_refusals(make: Callable[[list[nn.Parameter]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters([(3, 3)]))


@pytest.mark.parametrize("make", [Lion, Lamb, lambda params: Muon([{"params": params, "use_muon": True}])])
def test_sparse_gradients_are_refused(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    (param,) = parameters([(3, 3)])
    param.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 3\) in group 0 has a sparse gradient: drop"):
        make([param]).step()


def test_muon_refuses_vectors_by_shape() -> None:
    (param,) = parameters([(5,)])
    param.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \(5,\) is not a matrix"):
        Muon([{"params": [param], "use_muon": True}]).step()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4), (3, 6, 10), (1, 5)])
def test_orthogonalize(method: str, shape: tuple[int, ...]) -> None:
    """Singular values near 1 (the quintic's band), singular vectors kept; both methods agree."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrices, steps=5, method=method)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    overlap = (u.mT @ result @ vh.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(overlap, values.sort(dim=-1).values.gather(-1, overlap.argsort(-1).argsort(-1)))
    torch.testing.assert_close(result, orthogonalize(matrices, steps=5, method="standard"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("method", "dtype", "error"), [("standard", torch.bfloat16, 0.2), ("gram", torch.float16, 0.05)])
def test_orthogonalize_in_half_precision(method: str, dtype: torch.dtype, error: float) -> None:
    """The dtypes of accelerators, on an ill-conditioned matrix of large values. Five steps multiply small
    singular values, and with them the rounding of the input (2^-9 in bf16, 2^-12 in fp16), by up to 485."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(24, 24, generator=generator), torch.randn(24, 96, generator=generator)
    matrix = 1e6 * left @ torch.diag(torch.logspace(0, -4, 24)) @ right
    result = orthogonalize(matrix, steps=5, method=method, dtype=dtype).float()
    reference = orthogonalize(matrix, steps=5, method="standard", dtype=torch.float64).float()
    assert result.isfinite().all()
    assert (result - reference).norm() / reference.norm() < error


def test_muon_equals_torch() -> None:
    """The same as torch.optim.Muon, whose products are in bf16, up to that."""
    actual, reference = parameters([(16, 24), (24, 16)]), parameters([(16, 24), (24, 16)])
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    train(Muon([{"params": actual, "use_muon": True}], ns_method="standard", **options), steps=3)
    train(torch.optim.Muon(reference, **options), steps=3)
    for a, b, start in zip(actual, reference, parameters([(16, 24), (24, 16)]), strict=True):
        assert (a - b).norm() < 0.02 * (b - start).norm()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_muon_adam_half_equals_torch(adam_w_mode: bool) -> None:
    actual, reference = parameters(SHAPES), parameters(SHAPES)
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adam = Muon([{"params": actual, "use_muon": False}], adam_lr=1e-2, adam_w_mode=adam_w_mode, **options)
    train(adam, steps=5)
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    train(cls(reference, lr=1e-2, **options), steps=5)
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_muon_shapes() -> None:
    """A stack is its matrices; a convolution is its flattened matrix; the scale is sqrt(rows / columns)."""
    stack, conv = parameters([(3, 8, 4), (6, 2, 3, 3)])
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    flat = nn.Parameter(conv.detach().flatten(1).clone())
    stack.grad, conv.grad = torch.randn(stack.shape), torch.randn(conv.shape)
    for single, grad in zip(singles, stack.grad, strict=True):
        single.grad = grad.clone()
    flat.grad = conv.grad.flatten(1).clone()
    before = stack.detach().clone()
    Muon([{"params": [stack, conv, flat, *singles], "use_muon": True}], lr=1.0, nesterov=False).step()
    torch.testing.assert_close(stack.detach(), torch.stack([s.detach() for s in singles]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conv.detach().flatten(1), flat.detach())
    norms = torch.linalg.svdvals(before - stack.detach()) / math.sqrt(8 / 4)
    assert norms.min() > 0.6 and norms.max() < 1.3


def test_muon_empty_matrix() -> None:
    (empty,) = parameters([(4, 0)])
    empty.grad = torch.zeros(4, 0)
    Muon([{"params": [empty], "use_muon": True}]).step()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.wpe = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 6)
        self.shared_expert = nn.Linear(4, 4, bias=False)
        self.gate = nn.Linear(4, 1, bias=False)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.tied.weight


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)] for param in group["params"]}


def test_muon_groups() -> None:
    model = Model()
    muon, adam = muon_groups(model.named_parameters(remove_duplicate=False))
    assert (muon["use_muon"], adam["use_muon"]) == (True, False)
    assert names_of(model, muon) == {"up.weight", "shared_expert.weight"}
    assert len(names_of(model, adam)) == 6
    assert len(muon["params"] + adam["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_muon_per_head_is_that_of_each_head(method: str) -> None:
    """DeepSpeed's `per_head_muon`: each head's rows are orthogonalized and scaled like a matrix of their own."""
    (weight,), beta, lr = parameters([(12, 4)]), 0.9, 0.1
    optimizer = Muon([{"params": [weight], "use_muon": True, "heads": 2}], lr=lr, momentum=beta, ns_method=method)
    twin, momentum = weight.detach().clone(), torch.zeros(12, 4)
    for step in range(3):
        weight.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        momentum = beta * momentum + (1 - beta) * weight.grad
        update = (1 - beta) * weight.grad + beta * momentum
        for rows in (slice(0, 6), slice(6, 12)):
            x = update[rows].T / update[rows].norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            twin[rows] -= lr * math.sqrt(6 / 4) * x.T
        optimizer.step()
        torch.testing.assert_close(weight.detach(), twin, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"shape \(12, 4\) has no rows for 5 equal heads"):
        Muon([{"params": [weight], "use_muon": True, "heads": 5}])


class Attention(nn.Module):
    """The projections of a model's layer, with the names of several families."""

    def __init__(self, rows: dict[str, int], **config: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(text_config=types.SimpleNamespace(**config))
        self.attention = nn.ModuleDict({name: nn.Linear(8, count) for name, count in rows.items()})


LATENT = {"num_heads": 2, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("rows", "config", "heads"),
    [
        ({"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}, {"num_attention_heads": 4, "num_key_value_heads": 2}, [4, 2, 2]),
        ({"query": 12, "key": 12, "value": 12}, {"n_head": 3, "head_dim": 4}, [3, 3, 3]),
        ({"wq": 16, "wk": 12, "qkv_proj": 48}, {"num_heads": 4}, [4]),
        ({"q_a_proj": 4, "q_b_proj": 10, "kv_b_proj": 14}, LATENT, [2, 2]),
        ({"q_proj": 10, "kv_a_proj_with_mqa": 6}, LATENT, [2]),
    ],
)
def test_attention_heads(rows: dict[str, int], config: dict[str, int], heads: list[int]) -> None:
    model = Attention(rows, hidden_size=16, **config)
    found = attention_heads(model)
    assert list(found.values()) == heads
    groups = muon_groups(model.named_parameters(), heads=found)
    by_heads = {param: group.get("heads", 1) for group in groups for param in group["params"]}
    assert {id(param): count for param, count in by_heads.items() if count > 1} == found


def test_a_model_without_heads_is_refused() -> None:
    for rows, message in (({"up": 8}, "rows: none found"), ({"q_proj": 7}, "rows: {'q_proj': 7}")):
        with pytest.raises(ValueError, match=f"per_head_muon: no query, key or value projection of Attention.*{message}"):
            attention_heads(Attention(rows, num_heads=2, hidden_size=8))


def test_muon_groups_tell_a_shared_expert_from_a_shared_embedding() -> None:
    model = nn.ModuleDict({"shared": nn.Embedding(8, 4), "moe": MoE(4, num_experts=2, shared=GatedMLP(4, 8))})  # as T5 calls it
    muon, adam = muon_groups(model.named_parameters())
    assert {"moe.shared.gate_up.weight", "moe.shared.down.weight"} <= names_of(model, muon)
    assert names_of(model, adam) == {"shared.weight"}


def test_muon_groups_keep_the_callers_groups() -> None:
    model = Model()
    groups: list[dict[str, Any]] = [
        {"params": model.up.parameters(), "weight_decay": 0.5, "lr": 0.7},
        {"params": model.embed_tokens.weight},
        {"params": [model.shared_expert.weight], "use_muon": False},
    ]
    optimizer = Muon(muon_groups(model.named_parameters(), groups), muon_lr=0.1, adam_lr=0.2)
    settings = [(names_of(model, g), g["use_muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert settings == [
        ({"up.weight"}, True, 0.7, 0.5),
        ({"up.bias"}, False, 0.7, 0.5),
        ({"embed_tokens.weight"}, False, 0.2, 0.0),
        ({"shared_expert.weight"}, False, 0.2, 0.0),
    ]
    with pytest.raises(ValueError, match="not in the model"):
        muon_groups(model.named_parameters(), [{"params": parameters([(2, 2)])}])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.02, 3e-4)),
        ({"lr": 0.5}, (0.5, 0.5)),
        ({"lr": 0.5, "muon_lr": 0.1}, (0.1, 0.5)),
        ({"lr": 0.5, "adam_lr": 0.0}, (0.5, 0.0)),
    ],
)
def test_muon_rates(options: dict[str, Any], expected: tuple[float, float]) -> None:
    groups = Muon(Model().named_parameters(), **options).param_groups
    assert (groups[0]["lr"], groups[1]["lr"]) == expected

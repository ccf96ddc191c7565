"""`MoE`: a layer of experts, of which each token uses k. It drops no route unless it is given a capacity.

A layer is built whole, with all experts; `initialize` leaves each rank the experts of its index on the `ep` axis (moe/place.py).
Tokens are those of all leading dimensions; the router computes in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.moe import gate
from slipstream.moe.dispatch import Meanwhile, has_dropout, run_experts
from slipstream.moe.gate import Drop, Routes, Score
from slipstream.moe.grouped import without_autocast
from slipstream.moe.load import LoadMeter
from slipstream.moe.stack import ExpertStack
from slipstream.parallel.around import first_of
from slipstream.parallel.exchange import Exchange, leave
from slipstream.parallel.tensor import OwnCuts, Planned, Stacked
from slipstream.zero.hooks import eager


def mark_experts(module: nn.Module, ep_size: int) -> None:
    """Set DeepSpeed's marks on experts' parameters, by which scripts distinguish them from dense ones."""
    for param in module.parameters():
        vars(param).update(allreduce=False, group_name=f"ep_size_{ep_size}")


class Experts(Stacked):
    """The experts of one layer, and the ranks that have the others.

    ep_size   number of ranks over which the experts are split; None: as the config says (expert_parallel.autoep_size)
    is_sliced the caller has sliced the experts over the tp ranks
    is_whole  tp ranks do not slice the experts, unless the config names their layers; set by `initialize`
    exchange  over these ranks, and `tokens` over the ranks of a replica, which share its tokens; set by `initialize`
    apart     over the ranks of a replica if they arrive with different tokens: they average the auxiliary loss
    """

    def __init__(self, stack: ExpertStack, ep_size: int | None, *, is_sliced: bool = False) -> None:
        super().__init__()
        if ep_size is not None and (ep_size < 1 or stack.num_experts % ep_size):
            raise ValueError(f"{stack.num_experts} experts cannot be split over ep_size ({ep_size}) ranks: it must divide them")
        self.stack, self.num_experts, self.ep_size, self.is_sliced = stack, stack.num_experts, ep_size, is_sliced
        self.is_whole = True
        mark_experts(self, ep_size or 1)
        self.exchange: Exchange | None = None
        self.tokens: Exchange | None = None
        self.apart: Exchange | None = None

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The auxiliary loss of all tokens of a replica."""
        return loss if self.apart is None else leave(loss, self.apart) / self.apart.size

    def forward(self, x: Tensor, routes: Routes, meanwhile: Meanwhile = ()) -> Tensor:
        """x: [T, d]; returns the weighted sum of the experts' outputs. meanwhile: computed while rows travel (`run_experts`)."""
        experts, weights, kept = routes.experts, routes.weights, routes.kept
        if self.region is not None:
            x, experts, weights, kept = self.region.enter((x, experts, weights, kept))
        # Here ranks draw for different numbers of rows or features; everywhere else for the same tokens.
        draws = (self.region is not None or self.tokens is not None) and has_dropout(self.stack)
        if draws:
            for branch in meanwhile:
                branch()
            meanwhile = ()
        with torch.random.fork_rng([x.device] if x.is_cuda else [], enabled=draws):
            out = run_experts(x, experts, weights, kept, self.num_experts, self.stack, self.exchange, meanwhile, self.tokens)
        return out if self.region is None else self.region.leave(out)

    @property
    def own_cuts(self) -> OwnCuts:
        return {} if self.is_whole else _cuts_of("stack.expert", self.stack.expert)


class MoE(Planned):
    """A mixture of experts: exact counts, sorted rows, one product per expert; no route is dropped without a capacity.

    hidden_size     features of a token
    expert          a module that maps [rows, hidden_size] to the same shape, of which each expert is a copy; or a callable that
                    builds one. Default: a gated MLP (SiLU) of `expert_size` features
    num_experts, k  experts of the layer, and per token
    ep_size         number of ranks over which the experts are split; default: `expert_parallel.autoep_size` of the config
    score           "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3)
    normalize       divide a token's weights by their sum; default: if k > 1
    num_groups, top_groups  a token uses only experts of its `top_groups` best groups
    scale           factor of the weights
    shared          a module that every token uses beside its experts
    residual        a module whose output is mixed with the experts' by learned weights (PR-MoE, arXiv:2201.05596)
    capacity_factor, eval_capacity_factor, min_capacity  an expert takes max(ceil(k T / num_experts x factor), min_capacity) routes
                    of a rank's T tokens, with the second factor outside training (None: the same); None: all
    drop            which routes of an expert above its capacity: the smallest scores ("score"), the last ones ("position": all
                    second choices come after the first ones), or any ("random")
    jitter          in training, the router's inputs are multiplied by uniform numbers in [1 - jitter, 1 + jitter]
    balance_rate    if set, the selection of experts adds a bias per expert to the scores, which moves by this rate after each
                    update, against the load (arXiv:2408.15664): balance without an auxiliary loss
    z_loss          its weight in `l_aux`
    aux_loss_weight if not 0, a backward through the output adds the gradient of `l_aux` times this, as if it were a term of the
                    training loss, and `l_aux` has no graph: for layers whose loss does not reach the caller, as in pipeline stages

    Returns (output, l_aux, exp_counts): the auxiliary balance loss, for the caller to weight and add; int64 [num_experts], the
    routes of this rank's tokens to each expert. Raises ValueError for sizes that do not fit.
    """

    balance: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[], nn.Module] | None = None,
        num_experts: int = 8,
        *,
        k: int = 2,
        ep_size: int | None = None,
        expert_size: int | None = None,
        score: Score = "softmax",
        normalize: bool | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        drop: Drop = "score",
        shared: nn.Module | None = None,
        residual: nn.Module | None = None,
        jitter: float = 0.0,
        balance_rate: float | None = None,
        z_loss: float = 0.0,
        aux_loss_weight: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice(num_experts, k, num_groups, top_groups)
        _check_numbers(expert_size, jitter, balance_rate)
        for name, branch in (("shared", shared), ("residual", residual)):
            if branch is not None and not isinstance(branch, nn.Module):
                raise ValueError(f"{name} is {branch!r:.100}; it must be a module of {hidden_size} features, such as a GatedMLP")
        for name, value, kind in (("score", score, Score), ("drop", drop, Drop)):
            if value not in get_args(kind):
                raise ValueError(f"{name} {value!r} is none of {', '.join(map(repr, get_args(kind)))}")
        if capacity_factor is None and eval_capacity_factor is not None:
            raise ValueError(f"eval_capacity_factor ({eval_capacity_factor}) needs a capacity_factor")
        self.capacity, self.drop = None, drop
        if capacity_factor is not None:
            eval_factor = capacity_factor if eval_capacity_factor is None else eval_capacity_factor
            self.capacity = gate.Capacity(capacity_factor, eval_factor, min_capacity)
        if expert is None:
            size = expert_size or 4 * hidden_size
            expert = lambda: GatedMLP(hidden_size, size)  # noqa: E731
        self.hidden_size, self.num_experts, self.k, self.score, self.scale = hidden_size, num_experts, k, score, scale
        self.normalize = k > 1 if normalize is None else normalize
        self.num_groups, self.top_groups, self.jitter, self.z_loss = num_groups, top_groups, jitter, z_loss
        self.router = keep_exact(nn.Linear(hidden_size, num_experts, bias=False))
        self.experts = Experts(ExpertStack(expert, num_experts), ep_size)
        self.shared, self.residual = shared, residual
        self.coefficient = keep_exact(nn.Linear(hidden_size, 2)) if residual is not None else None
        self.balance_rate = balance_rate
        # The bias in units of the rate, because integers keep their dtype in an engine, and bf16 would lose a bias's steps.
        self.register_buffer("balance", None if balance_rate is None else torch.zeros(num_experts, dtype=torch.int64))
        self.meter = LoadMeter(num_experts)
        self.aux_loss_weight, self.seed = aux_loss_weight, LossSeed()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"{type(self).__name__} of hidden_size {self.hidden_size} is given tokens of {x.shape[-1]} features")
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.logits(tokens)
        routes = gate.choose(
            logits,
            self.k,
            score=self.score,
            normalize=self.normalize,
            bias=self.bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
            most=None if self.capacity is None else self.capacity.of(logits, self.k, training=self.training),
            drop=self.drop,
        )
        loss = routes.loss + self.z_loss * gate.z_loss(logits) if self.z_loss else routes.loss
        loss = self.experts.mean_loss(loss)
        if self.meter.counts(training=self.training):
            self.meter.record(routes.counts, tokens, routes.weights, routes.kept, loss)
        dense = [Branch(module, x) for module in (self.shared, self.residual) if module is not None]
        out = self.experts(tokens, routes, on_the_way(dense)).view_as(x)
        if self.shared is not None:
            out = out + dense[0].output
        if self.coefficient is not None:
            out = mix_residual(out, dense[-1].output, self.coefficient(x))
        if self.aux_loss_weight and self.training:
            out, loss = self.seed.inject(out, loss * self.aux_loss_weight), loss.detach()
        return out, loss, routes.counts

    @property
    def own_cuts(self) -> OwnCuts:
        return _cuts_of("shared", self.shared) | _cuts_of("residual", self.residual)

    @property
    def draws(self) -> bool:
        """Whether routing in training draws random numbers, which must be the same on the ranks of a replica."""
        return self.jitter > 0 or (self.capacity is not None and self.drop == "random")

    @property
    def bias(self) -> Tensor | None:
        """[num_experts], added to the scores for the selection of experts."""
        return None if self.balance is None or self.balance_rate is None else self.balance * self.balance_rate

    def logits(self, tokens: Tensor) -> Tensor:
        """The router's logits, fp32 [T, num_experts]."""
        inputs = tokens.float()
        if self.jitter and self.training:
            inputs = gate.jitter(inputs, self.jitter)
        with without_autocast(tokens.device):
            return F.linear(inputs, self.router.weight.float())

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, k={self.k}"


def keep_exact(linear: nn.Linear) -> nn.Linear:
    """A layer that is never quantized: errors in a router's logits send tokens to other experts."""
    vars(linear).update(stays_exact=True)
    return linear


def check_choice(num_experts: int, k: int, num_groups: int, top_groups: int) -> None:
    """Raise ValueError unless k experts can be chosen from the best groups."""
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}) must be at least 1")
    if not 1 <= k <= num_experts:
        raise ValueError(f"k ({k}) must lie in 1 to num_experts ({num_experts})")
    if (
        num_groups < 1
        or num_experts % num_groups
        or not 1 <= top_groups <= num_groups
        or k > num_experts // num_groups * top_groups
    ):
        raise ValueError(
            f"{top_groups} of {num_groups} groups of {num_experts} experts do not have k ({k}) experts: num_groups must divide "
            "num_experts, and top_groups be at least 1 and large enough"
        )


def _check_numbers(expert_size: int | None, jitter: float, balance_rate: float | None) -> None:
    if expert_size is not None and expert_size < 1:
        raise ValueError(f"expert_size ({expert_size}) must be at least 1")
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter ({jitter}) must lie in [0, 1): the router's inputs are multiplied by 1 - jitter to 1 + jitter")
    if balance_rate is not None and not 0 < balance_rate < math.inf:
        raise ValueError(f"balance_rate ({balance_rate}) must be positive; without it (None), no bias moves")


class LossSeed:
    """The gradient of a term of the training loss that arises inside the model; an engine sets it. A copy's is 1.

    Like Megatron-LM's MoEAuxLossAutoScaler, without a global.
    """

    def __init__(self) -> None:
        self.value: Callable[[], float] = lambda: 1.0

    def __reduce__(self) -> Any:
        return LossSeed, ()

    @eager
    def inject(self, out: Tensor, loss: Tensor) -> Tensor:
        """`out`, through which a backward also reaches `loss`."""
        result: Tensor = _Inject.apply(out, loss, self)
        return result


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, seed: LossSeed) -> Tensor:
        ctx.seed, ctx.like = seed, loss.new_empty(())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.like, ctx.seed.value()), None


class Branch:
    """A dense branch of a layer, called while the layer's rows travel."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x = module, x
        self.output: Any = None

    def __call__(self) -> None:
        self.output = self.module(self.x)


def on_the_way(branches: list[Branch]) -> list[Branch]:
    """The branches to compute while rows travel: all, except in a compiled graph, which ends at an exchange and contains them."""
    if not torch.compiler.is_compiling():
        return branches
    for branch in branches:
        branch()
    return []


def mix_residual(out: Tensor, dense: Any, coefficient: Tensor) -> Tensor:
    """The outputs of the experts and the dense branch, combined by each token's two learned weights."""
    weights = coefficient.softmax(-1)
    mixed: Tensor = out * weights[..., :1] + first_of(dense) * weights[..., 1:]
    return mixed


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product. Stacks of it, and dense branches, are sliced over tp ranks."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * size, bias=False)
        self.down = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gates) * values)
        return out


def _cuts_of(name: str, module: nn.Module | None) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """How a gated MLP is cut; any other module stays whole."""
    return {f"{name}.gate_up": ("column", (2, -1)), f"{name}.down": ("row", None)} if isinstance(module, GatedMLP) else {}

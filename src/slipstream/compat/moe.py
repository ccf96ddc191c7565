"""`deepspeed.moe`: the layer with DeepSpeed's gates and capacities, and its functions on parameter groups.

The gate is DeepSpeed's, except that random draws have their own order. Routes over the capacity are dropped before tokens are sent,
so nothing is padded. Experts are stacked: their parameters have the names of one expert, and a leading dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.moe import Experts, ExpertStack, Routes, gate, mix_residual
from slipstream.moe.dispatch import Meanwhile
from slipstream.moe.grouped import without_autocast
from slipstream.moe.huggingface import is_foreign
from slipstream.moe.layer import Branch, keep_exact, on_the_way
from slipstream.moe.listed import ListedExperts
from slipstream.moe.load import LoadMeter

_POLICIES = (None, "None", "Jitter", "RSample")
_GROUP_NUMEL = 178956971  # DeepSpeed's largest group


class TopKGate(nn.Module):
    """DeepSpeed's gate. The router's weight is `wg.weight`; the gate computes in fp32."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k ({k}) must lie in 1 to num_experts ({num_experts})")
        self.wg = keep_exact(nn.Linear(model_dim, num_experts, bias=False))
        self.k, self.capacity_factor, self.eval_capacity_factor = k, capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy, self.drop_tokens = min_capacity, noisy_gate_policy, drop_tokens
        self.use_rts, self.top2_2nd_expert_sampling = use_rts, top2_2nd_expert_sampling
        self.capacity()

    @property
    def draws(self) -> bool:
        """Whether routing in training draws random numbers, which must then be equal on the ranks of a replica."""
        sampled = (self.use_rts and self.drop_tokens) if self.k == 1 else self.k == 2 and self.top2_2nd_expert_sampling
        return sampled or self.noisy_gate_policy in ("Jitter", "RSample")

    def capacity(self) -> gate.Capacity | None:
        return gate.Capacity(self.capacity_factor, self.eval_capacity_factor, self.min_capacity) if self.drop_tokens else None

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        tokens = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = gate.jitter(tokens)
        with without_autocast(tokens.device):
            logits = F.linear(tokens, self.wg.weight.float())
        capacity = self.capacity()
        most = None if capacity is None else capacity.of(logits, self.k, training=self.training)
        if used_token is not None and self.k > 1:
            raise ValueError(f"used_token is for k = 1, and this gate has k ({self.k}): DeepSpeed ignores it; leave it out")
        if self.k == 1:
            noisy = self.noisy_gate_policy == "RSample" and self.training
            used = None if used_token is None else used_token.reshape(-1)
            return gate.top1(logits, most, noisy=noisy, random_selection=self.use_rts, used=used)
        if self.k == 2:
            return gate.top2(logits, most, sampled=self.top2_2nd_expert_sampling and self.training)
        return gate.top_k(logits, self.k, most)


class MOELayer(nn.Module):
    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.exp_counts = torch.empty(0, dtype=torch.int64)
        self.meter = LoadMeter(experts.num_experts)

    @property
    def l_aux(self) -> Tensor | None:
        """The auxiliary loss of the last call: with its graph until the next backward or step, then without it."""
        return self.meter.kept_loss

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None, meanwhile: Meanwhile = ()) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes: Routes = self.gate(tokens, used_token)
        loss = self.experts.mean_loss(routes.loss)
        self.meter.keep(loss)
        self.exp_counts = routes.counts
        if self.meter.counts(training=self.training):
            self.meter.record(routes.counts, tokens, routes.weights, routes.kept, loss)
        out: Tensor = self.experts(tokens, routes, meanwhile)
        return out.view_as(hidden_states), loss


class MoE(nn.Module):
    """DeepSpeed's layer: `expert` is copied `num_experts` times; returns (output, l_aux, exp_counts).

    use_tutel selects kernels in DeepSpeed and has no effect here. With enable_expert_tensor_parallelism, experts are sliced: either
    the caller has sliced them over the ranks of an mpu, with Megatron's marks, or tensor_parallel.partition_config names their
    layers. Otherwise `initialize` raises ValueError.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        assert ep_size > 0 and num_experts % ep_size == 0, (
            f"Number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size})"
        )
        assert noisy_gate_policy in _POLICIES, f"Unsupported noisy_gate_policy: {noisy_gate_policy}"
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual, self.enable_expert_tensor_parallelism = use_residual, enable_expert_tensor_parallelism
        router = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        experts = Experts(ExpertStack(expert, num_experts), ep_size, is_sliced=enable_expert_tensor_parallelism)
        self.deepspeed_moe = MOELayer(router, experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = keep_exact(nn.Linear(hidden_size, 2))

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Has no effect: `initialize` places the experts."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        dense = [Branch(self.mlp, hidden_states)] if self.use_residual else []
        output, loss = self.deepspeed_moe(hidden_states, used_token, on_the_way(dense))
        if self.use_residual:
            output = mix_residual(output, dense[0].output, self.coefficient(hidden_states))
        return output, loss, self.deepspeed_moe.exp_counts


def experts_of_layers(model: nn.Module) -> list[int]:
    """The number of experts of each layer of experts."""
    layers = (layer for layer in cast(Any, model.modules()) if isinstance(layer, Experts | ListedExperts) or is_foreign(layer))
    return [layer.num_experts for layer in layers]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has an expert layer, and the number of experts of the first one."""
    numbers = experts_of_layers(m)
    return bool(numbers), numbers[0] if numbers else 0


def is_moe_param(param: Any) -> bool:
    """Whether a parameter belongs to an expert of `MoE` or, in an engine, to a split expert of transformers or of a list."""
    return getattr(param, "allreduce", True) is False


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The parameters that belong to no expert, and those that do."""
    params = list(params)
    return [param for param in params if not is_moe_param(param)], [param for param in params if is_moe_param(param)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the parameters that belong to no expert, and of those that do."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad for param in shared], [param.grad for param in experts]


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = _GROUP_NUMEL
) -> list[dict[str, Any]]:
    """Move experts' parameters into groups of their own, with `moe: True` and the name of their expert-parallel group.

    max_group_size: elements per group of experts; None: one group per name. Slipstream does not need these groups.
    """
    if isinstance(param_groups, dict):
        groups = [param_groups]
    elif isinstance(param_groups, (list, tuple)):
        groups = list(param_groups)
    else:
        raise ValueError(f"Unknown param group type of {type(param_groups)}")
    added: list[dict[str, Any]] = []
    for group in groups:
        dense, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = dense
        for name in dict.fromkeys(param.group_name for param in experts):
            pieces: list[list[Any]] = [[]]
            for param in (param for param in experts if param.group_name == name):
                numel = sum(each.numel() for each in pieces[-1]) + param.numel()
                if pieces[-1] and max_group_size is not None and numel > max_group_size:
                    pieces.append([])
                pieces[-1].append(param)
            added += [{**group, "name": name, "moe": True, "params": piece} for piece in pieces]
    return groups + added


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Groups for parameters, or for groups that have no expert groups yet; others are returned unchanged."""
    assert isinstance(model_parameters, list), "model_parameters must be a list"
    for each in model_parameters:
        if not isinstance(each, (torch.Tensor, dict)):
            raise TypeError(f"the parameters of an optimizer are tensors or groups, and one is a {type(each).__name__}")
    if not model_parameters:
        raise ValueError("configure_moe_param_groups() got no parameters")
    if isinstance(model_parameters[0], torch.Tensor):
        return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)

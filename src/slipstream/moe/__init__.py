"""Mixtures of experts: the layer, its routers, and the placement of a model's experts on ranks."""

from slipstream.moe import gate
from slipstream.moe.gate import Routes
from slipstream.moe.layer import Experts, GatedMLP, MoE, mix_residual
from slipstream.moe.load import expert_loads
from slipstream.moe.stack import ExpertStack

__all__ = ["ExpertStack", "Experts", "GatedMLP", "MoE", "Routes", "expert_loads", "gate", "mix_residual"]

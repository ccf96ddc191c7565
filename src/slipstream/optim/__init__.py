"""Optimizers that torch does not have, and the way from a name in the JSON to a class.

Everything here is an ordinary `torch.optim.Optimizer` that steps on tensors with `.grad` set; none of it
knows of ranks or shards. The engine decides what the tensors are: ranges of a flat buffer for an elementwise
optimizer (`is_elementwise`), whole tensors, each owned by one rank, for every other.
"""

from slipstream.optim.lamb import Lamb
from slipstream.optim.lion import Lion
from slipstream.optim.muon import Muon, muon_groups
from slipstream.optim.resolve import Resolved, is_elementwise, optimizer_class, refuse_unshardable, resolve_optimizer
from slipstream.optim.rules import rule_of

__all__ = [
    "Lamb",
    "Lion",
    "Muon",
    "Resolved",
    "is_elementwise",
    "muon_groups",
    "optimizer_class",
    "refuse_unshardable",
    "resolve_optimizer",
    "rule_of",
]

"""Optimizers that torch does not have, and the lookup of an optimizer class by its name in the JSON.

These are ordinary `torch.optim.Optimizer`s, unaware of ranks and shards. The engine passes ranges of a flat buffer to an
elementwise optimizer (`is_elementwise`), and whole tensors, each owned by one rank, to any other.
"""

from slipstream.optim.loop import Lamb, Lion
from slipstream.optim.muon import Muon, attention_heads, muon_groups
from slipstream.optim.onebit import OneBitAdam, ZeroOneAdam
from slipstream.optim.onebit_lamb import OneBitLamb
from slipstream.optim.resolve import Resolved, is_elementwise, optimizer_class, refuse_unshardable, resolve_optimizer, rule_of

__all__ = [
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "Resolved",
    "ZeroOneAdam",
    "attention_heads",
    "is_elementwise",
    "muon_groups",
    "optimizer_class",
    "refuse_unshardable",
    "resolve_optimizer",
    "rule_of",
]

"""Adapters of PEFT on their way from a trainer to a server: where PEFT is installed, with what else is handed over."""

from tests.dist.test_handover import test_adapters_are_transferred_merged_or_refused
from tests.dist.test_rollouts import test_adapters_are_fused_for_rollouts

__all__ = ["test_adapters_are_fused_for_rollouts", "test_adapters_are_transferred_merged_or_refused"]

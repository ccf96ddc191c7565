"""`deepspeed.runtime.lr_schedules`: Slipstream's schedules, which have DeepSpeed's names, arguments and formulas."""

from __future__ import annotations

import argparse

from slipstream.train.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "add_tuning_arguments"]

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

_TUNING: dict[str, tuple[type, object]] = {
    "lr_schedule": (str, None),
    "lr_range_test_min_lr": (float, 0.001),
    "lr_range_test_step_rate": (float, 1.0),
    "lr_range_test_step_size": (int, 1000),
    "lr_range_test_staircase": (bool, False),
    "cycle_first_step_size": (int, 1000),
    "cycle_first_stair_count": (int, -1),
    "cycle_second_step_size": (int, -1),
    "cycle_second_stair_count": (int, -1),
    "decay_step_size": (int, 1000),
    "cycle_min_lr": (float, 0.01),
    "cycle_max_lr": (float, 0.1),
    "decay_lr_rate": (float, 0.0),
    "cycle_min_mom": (float, 0.8),
    "cycle_max_mom": (float, 0.9),
    "decay_mom_rate": (float, 0.0),
    "warmup_min_lr": (float, 0.0),
    "warmup_max_lr": (float, 0.001),
    "warmup_num_steps": (int, 1000),
    "warmup_type": (str, "log"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Flags for scripts that read them; nothing of Slipstream does."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    for name, (kind, default) in _TUNING.items():
        group.add_argument(f"--{name}", type=kind, default=default)
    return parser

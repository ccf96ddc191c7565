"""Forecasts of memory, traffic and time, before a run and of a running engine."""

from slipstream.train.planning.collectives import OPERATIONS, Rate
from slipstream.train.planning.collectives import measure as measure_collectives

__all__ = ["OPERATIONS", "Rate", "measure_collectives"]

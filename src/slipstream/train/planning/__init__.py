"""Forecasts of memory, traffic and time, before a run and of a running engine."""

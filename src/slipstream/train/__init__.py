"""Training: the engine, its step, precision, schedules and data."""

"""Training: the engine, its step, precision, schedules and data.

For the command line: the modules `recipe`, and in `planning` `explain`, `propose`, `predict`, `dry_run`, `calibrate` and
`collectives` (docs/PLANNING.md).
"""

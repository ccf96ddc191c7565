"""The command line, `slipstream`.

`hosts`, `environment`, `commands` and `failure` decide, as pure functions. Four modules start and watch processes: `run` (one
command), `agent` (one node, on `torch.distributed.run`), `worker` (one rank) and `remote` (several commands).
"""

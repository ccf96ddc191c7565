"""The command line, `slipstream`.

`hosts`, `environment`, `commands` and `failure` decide, as pure functions. Processes are started and watched in `run` (one
command), `agent` (one node, on `torch.distributed.run`), `worker` (one rank) and `remote` (several commands).
"""

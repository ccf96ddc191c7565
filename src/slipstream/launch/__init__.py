"""The command line: `slipstream run | report | plan`.

Decisions are pure (`hosts`, `environment`, `commands`, `failure`); processes are touched in `run`
(one command), `agent` (one node, on `torch.distributed.run`), `worker` (one rank) and `remote` (several
commands).
"""

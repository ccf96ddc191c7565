"""The commands `deepspeed` and `ds_report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
_VALUED = frozenset(
    {"-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators", "--master_port",
     "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--ssh_port"}
)  # fmt: skip
_DROPPED = frozenset({"--no_ssh_check", "--force_multi"})  # nothing to do
_REFUSED = {
    "--autotuning": "autotuning is not built; `slipstream plan` shows the bytes before anything runs",
    "--elastic_training": "elastic training is not built; restart at another size, every checkpoint loads",
    "--bind_cores_to_rank": "give each rank its cores with taskset or numactl, or OMP_NUM_THREADS",
    "--bind_core_list": "give each rank its cores with taskset or numactl",
    "--venv_script": "activate the environment in the shell's profile of each host, or start `deepspeed` from it",
}


def translate(arguments: Sequence[str]) -> list[str]:
    """`slipstream run`'s arguments for DeepSpeed's, whose spellings it takes. Raises ValueError for what does not exist."""
    ours, given = ["run", "--pass-local-rank"], list(arguments)  # as DeepSpeed does, unless it is told not to
    while given and given[0].startswith("-"):
        flag = given.pop(0)
        name, equals, _ = flag.partition("=")
        if name in _REFUSED:
            raise ValueError(f"deepspeed {name}: {_REFUSED[name]}")
        if name == "--no_local_rank":
            ours.remove("--pass-local-rank")
        elif name not in _DROPPED:
            ours.append(flag.replace("--num_accelerators", "--num_gpus"))
        if name in _VALUED and not equals and given:
            ours.append(given.pop(0))
    return [*ours, *given]


def main() -> int:
    """`deepspeed [flags] script.py [its arguments]`, as `slipstream run`."""
    from slipstream.launch import cli

    try:
        arguments = translate(sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return cli.main(arguments)


def report() -> int:
    """`ds_report`, as `slipstream report`."""
    from slipstream.launch import cli

    return cli.main(["report", *sys.argv[1:]])

"""The commands `deepspeed` and `ds_report`, and `python -m deepspeed.utils.zero_to_fp32`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
_VALUED = frozenset(
    """-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators --master_port --master_addr --node_rank
    --launcher --launcher_args --ssh_port --log_level""".split()  # noqa: SIM905
)
_LEVELS = ("debug", "info", "warning", "error", "critical")  # of the launcher's own words
_DROPPED = frozenset({"--no_ssh_check", "--force_multi"})  # nothing to do
_REFUSED = {
    "--autotuning": "autotuning is not built; `slipstream plan` shows the bytes before anything runs",
    "--elastic_training": "elastic training is not built; restart at another size, every checkpoint loads",
    "--bind_cores_to_rank": "give each rank its cores with taskset or numactl, or OMP_NUM_THREADS",
    "--bind_core_list": "give each rank its cores with taskset or numactl",
    "--save_pid": "end this process with SIGTERM, which ends all ranks",
    "--enable_each_rank_log": "what ranks print comes together here; redirect it in the script, by RANK",
    "--venv_script": "activate the environment in the shell's profile of each host, or start `deepspeed` from it",
}


def translate(arguments: Sequence[str]) -> list[str]:
    """`slipstream run`'s arguments for DeepSpeed's, whose spellings it takes. Raises ValueError for what does not exist."""
    ours, given = ["run", "--pass-local-rank"], list(arguments)  # as DeepSpeed does, unless it is told not to
    while given and given[0].startswith("-"):
        flag = given.pop(0)
        name, equals, value = flag.partition("=")
        if name in _VALUED and not equals and given:
            value = given.pop(0)
        if name in _REFUSED:
            raise ValueError(f"deepspeed {name}: {_REFUSED[name]}")
        if name == "--no_local_rank":
            ours.remove("--pass-local-rank")
        elif name == "--log_level":
            if value not in _LEVELS:
                raise ValueError(f"deepspeed --log_level {value!r} is none of {list(_LEVELS)}")
            ours += ["--quiet"] if _LEVELS.index(value) > 1 else []
        elif name not in _DROPPED:
            ours.append(flag.replace("--num_accelerators", "--num_gpus"))
            ours += [value] if name in _VALUED and not equals else []
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


def zero_to_fp32() -> int:
    """A checkpoint's weights in fp32, as a file; `slipstream convert` makes a Hugging Face folder."""
    from slipstream.compat.weights import convert_zero_checkpoint_to_fp32_state_dict

    parser = argparse.ArgumentParser(prog="python -m deepspeed.utils.zero_to_fp32", description=zero_to_fp32.__doc__)
    parser.add_argument("checkpoint_dir", help="the folder that `latest` is in")
    parser.add_argument("output_dir", help="gets pytorch_model.bin, or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file, at most; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="refused: save the checkpoint without them")
    parser.add_argument("-t", "--tag", help="of the checkpoint; by default what `latest` says")
    parser.add_argument("-d", "--debug", action="store_true", help="log what is done")
    given = parser.parse_args()
    if given.debug:
        logging.basicConfig(level=logging.DEBUG)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            given.max_shard_size,
            given.safe_serialization,
            given.tag,
            given.exclude_frozen_parameters,
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0

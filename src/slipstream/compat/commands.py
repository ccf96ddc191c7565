"""DeepSpeed's smaller commands: ds_bench, ds_io, ds_nvme_tune and ds_ssh."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HOSTFILE = "/job/hostfile"


def ds_bench() -> int:
    """`ds_bench`, as `slipstream bench-comm`."""
    from slipstream.launch import cli

    return cli.main(["bench-comm", *sys.argv[1:]])


def ds_io() -> int:
    """`ds_io --folder DIR` and `ds_nvme_tune --nvme_dir DIR`, as `slipstream bench-disk DIR`: it reads and writes at the same time,
    as training with offloaded states does."""
    from slipstream.launch import cli

    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=ds_io.__doc__)
    parser.add_argument("--nvme_dir", "--folder", required=True, help="a folder on the disk")
    parser.add_argument("--io_size", default="1G", help="the file's size: 400M; default 1G")
    parser.add_argument("--read", "--write", "--verbose", action="store_true", help="no effect: both are measured and shown")
    options = parser.parse_args()
    return cli.main(["bench-disk", options.nvme_dir, "--size", options.io_size])


def ds_ssh() -> int:
    """`ds_ssh [-f HOSTFILE] COMMAND...`: run a shell command on every host at once; lines of output begin with the host's name."""
    from slipstream.launch.hosts import parse_hostfile

    parser = argparse.ArgumentParser(prog="ds_ssh", description=ds_ssh.__doc__)
    parser.add_argument("-f", "--hostfile", default=HOSTFILE, help=f"one `HOST slots=N` per line; default {HOSTFILE}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="as for a shell")
    options = parser.parse_args()
    try:
        if not options.command:
            raise ValueError("no command; ds_ssh [-f HOSTFILE] COMMAND")
        hosts = parse_hostfile(Path(options.hostfile).read_text(), options.hostfile)
    except (OSError, ValueError) as error:
        why = f"cannot read {options.hostfile}: {error.strerror}; name one by -f" if isinstance(error, OSError) else error
        sys.stderr.write(f"ds_ssh: {why}\n")
        return 2
    return _on_all([host.name for host in hosts], " ".join(options.command))


def _on_all(hosts: Sequence[str], line: str) -> int:
    """The largest exit code. A signal ends the command on all hosts: each has a terminal (-tt), which hangs up."""
    running: list[subprocess.Popen[str]] = []

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    def show(host: str, process: subprocess.Popen[str]) -> None:
        for text in process.stdout or ():
            sys.stdout.write(f"{host}: {text.rstrip()}\n")
            sys.stdout.flush()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for host in hosts:
            argv = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", host, line]
            running.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        threads = [threading.Thread(target=show, args=pair) for pair in zip(hosts, running, strict=True)]
        for thread in threads:
            thread.start()
        codes = [process.wait() for process in running]
        for thread in threads:
            thread.join()
        for host, code in zip(hosts, codes, strict=True):
            if code:
                sys.stderr.write(f"ds_ssh: {host}: {shlex.quote(line)} ended with exit code {code}\n")
        return max(codes)
    except FileNotFoundError:
        sys.stderr.write("ds_ssh: ssh is not installed on this host; install an OpenSSH client\n")
        return 2
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)

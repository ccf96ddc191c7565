"""A Slurm of two nodes on this host, from Debian's packages slurm-wlm and munge, without services: `slipstream run` inside an
allocation, and the batch script of examples/deploy that saves on Slurm's signal and is requeued."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.alone]
ROOT = Path(__file__).parents[2]
SBIN = "/usr/sbin"
NEEDED = ("munged", "mungekey", "slurmctld", "slurmd", "slurmstepd", "srun", "salloc", "sbatch", "scontrol", "scancel", "squeue")

CONF = """
ClusterName=slipstream
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/linear
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SCRIPT = """
import sys, time
import torch, torch.nn as nn
import slipstream

folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
block = {"folder": folder, "every_steps": 1000}
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "slipstream": {"checkpoint": block},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine, *_ = slipstream.initialize(model=model, model_parameters=model.parameters(), config=config)
rank = torch.distributed.get_rank()
print(f"rank {rank} of {torch.distributed.get_world_size()} begins at {engine.global_steps}\\n", end="", flush=True)
while engine.global_steps < steps:
    torch.manual_seed(engine.global_steps * 2 + rank)
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    time.sleep(pause)
print(f"rank {rank} ends at {engine.global_steps}, loss {loss.item():.9g}\\n", end="", flush=True)
"""


class Slurm:
    """The daemons and the environment in which commands reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        self.nodes = ("n1", "n2")
        lacks = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
        if lacks:
            pytest.skip(f"{', '.join(lacks)} missing: apt-get install slurm-wlm munge")
        bin_ = folder / "bin"
        bin_.mkdir()
        (bin_ / "slipstream").write_text(f'#!/bin/sh\nexec {sys.executable} -m slipstream.launch.cli "$@"\n')
        (bin_ / "slipstream").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        paths = {"PATH": f"{bin_}:{kept['PATH']}:{SBIN}", "PYTHONPATH": str(ROOT / "src"), "SLURM_CONF": str(folder / "slurm.conf")}
        self.env = kept | paths | {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
        self.env["MASTER_ADDR"] = "127.0.0.1"  # n1 is no name that resolves
        ports = [free_port() for _ in range(2)]
        values = {"host": socket.gethostname(), "folder": folder, "user": getpass.getuser(), "ports": ports, "port": free_port()}
        (folder / "slurm.conf").write_text(CONF.format(**values))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()

    def start(self) -> None:
        here = self.folder
        self.run("mungekey", "-c", "-k", str(here / "key"))
        files = [
            f"--{name}={here / file}"
            for name, file in {
                "key-file": "key",
                "socket": "munge.sock",
                "pid-file": "munged.pid",
                "log-file": "munged.log",
                "seed-file": "seed",
            }.items()
        ]
        self.daemon("munged", "--foreground", "--force", *files)
        self.until(lambda: (here / "munge.sock").exists(), "munged")
        self.daemon("slurmctld", "-D")
        for node in self.nodes:
            self.daemon("slurmd", "-D", "-N", node, "-d", str(shutil.which("slurmstepd", path=self.env["PATH"])))
        self.until(lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False).stdout.split() == ["2", "idle"], "two idle nodes")

    def daemon(self, *argv: str) -> None:
        log = open(self.folder / f"{argv[0]}{len(self.started)}.out", "w")  # noqa: SIM115 (of the process)
        with log:
            self.started.append(
                subprocess.Popen(argv, env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
            )

    def run(self, *argv: str, check: bool = True, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def until(self, condition: Any, what: str, within: float = 90) -> None:
        end = time.monotonic() + within
        while not condition():
            logs = "\n".join(path.read_text()[-1500:] for path in [*self.folder.glob("*.out"), *self.folder.glob("*.log")])
            assert time.monotonic() < end, f"{what} did not come in {within:g} s\n{logs}"
            time.sleep(0.1)

    def stop(self) -> None:
        end = time.monotonic() + 30
        while self.run("squeue", "--noheader", check=False).stdout.strip() and time.monotonic() < end:
            self.run("scancel", "--signal=KILL", f"--user={getpass.getuser()}", check=False)
            time.sleep(0.5)
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def test_a_job_over_two_nodes_in_an_allocation(slurm: Slurm) -> None:
    (slurm.folder / "train.py").write_text(SCRIPT)
    done = slurm.run("salloc", "--nodes=2", "slipstream", "run", "--nproc", "1", "train.py", "alone", "4", "0")
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split(", loss")[0] for line in lines] == [
        *("rank 0 ends at 4", "rank 0 of 2 begins at 0", "rank 1 ends at 4", "rank 1 of 2 begins at 0")
    ]
    assert "2 ranks on 2 hosts, by slurm" in done.stderr
    per_node = slurm.run(
        "salloc", "--nodes=2", "srun", "--ntasks-per-node=1", "slipstream", "run", "-q", "train.py", "agents", "4", "0"
    )
    assert sorted(line for line in per_node.stdout.splitlines() if line.startswith("rank")) == lines


def test_the_batch_script_saves_on_a_signal_and_goes_on_when_requeued(slurm: Slurm) -> None:
    """As before the end of its time: the losses at the end are those of a job that nobody disturbed."""
    (slurm.folder / "train.py").write_text(SCRIPT)
    shutil.copy(ROOT / "examples" / "deploy" / "slurm.sbatch", slurm.folder)
    options = (
        "--parsable",
        "--gpus-per-node=0",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--export=ALL,NPROC=1",
        "slurm.sbatch",
        "train.py",
    )
    whole = slurm.run("sbatch", "--wait", *options, "whole", "12", "0").stdout.strip()
    job = slurm.run("sbatch", *options, "parts", "12", "0.5").stdout.strip()
    log = slurm.folder / f"slipstream-{job}.log"
    slurm.until(lambda: log.exists() and log.read_text().count("begins at 0") == 2, "the first steps")
    time.sleep(2)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.until(lambda: log.read_text().count("ends at 12") == 2, "the end after a requeue", within=200)
    text = log.read_text()
    begins = sorted(int(line.split()[-1]) for line in text.splitlines() if "begins at" in line)
    assert begins[:2] == [0, 0] and 0 < begins[2] == begins[3] < 12, text
    assert "start again" in text and "Traceback" not in text
    ends = [
        sorted(line for line in (slurm.folder / f"slipstream-{name}.log").read_text().splitlines() if " ends at " in line)
        for name in (whole, job)
    ]
    assert ends[0] == ends[1] and len(ends[0]) == 2

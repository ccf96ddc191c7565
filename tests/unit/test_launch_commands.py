"""Golden command lines of every launcher, and what environment travels."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.launch import commands, environment
from slipstream.launch.commands import Job
from slipstream.launch.hosts import Host

EVEN = (Host(name="a", devices=(0, 1)), Host(name="b", devices=(0, 1)))
JOB = Job(
    hosts=EVEN,
    master_addr="a",
    master_port=29500,
    python="/py",
    directory="/my work",
    program="train.py",
    arguments=("--deepspeed_config", "ds config.json"),
    exports={"NCCL_DEBUG": "INFO", "X": "a b"},
)
AGENT = "/py -u -m slipstream.launch.agent --report"
TAIL = "--module -- slipstream.launch.worker train.py --deepspeed_config 'ds config.json'"
WORKER = "/py -u -m slipstream.launch.worker --report train.py --deepspeed_config 'ds config.json'"


def lines(jobs: list[commands.Command]) -> list[str]:
    return [shlex.join(command.argv) for command in jobs]


def test_one_node() -> None:
    job = replace(JOB, hosts=EVEN[:1], master_addr="127.0.0.1")
    assert shlex.join(commands.one_node(job)) == (
        f"--nnodes=1 --nproc-per-node=2 --max-restarts=0 --node-rank=0 --master-addr=127.0.0.1 --master-port=29500 {TAIL}"
    )


def test_module_no_python_and_local_rank() -> None:
    alone = replace(JOB, hosts=EVEN[:1], arguments=("--x",))
    assert commands.one_node(replace(alone, module=True))[-6:] == [
        *("--module", "--", "slipstream.launch.worker", "-m", "train.py", "--x")
    ]
    assert commands.one_node(replace(alone, no_python=True))[-4:] == ["--no-python", "--", "train.py", "--x"]
    assert commands.one_node(replace(alone, pass_local_rank=True))[-3:] == ["--pass-local-rank", "train.py", "--x"]


def test_restarts_meet_by_c10d() -> None:
    job = replace(JOB, max_restarts=3)
    argv = shlex.join(commands.one_node(job, num_nodes=2, node_rank=1))
    assert argv == (
        "--nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=a:29500 "
        f"--rdzv-id=slipstream-29500 {TAIL}"
    )
    assert "--local-addr=b" in commands.ssh(job)[1].argv[-1]


def test_ssh() -> None:
    jobs = commands.ssh(replace(JOB, ssh_port=2222, launcher_args=("-v",)))
    head, line = jobs[1].argv[:-1], jobs[1].argv[-1]
    assert shlex.join(head) == "ssh -o BatchMode=yes -p 2222 -v b"
    assert line == (
        f"cd '/my work' && exec env NCCL_DEBUG=INFO X='a b' {AGENT} --lease --nnodes=2 --nproc-per-node=2 "
        f"--max-restarts=0 --node-rank=1 --master-addr=a --master-port=29500 {TAIL}"
    )
    assert [command.name for command in jobs] == ["a", "b"]
    assert all(command.lease for command in jobs)


def test_ssh_gives_each_host_its_devices() -> None:
    uneven = (Host(name="a", devices=(1, 3)), Host(name="b", devices=(0,)))
    first, second = commands.ssh(replace(JOB, hosts=uneven))
    assert "CUDA_VISIBLE_DEVICES=1,3" in first.argv[-1]
    assert "--nproc-per-node=2" in first.argv[-1]
    assert "CUDA_VISIBLE_DEVICES" not in second.argv[-1]
    assert "--nproc-per-node=1" in second.argv[-1]


def test_quiet_reaches_the_agents() -> None:
    (command, _) = commands.ssh(replace(JOB, quiet=True))
    assert f"{AGENT} --lease --quiet --nnodes=2" in command.argv[-1]


def test_pdsh() -> None:
    uneven = (Host(name="a", devices=(1, 3)), Host(name="b", devices=(0,)))
    (command,) = commands.pdsh(replace(JOB, hosts=uneven, arguments=("50%",)))
    assert shlex.join(command.argv[:-1]) == "pdsh -S -N -R ssh -f 2 -w a,b"
    assert command.argv[-1] == (
        "NODE=%n; case $NODE in 0) RANKS=2; export CUDA_VISIBLE_DEVICES=1,3;; 1) RANKS=1;; esac; "
        f"cd '/my work' && exec env NCCL_DEBUG=INFO X='a b' {AGENT} --nnodes=2 "
        '--nproc-per-node="$RANKS" --max-restarts=0 --node-rank="$NODE" --master-addr=a --master-port=29500 '
        "--module -- slipstream.launch.worker train.py 50%%"
    )
    assert command.env == {"PDSH_SSH_ARGS_APPEND": "-tt -o BatchMode=yes"}


def test_slurm() -> None:
    (command,) = commands.slurm(JOB)
    assert shlex.join(command.argv) == (
        "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=a,b --distribution=block --kill-on-bad-exit=1 --export=ALL "
        f"'--chdir=/my work' {WORKER}"
    )
    assert command.env == {"NCCL_DEBUG": "INFO", "X": "a b"}, "the ranks derive the port from job and step"


def test_slurm_chooses_nodes() -> None:
    (command,) = commands.slurm(replace(JOB, hosts=EVEN[:1], launcher_args=("--partition=p",)), num_nodes=3)
    assert shlex.join(command.argv).startswith(
        "srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --distribution=block --kill-on-bad-exit=1"
    )
    assert "--partition=p" in command.argv


def test_openmpi() -> None:
    assert lines(commands.openmpi(JOB)) == [
        "mpirun -np 4 --host a:2,b:2 --map-by slot --bind-to none --wdir '/my work' -x NCCL_DEBUG=INFO "
        f"-x 'X=a b' -x MASTER_ADDR=a -x MASTER_PORT=29500 {WORKER}"
    ]


def test_mpich() -> None:
    assert lines(commands.mpich(JOB)) == [
        "mpiexec -n 4 -hosts a:2,b:2 -wdir '/my work' -genv NCCL_DEBUG INFO -genv X 'a b' "
        f"-genv MASTER_ADDR a -genv MASTER_PORT 29500 {WORKER}"
    ]


def test_executables_start_bare_under_mpi() -> None:
    assert commands.openmpi(replace(JOB, no_python=True))[0].argv[-3:] == ("train.py", *JOB.arguments)


def test_refusals() -> None:
    uneven = replace(JOB, hosts=(EVEN[0], Host(name="b", devices=(0,))))
    with pytest.raises(ValueError, match=r"same number of ranks on all hosts \(a: 2, b: 1\)"):
        commands.slurm(uneven)
    masked = replace(JOB, hosts=(EVEN[0], Host(name="b", devices=(2, 3))))
    with pytest.raises(ValueError, match="needs the same devices on all hosts"):
        commands.openmpi(masked)
    for launcher in (commands.slurm, commands.openmpi, commands.mpich):
        with pytest.raises(ValueError, match=r"--max_restarts 1: .* cannot restart"):
            launcher(replace(JOB, max_restarts=1))


def test_what_travels() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_LAUNCH_BLOCKING": "1",
        "WANDB_API_KEY": "secret",
        "SLIPSTREAM_API_KEYS": "secret,another",
        "HF_TOKEN": "secret",
        "HF_HOME": "/data",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "",
    }
    assert environment.propagated(environ) == {
        "CUDA_LAUNCH_BLOCKING": "1",
        "HF_HOME": "/data",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert environment.shown({"A": "1", "MY_TOKEN": "s3cret"}) == "A=1 MY_TOKEN=***"


def test_environment_file() -> None:
    text = "# mine\nA=1\n export B=two words\nC='x=y'\n\n"
    assert environment.parse_file(text, "f") == {"A": "1", "B": "two words", "C": "x=y"}
    for bad in ("A", "1A=2", "=x"):
        with pytest.raises(ValueError, match=f"^f:1: '{bad}' is not VAR=VALUE"):
            environment.parse_file(bad, "f")


def test_a_second_ctrl_c_is_no_traceback(tmp_path: Path) -> None:
    """It comes while commands are being stopped, which takes seconds."""
    script = """
from slipstream.launch import remote
from slipstream.launch.commands import Command
remote._GRACE_S = 0.5
stubborn = "trap '' TERM; touch runs; while :; do sleep 0.05; done"
raise SystemExit(remote.run_commands([Command(name="x", argv=("sh", "-c", stubborn))]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "runs").exists():
        time.sleep(0.01)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.communicate(timeout=60)[1] == "slipstream run: stopped by SIGINT, and the ranks on all hosts have stopped\n"
    assert process.returncode == 130

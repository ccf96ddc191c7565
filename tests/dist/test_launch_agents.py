"""`slipstream run` with real processes: agents on loopback, one report of the first failure, timely termination."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

TOKEN = "SLIPSTREAM_TEST_LAUNCH"
ALL_REDUCE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    sum_ = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(sum_)
    node = os.environ["GROUP_RANK"]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} node {node} sum {sum_.item():g}\\n", end="")
    dist.destroy_process_group()
"""


class Launcher:
    """Starts `slipstream` commands; kills all their processes at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def script(self, text: str) -> str:
        file = self.folder / "train.py"
        file.write_text(textwrap.dedent(text))
        return str(file)

    def start(
        self, *arguments: str, path: Path | None = None, command: tuple[str, ...] = ("-m", "slipstream.launch.cli", "run")
    ) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            TOKEN: self.token,
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
        }
        if path is not None:
            env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
        process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def survivors(self) -> list[int]:
        mark = f"{TOKEN}={self.token}".encode()
        results = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    results.append(int(entry.name))
            except OSError:
                continue
        return results

    def gone(self, within: float) -> bool:
        """Whether every process has ended `within` seconds from now."""
        return self.ended(self.survivors, within)

    def ranks_gone(self, within: float) -> bool:
        """The same for all processes except the command itself, which needs time to unload torch."""
        own = {process.pid for process in self.started}
        return self.ended(lambda: [pid for pid in self.survivors() if pid not in own], within)

    @staticmethod
    def ended(alive: Callable[[], list[int]], within: float) -> bool:
        deadline = time.monotonic() + within
        while alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        for pid in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started:
            process.communicate(timeout=10)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def wait_for(path: Path, within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear in {within:g} s"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_nodes_started_by_hand(launcher: Launcher) -> None:
    script = launcher.script(ALL_REDUCE)
    common = ("--num_nodes", "2", "--nproc", "1", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    nodes = [launcher.start(*common, "--node_rank", str(rank), script) for rank in range(2)]
    for rank, process in enumerate(nodes):
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert out == f"rank {rank} of 2 node {rank} sum 3\n"
    assert launcher.gone(within=1)


def fake_ssh(folder: Path) -> Path:
    """An `ssh` that runs the command line on this host, as a remote login shell would."""
    binary = folder / "bin"
    binary.mkdir()
    ssh = binary / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nexec /bin/sh -c "$2"\n')
    ssh.chmod(0o755)
    return binary


def hostfile(folder: Path) -> str:
    file = folder / "hosts"
    file.write_text("far1 slots=1\nfar2 slots=1\n")
    return str(file)


@pytest.mark.slow
def test_two_nodes_by_ssh_and_environment_files(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(ALL_REDUCE + "    print(os.environ['FROM_FILE'] + '\\n', end='')\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=it's here\n")
    arguments = ("--hostfile", hostfile(tmp_path), "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    code, out, err = launcher.run(*arguments, script, path=fake_ssh(tmp_path))
    assert code == 0, err
    lines = ["it's here", "it's here", "rank 0 of 2 node 0 sum 3", "rank 1 of 2 node 1 sum 3"]
    assert sorted(out.splitlines()) == lines
    assert "2 ranks on 2 hosts, by ssh" in err
    assert ".deepspeed_env: FROM_FILE=it's here" in err


@pytest.mark.slow
def test_the_mesh_of_the_launcher_reaches_all_hosts(launcher: Launcher, tmp_path: Path) -> None:
    """`--mesh` is said in one table by the launcher, and is every engine's mesh; the engine does not repeat the table."""
    script = launcher.script("""
        import os, torch, slipstream
        config = {"train_batch_size": 1, "steps_per_print": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engine, *_ = slipstream.initialize(model=torch.nn.Linear(4, 4), config=config)
        print(f"rank {engine.rank} sp {engine.mesh.sp.index} of {engine.mesh.sp.size}\\n", end="")
    """)
    (tmp_path / ".deepspeed_env").write_text("SLIPSTREAM_NATIVE=0\n")  # the home directory has no compiled kernels
    hosts = ("--hostfile", hostfile(tmp_path), "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    code, out, err = launcher.run(*hosts, "--mesh", "sp=2", script, path=fake_ssh(tmp_path))
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "sp" in line) == ["rank 0 sp 0 of 2", "rank 1 sp 1 of 2"]
    assert "mesh sp 2\n  host  ranks  sp\n  far1  0      0\n  far2  1      1\n" in err
    assert (out + err).count("mesh sp 2\n") == 1


@pytest.mark.slow
def test_a_failure_on_another_node_is_reported_once_and_stops_all(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("""
        import os, time
        if os.environ["RANK"] == "1":
            raise RuntimeError("the far one")
        time.sleep(300)
    """)
    arguments = ("--hostfile", hostfile(tmp_path), "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    code, _, err = launcher.run(*arguments, script, path=fake_ssh(tmp_path))
    assert code == 1
    assert err.count("Traceback") == 1
    assert "rank 1 on " in err
    assert "RuntimeError: the far one" in err
    assert "\x1e" not in err
    assert launcher.gone(within=1)


def test_the_first_failing_rank_is_what_the_user_sees(launcher: Launcher) -> None:
    script = launcher.script("""
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        def inner():
            raise ValueError("boom of rank 1")
        dist.barrier()
        if dist.get_rank() == 1:
            inner()
        dist.all_reduce(torch.ones(1))
    """)
    code, _, err = launcher.run("--nproc", "2", script, "--deepspeed_config", "x.json")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "slipstream run: rank 1 on " in err
    traceback = err[err.index("Traceback") :]
    assert re.match(
        r"Traceback \(most recent call last\):\n"
        r'  File ".*train.py", line 8, in <module>\n    inner\(\)\n(?: +[~^]+\n)?'
        r'  File ".*train.py", line 5, in inner\n    raise ValueError\("boom of rank 1"\)\n(?: +[~^]+\n)?'
        r"ValueError: boom of rank 1\n",
        traceback,
    )
    assert launcher.gone(within=1)


def test_a_killed_rank_is_explained_and_an_unresponsive_one_causes_no_delay(launcher: Launcher, tmp_path: Path) -> None:
    """Rank 0 catches SIGTERM and sleeps in native code; all processes end within 5 s of rank 1's death."""
    script = launcher.script("""
        import os, signal, sys, time
        from pathlib import Path
        here = Path(sys.argv[1])
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (here / "deaf").touch()
            time.sleep(300)
        while not (here / "deaf").exists():
            time.sleep(0.01)
        (here / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    process = launcher.start("--nproc", "2", script, str(tmp_path))
    wait_for(tmp_path / "killed")
    assert launcher.ranks_gone(within=5)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 137
    assert "rank 1 on " in err
    assert "(exit code -9, SIGKILL)" in err
    assert "out-of-memory killer" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_segmentation_fault_shows_the_python_stack(launcher: Launcher) -> None:
    script = launcher.script("""
        import ctypes
        def crash():
            ctypes.string_at(0)
        crash()
    """)
    code, _, err = launcher.run("--nproc", "1", script)
    assert code == 139
    assert "segmentation fault (SIGSEGV)" in err
    assert "line 4 in crash" in err
    assert "slipstream/launch" not in err


def test_a_rank_that_hangs_at_exit_is_ended(launcher: Launcher) -> None:
    script = launcher.script("""
        import threading, time
        threading.Thread(target=time.sleep, args=(300,)).start()
        raise KeyError("late")
    """)
    process = launcher.start("--nproc", "1", script)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "KeyError: 'late'" in err


def test_what_a_failed_rank_has_written_is_there(launcher: Launcher, tmp_path: Path) -> None:
    """Its threads, its exit handlers and its open files end as always."""
    script = launcher.script("""
        import atexit, gzip, threading, time, zipfile
        import slipstream.train.initialize  # with all that it brings, the end is as complete
        kept = open("kept.txt", "w")
        kept.write("in the buffer")
        packed, archive = gzip.open("packed.gz", "wt"), zipfile.ZipFile("archive.zip", "w")
        packed.write("packed")
        archive.writestr("name", "zipped")
        atexit.register(lambda: print("exit handler", end=" "))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread", end=" "))).start()
        raise KeyError("late")
    """)
    code, out, err = launcher.run("--nproc", "1", script)
    assert (code, out.split()) == (1, ["thread", "exit", "handler"]), err
    assert (tmp_path / "kept.txt").read_text() == "in the buffer"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"packed"
    assert zipfile.ZipFile(tmp_path / "archive.zip").read("name") == b"zipped"


# Fails until it runs in a fork of the zygote, which needs a few seconds.
FORKED = """
    import os, sys, time, slipstream
    forked = "torch._dynamo" in sys.modules
    with open("attempts.txt", "a") as file:
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], file=file)
    if not forked:
        time.sleep(3)  # most often once: each attempt imports torch twice
        raise RuntimeError("not yet")
    import numpy, random, helper
    here = [sys.argv[1:], sys.path[0], __name__, __file__, os.getcwd(), os.getsid(0) == os.getpid(), os.environ.get("LATER")]
    print(*here, "parent", os.getppid(), "drawn", numpy.random.rand(), random.random())
"""


def test_a_restarted_rank_is_a_fork_that_looks_like_a_process(launcher: Launcher, tmp_path: Path) -> None:
    """The agent is its parent, and nothing of the user's has run before it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("import numpy\nopen('helper.txt', 'a').write('read ')")
    script = tmp_path / "code" / "train.py"
    script.write_text(textwrap.dedent(FORKED))
    process = launcher.start("--nproc", "2", "--max_restarts", "50", str(script), "--lr", "0.1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    ranks = out.splitlines()
    looks = f"['--lr', '0.1'] {script.parent} __main__ {script} {tmp_path} True None parent {process.pid} drawn "
    drawn = [number for line in ranks for number in line.removeprefix(looks).split()]
    assert [line.startswith(looks) for line in ranks] == [True, True], out
    assert len(set(drawn)) == 4 and all(0 < float(number) < 1 for number in drawn)
    assert (tmp_path / "helper.txt").read_text() == "read read "
    attempts = (tmp_path / "attempts.txt").read_text().splitlines()
    assert len(attempts) == len(set(attempts)) > 2 and "restart 1 of 50 after rank" in err
    assert launcher.gone(within=1)


def test_a_run_restarts_without_its_zygote(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, sys, time, slipstream
        from pathlib import Path
        children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            while not (zygotes := [int(pid) for pid in children.read_text().split() if b"launch.zygote" in
                                   Path(f"/proc/{pid}/cmdline").read_bytes()]):
                time.sleep(0.01)
            os.kill(zygotes[0], signal.SIGKILL)
            sys.exit(3)
        print("again", "torch" in sys.modules)
    """)
    code, out, err = launcher.run("--nproc", "1", "--max_restarts", "1", script)
    assert (code, out) == (0, "again False\n"), err


def test_exit_codes_and_messages_of_sys_exit(launcher: Launcher) -> None:
    code, _, err = launcher.run("--nproc", "1", launcher.script("import sys; sys.exit(7)"))
    assert (code, "sys.exit(7)" in err, "Traceback" in err) == (7, True, False)


@pytest.mark.parametrize("saves", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_ctrl_c_is_one_line_with_the_last_checkpoint(saves: int, launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("""
        import os, sys, time
        from pathlib import Path
        from slipstream.world.brief import note_save
        folder, rank = Path(sys.argv[1]), os.environ["RANK"]
        for step in range(int(sys.argv[2]) if rank == "0" else 0):
            note_save(folder / f"step{step}")  # its folder appears when it is complete
        (folder / "step0").mkdir(exist_ok=True)
        (folder / f"ready{rank}").touch()
        time.sleep(300)
    """)
    process = launcher.start("--nproc", "2", script, str(tmp_path), str(saves))
    for rank in range(2):
        wait_for(tmp_path / f"ready{rank}")
    process.send_signal(signal.SIGINT)
    assert launcher.ranks_gone(within=5)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    saved = f"the last complete checkpoint is 'step0' in {tmp_path}" if saves else "no checkpoint was saved"
    assert err.splitlines()[-1] == f"slipstream run: stopped by SIGINT, and its ranks have stopped; {saved}"
    assert "Traceback" not in err


def test_ctrl_c_after_a_failure_lets_ranks_finish(launcher: Launcher, tmp_path: Path) -> None:
    """Nobody has asked for the end before, so the ranks that are being stopped keep their grace period."""
    script = launcher.script("""
        import os, signal, sys, time
        from pathlib import Path
        folder = Path(sys.argv[1])
        def on_sigterm(number, frame):
            (folder / "told").touch()
            time.sleep(0.5)
            (folder / "finished").touch()
            sys.exit(0)
        if os.environ["RANK"] == "0":
            while not (folder / "ready").exists():
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, on_sigterm)
        (folder / "ready").touch()
        time.sleep(300)
    """)
    process = launcher.start("--nproc", "2", script, str(tmp_path))
    wait_for(tmp_path / "told")
    process.send_signal(signal.SIGINT)
    assert launcher.ranks_gone(within=5)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130 and (tmp_path / "finished").exists(), err


@pytest.mark.slow
def test_logs_of_each_rank_cores_and_a_pid_file(launcher: Launcher, tmp_path: Path) -> None:
    """The first failure stays on the terminal; its traceback is in the rank's log, too."""
    script = launcher.script("""
        import os, sys, time
        from pathlib import Path
        sets = [os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"]]
        print("out of", os.environ["RANK"], sets, flush=True)
        os.system("echo its child >&2")
        if os.environ["RANK"] == "0":
            Path(sys.argv[1]).touch()
            time.sleep(300)
        while not Path(sys.argv[1], "..", "go").resolve().exists():
            time.sleep(0.02)
        raise ValueError("boom of 1")
    """)
    cores = sorted(os.sched_getaffinity(0))[:2]
    ranks = len(cores)
    listed = ",".join(map(str, cores))
    logs = ("--enable_each_rank_log", "logs/here", "--bind_core_list", listed, "--save_pid")
    process = launcher.start("--nproc", "2", *logs, script, str(tmp_path / "ready")) if ranks == 2 else pytest.skip("one core")
    wait_for(tmp_path / "ready")
    pid_file = tmp_path / f"{process.pid}.deepspeed"
    assert pid_file.read_text() == str(process.pid)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (1, "") and not pid_file.exists()
    assert "rank 1 on " in err and err.count("ValueError: boom of 1") == 1 and "its child" not in err
    files = sorted((tmp_path / "logs/here").iterdir())
    assert [re.sub(r"\d{14}", "TIME", file.name) for file in files] == ["TIME_rank0.log", "TIME_rank1.log"]
    for rank, file in enumerate(files):
        text = file.read_text()
        assert f"out of {rank} [{{{cores[rank]}}}, '1']\n" in text and "its child\n" in text
        assert ("ValueError: boom of 1" in text) == (rank == 1)
    assert launcher.gone(within=5)


def test_an_executable_is_bound_to_its_core(launcher: Launcher) -> None:
    core = max(os.sched_getaffinity(0))
    arguments = ("--bind_core_list", str(core), "--no_python", "sh", "-c", "grep Cpus_allowed_list /proc/self/status; exit 3")
    code, out, err = launcher.run("--nproc", "1", *arguments)
    assert (code, out.split()) == (3, ["Cpus_allowed_list:", str(core)]), err


def test_ranks_die_with_their_agent(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(300)")
    process = launcher.start("--nproc", "1", script, str(tmp_path / "ready"))
    wait_for(tmp_path / "ready")
    process.kill()
    assert launcher.gone(within=5)


@pytest.mark.slow
def test_restart_on_failure(launcher: Launcher) -> None:
    """The second attempt has new process groups: keys of the first would refer to dead ranks."""
    script = launcher.script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and dist.get_rank() == 1:
            raise ValueError("only at first")
        dist.all_reduce(torch.ones(1))
        print(f"rank {dist.get_rank()} attempt {attempt}\\n", end="")
        dist.destroy_process_group()
    """)
    code, out, err = launcher.run("--nproc", "2", "--max_restarts", "1", script)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 attempt 1", "rank 1 attempt 1"]
    assert "restart 1 of 1 after rank 1: ValueError: only at first" in err


@pytest.mark.slow
def test_a_restart_names_the_rank_and_how_it_ended(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1" and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["RANK"] == "1" and attempt == 1:
            time.sleep(2)  # rank 0 says why it was restarted, if it lives long enough
            os._exit(7)
        time.sleep(60 if attempt < 2 else 0)
    """)
    code, _, err = launcher.run("--nproc", "2", "--max_restarts", "2", script)
    assert code == 0, err
    assert "restart 1 of 2 after rank 1 was killed by SIGKILL\n" in err
    assert "restart 2 of 2 after rank 1 exited with code 7 and no message\n" in err


@pytest.mark.slow
def test_scripts_see_what_python_would_show_them(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'a module beside the script'\n")
    script = launcher.script("""
        import multiprocessing, os, sys
        from beside import NAME
        class Point: pass
        if __name__ == "__main__":
            assert sys.modules["__main__"].Point is Point
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(sys.argv[1:], type(pool.apply(Point)).__name__, os.environ["OMP_NUM_THREADS"])
    """)
    code, out, err = launcher.run("--nproc", "1", "--pass_local_rank", script, "--log", "1")
    assert code == 0, err
    cores = len(os.sched_getaffinity(0))
    assert out.split("\n")[0] == f"['--local_rank=0', '--log', '1'] Point {cores}"
    assert f"OMP_NUM_THREADS={cores} for each rank" in err
    code, out, err = launcher.run("-q", "--nproc", "1", "--module", "beside")
    assert (code, out, err) == (0, "", "")


@pytest.mark.slow
def test_ranks_started_by_mpi_find_their_rank(launcher: Launcher, tmp_path: Path) -> None:
    """A substitute for mpirun starts the ranks with Open MPI's variables, and one fails."""
    binary = tmp_path / "bin"
    binary.mkdir()
    mpirun = binary / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\n"
        f'while [ "$1" != {sys.executable} ]; do [ "$1" = -x ] && export "$2"; shift; done\n'
        "export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2\n"
        'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" &\n'
        'OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 "$@"; code=$?\n'
        "wait; exit $code\n"
    )
    mpirun.chmod(0o755)
    script = launcher.script("""
        import os
        words = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))
        os.write(1, " ".join(words).encode() + b"\\n")
        if os.environ["RANK"] == "1":
            raise ValueError("under MPI")
    """)
    code, out, err = launcher.run("--launcher", "openmpi", "--nproc", "2", script, path=binary)
    assert code == 1
    assert sorted(out.splitlines()) == ["0 2 0 localhost", "1 2 1 localhost"]
    assert err.count("Traceback") == 1
    assert "rank 1 on " in err
    assert "ValueError: under MPI" in err


BENCH = ("-m", "slipstream.launch.cli", "bench-comm")
DS_SSH = ("-c", "import sys; from slipstream.compat.commands import ds_ssh; sys.exit(ds_ssh())")


@pytest.mark.slow
def test_a_benchmark_of_collectives_starts_its_own_ranks(launcher: Launcher) -> None:
    arguments = ("--nproc", "2", "--seconds", "0.002", "--min", "4K", "--max", "64K")
    code, out, err = launcher.run(*arguments, "--json", command=BENCH)
    assert (code, err) == (0, "")
    rates = json.loads(out)
    assert len(rates) == 3 * 9 and {rate["transport"] for rate in rates} == {"gloo", "shared memory"}
    code, out, err = launcher.run(*arguments, "--ops", "all_gather", command=BENCH)
    assert (code, err) == (0, "") and re.findall(r"^\w+, .*", out, re.M) == ["all_gather, gloo", "all_gather, shared memory"]


@pytest.mark.slow
def test_ctrl_c_of_a_benchmark_leaves_nothing(launcher: Launcher) -> None:
    process = launcher.start("--nproc", "2", "--seconds", "60", command=BENCH)
    assert process.stdout is not None and "2 ranks" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert launcher.gone(within=5)


def test_a_command_on_all_hosts(launcher: Launcher, tmp_path: Path) -> None:
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "ssh").write_text(
        '#!/bin/sh\nwhile [ "$1" = -o ] || [ "$1" = -tt ]; do [ $1 = -o ] && shift; shift; done\n'
        'HOST="$1"; export HOST; exec /bin/sh -c "$2"\n'
    )
    (binary / "ssh").chmod(0o755)
    hosts = hostfile(tmp_path)
    line = ("echo $HOST is here;", '[ "$HOST" = far2 ] && exit 3;', "exit 0")
    code, out, err = launcher.run("-f", hosts, *line, path=binary, command=DS_SSH)
    assert (code, sorted(out.splitlines())) == (3, ["far1: far1 is here", "far2: far2 is here"])
    assert "far2" in err and "ended with exit code 3" in err and "far1" not in err
    code, _, err = launcher.run("-f", hosts, '[ "$HOST" = far1 ] || kill -9 $$', path=binary, command=DS_SSH)
    assert code == 137 and "far2" in err and "ended with exit code 137" in err
    process = launcher.start("-f", hosts, "echo ready; sleep 300", path=binary, command=DS_SSH)
    assert process.stdout is not None and process.stdout.readline().endswith(": ready\n")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and launcher.gone(within=5)
    process = launcher.start("-f", hosts, "while :; do echo $HOST; done", path=binary, command=DS_SSH)
    assert process.stdout is not None and process.stderr is not None and process.stdout.readline().startswith("far")
    process.stdout.close()  # like `| head -1`
    err = process.stderr.read()
    assert process.wait(timeout=60) != 120 and "Traceback" not in err and "BrokenPipe" not in err and launcher.gone(within=5)
    for arguments, says in ((("-f", hosts), "no command; ds_ssh [-f HOSTFILE]"), (("-f", "none", "ls"), "cannot read none")):
        code, _, err = launcher.run(*arguments, command=DS_SSH)
        assert (code, err.count("\n")) == (2, 1) and says in err

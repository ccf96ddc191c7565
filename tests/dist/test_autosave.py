"""Checkpoints that the engine saves by itself, and runs that go on after signals, kills, and hosts that leave and join."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slipstream.checkpoint import CheckpointError
from slipstream.launch import agent
from slipstream.train.autosave import Preempted
from slipstream.world import brief
from tests import toy
from tests.dist.test_launch_agents import Launcher
from tests.pool import distributed
from tests.ports import free_port

# Each rank appends what a step trained on to a file of its own: step, ranks, samples, loss.
SCRIPT = """
import os, sys, time, torch, slipstream
folder, stop, pause, batch = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), 4
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): return torch.sin(torch.arange(8.0) * i), i
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
config = {"train_batch_size": batch, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 2},
          "slipstream": {"checkpoint": {"folder": folder, "every_steps": int(sys.argv[4]),
                                        "memory_every_steps": int(sys.argv[-1] in ("dies", "memory"))}}}
engine, _, loader, _ = slipstream.initialize(model=model, config=config, training_data=Data())
log = open(f"{folder}-{time.time_ns()}-{os.environ['RANK']}.log", "a")
for x, ids in loader:
    if engine.global_steps == stop:
        break
    loss = engine(x).square().mean()
    engine.backward(loss)
    print(engine.global_steps, os.environ["WORLD_SIZE"], *ids.tolist(), loss.item(), file=log, flush=True)
    time.sleep(pause)
    if "dies" in sys.argv and (engine.global_steps, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (5, "1", "0"):
        os.kill(os.getpid(), 9)
    engine.step()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert launcher.gone(within=10)


def steps(folder: Path) -> dict[int, dict[int, Any]]:
    """step -> number of ranks -> (samples in ascending order, mean loss)."""
    parts: dict[int, dict[int, list[tuple[list[int], float]]]] = {}
    for path in folder.parent.glob(f"{folder.name}-*.log"):
        for line in path.read_text().splitlines():
            step, ranks, *ids, loss = line.split()
            parts.setdefault(int(step), {}).setdefault(int(ranks), []).append(([int(i) for i in ids], float(loss)))
    joined = {}
    for step, by_ranks in parts.items():
        for ranks, seen in by_ranks.items():
            ids = sorted({i for part, _ in seen for i in part})
            joined.setdefault(step, {})[ranks] = (ids, sum(loss for _, loss in seen) / len(seen))
    return joined


def wait_until(condition: Any, process: subprocess.Popen[str], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.communicate(timeout=5)
        time.sleep(0.05)


@contextmanager
def own_handler() -> Iterator[tuple[Any, list[int]]]:
    """A script's handler of SIGUSR1, and the signals that it got."""
    called: list[int] = []

    def own(number: int, _: Any) -> None:
        called.append(number)

    outside = signal.signal(signal.SIGUSR1, own)  # the pool's, which would end the test
    try:
        yield own, called
    finally:
        signal.signal(signal.SIGUSR1, outside)


@distributed(world_size=2)
def test_checkpoints_by_itself(tmp_path: Path) -> None:
    """`folder`, `every_steps`, `every_minutes`, `on_signal` and `resume` of slipstream.checkpoint."""

    def engine_of(**options: Any) -> Any:
        return toy.make(toy.seeded(toy.Lm), 2, slipstream={"checkpoint": {"folder": str(tmp_path / "a"), **options}})

    def tags(folder: str = "a") -> list[str]:
        return sorted(path.name for path in (tmp_path / folder).glob("global_step*"))

    with own_handler() as (own, _):
        engine = engine_of(every_steps=2)
        for i in range(5):
            toy.step(engine, toy.tokens(engine.rank, i))
        assert tags() == ["global_step2", "global_step4"]
        engine.destroy()
        engine = engine_of(every_steps=2)  # goes on from step 4
        assert engine.global_steps == 4
        if engine.rank == 1:  # one rank gets the signal, in the middle of a step; all save at its end
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Preempted) as stopped:
            toy.step(engine, toy.tokens(engine.rank, 4))
        assert stopped.value.code == 85 and tags()[-1] == "global_step5"
        engine.destroy()
        assert signal.getsignal(signal.SIGUSR1) is own
        engine = engine_of(resume=False, on_signal=["SIGUSR2"])
        assert engine.global_steps == 0 and signal.getsignal(signal.SIGUSR1) is own
        engine.destroy()
    engine = engine_of(folder=str(tmp_path / "b"), every_minutes=1e-9)
    for i in range(2):
        toy.step(engine, toy.tokens(engine.rank, i))
    assert tags("b") == ["global_step1", "global_step2"]
    engine.destroy()


@distributed(world_size=2)
def test_a_signal_saves_every_engine_of_the_process(tmp_path: Path) -> None:
    """Also if one that listened, too, is gone."""
    with own_handler() as (own, called):
        engines = [toy.make(toy.seeded(toy.Lm), 2, slipstream={"checkpoint": {"folder": str(tmp_path / name)}}) for name in "abcd"]
        rank = engines[0].rank
        engines.pop(0).destroy()
        engines.pop().destroy()
        first, second = engines
        for engine in (first, second, second):
            toy.step(engine, toy.tokens(rank, 0))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Preempted):
            toy.step(first, toy.tokens(rank, 1))
        assert [tags(tmp_path / name) for name in "abcd"] == [[], ["global_step2"], ["global_step2"], []]
        assert called == [signal.SIGUSR1] * (rank == 1), "the script's own handler, once all is saved"
        first.destroy()
        second.destroy()
        assert signal.getsignal(signal.SIGUSR1) is own


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step*"))


def only(memory: Path) -> Path:
    """The folder of the only engine that has checkpoints in a host's memory."""
    (folder,) = memory.iterdir()
    return folder


@distributed(world_size=2)
def test_checkpoints_in_memory(tmp_path: Path) -> None:
    """`memory_every_steps`: the newest of memory and disk is resumed, a damaged one is left out, a full memory ends no run."""

    def engine_of() -> Any:
        checkpoint = {"folder": str(tmp_path / "disk"), "every_steps": 2, "memory_every_steps": 1}
        return toy.make(toy.seeded(toy.Lm), 3, slipstream={"checkpoint": checkpoint}, checkpoint={"writer": {"decoupled": True}})

    def train(engine: Any, until: int) -> None:
        for i in range(engine.global_steps, until):
            toy.step(engine, toy.tokens(engine.rank, i))

    whole = toy.make(toy.seeded(toy.Lm), 3)
    train(whole, 7)
    memory = tmp_path / "memory"
    with mock.patch.dict(os.environ, {brief.MEMORY: str(memory)}):
        engine = engine_of()
        train(engine, 5)
        assert tags(only(memory)) == ["global_step5"]
        engine.destroy()
        assert tags(tmp_path / "disk") == ["global_step2", "global_step4"]
        engine = engine_of()
        assert engine.global_steps == 5
        train(engine, 7)
        assert torch.equal(toy.checksum(engine), toy.checksum(whole)), "as if nothing had happened, bit for bit"
        engine.destroy()
        if engine.rank == 0:
            next((only(memory) / "global_step7").glob("*.bin")).write_bytes(b"")
        whole.states.fence()
        engine = engine_of()
        assert engine.global_steps == 6, "the newest that is whole"
        engine.destroy()
    (tmp_path / "file").touch()
    with mock.patch.dict(os.environ, {brief.MEMORY: str(tmp_path / "file" / "memory")}):  # as if it were full
        engine = engine_of()
        train(engine, 8)
        assert engine.global_steps == 8 and engine.saves.auto.memory is None
        engine.destroy()
        assert tags(tmp_path / "disk")[-1] == "global_step8"
    whole.destroy()


@distributed(world_size=4)
def test_checkpoints_in_the_memory_of_hosts(tmp_path: Path) -> None:
    """Two hosts of two ranks. One is replaced by an empty one, or its files are damaged: the other has them. If both have lost the
    same file, the disk has the newest."""

    def engine_of(stage: int) -> Any:
        checkpoint = {"folder": str(tmp_path / "disk"), "every_steps": 2, "memory_every_steps": 1}
        return toy.make(toy.seeded(toy.Lm), stage, slipstream={"checkpoint": checkpoint})

    def on_host(number: int, per_host: int = 2) -> Any:
        local = {"LOCAL_WORLD_SIZE": str(per_host), "LOCAL_RANK": str(rank % per_host)}
        return mock.patch.dict(os.environ, {brief.MEMORY: str(tmp_path / f"host{number}")} | local)

    def train(engine: Any, until: int) -> None:
        for i in range(engine.global_steps, until):
            toy.step(engine, toy.tokens(engine.rank, i))

    rank = dist.get_rank()
    host = rank // 2
    whole = toy.make(toy.seeded(toy.Lm), 3)
    train(whole, 5)
    with on_host(host):
        engine = engine_of(3)
        train(engine, 5)
        assert tags(only(tmp_path / f"host{host}")) == ["global_step5"]
        assert tags(tmp_path / "disk") == ["global_step2", "global_step4"]
        assert len(list((tmp_path / f"host{host}").rglob("*.bin"))) == 4, "of two hosts: all"
        engine.destroy()
    expected = toy.checksum(whole)
    whole.destroy()
    with on_host(host * 2):  # the second host's folder is new
        engine = engine_of(1)
        assert engine.global_steps == 5 and torch.equal(toy.checksum(engine), expected)
        engine.destroy()
    if rank == 0:
        (only(tmp_path / "host0") / "global_step5" / "rank_00000.bin").unlink()
        (only(tmp_path / "host2") / "global_step5" / "rank_00003.bin").write_bytes(b"short")
    dist.barrier()
    with on_host(host * 2):
        engine = engine_of(2)
        assert engine.global_steps == 5 and torch.equal(toy.checksum(engine), expected)
        engine.destroy()
    if rank == 0:
        for number in (0, 2):
            (only(tmp_path / f"host{number}") / "global_step5" / "rank_00001.bin").unlink()
    dist.barrier()
    with on_host(host * 2):
        engine = engine_of(3)
        assert engine.global_steps == 4
        engine.destroy()
    with on_host(10 + rank, per_host=1):  # four hosts in a ring: two of their files are on each
        engine = engine_of(3)
        train(engine, 5)
        engine.destroy()
        assert len(list((tmp_path / f"host{10 + rank}").rglob("*.bin"))) == 2
    with on_host(20 if rank == 1 else 10 + rank, per_host=1):  # one is lost, and a new one takes its place
        engine = engine_of(2)
        assert engine.global_steps == 5 and torch.equal(toy.checksum(engine), expected)
        engine.destroy()
    for number in (10, 12) if rank == 0 else ():  # what each had of its own
        for path in (only(tmp_path / f"host{number}") / "global_step5").glob("*.bin"):
            if path.name not in (f"rank_0000{number - 10}.bin", f"rank_0000{(number - 11) % 4}.bin"):
                path.unlink()
    dist.barrier()
    with on_host(10 + 2 * host):  # two of the four are left, with other numbers of ranks; the disk has step 4
        engine = engine_of(3)
        assert engine.global_steps == 5 and torch.equal(toy.checksum(engine), expected)
        engine.destroy()
    with on_host(0, per_host=4):  # one host is left, and it lacks a file
        engine = engine_of(3)
        assert engine.global_steps == 4 and engine.saves.auto.hosts is None
        engine.destroy()


@distributed(world_size=4)
def test_directories_of_each_host(tmp_path: Path) -> None:
    """Two hosts of two ranks, each with the files of its own. The same ranks load them, others too, and what came goes again."""

    def on_host(per_host: int = 2) -> Any:
        return mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(per_host), "LOCAL_RANK": str(rank % per_host)})

    def engine_of(stage: int) -> Any:
        return toy.make(toy.seeded(toy.Lm), stage, checkpoint={"use_node_local_storage": True})

    def files(number: int, tag: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / f"host{number}" / tag).glob("*.bin"))

    def load(stage: int, number: int, tag: str | None = None, per_host: int = 2) -> None:
        with on_host(per_host):
            engine = engine_of(stage)
            path, state = engine.load_checkpoint(str(tmp_path / f"host{number}"), tag)
            assert path is not None and state == {"mine": 7} and torch.equal(toy.checksum(engine), expected)
            engine.destroy()
        dist.barrier()

    rank = dist.get_rank()
    host = rank // 2
    own = [f"rank_0000{2 * host}.bin", f"rank_0000{2 * host + 1}.bin"]
    with on_host():
        engine = engine_of(3)
        for i in range(2):
            toy.step(engine, toy.tokens(rank, i))
        expected = toy.checksum(engine)
        engine.save_checkpoint(str(tmp_path / f"host{host}"), "two", client_state={"mine": 7})
        engine.save_checkpoint(str(tmp_path / f"host{host}"), "later", client_state={"mine": 7}, save_latest=False)
        assert files(host, "two") == files(host, "later") == own
        with pytest.raises(CheckpointError, match="is not this host's own"):
            engine.save_checkpoint(str(tmp_path / "both"), "two")
        dist.barrier()
        assert not list((tmp_path / "both").iterdir())
        engine.destroy()
    for stage in (3, 0):
        load(stage, host)
        assert files(host, "two") == files(host, "later") == own
    number = {0: 0, 2: 1}.get(rank, 10 + rank)  # four hosts: the first and the third have saved
    if rank == 3:  # it has something else by that name
        (tmp_path / "host13" / "two").mkdir(parents=True)
        (tmp_path / "host13" / "two" / "mine").write_text("7")
    load(2, number, per_host=1)
    left = [str(path.relative_to(tmp_path / f"host{number}")) for path in (tmp_path / f"host{number}").rglob("*")]
    assert number < 10 or left == (["two", "two/mine"] if rank == 3 else [])
    assert files(host, "two") == files(host, "later") == own
    if rank == 0:
        (tmp_path / "host1" / "later" / "rank_00003.bin").write_bytes(b"short")
    dist.barrier()
    with on_host():
        engine = engine_of(2)
        before = toy.checksum(engine)
        with pytest.raises(CheckpointError, match=r"no host has rank_00003.bin, whole, of later"):
            engine.load_checkpoint(str(tmp_path / f"host{host}"), "later")
        assert engine.load_checkpoint(str(tmp_path / f"none{host}")) == (None, {})
        with pytest.raises(CheckpointError, match="never"):
            engine.load_checkpoint(str(tmp_path / f"host{host}"), "never")
        assert torch.equal(toy.checksum(engine), before)
        with pytest.raises(CheckpointError, match="tag"):
            engine.load_checkpoint(str(tmp_path / f"host{host}"), "two" if rank else None)
        engine.destroy()
    dist.barrier()
    assert not list(tmp_path.glob("*/.loading*"))


def test_no_memory_without_a_launcher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = toy.make(torch.nn.Linear(2, 2), 0, slipstream={"checkpoint": {"folder": str(tmp_path), "memory_every_steps": 1}})
    assert "memory_every_steps has no effect here: only `slipstream run` with --max-restarts or --elastic" in caplog.text
    engine.destroy()


def test_engines_of_one_process_keep_their_checkpoints_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On disk by folders of their own, which a newer engine does not take from an older one in silence; then in memory, too."""

    def engine_of(folder: str, **every: int) -> Any:
        model = toy.seeded(lambda: torch.nn.Linear(8, 8), len(engines))
        engines.append(toy.make(model, 0, slipstream={"checkpoint": {"folder": str(tmp_path / folder), **every}}))
        return engines[-1]

    def train(engine: Any) -> torch.Tensor:
        engine.backward(engine(toy.floats(0, 0)).square().sum())
        engine.step()
        return toy.checksum(engine)

    engines: list[Any] = []
    monkeypatch.setenv(brief.MEMORY, str(tmp_path / "memory"))
    older, newer = engine_of("disk", every_steps=2), engine_of("disk", every_steps=1)
    train(older)
    wanted = train(newer)
    with pytest.raises(ValueError, match=r"two engines of this process save to .*disk', .* a folder of its own, or end one"):
        train(older)
    newer.destroy()
    resumed = engine_of("disk")
    assert torch.equal(toy.checksum(resumed), wanted) and not caplog.text
    resumed.destroy()
    resumed = engine_of("disk")
    engines.clear()  # a notebook's cell that runs again replaces its engine only when the new one is there
    train(resumed := engine_of("disk"))
    assert not caplog.text
    resumed.destroy()
    train(older)
    train(older)
    assert tags(tmp_path / "disk") == ["global_step1", "global_step4"], "the other has ended"
    idle = engine_of("disk/../disk", every_steps=1)  # as a reference model, which never steps
    both = engine_of("disk")
    train(both)
    assert "another engine of this process has resumed from" in caplog.text
    both.destroy()
    train(older)
    train(older)
    first, second = (engine_of(name, memory_every_steps=1) for name in ("one", "./one"))
    train(first)
    train(second)
    with pytest.raises(ValueError, match="two engines"):
        train(first)
    for engine in (idle, older, first, second):
        engine.destroy()
    sums = [train(engine_of(name, memory_every_steps=1)) for name in ("g", "d")]
    for engine in engines[-2:]:
        engine.destroy()
    assert [int(toy.checksum(engine_of(name, memory_every_steps=1))) for name in ("g", "d")] == [int(each) for each in sums]
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize("engines", ["a gone one", "a gone and a new one", "one"])
def test_a_script_that_calls_the_handler_which_it_found(tmp_path: Path, engines: str) -> None:
    """Its own function, around that of an engine: the signal ends the process when the engine is gone, and exits with 85 after the
    save of a later engine; a second signal ends it at once."""

    def train() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        engine = engine_of("a")
        found: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *args: found(*args))
        if engines != "one":
            engine.destroy()
        if engines == "a gone and a new one":
            engine = engine_of("b")
        for _ in range(2 if engines == "one" else 1):
            os.kill(os.getpid(), signal.SIGTERM)
        engine.backward(engine(toy.floats(0, 0)).sum())
        engine.step()

    def engine_of(folder: str) -> Any:
        return toy.make(torch.nn.Linear(8, 8), 0, slipstream={"checkpoint": {"folder": str(tmp_path / folder)}})

    if (child := os.fork()) == 0:
        try:
            train()
        except SystemExit as error:
            os._exit(error.code)  # type: ignore[arg-type]
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == (85 if engines == "a gone and a new one" else -signal.SIGTERM)
    assert tags(tmp_path / "b") == (["global_step1"] if engines == "a gone and a new one" else [])


def test_memory_goes_with_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_SHARED_MEMORY", tmp_path)
    left, other = tmp_path / "slipstream-memory-left", tmp_path / "another"
    left.mkdir()
    other.mkdir()
    with agent._memory_of_host():
        first = Path(os.environ[brief.MEMORY])
        assert first.parent == tmp_path and other.exists() and not left.exists(), "its agent was killed"
        (first / "file").touch()
        with agent._memory_of_host():
            assert first.exists(), "its agent runs"
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.slow
def test_a_killed_rank_loses_no_more_than_its_step(launcher: Launcher, tmp_path: Path) -> None:
    """Rank 1 is killed in the middle of step 5, without a checkpoint on disk: step 5 is made again, with the bits of other runs."""

    def lines(folder: Path) -> list[str]:
        return sorted(line for path in tmp_path.glob(f"{folder.name}-*.log") for line in path.read_text().splitlines())

    script, folder, whole = launcher.script(SCRIPT), tmp_path / "ck", tmp_path / "whole"
    code, _, err = launcher.run("--nproc", "2", "--max-restarts", "1", script, str(folder), "12", "0", "0", "dies")
    assert code == 0 and "restart 1 of 1" in err and "SIGKILL" in err, err
    code, _, err = launcher.run("--nproc", "2", script, str(whole), "12", "0", "0")
    assert code == 0, err
    made, expected = lines(folder), lines(whole)
    assert sorted({*made}) == expected and len(made) == len(expected) + 2, "step 5, on both ranks"
    assert all(line.startswith("5 ") for line in made if made.count(line) > 1)


@pytest.mark.slow
def test_a_signal_to_the_launcher(launcher: Launcher, tmp_path: Path) -> None:
    """Both signals save the step that runs, and the next start continues as if nothing had happened, bit for bit."""
    script, folder, whole = launcher.script(SCRIPT), tmp_path / "ck", tmp_path / "whole"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        done = max(steps(folder), default=0)
        process = launcher.start("--nproc", "2", script, str(folder), "100000", "0.05", "0")
        wait_until(lambda done=done: max(steps(folder), default=0) >= done + 3, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=200)
        assert process.returncode == 85, err
        saved = int((folder / "latest").read_text().strip().removeprefix("global_step"))
        assert saved == max(steps(folder)) + 1  # the step that ran is the last one and is saved
        assert f"all ranks have stopped after a signal; the last complete checkpoint is 'global_step{saved}'" in err
    code, _, err = launcher.run("--nproc", "2", script, str(whole), str(saved), "0", "0")
    assert code == 0, err
    assert steps(folder) == steps(whole) and len(steps(whole)) == saved


@pytest.mark.slow
@pytest.mark.parametrize("every", [("1",), ("0", "memory")])
def test_hosts_leave_and_join(launcher: Launcher, tmp_path: Path, every: tuple[str, ...]) -> None:
    """Two agents of one rank; the second is killed, and a third joins: 2 -> 1 -> 2 ranks with the same samples in each step. The
    newest checkpoint is on disk, or in the memory of the host that is left."""
    script, folder, whole = launcher.script(SCRIPT), tmp_path / "ck", tmp_path / "whole"
    port = free_port()
    options = ("--elastic", "1:2", "--nproc", "1", "--master_addr", "127.0.0.1", "--master_port", str(port))
    first = launcher.start(*options, script, str(folder), "1000000", "0.05", *every)
    with socket.socket() as probe:
        wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, first)  # the first one is where all meet
    second = launcher.start(*options, script, str(folder), "1000000", "0.05", *every)
    wait_until(lambda: sum(2 in each for each in steps(folder).values()) >= 3, first)
    second.kill()
    second.communicate()
    time.sleep(0.2)  # the step that the first rank may be in
    killed = max(steps(folder))
    wait_until(lambda: max(steps(folder)) > killed + 3, first)
    after = steps(folder)
    alone = min(step for step in after if step >= killed - 1 and 1 in after[step])
    assert alone <= killed + 1, "no step is missing"
    third = launcher.start(*options, script, str(folder), "1000000", "0.05", *every)
    wait_until(lambda: max(step for step, each in steps(folder).items() if 2 in each) > alone + 3, first)
    for process in (first, third):
        process.send_signal(signal.SIGTERM)
    for process in (first, third):
        _, err = process.communicate(timeout=200)
    end = max(steps(folder))
    code, _, err = launcher.run("--nproc", "1", script, str(whole), str(end), "0", "0")
    assert code == 0, err
    for step, by_ranks in steps(whole).items():
        ids, loss = by_ranks[1]
        for seen, mean in steps(folder)[step].values():
            assert seen == ids and abs(mean - loss) < 1e-5, step


def test_wrong_settings() -> None:
    for checkpoint, message in (
        ({"every_steps": 3}, "without a folder"),
        ({"on_signal": ["SIGUSR1"]}, "on_signal without a folder"),
        ({"resume": True}, "resume without a folder"),
        ({"memory_every_steps": 1}, "memory_every_steps without a folder"),
        ({"folder": "a", "on_signal": ["SIGKILL"]}, r"on_signal has SIGKILL"),
        ({"folder": "a", "on_signal": "USR1"}, r"on_signal has USR1"),
    ):
        with pytest.raises(ValueError, match=message):
            toy.make(torch.nn.Linear(2, 2), 0, slipstream={"checkpoint": checkpoint})
    with pytest.raises(ValueError, match=r"with slipstream\.local_steps they do not"):
        toy.make(torch.nn.Linear(2, 2), 0, slipstream={"checkpoint": {"folder": "a"}, "local_steps": {"every": 5}})

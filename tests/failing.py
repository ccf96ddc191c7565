"""Ranks that die, fail or hang: many concurrent jobs of a few forked processes, each with its own records.

    nursery = Nursery(folder)                       # imports torch once; jobs are forks of it
    nursery.start("a name", "train", world=2, edge="publish", bad=1, act="kill")
    outcome = nursery.end()["a name"]
    assert outcome.codes == [1, -9] and outcome.records[0]["error"] == "PeerError"

A rank is a forked interpreter that runs one function of this module like a script, with its own stdout, stderr and session, and
ends through the complete interpreter exit. There is no launcher.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from tests.budget import add_workers, spent_here
from tests.on_gpu import ON_GPU, tensors_of_tests
from tests.pool import single_threaded
from tests.ports import free_port
from tests.ranks import TOKEN

HERE = Path(__file__).resolve()


class Outcome(NamedTuple):
    """The result of one job, by rank."""

    codes: list[int | None]  # None: killed after the timeout
    records: list[dict[str, Any]]  # written by `note`
    stdout: list[str]
    stderr: list[str]
    ended: list[float]  # time.monotonic()

    def late(self, rank: int, bad: int) -> float:
        """Seconds from the bad rank's act to this rank's error."""
        return float(self.records[rank]["when"] - self.records[bad]["acted"])


class Nursery:
    """The process that forks jobs and waits for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, int] = {}
        self._counted = 0.0  # processor seconds of ranks that are already in the budget
        self.token = f"nursery{os.getpid()}-{time.monotonic_ns()}"
        path = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
        env = single_threaded(os.environ) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", TOKEN: self.token}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.failing import serve; serve()"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, name: str, function: str, world: int = 2, **options: Any) -> Path:
        """Fork the ranks of one job; return its folder."""
        folder = self._folder / f"job{len(self._jobs)}"
        folder.mkdir()
        self._jobs[name] = world
        job = {"name": name, "function": function, "world": world, "options": options, "folder": str(folder)}
        self._ask(job)
        return folder

    def end(self, timeout: float = 60.0) -> dict[str, Outcome]:
        """Wait for all jobs. Ranks that still run after `timeout` are killed; their exit code is None."""
        answer = self._ask({"end": timeout})
        spent = answer.pop("cpu_s")
        self._counted += spent
        add_workers(spent)
        jobs, self._jobs = self._jobs, {}
        outcomes = {}
        for name in jobs:
            folder = Path(answer[name]["folder"])
            files = [[folder / f"{rank}.{kind}" for rank in range(jobs[name])] for kind in ("json", "out", "err")]
            records = [json.loads(file.read_text()) if file.exists() else {} for file in files[0]]
            out, err = ([file.read_text(errors="replace") for file in column] for column in files[1:])
            outcomes[name] = Outcome(answer[name]["codes"], records, out, err, answer[name]["ended"])
            folder.rename(folder.with_name(f"done-{time.monotonic_ns()}"))
        return outcomes

    def survivors(self) -> list[int]:
        """The running processes of all jobs, even detached ones."""
        mark = f"{TOKEN}={self.token}".encode()
        results = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != self._process.pid:
                    results.append(int(entry.name))
        return results

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        add_workers(-self._counted)  # this process has now waited for the nursery, so its own children include them
        self._process.stdout.close()
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline() or "null")


# ---- the nursery's process


@tensors_of_tests()
def serve() -> None:
    from tests import toy

    if not ON_GPU:  # a backward on a GPU starts threads, which no fork survives
        warm = toy.make(toy.seeded(toy.Lm), 3)
        toy.step(warm, toy.tokens(0, 0))
        warm.destroy()
        del warm
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "end" in question:
            answer: Any = _wait(jobs, question["end"])
            jobs = {}
        else:
            port = free_port()
            question["pids"] = []
            for rank in range(question["world"]):
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    _become(question, rank, port)
                    return  # end through the interpreter's exit
                question["pids"].append(pid)
            jobs[question["name"]] = question
            answer = question["pids"]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


_reported = 0.0  # processor seconds of this process and its ranks in earlier answers


def _wait(jobs: dict[str, dict[str, Any]], timeout: float) -> dict[str, Any]:
    global _reported
    codes: dict[int, int | None] = {}
    ended: dict[int, float] = {}
    pids = [pid for job in jobs.values() for pid in job["pids"]]
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if pid not in codes]:
        for pid in left:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid], ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGUSR1)  # dumps its stacks
                time.sleep(0.2)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid], ended[pid] = None, time.monotonic()
        time.sleep(0.01)
    now = spent_here()
    spent, _reported = now - _reported, now
    return {"cpu_s": spent} | {
        name: {"folder": job["folder"], "codes": [codes[pid] for pid in job["pids"]], "ended": [ended[pid] for pid in job["pids"]]}
        for name, job in jobs.items()
    }


def _become(job: dict[str, Any], rank: int, port: int) -> None:
    os.setsid()
    folder = Path(job["folder"])
    for fd, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    world = str(job["world"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    global _record, _rank
    _record, _rank = folder / f"{rank}.json", rank
    globals()[job["function"]](**job["options"])


# ---- helpers of ranks

_record = Path(os.devnull)
_rank = 0


def note(**facts: Any) -> None:
    """Add to this rank's record on disk."""
    known = json.loads(_record.read_text()) if _record.exists() else {}
    part = _record.with_suffix(".part")
    part.write_text(json.dumps(known | facts))
    part.rename(_record)


@contextlib.contextmanager
def noting_errors() -> Any:
    try:
        yield
    except BaseException as error:
        note(error=type(error).__name__, text=str(error), when=time.monotonic(), trace=traceback.format_exc())
        raise


def act(how: str) -> None:
    """The failure of the bad rank."""
    note(acted=time.monotonic())
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "raise":
            raise ValueError("boom")


def strike(edge: str, bad: int, how: str, nth: int) -> None:
    """Make rank `bad` call `act(how)` before it enters an edge for the nth time."""
    if _rank != bad:
        return
    from slipstream.checkpoint import directory, writer
    from slipstream.zero.comm import ProcessGroupComm
    from slipstream.zero.shared import SharedComm
    from tests import probe

    places: dict[str, list[tuple[Any, str]]] = {
        "gather": [(probe.owner_of("gather"), "gather")],
        "reduce": [(probe.owner_of("reduce"), "reduce")],
        "settle": [(probe.owner_of("settle"), "settle")],
        "publish": [(probe.owner_of("publish"), "publish")],
        "exchange": [(SharedComm, "exchange"), (ProcessGroupComm, "exchange")],
        "save": [(writer.Writer, "write")],
        "commit": [(directory.Draft, "commit")],
    }
    calls = 0
    for owner, name in places[edge]:
        before = getattr(owner, name)

        def method(self: Any, *args: Any, _before: Any = before, **kwargs: Any) -> Any:
            nonlocal calls
            if edge != "gather" or probe.View(self).is_released:
                calls += 1
                if calls == nth:
                    act(how)
            return _before(self, *args, **kwargs)

        setattr(owner, name, method)


def engine_of(stage: int, transport: str, **blocks: Any) -> Any:
    from tests import toy

    return toy.make(toy.seeded(toy.Lm), stage, transport, **blocks)


def train_step(engine: Any, step: int) -> None:
    from tests import toy

    toy.step(engine, toy.tokens(_rank, step))


# ---- jobs


def train(stage: int, transport: str, edge: str, bad: int, how: str, nth: int = 6, save: str = "") -> None:
    """Train until the bad rank acts."""
    engine = engine_of(stage, transport)
    if save:
        train_step(engine, 0)
        engine.save_checkpoint(save, "good")
    strike(edge, bad, how, nth)
    with noting_errors():
        for step in range(1, 200):
            train_step(engine, step)
            if save:
                engine.save_checkpoint(save, f"bad{step}")


def pipeline(transport: str, bad: int, how: str, pause_s: float = 0.0) -> None:
    """Two stages, until the bad rank acts in the middle of a batch. The other rank pauses before it asks for a message."""
    import slipstream
    from tests.dist import test_pipeline as pipes

    slipstream.init_distributed()
    engine = pipes.make(pipes.module(num_stages=2), 1, transport)
    calls = 0
    send = engine.mail.send

    def sending(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if _rank == bad and calls == 6:
            act(how)
        send(*args)

    receive = engine.mail.receive

    def receiving(*args: Any) -> Any:
        if _rank != bad:
            time.sleep(pause_s)
        return receive(*args)

    engine.mail.send, engine.mail.receive = sending, receiving
    with noting_errors():
        for step in range(50):
            engine.train_batch(iter(pipes.batches(0, step)))


def early(stage: int, transport: str, traceback: str) -> None:
    """Rank 1 ends its script after one step; the others do not catch their error."""
    os.environ["SLIPSTREAM_TRACEBACK"] = traceback
    engine = engine_of(stage, transport)
    for step in range(1 if _rank == 1 else 9):
        train_step(engine, step)


def mismatch(stage: int, transport: str, what: str, folder: str) -> None:
    """Rank 1 makes different calls than the others."""
    from tests import toy

    engine = engine_of(stage, transport, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    train_step(engine, 0)
    with noting_errors():
        note(acted=time.monotonic())
        if _rank == 1:
            match what:
                case "skips a backward":
                    engine(toy.tokens(1, 1))
                    engine.step()
                case "one more backward":
                    engine.backward(engine(toy.tokens(1, 1)))
                    engine.backward(engine(toy.tokens(1, 1)))
                case "state_dict alone":
                    engine.state_dict()
                case "save alone":
                    engine.save_checkpoint(folder, "alone")
                case "destroy alone":
                    engine.destroy()
                    note(destroyed=True)
                    return
        for step in range(1, 4):
            train_step(engine, step)
    note(finished=True)


def places(folder: str, axis: str) -> None:
    """Rank 1 of two on an axis saves alone, while the other trains with layers that both share, or with shares of sequences."""
    import torch

    import slipstream
    from tests import toy
    from tests.dist import test_pipeline as pipes

    slipstream.init_distributed()
    model = torch.nn.Sequential(pipes.Sliced(True, None, 0), pipes.Sliced(True, None, 0)) if axis == "tp" else toy.Net()
    engine = toy.make(model, 1, "shared", slipstream={"mesh": {axis: 2}})
    with noting_errors():
        note(acted=time.monotonic())
        for step in range(4):
            if _rank == 1 and step == 2:
                engine.save_checkpoint(folder, "alone")
            engine.backward(engine(toy.floats(0, step)).square().mean())
            engine.step()


def busy(stage: int, transport: str, by: str, seconds: float, timeout_s: float, rank: int = 0) -> None:
    """One rank evaluates alone, while the others wait in their next step or in a barrier."""
    import logging

    import torch
    import torch.distributed as dist

    from tests import toy

    logging.basicConfig(format="%(levelname)s %(message)s")
    engine = engine_of(stage, transport, slipstream={"timeout_s": timeout_s})
    watch = engine.watch
    watch.beat_s, watch.standstill_s, watch.name_busy_s = 0.2, 0.6, 1.0
    train_step(engine, 0)
    with noting_errors():
        note(acted=time.monotonic())
        if _rank == rank:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if stage < 3 or transport == "shared":
                    with torch.no_grad():
                        engine(toy.tokens(0, 1))
                time.sleep(0.05)
        if by == "barrier":
            dist.barrier()
        for step in range(1, 4):
            train_step(engine, step)
        note(sum=int(toy.checksum(engine)))


def branches(stage: int) -> None:
    """On shared memory each rank may run its own branch of the model and its own number of forwards."""
    import torch

    from tests import toy

    engine = engine_of(stage, "shared")
    blocks = list(engine.module.blocks)
    with noting_errors():
        for step in range(4):
            skipped = blocks[(_rank + step) % len(blocks)]
            engine.module.blocks = torch.nn.ModuleList(b for b in blocks if step == 0 or b is not skipped)
            train_step(engine, step)
            engine.module.blocks = torch.nn.ModuleList(blocks)
            with torch.no_grad():
                for length in range(2, 3 + 4 * _rank):
                    engine(toy.tokens(_rank, step)[:, :length])
        note(sum=int(toy.checksum(engine)))


class Batches:
    """A map-style dataset of `Lm` rows."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        from tests import toy

        return toy.tokens(0, i)[0]


def with_workers(stage: int, transport: str, how: str) -> None:
    """Train from a DataLoader with two forked workers; `how`: which process is killed."""
    import torch
    from torch.utils.data import DataLoader

    from tests import toy

    engine = engine_of(stage, transport)
    train_step(engine, 0)
    pid = os.fork()  # a child's interpreter exit must not count as the rank's end
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    with noting_errors():
        for epoch in range(2):
            loader: Any = DataLoader(Batches(), batch_size=2, num_workers=2)  # type: ignore[arg-type]
            for i, batch in enumerate(loader):
                toy.step(engine, batch)
                if i == 5 and epoch == 1 and _rank == 1 and how == "kill":
                    act("kill")
                if i == 8:
                    break
            if how == "kill worker" and epoch == 0 and _rank == 1:
                iterator = iter(DataLoader(Batches(), batch_size=2, num_workers=2))  # type: ignore[arg-type]
                next(iterator)
                try:
                    os.kill(iterator._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
                    for _ in range(300):  # torch's SIGCHLD handler raises here; a read could meet the broken pipe first
                        time.sleep(0.1)
                except RuntimeError as error:
                    note(worker=str(error))
                del iterator  # while it exists, torch raises the same error whenever another child ends
        train_step(engine, 1)
        assert torch.isfinite(toy.checksum(engine).float())
        note(sum=int(toy.checksum(engine)))


def last_transfer() -> None:
    """End the script with a transfer."""
    import torch
    import torch.distributed as dist

    import slipstream

    sys.setswitchinterval(100.0)  # the script keeps the interpreter, as a short one does
    slipstream.init_distributed()
    dist.group.WORLD.allreduce_coalesced([torch.zeros(1) for _ in range(1000)]).wait()  # type: ignore[union-attr]


def leave(stage: int, transport: str, how: str) -> None:
    """End the script without engine.destroy()."""
    import threading
    import weakref

    import torch.distributed as dist

    engine = engine_of(stage, transport)
    for step in range(2):
        train_step(engine, step)
    match how:
        case "end":
            keep.append(engine)
        case "slow rank":
            if _rank == 1:
                time.sleep(1.5)
                train_step_alone(engine)
        case "raise":
            raise KeyError("on purpose")
        case "exit 3":
            sys.exit(3)
        case "drop":
            gone = weakref.ref(engine)
            del engine
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                gc.collect()
                threads = [thread.name for thread in threading.enumerate()]
                if gone() is None and "slipstream-watch" not in threads and not mappings():
                    break
                time.sleep(0.1)
            note(alive=gone() is not None, threads=threads, mappings=mappings())
            dist.barrier()
            engine = engine_of(stage, transport)  # another engine works
            train_step(engine, 0)
    note(finished=True)


keep: list[Any] = []


def train_step_alone(engine: Any) -> None:
    """Evaluate on this rank alone, which needs no other rank here."""
    import torch

    from tests import toy

    with torch.no_grad():
        engine(toy.tokens(_rank, 0))


def mappings() -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/memfd:slipstream" in line]


def serve_ranks(
    folder: str, bad: int, how: str, split: dict[str, int], nth: int = 20, forward: str = "native", hosts: int = 1
) -> None:
    """Answer by several processes until the bad rank acts in a forward; `how` "interrupt": as Ctrl-C does. `forward`: whose code
    computes: native, torch or transformers. `hosts`: 2, as if each rank were on its own."""
    import slipstream
    from slipstream.inference import native, ranks
    from slipstream.inference.generic import GenericDecoder
    from slipstream.inference.joined import JoinedParts

    kind, name = (native.NativeDecoder, "_run") if forward == "native" else (GenericDecoder, "run")
    if forward == "torch":
        native.why_not, kind, name = lambda config: "as asked", JoinedParts, "added"
    if hosts > 1:
        meet = ranks.meet
        ranks.meet = lambda axis: [peer._replace(host=str(peer.rank)) for peer in meet(axis)]
    run, calls = getattr(kind, name), 0

    def running(self: Any, *numbers: Any, **types: Any) -> Any:
        nonlocal calls
        calls += 1
        if _rank == bad and calls == nth:
            if how == "interrupt":
                note(acted=time.monotonic())
                for pid in (Path(folder) / "pids").iterdir():
                    os.kill(int(pid.name), signal.SIGINT)
            elif how == "kill when idle":
                threading.Timer(0.5, act, ["kill"]).start()
            else:
                act(how)
        return run(self, *numbers, **types)

    setattr(kind, name, running)
    (Path(folder) / "pids").mkdir(exist_ok=True)
    (Path(folder) / "pids" / str(os.getpid())).touch()
    with noting_errors(), slipstream.init_inference(folder, **split, token_budget=64, max_running=4, device="cpu") as engine:
        answered = 0
        while engine.leads and (how != "kill when idle" or answered < 12):
            engine.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)
            answered += 1
        while engine.leads and engine.engine.healthy:
            time.sleep(0.01)
        if engine.leads:
            engine.generate([1])

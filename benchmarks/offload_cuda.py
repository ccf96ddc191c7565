"""`python -m benchmarks.offload_cuda`: GPTs of 1.3 and 3 billion parameters in a 16 GiB slice of a GPU, with states on the host.

Sequence 2,048, blocks computed again in the backward, bf16, 1 and 8 micro-batches a step. Every contender trains the same model in
a fresh process of its own, one after the other in each round; what it allocates is held to the slice by
`set_per_process_memory_fraction`. `resident` alone has the whole device: fp32 weights under autocast and torch's fused AdamW do not
fit the slice. `--largest` adds blocks until one step fails: ours (weights and optimizer states in host memory) and plain torch,
which is what DDP is on one rank. DeepSpeed comes from `--peers`, an interpreter with a torch for CUDA.

`--dry-run` does all of it with a toy on the CPU, where nothing leaves and nothing is held: it shows that the command runs, no more.

Not yet run on a GPU: RESULTS.md has none of its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.ranks import ROOT
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.systems import ADAMW
from benchmarks.workloads import CLIPPING, GPT, Workload, build_batch

SLICE = 16 << 30
MODELS = {
    "1.3B": Workload(name="1.3B", width=2048, depth=24, heads=16, vocab=32768, batch=1, length=2048),
    "3B": Workload(name="3B", width=2560, depth=36, heads=20, vocab=32768, batch=1, length=2048),
}
GROWING = Workload(name="largest", width=4096, depth=2, heads=32, vocab=32768, batch=1, length=2048)
TOY = Workload(name="toy", width=64, depth=2, heads=2, vocab=256, batch=1, length=32)
HOST = {"device": "cpu", "pin_memory": True}
ZERO: dict[str, dict[str, Any]] = {
    "slipstream:1": {"stage": 1, "offload_optimizer": HOST},  # gradients add up on the device and leave once a step
    "slipstream:2": {"stage": 2, "offload_optimizer": HOST},
    "slipstream:3": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "deepspeed:2": {"stage": 2, "offload_optimizer": HOST},
    "deepspeed:3": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
TIMED = 3  # steps in a row
TIMEOUT = 1800.0
OUT_OF_MEMORY = 3  # a contender's exit status
Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    system: str
    work: Workload
    micros: int
    slice_nbytes: int  # 0: the whole device
    timed: int = TIMED

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**fields | {"work": Workload(**fields["work"])})


# -- one contender, in its process --


class Recomputed(nn.Module):
    """A block that keeps its input only. ZeRO-3 of DeepSpeed is made for the reentrant kind."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return y


def recomputing(model: GPT, reentrant: bool = False) -> GPT:
    model.blocks = nn.ModuleList(Recomputed(block, reentrant) for block in model.blocks)
    return model


def config_of(job: Job) -> dict[str, Any]:
    """The JSON that DeepSpeed and Slipstream share."""
    return {
        "train_micro_batch_size_per_gpu": job.work.batch,
        "gradient_accumulation_steps": job.micros,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": ZERO[job.system],
    }


def of_engine(engine: Any, batch: tuple[Tensor, Tensor], micros: int) -> Step:
    def step() -> float:
        for _ in range(micros):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
        return float(loss)

    return step


def slipstream_step(job: Job, batch: tuple[Tensor, Tensor]) -> Step:
    import slipstream

    with slipstream.zero.Init():
        model = GPT(job.work)
    config = config_of(job) | {"slipstream": {"activations": "recompute"}}
    return of_engine(slipstream.initialize(model=model, config=config)[0], batch, job.micros)


def deepspeed_step(job: Job, batch: tuple[Tensor, Tensor]) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed(verbose=False)
    config = config_of(job) | {"steps_per_print": 2**31}
    torch.set_default_dtype(torch.bfloat16)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=job.system == "deepspeed:3"):
        model = recomputing(GPT(job.work), reentrant=True)
    torch.set_default_dtype(torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    return of_engine(engine, batch, job.micros)


def torch_step(job: Job, batch: tuple[Tensor, Tensor]) -> Step:
    """fp32 weights, autocast and a fused AdamW: what DDP holds on one rank."""
    device = batch[0].device
    with device:
        model = recomputing(GPT(job.work))
    betas = tuple(ADAMW["betas"])
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "betas": betas}, fused=True)

    def step() -> float:
        for _ in range(job.micros):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(*batch)
            (loss / job.micros).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def contend(job: Job) -> None:
    """Make the steps and say what they took, as a line of JSON."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda and job.slice_nbytes:
        share = job.slice_nbytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
    torch.manual_seed(0)
    tokens, targets = build_batch(job.work, 0)
    batch = (tokens.to(device), targets.to(device))
    build = {"slipstream": slipstream_step, "deepspeed": deepspeed_step, "torch": torch_step}[job.system.split(":")[0]]
    try:
        step = build(job, batch)
        losses = [step()]
        wait = torch.cuda.synchronize if cuda else _nothing
        wait()
        start = time.perf_counter()
        losses += [step() for _ in range(job.timed)]
        wait()
        seconds = (time.perf_counter() - start) / job.timed
    except torch.OutOfMemoryError:
        os._exit(OUT_OF_MEMORY)
    peak = torch.cuda.max_memory_reserved() if cuda else 0
    print("@" + json.dumps({"seconds": seconds, "peak": peak, "losses": losses}), flush=True)
    os._exit(0)  # no contender's exit handlers are waited for


def _nothing() -> None:
    pass


# -- all of them --


def run(job: Job, python: Path) -> dict[str, Any] | None:
    """What a contender reached, in a process of its own; None where it ran out of the device's memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    command = [str(python), "-m", "benchmarks.offload_cuda", "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode == OUT_OF_MEMORY:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if done.returncode or not lines:
        raise SystemExit(f"{job.system}, {job.work.name}, ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1][1:])
    return found


def compare(works: list[Workload], systems: list[str], pythons: dict[str, Path], rounds: int, slice_nbytes: int) -> str:
    rows, judged = [], []
    for work in works:
        for micros in (1, 8):
            took: dict[str, list[float]] = {system: [] for system in systems}
            last: dict[str, dict[str, Any] | None] = {}
            for _ in range(rounds):
                for system in systems:
                    job = Job(system=system, work=work, micros=micros, slice_nbytes=0 if system == "torch" else slice_nbytes)
                    last[system] = found = run(job, pythons[system.split(":")[0]])
                    took[system] += [found["seconds"]] if found else []
            resident = took["torch"]
            for system in systems:
                found = last[system]
                if found is None or not took[system]:
                    rows.append([work.name, str(micros), _label(system), "out of memory", "", "", ""])
                    continue
                over = Spread.of([mine / its for mine, its in zip(took[system], resident, strict=False)]) if resident else None
                rows.append(
                    [
                        work.name,
                        str(micros),
                        _label(system),
                        Spread.of(took[system]).show(),
                        over.show(2) if over else "",
                        f"{found['peak'] / 2**30:.1f}",
                        f"{found['losses'][0]:.3f} -> {found['losses'][-1]:.3f}",
                    ]
                )
            judged += _judge(f"{work.name}, {micros} micro-batches", took, micros)
    head = ["model", "micro-batches", "contender", "step, s", "over resident", "device, GiB", "loss"]
    return "\n\n".join((table(head, rows), verdicts(judged)))


def _judge(what: str, took: dict[str, list[float]], micros: int) -> list[list[str]]:
    """Ours at its best stage, as its user would choose it; DeepSpeed at the same stages."""
    found = []
    best = {name: [min(took[system]) for system in took if system.startswith(name) and took[system]] for name in ("slip", "deep")}
    if best["slip"] and best["deep"]:
        found.append(verdict(f"{what}: times DeepSpeed", min(best["deep"]) / min(best["slip"]), 2.0, at_least=True))
    if best["slip"] and took["torch"] and micros == 8:
        found.append(verdict(f"{what}: of resident's rate", min(took["torch"]) / min(best["slip"]), 0.9, at_least=True))
    return found


def largest(system: str, python: Path, slice_nbytes: int, start: Workload, most: int) -> Workload | None:
    """The deepest model that makes a step, to a sixteenth; None where not even the first does."""

    def fits(depth: int) -> bool:
        job = Job(system=system, work=replace(start, depth=depth), micros=1, slice_nbytes=slice_nbytes, timed=1)
        return run(job, python) is not None

    low, high = 0, start.depth
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(start, depth=low) if low else None


def _label(system: str) -> str:
    kind, _, stage = system.partition(":")
    where = ", weights and optimizer on the host" if stage == "3" else ", optimizer on the host"
    return "resident: torch, fused AdamW, the whole device" if kind == "torch" else f"{kind}, stage {stage}{where}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="an interpreter with DeepSpeed and a torch for CUDA")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", action="store_true", help="also the largest model of each kind: an hour")
    parser.add_argument("--most-blocks", type=int, default=40, help="--largest goes no deeper (each has 0.2 billion weights)")
    parser.add_argument("--dry-run", action="store_true", help="a toy on the CPU")
    args = parser.parse_args()
    if args.job:
        contend(Job.from_json(args.job))
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none here; --dry-run shows that the command runs")
    own = Path(sys.executable)
    pythons = {"torch": own, "slipstream": own} | ({"deepspeed": args.peers} if args.peers else {})
    systems = ["torch", *(system for system in ZERO if system.split(":")[0] in pythons)]
    works = [TOY] if args.dry_run else [MODELS[name] for name in args.models]
    where = "the CPU (a dry run)" if args.dry_run else f"{torch.cuda.get_device_name()}, {SLICE >> 30} GiB of it"
    print(f"torch {torch.__version__}, {where}\n")
    print(compare(works, systems, pythons, 1 if args.dry_run else args.rounds, SLICE))
    if not args.largest:
        return
    start, most = (TOY, 4) if args.dry_run else (GROWING, args.most_blocks)
    sizes = {system: largest(system, own, SLICE, start, most) for system in ("torch", "slipstream:3")}
    for system, work in sizes.items():
        print(f"\nlargest, {system}: {'none' if work is None else work.describe()}")
    ddp, ours = sizes["torch"], sizes["slipstream:3"]
    if ddp and ours:
        print("\n" + verdicts([verdict("largest model, times DDP's", ours.num_params / ddp.num_params, 8.0, at_least=True)]))


if __name__ == "__main__":
    main()

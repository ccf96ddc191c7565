"""The leg `pretrained`: host memory of `from_pretrained` under stage 3, of `initialize` after it, and of `save_pretrained`.

Two ranks in the environment of `make test-clients`, and transformers' own calls. What each keeps (anonymous and shared memory; not
the pages of files, which the kernel takes back) is read 2000 times a second while a phase runs. The peak is told beyond what rests
on the rank, in units: parameters that are gathered together, here a block's.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.memory import MALLOC
from benchmarks.ranks import ROOT, free_port
from benchmarks.report import host, table, verdict, verdicts

WORLD, PERIOD_S, TARGET = 2, 0.0005, 2
# a block is 3.2 million parameters, and so is what is in none
SIZES = {"vocab_size": 3072, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}


class Took(NamedTuple):
    """Bytes of one rank."""

    before: int
    peak: int
    after: int


class Rank:
    def __init__(self, rank: int, folder: Path, python: Path, port: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | MALLOC | {name: str(value) for name, value in place.items()} | {"HF_HUB_OFFLINE": "1"}
        env["PYTHONPATH"] = f"{ROOT / 'src'}"
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the object)
        script = str(ROOT / "benchmarks" / "pretrained_worker.py")
        self.process = subprocess.Popen(
            [str(python), "-W", "ignore", script, str(folder)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def hear(self) -> dict[str, Any]:
        out: IO[str] | None = self.process.stdout
        assert out is not None, "it is a pipe"
        for line in out:
            if line.startswith("{"):
                return dict(json.loads(line))
        self.errors.seek(0)
        raise RuntimeError(f"a rank of the leg pretrained ended with {self.process.wait()}: {self.errors.read()[-2000:]}")

    def go_on(self) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        print("go", file=self.process.stdin, flush=True)

    def held(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        sizes = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        return (int(sizes["RssAnon"]) + int(sizes["RssShmem"])) << 10


def measure(folder: Path, python: Path) -> dict[str, list[Took]]:
    """By phase, what each rank took."""
    ranks: list[Rank] = []
    found: dict[str, list[Took]] = {}
    port = free_port()
    try:
        ranks = [Rank(rank, folder, python, port) for rank in range(WORLD)]
        for name in ("from_pretrained", "initialize", "save_pretrained"):
            assert [rank.hear()["begins"] for rank in ranks] == [name] * WORLD
            before = [rank.held() for rank in ranks]
            most, over = list(before), threading.Event()

            def look(most: list[int] = most, over: threading.Event = over) -> None:
                while not over.wait(PERIOD_S):
                    most[:] = [max(known, rank.held()) for known, rank in zip(most, ranks, strict=True)]

            thread = threading.Thread(target=look)
            thread.start()
            for rank in ranks:
                rank.go_on()
            ends = [rank.hear()["ends"] for rank in ranks]
            over.set()
            thread.join()
            assert ends == [name] * WORLD
            found[name] = [Took(*row) for row in zip(before, most, [rank.held() for rank in ranks], strict=True)]
            for rank in ranks:
                rank.go_on()
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
    return found


def write_model(folder: Path, depth: int) -> tuple[int, int]:
    """A Llama with random weights; the bytes of its weights, and of one block's."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=depth, tie_word_embeddings=False))
    model.save_pretrained(folder)

    def nbytes(module: torch.nn.Module) -> int:
        return sum(param.nbytes for param in module.parameters())

    return nbytes(model), nbytes(model.model.layers[0])


def run(*, quick: bool, python: Path) -> str:
    if not python.exists():
        raise RuntimeError(f"the leg `pretrained` needs {python}: make test-clients")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "small", 1)
        whole, unit = write_model(folder / "source", 4 if quick else 12)
        found = measure(folder, python)
    shard = whole // WORLD
    names = {
        "from_pretrained": "`AutoModelForCausalLM.from_pretrained`, stage 3",
        "initialize": "`deepspeed.initialize` of it",
        "save_pretrained": "`engine.save_pretrained`",
    }
    beyond = {
        "from_pretrained": [
            took.peak - min(took.before + shard, took.after)
            for took in found["from_pretrained"]  # malloc may have kept memory
        ],
        "initialize": [took.peak - max(took.before, took.after) for took in found["initialize"]],
        "save_pretrained": [took.peak - took.before for took in found["save_pretrained"]],
    }
    rests = {name: [f"{(took.after - took.before) / 1e6:.1f}" for took in ranks] for name, ranks in found.items()}
    rows = [[names[name], *rests[name], *(f"{each / unit:.2f}" for each in most)] for name, most in beyond.items()]
    goals = [verdict(f"{name}, units beyond what rests", max(most) / unit, TARGET) for name, most in beyond.items()]
    return "\n\n".join(
        [
            host(f"{WORLD} ranks, {python.parent.parent.name}"),
            f"{whole / 1e6:.1f} MB of fp32 weights, {unit / 1e6:.1f} MB a unit, {shard / 1e6:.1f} MB "
            "a rank's shard of the weights.",
            table(["", "rests more: rank 0, MB", "rank 1", "peak beyond that: rank 0, units", "rank 1"], rows),
            verdicts(goals),
        ]
    )

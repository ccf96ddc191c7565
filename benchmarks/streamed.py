"""The leg `streamed`: a random Llama whose layers are on disk while it generates (ZeRO-Inference), beside transformers with
accelerate's disk offload, in turns.

Each process is in a memory cgroup whose limit, page cache included, is less than the weights. Slipstream is told how many of
them to hold; what accelerate has read stays in the page cache as far as there is room.
Tokens per second are those of a batch's decoding, without its prompts. The bound is one read of all stored bytes per forward: the
batch times the rate at which the same file is read in the same pieces while nothing computes, over these bytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cgroup import Cgroup, meter
from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving.measure import judged, ratios
from benchmarks.worker import Failed, Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

OURS, PEER = "Slipstream", "transformers, accelerate's disk offload"
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LAYERS, BATCH, PROMPT, TOKENS = 16, 16, 16, 9
LIMIT = 1 << 30  # bytes of each process, page cache included
HELD = 560 << 20  # bytes of weights that Slipstream holds


# -- the processes; the peer's runs in the clients' environment --


def write(folder: Path, layers: int) -> int:
    """A random model in bf16, as a Hugging Face folder. Returns the bytes of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True)).bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.fill_(1.0) if "norm" in name else param.normal_(std=0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    return sum(param.nbytes for param in model.parameters())


def prompts() -> list[list[int]]:
    return [[(7 * row + 13 * at) % 8192 for at in range(PROMPT)] for row in range(BATCH)]


def ours(channel: Channel, folder: str) -> None:
    import slipstream

    options: dict[str, Any] = {
        "device": "cpu",
        "weights_folder": folder,
        "weights_bytes": HELD,
        "max_running": BATCH,
        "max_context": 64,
        "prefix_caching": False,
    }
    engine = slipstream.init_inference(folder, **options)
    store: Any = engine.engine.runner.layer_store  # type: ignore[attr-defined]

    def decode(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(prompts(), max_new_tokens=tokens, temperature=0, ignore_eos=True)
        return time.perf_counter() - start

    def read() -> float:
        """Bytes per second of the file's layers, each in its turn."""
        start = time.perf_counter()
        for number in range(store.num_layers):
            store.fetch(number)
            store.release(number)
        return float(store.nbytes / (time.perf_counter() - start))

    channel.serve({"decode": decode, "read": read, "nbytes": lambda: store.nbytes})


def peer(channel: Channel, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.layers": "disk"}
    with tempfile.TemporaryDirectory(dir=folder) as offload:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=places, offload_folder=offload)
        ids = torch.tensor(prompts())

        def decode(tokens: int) -> float:
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            return time.perf_counter() - start

        channel.serve({"decode": decode})


# -- the leg --


def _tokens_per_second(worker: Worker) -> float:
    first, all_ = worker.call("decode", tokens=1), worker.call("decode", tokens=TOKENS)
    return float(BATCH * (TOKENS - 1) / (all_ - first))


def _evict(folder: Path) -> None:
    """Drop the files from the page cache: its pages count for who has read or written them first, and others read them for free."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _limited(group: Cgroup) -> bool:
    """Set the limit of the group, if the kernel lets us."""
    for name in ("memory.limit_in_bytes", "memory.max"):
        try:
            (group.path / name).write_text(str(LIMIT))
            return True
        except OSError:
            continue
    return False


def run(options: Options) -> str:
    layers = 4 if options.quick else LAYERS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-streamed-")))
        nbytes = write(folder, layers)
        limited = True
        workers: dict[str, Worker] = {}
        failures: dict[str, str] = {}
        for name, target, python in ((OURS, "ours", None), (PEER, "peer", options.clients)):
            group = stack.enter_context(meter(f"-{target}"))
            limited &= _limited(group)
            _evict(folder)
            try:
                made = Worker(f"benchmarks.streamed:{target}", {"folder": str(folder)}, name=name, python=python, enter=group.enter)
                workers[name] = stack.enter_context(made)
                made.ready()
                made.call("decode", tokens=1)
            except Failed as failed:
                workers.pop(name, None)
                failures[name] = failed.reason
        rates: dict[str, list[float]] = {name: [] for name in workers}
        reads = []
        for _ in range(options.num_rounds(3)):
            for name, one in workers.items():
                rates[name].append(_tokens_per_second(one))
                if name == OURS:
                    reads.append(one.call("read"))
        stored = workers[OURS].call("nbytes") if OURS in workers else nbytes
    bounds = [BATCH * read / stored for read in reads]
    rows = [[name, Spread.of(values).show(1)] for name, values in rates.items()] + [[name, why] for name, why in failures.items()]
    if bounds:
        rate = f"{statistics.median(reads) / 1e9:.2f} GB/s"
        rows.append([f"bound: a read of the stored bytes per forward, at {rate}", Spread.of(bounds).show(1)])
    mine, why = rates.get(OURS), failures.get(OURS)
    judgments = [
        judged("tokens per second over the bound", ratios(mine, bounds, why), 0.8),
        judged("over accelerate's disk offload", ratios(mine, rates.get(PEER), why or failures.get(PEER)), 3),
    ]
    memory = f"at most {LIMIT / 1e9:.2f} GB with page cache" if limited else "not limited (no memory cgroup)"
    about = (
        f"A Llama of {nbytes / 1e9:.2f} GB in bf16, {stored / 1e9:.2f} GB of its {layers} layers on disk; {BATCH} streams. "
        f"Memory of each process: {memory}; Slipstream holds {HELD / 1e9:.2f} GB of the weights."
    )
    return "\n\n".join((about, table(["", "tokens per second"], rows), verdicts(judgments)))

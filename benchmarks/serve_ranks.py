"""The leg `serve-ranks`: tokens per second of a random Mixtral, most of whose weights are experts, and of a random Llama, on one
process and on several, and the memory of each process.

One process has as many threads as the others have processes, so that all use the same cores. `--measure` is one contender.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.legs import Options
from benchmarks.report import Spread, table

HIDDEN, INNER, LAYERS, EXPERTS, VOCAB = 1024, 3584, 4, 8, 4096
BATCHES = (1, 8)  # sequences
NEW, PROMPT = 48, 512  # tokens of each, of a prompt alone
KINDS = {"mixture": ("one process", "ep_size", "moe_tp_size", "tp_size"), "dense": ("one process", "tp_size")}  # by model
CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, model: str) -> None:
    """A file for each layer, so that no more than one is in memory. The dense model's MLPs are as large as two experts."""
    torch.manual_seed(0)
    kv = HIDDEN // 4
    index: dict[str, str] = {}

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    save("ends.safetensors", {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)})
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {f"{at}{norm}": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in {"q_proj": HIDDEN, "k_proj": kv, "v_proj": kv, "o_proj": HIDDEN}.items():
            shapes[f"{at}self_attn.{name}"] = (rows, HIDDEN)
        if model == "dense":
            for name, shape in {"gate": (2 * INNER, HIDDEN), "down": (HIDDEN, 2 * INNER), "up": (2 * INNER, HIDDEN)}.items():
                shapes[f"{at}mlp.{name}_proj"] = shape
        else:
            shapes[f"{at}block_sparse_moe.gate"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                for name, shape in {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}.items():
                    shapes[f"{at}block_sparse_moe.experts.{expert}.{name}"] = shape
        save(f"layer{layer}.safetensors", shapes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    other = {"model_type": "llama", "intermediate_size": 2 * INNER} if model == "dense" else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | other))


def private_megabytes() -> float:
    """This process's memory that no other has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def tell(name: str, value: float) -> None:
    """A line in one write: ranks share the output."""
    print(f"{name} {value}\n", end="", flush=True)


def measure(folder: str, dtype: str, split: dict[str, Any], threads: int) -> None:
    """One process: print its memory, and on rank 0 tokens per second by batch and of a prompt."""
    import slipstream

    options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "threads": threads, "kv_cache_bytes": "64M", "max_running": 16}
    before = private_megabytes()
    with slipstream.init_inference(folder, **split, **options, prefix_caching=False) as engine:
        tell("memory", private_megabytes() - before)
        for batch in (BATCHES[0], *BATCHES) if engine.leads else ():  # the first is not counted
            began = time.perf_counter()
            engine.generate([[i + 1, 7, 9] for i in range(batch)], max_new_tokens=NEW, ignore_eos=True)
            tell(f"decode {batch}", batch * NEW / (time.perf_counter() - began))
        for _ in range(3 if engine.leads else 0):
            began = time.perf_counter()
            engine.generate([[i * 7 % VOCAB for i in range(PROMPT)]], max_new_tokens=1, ignore_eos=True)
            tell("prompt", PROMPT / (time.perf_counter() - began))


def figures(folder: Path, dtype: str, kind: str, processes: int) -> dict[str, float]:
    """Tokens per second by figure, and the most memory of a process in MB. `kind`: of KINDS."""
    one = kind == "one process"
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve_ranks",
        "--measure",
        str(folder),
        "--dtype",
        dtype,
        "--threads",
        str(processes if one else 1),
    ]
    if not one:
        launch = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(processes)]
        command = [*launch, *command[1:], "--split", kind, "--processes", str(processes)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    found = [(name, float(value)) for name, _, value in (line.rpartition(" ") for line in lines if line)]
    return dict(found) | {"memory": max(value for name, value in found if name == "memory")}


def run(options: Options, dtype: str = "int4", processes: int = 2) -> str:
    rows = []
    for model, kinds in KINDS.items():
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), model)
            for turn in range(options.num_rounds(3)):
                for kind in kinds[:: 1 if turn % 2 == 0 else -1]:
                    found[kind].append(figures(Path(folder), dtype, kind, processes))
                    print(f"  serve-ranks, {model}, {kind}: done", flush=True)
        for figure in (*(f"decode {batch}" for batch in BATCHES), "prompt", "memory"):
            base = [one[figure] for one in found["one process"]]
            for kind, rounds in found.items():
                values = [one[figure] for one in rounds]
                rows.append([model, figure, kind, Spread.of(values).show(1), Spread.ratio(values, base).show(2)])
    return "\n\n".join(
        (
            f"A random Mixtral (width {HIDDEN:,}, {LAYERS} layers of {EXPERTS} experts of {INNER:,} features) and a Llama (an MLP "
            f"of {2 * INNER:,}), {dtype}, on {processes} cores: one process of {processes} threads, or {processes} of one thread, "
            "which have whole experts (ep_size), columns of each (moe_tp_size) or of all products (tp_size). Tokens per second of "
            f"1 and 8 sequences ({NEW} new tokens of each) and of a prompt ({PROMPT} tokens, the last of three); MB of private "
            "memory of the largest process; median (min-max) of the rounds.",
            table(["model", "figure", "processes", "tok/s, MB", "over one process"], rows),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--measure", required=True)
    parser.add_argument("--split")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    measure(options.measure, options.dtype, {options.split: options.processes} if options.split else {}, options.threads)


if __name__ == "__main__":
    main()

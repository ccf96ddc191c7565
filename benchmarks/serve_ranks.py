"""The leg `serve-ranks`: tokens per second of a random Mixtral, most of whose weights are experts, and of a random Llama, on one
process and on several, and the memory of each process; the Llama in bf16 on several, beside DeepSpeed's AutoTP and vLLM; the bytes
that a token of the Mixtral reads over the read bandwidth.

One process has as many threads as the others have processes, so that all use the same cores. `--measure` is one contender.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.serving.contenders import environment
from benchmarks.serving.limits import Rates, Shape
from benchmarks.worker import Worker

HIDDEN, INNER, LAYERS, EXPERTS, VOCAB = 1024, 3584, 4, 8, 4096
BATCHES = (1, 8)  # sequences
NEW, PROMPT = 48, 512  # tokens of each, of a prompt alone
ONE, AUTOTP, VLLM = "one process", "DeepSpeed AutoTP", "vLLM"
KINDS = {"mixture": (ONE, "ep_size", "moe_tp_size", "tp_size"), "dense": (ONE, "tp_size")}  # by model
TARGETS = {"decode 1": 0.9, "prompt": 0.95}  # over one process
SHARES = {2: 0.55, 4: 0.30}  # of one process's memory, by processes
READERS = ((ONE, 2), ("tp_size", 2), ("ep_size", 2), ("ep_size", 4))  # of the mixture: kind, processes (threads of one)
LEAST_READ = 0.6  # of the read bandwidth
FIGURES = (*(f"decode {batch}" for batch in BATCHES), "prompt", "memory")
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


def measure(folder: str, dtype: str, split: dict[str, Any], threads: int, memory_only: bool) -> None:
    """One process: print its memory, and on rank 0 tokens per second by batch and of a prompt."""
    import slipstream

    options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "threads": threads, "kv_cache_bytes": "64M", "max_running": 16}
    before = private_megabytes()
    with slipstream.init_inference(folder, **split, **options, prefix_caching=False) as engine:
        tell("memory", private_megabytes() - before)
        if memory_only:
            return
        for batch in (BATCHES[0], *BATCHES) if engine.leads else ():  # the first is not counted
            began = time.perf_counter()
            engine.generate([[i + 1, 7, 9] for i in range(batch)], max_new_tokens=NEW, ignore_eos=True)
            tell(f"decode {batch}", batch * NEW / (time.perf_counter() - began))
        for _ in range(3 if engine.leads else 0):
            began = time.perf_counter()
            engine.generate([[i * 7 % VOCAB for i in range(PROMPT)]], max_new_tokens=1, ignore_eos=True)
            tell("prompt", PROMPT / (time.perf_counter() - began))


def measure_autotp(folder: str, dtype: str, processes: int) -> None:
    """The same by DeepSpeed and transformers' `generate`."""
    import deepspeed
    import transformers

    kind, before = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], private_megabytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    engine = deepspeed.init_inference(model, dtype=kind, tensor_parallel={"tp_size": processes}, replace_with_kernel_inject=False)
    tell("memory", private_megabytes() - before)

    def rate(batch: int, prompt: int, new: int) -> float:
        ids = torch.arange(batch * prompt).view(batch, prompt) * 7 % VOCAB
        began = time.perf_counter()
        engine.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return batch * (new if new > 1 else prompt) / (time.perf_counter() - began)

    told = [(f"decode {batch}", rate(batch, 3, NEW)) for batch in (BATCHES[0], *BATCHES)]
    told += [("prompt", rate(1, PROMPT, 1)) for _ in range(3)]
    for name, value in told if torch.distributed.get_rank() == 0 else ():
        tell(name, value)


def measure_vllm(folder: str, dtype: str, processes: int) -> None:
    """The same by vLLM, whose processes are its own; their memory is not read, most of it is a cache of 1 GiB."""
    cores = sorted(os.sched_getaffinity(0))[:processes]
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))  # by default it keeps a core for itself
    import vllm

    options: dict[str, Any] = {"max_num_seqs": 16, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    kind = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    engine = vllm.LLM(model=folder, tensor_parallel_size=processes, dtype=kind, max_model_len=1024, **options)

    def rate(batch: int, prompt: int, new: int) -> float:
        prompts = [{"prompt_token_ids": [(i + batch * k) * 7 % VOCAB for k in range(prompt)]} for i in range(batch)]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return batch * (new if new > 1 else prompt) / (time.perf_counter() - began)

    for batch in (BATCHES[0], *BATCHES):
        tell(f"decode {batch}", rate(batch, 3, NEW))
    for _ in range(3):
        tell("prompt", rate(1, PROMPT, 1))


def figures(folder: Path, dtype: str, kind: str, processes: int, peers: Peers, *more: str) -> dict[str, float]:
    """Tokens per second by figure, and the most memory of a process in MB. `kind`: of KINDS, or AUTOTP. `more`: arguments."""
    one, autotp, env = kind == ONE, kind == AUTOTP, dict(os.environ)
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
        *more,
    ]
    if not one:
        ours = [sys.executable, "-m", "slipstream", "run", "--quiet", "--nproc", str(processes)]
        theirs = [str(peers.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*(theirs if autotp else ours), *command[1:], "--split", kind, "--processes", str(processes)]
    if autotp:  # LOCAL_SIZE: as its launcher sets it; without, its sums over shared memory crash
        env |= peers.env() | {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(processes)}
    return figures_of(command, env)


def figures_of_vllm(folder: Path, dtype: str, processes: int, python: Path) -> dict[str, float]:
    command = [str(python), "-m", "benchmarks.serve_ranks", "--measure", str(folder), "--dtype", dtype, "--split", VLLM]
    return figures_of([*command, "--processes", str(processes)], dict(os.environ) | environment("vllm", python))


def figures_of(command: Sequence[str], env: dict[str, str]) -> dict[str, float]:
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.split("\n")
    split = [line.rpartition(" ") for line in lines]
    found = [(name, float(value)) for name, _, value in split if name in FIGURES]
    return dict(found) | {"memory": max((value for name, value in found if name == "memory"), default=float("nan"))}


def shares(dtype: str, peers: Peers) -> list[list[str]]:
    """Verdicts on the memory of a process of several over that of one."""
    told: list[list[str]] = []
    for model in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), model)
            one = figures(Path(folder), dtype, ONE, 2, peers, "--memory-only")["memory"]
            for processes, most in SHARES.items():
                part = figures(Path(folder), dtype, "tp_size", processes, peers, "--memory-only")["memory"]
                told.append(verdict(f"memory of a process of {processes} over one's, {model}", part / one, most, at_least=False))
    return told


def readings(options: Options, dtype: str, peers: Peers) -> list[list[str]]:
    """Verdicts on the bytes that one sequence's tokens read in a second, of attention, a token's experts and the head, over the
    bandwidth that is measured before each round."""
    kv, active = HIDDEN // 4, CONFIG["num_experts_per_tok"]
    layer = 2 * HIDDEN * (HIDDEN + kv) + EXPERTS * HIDDEN + active * 3 * HIDDEN * INNER
    token = Shape(LAYERS * layer, VOCAB * HIDDEN, 0, 0).weight_bytes(dtype)
    found: dict[tuple[str, int], list[float]] = {reader: [] for reader in READERS}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "mixture")
        for _ in range(options.num_rounds(3)):
            with Worker("benchmarks.serving.limits:measure", name="rates") as worker:
                worker.ready()
                read = Rates(*worker.call("rates")).read
            for kind, processes in READERS:
                rate = figures(Path(folder), dtype, kind, processes, peers)["decode 1"]
                found[kind, processes].append(rate * token / read)
                print(f"  serve-ranks, mixture, {dtype}, {kind}, {processes}: {rate:.1f} tok/s", flush=True)
    return [
        verdict(
            f"active bytes over the read bandwidth, mixture, {dtype}, {kind}{'' if kind == ONE else f' {processes}'}",
            Spread.of(values).median,
            LEAST_READ,
            at_least=True,
        )
        for (kind, processes), values in found.items()
    ]


def turns(
    options: Options, model: str, dtype: str, kinds: Sequence[str], processes: int, peers: Peers, python: Path | None = None
) -> list[list[str]]:
    """Rows of the table; ratios are over the first of `kinds`. `python`: vLLM's."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), model)
        for turn in range(options.num_rounds(3)):
            for kind in kinds[:: 1 if turn % 2 == 0 else -1]:
                if kind == VLLM:
                    found[kind].append(figures_of_vllm(Path(folder), dtype, processes, python or Path()))
                else:
                    found[kind].append(figures(Path(folder), dtype, kind, processes, peers))
                print(f"  serve-ranks, {model}, {dtype}, {kind}: done", flush=True)
    rows = []
    for figure in FIGURES if VLLM not in kinds else FIGURES[:-1]:
        base = [one[figure] for one in found[kinds[0]]]
        for kind, rounds in found.items():
            values = [one[figure] for one in rounds]
            rows.append([f"{model}, {dtype}", figure, kind, Spread.of(values).show(1), Spread.ratio(values, base).show(2)])
    return rows


def reached(rows: Sequence[Sequence[str]], dtype: str, figure: str, kind: str) -> float:
    """The median of a row's ratio."""
    return next(float(row[4].split()[0]) for row in rows if row[:3] == [f"dense, {dtype}", figure, kind])


def run(options: Options, dtype: str = "int4", processes: int = 2) -> str:
    peers, rows = prepare(options.peers), []
    for model, kinds in KINDS.items():
        rows += turns(options, model, dtype, kinds, processes, peers)
    judgments = [
        verdict(f"{figure}, {processes} processes over one, dense", reached(rows, dtype, figure, "tp_size"), least, at_least=True)
        for figure, least in TARGETS.items()
    ]
    peer_rows: list[list[str]] = []
    if peers.python is not None:
        peer_rows = turns(options, "dense", "bf16", (AUTOTP, "tp_size"), processes, peers)
        judgments += [
            verdict(f"{figure}, over {AUTOTP}", reached(peer_rows, "bf16", figure, "tp_size"), 2.0, at_least=True)
            for figure in FIGURES[:-1]
        ]
    judgments += shares(dtype, peers) + readings(options, "bf16", peers)
    vllm_rows: list[list[str]] = []
    if options.serve_peers.exists():
        vllm_rows = turns(options, "dense", "bf16", (VLLM, "tp_size"), processes, peers, options.serve_peers)
        judgments += [
            verdict(f"{figure}, over {VLLM}'s {processes}", reached(vllm_rows, "bf16", figure, "tp_size"), 1.5, at_least=True)
            for figure in FIGURES[:-1]
        ]
    head = ["model", "figure", "processes", "tok/s, MB"]
    return "\n\n".join(
        (
            f"A random Mixtral (width {HIDDEN:,}, {LAYERS} layers of {EXPERTS} experts of {INNER:,} features) and a Llama (an MLP "
            f"of {2 * INNER:,}), {dtype}, on {processes} cores: one process of {processes} threads, or {processes} of one thread, "
            "which have whole experts (ep_size), columns of each (moe_tp_size) or of all products (tp_size). Tokens per second of "
            f"1 and 8 sequences ({NEW} new tokens of each) and of a prompt ({PROMPT} tokens, the last of three); MB of private "
            "memory of the largest process; median (min-max) of the rounds. The Llama in bf16 beside DeepSpeed's AutoTP (gloo and "
            f"its shared memory, transformers' `generate`), {processes} processes of one thread; {peers}.",
            table([*head, "over one process"], rows),
            *([table([*head, f"over {AUTOTP}"], peer_rows)] if peer_rows else []),
            *([table([*head, f"over {VLLM}"], vllm_rows)] if vllm_rows else []),
            verdicts(judgments),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--measure", required=True)
    parser.add_argument("--split")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-only", action="store_true")
    options = parser.parse_args()
    if options.split == AUTOTP:
        return measure_autotp(options.measure, options.dtype, options.processes)
    if options.split == VLLM:
        return measure_vllm(options.measure, options.dtype, options.processes)
    split = {options.split: options.processes} if options.split else {}
    measure(options.measure, options.dtype, split, options.threads, options.memory_only)


if __name__ == "__main__":
    main()

"""The legs: what each one asks, its level, the minutes that it may take, and the function that measures it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.worker import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, for the legs. `only` has names, or beginnings of names, of contenders; `rounds` is None for a leg's own."""

    peers: Path = ROOT / ".venv-peers" / "bin" / "python"  # with DeepSpeed
    serve_peers: Path = ROOT / ".venv-serve-peers" / "bin" / "python"  # with vLLM and llama.cpp
    clients: Path = ROOT / ".venv-clients" / "bin" / "python"  # with accelerate, transformers and Slipstream
    quick: bool = False
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    rounds: int | None = None
    before: Path | None = None  # a checkout of Slipstream to compare steps with

    def num_rounds(self, usual: int) -> int:
        return self.rounds or (1 if self.quick else usual)


@dataclass(frozen=True, slots=True)
class Leg:
    """A section of RESULTS.md. Level 1 is `make bench`, 2 is `make bench-all`, 0 is run by name only and writes nothing."""

    name: str
    level: int
    minutes: float  # on two cores
    question: str
    function: str  # MODULE:FUNCTION in benchmarks, which takes Options and `arguments` and returns the section
    needs: str = ""  # deepspeed or models: prepared before the leg's clock starts
    title: str = ""  # default: the name
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> str:
        return self.title or self.name

    def run(self, options: Options) -> str:
        module, _, function = self.function.partition(":")
        measure: Callable[..., str] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
        return measure(options, **self.arguments)


def _step(name: str, level: int, minutes: float, workload: str, question: str) -> list[Leg]:
    def leg(dtype: str) -> Leg:
        title = f"step, {workload if name == 'step' else name}, {dtype}"
        arguments = {"workload": workload, "contenders": name, "dtype": dtype}
        return Leg(name, level, minutes, question, "step:run", "deepspeed", title, arguments)

    return [leg("fp32"), leg("bf16")]


def _offload(name: str, level: int, minutes: float, micros: int, rounds: int, title: str) -> Leg:
    question = (
        f"seconds per step of {micros} micro-batches with states on disk, over compute and disk, a resident step, and DeepSpeed"
    )
    return Leg(name, level, minutes, question, "offload:run", "deepspeed", title, {"micros": micros, "rounds": rounds})


def _serve(name: str, level: int, minutes: float, question: str, needs: str = "models") -> Leg:
    return Leg(name, level, minutes, question, f"serving.{name}:run", needs, f"serve, {name}")


LEGS = (
    *_step("step", 1, 3.5, "moving", "seconds per training step over the floor: Slipstream, DeepSpeed, FSDP2 and DDP"),
    Leg("memory", 1, 4.5, "bytes per parameter over the formula of each ZeRO stage, and DeepSpeed's", "memory:run", "deepspeed"),
    Leg("wire", 1, 2.5, "bytes that a rank sends per step, over the formula", "wire:run", "deepspeed"),
    Leg("wire-axes", 2, 2, "bytes of a block in slices and in shares of sequences, over the formula", "wire:run_axes"),
    Leg("optimizer", 1, 1, "seconds per AdamW step, over its bytes at the rate of a stream", "optimizer:run", "deepspeed"),
    _offload("offload", 1, 5, 1, 3, "offload"),
    Leg("pipeline", 2, 4, "a pipeline of two stages over its bound, and DeepSpeed's", "layouts:pipeline", "deepspeed"),
    Leg("slices", 2, 5, "layers in two slices over the ideal; AutoTP and parallelize_module", "layouts:slices", "deepspeed"),
    Leg("embed", 2, 2, "MiniLM's vectors of 64 texts and of one over transformers; share of the rate of products", "embed:run"),
    Leg("streamed", 2, 5, "tokens per second of layers on disk over the disk's rate; accelerate's disk offload", "streamed:run"),
    Leg("anymodule", 2, 2, "a token of GPT-2 in transformers' code with our int8 layers, over torch's fp32 ones", "anymodule:run"),
    Leg(
        "experts",
        2,
        6,
        "a layer of experts over a dense one, DeepSpeed's and transformers'; its GPT on two ranks",
        "experts:run",
        "deepspeed",
    ),
    Leg("experts-split", 2, 3, "a layer whose experts are split over two ranks, and DeepSpeed's", "experts:beside", "deepspeed"),
    Leg("experts-products", 2, 0.5, "native grouped products over one of torch's for each expert", "expert_products:run"),
    Leg("experts-bytes", 2, 1, "bytes of split experts over the exact formula, and DeepSpeed's", "experts:bytes_sent", "deepspeed"),
    Leg("experts-link", 2, 1.5, "a shared expert that computes while rows travel over a link of 200 Mbit/s", "experts:link"),
    Leg("experts-resting", 2, 1, "bytes and seconds of an update that uses 2 of 32 experts", "resting:run"),
    Leg(
        "experts-quality",
        2,
        4,
        "the time in which experts reach the loss of a dense model of equal active parameters",
        "experts_quality:run",
        arguments={"systems": ("dense", "moe")},
    ),
    Leg(
        "experts-pyramid",
        2,
        4,
        "bytes and loss of PR-MoE and MoE after equal time",
        "experts_quality:run",
        arguments={"systems": ("moe", "pyramid")},
    ),
    Leg(
        "experts-quality-shared",
        2,
        4,
        "the same of one expert of 8 and a shared one",
        "experts_quality:run",
        arguments={"systems": ("dense", "shared")},
    ),
    Leg(
        "experts-quality-wide",
        2,
        14,
        "the same of models of twice the width, for 4 minutes each",
        "experts_quality:run",
        arguments={"systems": ("dense", "moe"), "width": 256, "seconds": 240.0},
    ),
    Leg("link", 2, 2, "a pipeline beside data parallelism over links of 200 Mbit/s", "layouts:link"),
    Leg("compressed", 2, 6, "seconds and bytes per step of 1-bit Adam and codes over links of 1 Gbit/s", "compressed:run"),
    Leg("groups", 2, 7, "bytes between two groups of ranks, seconds and loss of ZeRO++ over ZeRO-3", "groups:run"),
    Leg("rows", 2, 2, "bytes and seconds per step of an embedding-heavy model with sparse gradients", "rows:run"),
    Leg(
        "convergence",
        2,
        22,
        "the time to a fixed loss of 1-bit Adam and local steps over links of 100 and 400 Mbit/s",
        "convergence:run",
    ),
    Leg("dropping", 2, 9, "time, bytes and loss of progressive layer dropping over training all blocks", "dropping:run"),
    Leg("efficiency", 2, 4, "time per sample of random-LTD, and samples to equal loss of curricula", "efficiency:run"),
    Leg("moq", 2, 8, "perplexity of weights rounded to 8 and 4 bits in training (MoQ) and after it", "moq:run"),
    Leg("moq-smollm2", 2, 15, "the same for SmolLM2-135M", "moq:run_smollm2"),
    Leg(
        "sparse",
        2,
        12,
        "block-sparse attention over dense attention, and the longest sequence under a limit of memory",
        "sparse:run",
    ),
    Leg("fused", 2, 3, "a fused BertLayer over transformers' eager one and over torch.compile, and what it keeps", "fused:run"),
    Leg("states", 2, 3, "bytes per parameter over the formula, on pp, tp and both", "layouts:states"),
    Leg("predicted", 2, 3, "the time model of `slipstream plan --ranks` over measured steps of six layouts", "layouts:predicted"),
    Leg("sequences", 2, 8, "the longest sequence of a step under a limit of memory", "sequences:run"),
    _serve("solo", 1, 5, "tokens per second of one stream, 16 streams, a prompt and a mixed batch: vLLM and llama.cpp"),
    *_step("transports", 2, 12, "moving", "the same over gloo, without native kernels, at stage 0, and DeepSpeed's two reductions"),
    *_step("computing", 2, 8, "computing", "the same with more work per byte"),
    _offload("accumulation", 2, 8, 8, 1, "offload, 8 micro-batches"),
    Leg("kernels", 2, 8, "native kernels over torch and memcpy, cost of a call, vector instruction sets over AVX2", "kernels:run"),
    Leg("recipes", 2, 32, "validation loss of `examples/pretrain` with fewer bytes per parameter, over fp32 states", "recipes:run"),
    Leg("quality", 2, 2, "perplexity in int8 and int4 over bf16's", "quality:run"),
    Leg("verdict", 2, 0.2, "Python's time for a step's agreement on norm and clipping, simulated for 1,024 ranks", "agreement:run"),
    Leg(
        "flops",
        2,
        1,
        "what the flops profiler counts for five models over formulas; DeepSpeed's",
        "profiling:run_flops",
        "deepspeed",
    ),
    Leg("profiling", 2, 1, "what the flops profiler adds to the step that it profiles", "profiling:run_profiling"),
    Leg("tune", 2, 15, "what `slipstream tune` chooses over the best of an exhaustive grid, and its time", "tuning:run"),
    Leg("monitors", 2, 4, "what monitors add to a step of 50 ms, and what one that hangs adds", "monitors:run"),
    Leg("logs", 2, 2, "what comms_logger and wall_clock_breakdown add to a step of two ranks", "monitors:run_logs"),
    Leg("restart", 2, 4, "seconds until a run trains again after a rank is killed, and the steps lost", "restart:run"),
    Leg("kills", 2, 12, "steps that 200 kills of ranks at random moments lose, and whether anything else is", "restart:run_kills"),
    Leg("disk", 2, 3, "bytes per second of the disk layer over fio's", "disk:run"),
    Leg("save", 2, 5, "seconds until a checkpoint is on disk: fio, torch.save, DeepSpeed; 200 kills", "save:run", "deepspeed"),
    Leg("install", 2, 2, "seconds from a wheel to the first training step in an environment without a compiler", "install:run"),
    Leg("clients", 2, 3, "seconds per step through accelerate and transformers' Trainer, over the native loop", "clients:run"),
    _serve("shared", 2, 6, "seconds for prompts with 90 % in common: without the prefix cache, vLLM and llama.cpp"),
    _serve("poisson", 2, 23, "requests per second within one latency target, at rising arrival rates: vLLM and llama.cpp"),
    _serve("mixture", 2, 3, "tokens per second of one stream from a random Mixtral: llama.cpp and transformers", needs=""),
    _serve("k_quants", 2, 3, "tokens per second of one stream from a Q4_K_M file, and memory over the file: llama.cpp", needs=""),
    _serve("long", 2, 3, "a token of one stream after 8,192 positions over its bytes, and two threads over one", needs=""),
    _serve("adapters", 2, 6, "tokens per second of requests with 8 LoRA adapters, over the base alone: vLLM"),
    _serve("draft", 2, 2, "tokens per second of one stream with a draft model of an eighth of the size, over without", needs=""),
    _serve("gpt2", 2, 5, "tokens per second of a random GPT-2, one stream and 16: vLLM", needs=""),
    Leg("serve-ranks", 2, 18, "tokens per second of models over two processes", "serve_ranks:run", "deepspeed", "serve, ranks"),
    _serve("load", 2, 5, "seconds from the start of a process to its first token, and of `slipstream serve` to its first answer"),
    _serve("stall", 2, 2, "the longest gap in a stream while others send requests that are expensive to prepare", needs=""),
    _serve(
        "fair",
        2,
        4,
        "the first token of one API key's requests while another key floods the queue, over an idle server's",
        needs="",
    ),
    _serve("replicas", 2, 8, "two engines with a core each over one: tokens, prefix hits, time of a token, stalls", needs=""),
    Leg(
        "cuda",
        0,
        60,
        "on a GPU: training with states in host memory, serving a Llama of 1.2 billion weights, block-sparse attention",
        "cuda:run",
    ),
)
MINUTES = ("minutes, level 1", "minutes, level 2")
ORDER = (*MINUTES, *(leg.section for leg in LEGS if leg.level))  # of the sections of RESULTS.md

"""The legs `flops` and `profiling`: what the flops profiler counts, over formulas, and what a profiled step takes.

FLOP are of models of transformers, of a size that one core runs, with random weights; DeepSpeed's profiler counts a forward of the
same models in its own process. A step's time is measured as in the leg `monitors`: profiled and other steps alternate.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.report import percent_over, table, verdict, verdicts
from benchmarks.worker import Failed, Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

B, S, V, D, H, F, LAYERS = 2, 128, 1024, 256, 8, 688, 4  # samples, tokens, vocabulary, width, heads, width of the MLP
KV, EXPERTS, TOP = 4, 8, 2  # key heads; experts, and of those a token's
WIDTHS, DEPTHS, PIXELS = (256, 512, 1024, 2048), (3, 4, 6, 3), 224  # of ResNet-50
NAMES = ("GPT-2", "BERT", "Llama", "Mixtral", "ResNet-50")
MODES = ("off", "off again", "on")
SIZES = {"dim": 192, "layers": 3, "heads": 4, "hidden": 768}
ROUNDS = 300


def _model(name: str) -> tuple[Any, Any]:
    """A model and what its forward takes."""
    hf: Any = importlib.import_module("transformers")  # whose types of arguments are wide

    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0))
    end = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    decoder = {"num_hidden_layers": LAYERS, "num_attention_heads": H, "num_key_value_heads": KV, "intermediate_size": F}
    decoder |= {"hidden_size": D, "vocab_size": V, **end}
    torch.manual_seed(0)
    if name == "GPT-2":
        config = hf.GPT2Config(n_embd=D, n_layer=LAYERS, n_head=H, vocab_size=V, n_positions=S, attn_pdrop=0.0, **end)
        return hf.GPT2LMHeadModel(config), tokens
    if name == "BERT":
        sizes = {**decoder, "intermediate_size": 4 * D, "attention_probs_dropout_prob": 0.0}
        sizes.pop("num_key_value_heads")
        return hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=S, **sizes)), tokens
    if name == "Llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), tokens
    if name == "Mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOP, **decoder)), tokens
    config = hf.ResNetConfig(hidden_sizes=list(WIDTHS), depths=list(DEPTHS), num_labels=V)
    return hf.ResNetForImageClassification(config), torch.randn(B, 3, PIXELS, PIXELS)


def formula(name: str) -> tuple[int, int]:
    """FLOP of a forward and of its backward, which has two products for each one, and for attention, which computes the scores
    again, five for each two (four with dropout, which the CPU's flash attention lacks). The first convolution has no gradient of
    its input."""
    if name == "ResNet-50":
        stem, rest = _resnet()
        return stem + rest, stem + 2 * rest
    keys = KV * D // H
    weights = {
        "GPT-2": LAYERS * 12 * D * D + D * V,
        "BERT": LAYERS * 12 * D * D + D * D + D * V,
        "Llama": LAYERS * (2 * D * D + 2 * D * keys + 3 * D * F) + D * V,
        "Mixtral": LAYERS * (2 * D * D + 2 * D * keys + D * EXPERTS + TOP * 3 * D * F) + D * V,
    }[name]
    products, scores = 2 * B * S * weights, LAYERS * 4 * B * S * S * D
    return products + scores, 2 * products + scores * 5 // 2


def _resnet() -> tuple[int, int]:
    """FLOP of a forward: of the first convolution, and of the rest."""
    side, width, macs = PIXELS // 4, 64, 0
    for stage, (out, depth) in enumerate(zip(WIDTHS, DEPTHS, strict=True)):
        inner, before = out // 4, side
        side = side if stage == 0 else side // 2
        macs += before**2 * width * inner + side**2 * (9 * inner**2 + inner * out + width * out)  # with the shortcut
        macs += (depth - 1) * side**2 * (2 * out * inner + 9 * inner**2)
        width = out
    return 2 * B * (PIXELS // 2) ** 2 * 64 * 3 * 49, 2 * B * (macs + width * V)


def ours(channel: Channel) -> None:
    """A worker's target: its handler counts a forward and backward."""
    torch.set_num_threads(1)
    from slipstream.observe.profile import FlopsProfiler

    def count(name: str) -> list[int]:
        model, batch = _model(name)
        profiler = FlopsProfiler(model.train())
        profiler.start_profile()
        model(batch).logits.sum().backward()
        profiler.stop_profile()
        return [profiler.get_total_flops(), profiler.get_total_backward_flops()]

    channel.serve({"count": count})


def deepspeed(channel: Channel, packages: str) -> None:
    """A worker's target: its handler counts a forward. packages: where transformers is, which the peer's environment lacks."""
    sys.path.append(packages)
    torch.set_num_threads(1)
    from deepspeed.profiling.flops_profiler import get_model_profile

    def count(name: str) -> list[int]:
        model, batch = _model(name)
        return [int(get_model_profile(model, args=[batch], print_profile=False, as_string=False, warm_up=0)[0])]

    channel.serve({"count": count})


def run_flops(options: Options) -> str:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None, "the development environment has transformers"
    rows, judged = [], []
    with (
        Worker("benchmarks.profiling:ours", name="slipstream") as own,
        Worker(
            "benchmarks.profiling:deepspeed",
            {"packages": str(Path(spec.origin).parents[1])},
            name="deepspeed",
            python=options.peers,
        ) as peer,
    ):
        own.ready()
        peer.ready()
        for name in NAMES:
            exact, counted = formula(name), own.call("count", name=name)
            try:
                told = f"{100 * (peer.call('count', name=name)[0] / exact[0] - 1):+.2f}"
            except Failed as error:
                told = error.reason
            off = [100 * (a / b - 1) for a, b in zip(counted, exact, strict=True)]
            rows.append([name, f"{exact[0] / 1e9:.3f}", f"{exact[1] / 1e9:.3f}", *(f"{each:+.2f}" for each in off), told])
            judged.append(verdict(f"{name}: % off the formula, the larger of both", max(map(abs, off)), 1.0))
    return "\n\n".join(
        (
            f"Models of transformers with {LAYERS} layers of width {D}, {B} samples of {S} tokens, and ResNet-50 with {B} images "
            f"of {PIXELS} pixels. FLOP of products, convolutions and attention. DeepSpeed's profiler takes twice its forward for "
            "the backward; here the backward is counted.",
            table(
                [
                    "model",
                    "formula, forward, GFLOP",
                    "backward",
                    "ours, forward, % off",
                    "backward, % off",
                    "DeepSpeed, forward, % off",
                ],
                rows,
            ),
            verdicts(judged),
        )
    )


def steps(channel: Channel) -> None:
    """A worker's target: its handler makes rounds of a step in each mode, and returns their seconds and those of the counting."""
    torch.set_num_threads(1)
    import slipstream
    from slipstream.observe.profile import FlopsProfiler

    models = example("model")
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = slipstream.initialize(model=models.LanguageModel(models.ModelConfig(vocab_size=V, **SIZES)), config=config)[0]
    profiler, tokens, draws = FlopsProfiler(engine.module, engine), torch.randint(V, (2, S)), random.Random(0)

    def step(mode: str) -> tuple[float, float]:
        if mode == "on":
            profiler.start_profile()
        begin = time.perf_counter()
        engine.backward(engine(tokens, tokens))
        engine.step()
        seconds = time.perf_counter() - begin
        counting = profiler.counting_s if mode == "on" else 0.0
        profiler.stop_profile()
        return seconds - counting, counting

    def run(rounds: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        counting = []
        for _ in range(rounds):
            for mode in draws.sample(MODES, len(MODES)):
                took, counted = step(mode)
                seconds[mode].append(took)
                counting += [counted] if counted else []
        return {"seconds": seconds, "counting": counting}

    channel.serve({"run": run})


def run_profiling(options: Options) -> str:
    rounds = options.num_rounds(ROUNDS)
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with Worker("benchmarks.profiling:steps", name="profiling", core=0, env=env) as worker:
        worker.ready()
        counting = worker.call("run", rounds=3)["counting"][0]
        told = worker.call("run", rounds=rounds)
    off = told["seconds"]["off"]
    usual = statistics.median(off)
    over = percent_over(told["seconds"])
    return "\n\n".join(
        (
            f"A GPT of {SIZES['layers']} blocks of width {SIZES['dim']}, {2 * S} tokens, fp32, one core; {rounds} rounds of a step "
            "without the profiler, one without it again, and one with it. Medians of rounds, in % of a step without it. FLOP of "
            "a batch's shape are counted once, on tensors without memory, in the step before, which that time is added to.",
            table(
                ["ms of a step without", "without again, %", "profiled, %", "counting once, ms"],
                [[f"{1e3 * usual:.1f}", f"{over['off again']:+.2f}", f"{over['on']:+.2f}", f"{1e3 * counting:.1f}"]],
            ),
            verdicts([verdict("profiled: % of a step", over["on"], 3.0)]),
        )
    )

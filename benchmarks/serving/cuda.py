"""`python -m benchmarks.serving.cuda`: a Llama of 1.2 billion random weights in bf16 on one GPU, ours beside transformers.

Single stream and batch 64, prompts of 128 tokens. What is measured is a generated token: the time of a long answer less that of a
short one, so that neither the prompts nor the start count. The limit is reading each weight once per forward at the rate at which
this GPU copies its memory (bytes read and written), measured in the same process. Needs a GPU, triton and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

BATCHES = (1, 64)
PROMPT, SHORT, LONG = 128, 16, 144  # tokens
LLAMA_1B = {  # meta-llama/Llama-3.2-1B
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate() -> float:
    """Bytes/s, read and written, of copies that no cache holds."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def per_token(generate: Callable[[int], object], rounds: int) -> float:
    """Median seconds of a forward that generates; `generate(n)` makes n tokens of each prompt."""
    generate(SHORT)
    return statistics.median(
        (seconds(lambda: generate(LONG)) - seconds(lambda: generate(SHORT))) / (LONG - SHORT) for _ in range(rounds)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.cuda", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bf16", "int8", "int4"), default="bf16", help="our weights")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none here")

    import transformers

    import slipstream

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_1B)).bfloat16().eval()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())  # the tied head once: the embedding is looked up
    rate = copy_rate()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copies at {rate / 1e12:.2f} TB/s (read and written)")
    print(f"weights: {weight_bytes / 1e9:.2f} GB in bf16, at least {1e3 * weight_bytes / rate:.3f} ms per forward")
    serving = slipstream.init_inference(model, dtype=args.dtype, device="cuda", max_running=max(BATCHES), max_context=1024)
    print(serving.description)
    if "Triton kernels" not in serving.description:
        raise SystemExit("that is not the forward to be measured; its reason is in the line above")
    for batch in BATCHES:
        ids = torch.randint(1, LLAMA_1B["vocab_size"], (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
        ours = per_token(partial(_ours, serving, ids.tolist()), args.rounds)
        peer = per_token(partial(_theirs, model, ids.cuda()), args.rounds)
        print(
            f"batch {batch:2}: ours {1e3 * ours:.3f} ms per token, {batch / ours:,.0f} tok/s, "
            f"{weight_bytes / rate / ours:.2f} of bf16's limit; transformers {1e3 * peer:.3f} ms, {batch / peer:,.0f} tok/s; "
            f"ours is {peer / ours:.1f} times as fast"
        )
    serving.close()


def _ours(serving: Any, prompts: list[list[int]], new: int) -> None:
    serving.generate(prompts, max_new_tokens=new, temperature=0, ignore_eos=True)


def _theirs(model: Any, ids: torch.Tensor, new: int) -> None:
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)  # no token ends it


if __name__ == "__main__":
    main()

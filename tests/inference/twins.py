"""Tiny random transformers models, and a hand-written loop that serves them: greedy, with random chunks, fused in one batch."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from slipstream.inference.core import Batch, Chunk, Request, Runner, SamplingParams
from slipstream.inference.decoder import Decoder, head_shapes
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.models import from_hf, from_state

VOCAB = 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPTS = [[i * i % (VOCAB - 1) + 1 for i in range(length)] for length in (5, 19, 33)]  # no 0: generate hides padding
NEW = 10


def tiny(family: str, **changes: Any) -> Any:
    """A causal model of `family` ("Llama": LlamaConfig, LlamaForCausalLM) whose every weight, bias and norm is random."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**changes)
    name = family.removesuffix("Text")  # of a family that also sees: Gemma3TextConfig, Gemma3ForCausalLM
    model = getattr(transformers, f"{name}LMHeadModel" if family == "GPT2" else f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def decoder_of(model: Any, num_blocks: int = 64, block_size: int = 4) -> Decoder:
    config = from_hf(model.config.to_dict())
    cache = KVCache(head_shapes(config), num_blocks=num_blocks, block_size=block_size, dtype=torch.float32)
    return Decoder(config, from_state(config, model.state_dict()), cache, torch.float32)


def serve(runner: Runner, guesses: Sequence[Sequence[int]], seed: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy continuations of PROMPTS and the logits [NEW, vocab] they were chosen from.

    Every forward computes of each unfinished request a random number of its tokens, and, when that samples, at times two
    drafts from `guesses`, the second of them wrong.
    """
    rng = random.Random(seed)
    free = rng.sample(range(runner.num_blocks), runner.num_blocks)
    requests = [Request(id=str(i), tokens=list(prompt), params=SamplingParams()) for i, prompt in enumerate(PROMPTS)]
    logits: list[list[torch.Tensor]] = [[] for _ in requests]
    while left := [r for r in requests if r.num_generated < NEW]:
        chunks = []
        for r in left:
            stop = rng.randint(r.num_computed + 1, len(r.tokens))
            guess = guesses[int(r.id)][len(r.tokens) : len(r.tokens) + 2]
            drafts = stop == len(r.tokens) and len(guess) == 2 and r.num_generated + 3 <= NEW and rng.random() < 0.5
            draft = (guess[0], (guess[1] + 1) % VOCAB) if drafts else ()
            while len(r.blocks) * runner.block_size < stop + len(draft):
                r.blocks.append(free.pop())
            chunks.append(Chunk(r, r.num_computed, stop, draft))
        out: Any = runner.forward(Batch(tuple(chunks), ()))
        out = torch.tensor(out) if isinstance(out, np.ndarray) else out
        assert (out.dtype, out.shape) == (torch.float32, (sum(chunk.num_rows for chunk in chunks), runner.vocab_size))
        row = 0
        for chunk in chunks:
            r, lines = chunk.request, out[row : row + chunk.num_rows]
            row += chunk.num_rows
            r.num_computed = chunk.stop
            for i, line in enumerate(lines):
                logits[int(r.id)].append(line.clone())
                r.tokens.append(int(line.argmax()))
                if i == len(chunk.draft) or chunk.draft[i] != r.tokens[-1]:
                    break
                r.num_computed += 1
    return [r.tokens for r in requests], [torch.stack(rows) for rows in logits]


@torch.inference_mode()
def check_against_generate(model: Any, runner: Runner, *, tolerance: float = 2e-4) -> None:
    """Served as `model.generate` does it greedily, twice, with different chunks; and from the same logits."""
    expected = [model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist() for prompt in PROMPTS]
    for seed in (1, 2):
        tokens, chosen_from = serve(runner, expected, seed)
        for tokens_out, reference_ids, logits in zip(tokens, expected, chosen_from, strict=True):
            begin = len(tokens_out) - NEW
            reference = model(torch.tensor([tokens_out])).logits[0, begin - 1 : -1].float()
            torch.testing.assert_close(logits, reference, rtol=tolerance, atol=tolerance)
            if tokens_out != reference_ids:
                first = next(i for i in range(NEW) if tokens_out[begin + i] != reference_ids[begin + i])
                top = reference[first].topk(2).values
                assert top[0] - top[1] < 1e-4, (tokens_out[begin:], reference_ids[begin:])

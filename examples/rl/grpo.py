"""Teach a small model by its own samples (GRPO, arXiv:2402.03300): train under ZeRO-3, generate with the serving engine in between.

    slipstream run --nproc 2 examples/rl/grpo.py                                # a minute on two cores
    slipstream run --nproc 2 examples/rl/grpo.py --steps 200 --kl 0.1

Each step: the trainer hands its weights to the inference engine, unit by unit; that answers every prompt `--group` times; a rule
gives each answer its reward; and the trainer learns from how an answer's reward differs from its group's mean. The server's
log-probability of a token and the trainer's are bit-identical, so the ratio of the two policies is exactly 1, and the
script stops where it is not. A frozen copy of the first model, sharded as well, holds the policy near where it began.

The task, so that it needs no data: count upwards from the prompt's last token, modulo the vocabulary.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.inference import Completion, SamplingParams, ServedForward, token_logprobs

VOCABULARY = 16
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
    "steps_per_print": 1_000_000,
}
FROZEN = {key: value for key, value in CONFIG.items() if key != "optimizer"}


def small_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def reward(prompt: list[int], answer: list[int]) -> float:
    """The share of tokens that are one more than the token before them."""
    pairs = zip([prompt[-1], *answer], answer, strict=False)
    return sum(after == (before + 1) % VOCABULARY for before, after in pairs) / len(answer)


def batch_of(prompts: list[list[int]], answers: list[Completion]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of prompt and answer, padded on the right; for tokens but the first, whether generated and the server's logprob."""
    rows = [torch.tensor(prompt + answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    generated, sampled = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        part = slice(len(prompt), len(rows[i]))
        generated[i, part] = True
        sampled[i, part] = torch.tensor([entry.logprob for entry in answer.logprobs or ()])
    return ids, generated[:, 1:], sampled[:, 1:]


def logprobs_of(engine: Any, served: ServedForward, ids: Tensor) -> Tensor:
    """Of each row's tokens but the first."""
    return token_logprobs(engine(input_ids=ids).logits[:, :-1], ids[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=8, help="of each rank and step")
    parser.add_argument("--group", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=12, help="of an answer")
    parser.add_argument("--kl", type=float, default=0.01, help="how much it costs to leave the first model")
    options = parser.parse_args()

    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # a server and a trainer on a GPU differ in rounding; on the CPU they have the same bits
    )
    slipstream.init_distributed()
    policy, first = small_model(), small_model().requires_grad_(False)
    server = slipstream.init_inference(policy.config, dtype="fp32", device="cpu", kv_cache_bytes="16M", max_running=64)
    engine = slipstream.initialize(model=policy, config=CONFIG)[0]
    reference = slipstream.initialize(model=first, config=FROZEN)[0]
    served, served_reference = ServedForward(engine.module), ServedForward(reference.module)
    choice = random.Random(engine.rank)

    for step in range(options.steps):
        began = time.perf_counter()
        server.update_weights(engine.named_weights())
        prompts = [[choice.randrange(VOCABULARY) for _ in range(choice.randint(1, 6))] for _ in range(options.prompts)]
        sampling = SamplingParams(max_tokens=options.tokens, logprobs=0, seed=choice.getrandbits(60))
        answers = server.generate(prompts, sampling, n=options.group)
        row_prompts = [prompt for prompt in prompts for _ in range(options.group)]
        rewards = torch.tensor([reward(prompt, answer.token_ids) for prompt, answer in zip(row_prompts, answers, strict=True)])
        groups = rewards.view(options.prompts, options.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        ids, generated, sampled = batch_of(row_prompts, answers)
        with served_reference, torch.no_grad():
            before = logprobs_of(reference, served_reference, ids)
        with served:
            logprobs = logprobs_of(engine, served, ids)
            assert logprobs[generated].equal(sampled[generated]), "the trainer and the server are not the same policy"
            ratio = (logprobs - sampled).exp()  # 1 in value; its gradient is the policy's
            away = (before - logprobs).exp() - (before - logprobs) - 1  # an estimate of the KL divergence, never below 0
            losses = options.kl * away - advantages * ratio
            engine.backward(losses[generated].mean())
        engine.step()
        if engine.rank == 0 and (step % 10 == 9 or step == 0):
            kl, seconds = away[generated].mean().item(), time.perf_counter() - began
            print(f"step {step + 1:3}   reward {rewards.mean():.2f}   KL to the first model {kl:.3f}   {seconds:.2f} s", flush=True)

    if engine.rank == 0:
        print(f"log-probabilities of the server and the trainer: the same bits in all {options.steps} steps")
        print(f"after 5 6 7: {server.generate([5, 6, 7], max_new_tokens=8).token_ids}")
    for model in (reference, engine):
        model.destroy()
    server.close()


if __name__ == "__main__":
    main()

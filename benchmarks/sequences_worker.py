"""The contenders of the leg `sequences`, in a rank: a Llama of 25 million parameters of transformers, with a vocabulary of 32,000.

plain   transformers with torch's AdamW
keep    Slipstream, with shares of the sequence (Ulysses) if there are several ranks
all     the same with recomputed blocks, MLPs in tiles, and a loss without the logits of all tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layouts_worker import ADAMW

if TYPE_CHECKING:
    from benchmarks.worker import Channel

WIDTH, DEPTH, HEADS, VOCAB = 256, 8, 4, 32_000
TILE = 512  # tokens of an MLP's tile


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=1 << 20,
    )
    return LlamaForCausalLM(config)


class TiledForCausalLM(nn.Module):
    """A decoder of transformers whose MLPs and loss are computed in tiles."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config
        self.exchange: Any = None  # of the ranks of a sequence; set after initialize
        for layer in model.model.layers:
            layer.mlp.forward = _tiled(layer.mlp.forward)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        from slipstream.activations import fused_linear_cross_entropy
        from slipstream.parallel.sequence import sequence_mean

        hidden = self.inner.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        total = fused_linear_cross_entropy(hidden, self.inner.lm_head.weight, labels, reduction="sum")
        return sequence_mean(total, (labels != -100).sum(), self.exchange)


def _tiled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    from slipstream.activations import tiled_mlp

    return lambda x: tiled_mlp(forward, x, max(1, x.shape[1] // TILE))


def train(channel: Channel, system: str) -> None:
    """The target of a rank. Its handler makes a step on one sequence of `length` tokens and returns the loss."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    step = _plain() if system == "plain" else _ours(system == "all")

    def run(length: int) -> float:
        ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        return float(step(ids).detach())

    channel.serve({"step": run})


def _plain() -> Callable[[Tensor], Tensor]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"])

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _ours(tiled: bool) -> Callable[[Tensor], Tensor]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    size = dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": 2**31,
        "slipstream": {"mesh": {"sp": size}, "activations": "recompute" if tiled else "keep"},
    }
    model = TiledForCausalLM(llama()) if tiled else llama()
    engine = slipstream.initialize(model=model, config=config)[0]
    if tiled:
        model.exchange = engine.exchange("sp")

    def step(ids: Tensor) -> Tensor:
        if tiled and size == 1:  # the labels of shares are shifted before the model's forward
            loss = engine(input_ids=ids, labels=nn.functional.pad(ids, (0, 1), value=-100)[:, 1:])
        else:
            loss = engine(input_ids=ids, labels=ids)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        engine.backward(loss)
        engine.step()
        return loss

    return step

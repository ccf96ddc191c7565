"""The script that the leg `tune` tunes: a training loop that knows nothing of the tuner. `--model gpt`, `mlp` or `conv`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream

STEPS = 10_000
LENGTH, VOCABULARY, IMAGE = 64, 2048, 32


class GPT(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer: dict[str, Any] = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embed(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class MLP(nn.Module):
    """Many weights and little work for each: communication and the optimizer weigh most."""

    def __init__(self, width: int = 768, depth: int = 6) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth))
        self.blocks = nn.ModuleList(map(Residual, layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Conv(nn.Module):
    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(depth))
        self.blocks = nn.ModuleList(map(Residual, layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.int64))


MODELS = {"gpt": GPT, "mlp": MLP, "conv": Conv}


def batch(model: str, rows: int) -> Tensor:
    if model == "gpt":
        return torch.randint(VOCABULARY, (rows, LENGTH))
    return torch.randn(rows, 768) if model == "mlp" else torch.randn(rows, 3, IMAGE, IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    arguments = slipstream.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    engine, *_ = slipstream.initialize(args=arguments, model=MODELS[arguments.model]())
    for _ in range(STEPS * engine.plan.batch.accumulation):
        engine.backward(engine(batch(arguments.model, engine.plan.batch.micro_batch_size)))
        engine.step()


if __name__ == "__main__":
    main()

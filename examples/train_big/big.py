"""A few steps of a model that is far too big for the memory: the training script, as any other.

    slipstream run --nproc 1 examples/train_big/big.py      # held to a budget, and drawn: make train-big

The model is that of examples/pretrain with more and wider layers, the text is the same. `--plain` trains it with nothing but
torch: DistributedDataParallel and AdamW.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import slipstream

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "pretrain"))

import data  # noqa: E402
from model import LanguageModel, ModelConfig  # noqa: E402

VOCAB_SIZE = 8192


def main() -> None:
    args = parse_arguments()
    slipstream.init_distributed()
    config = ModelConfig(vocab_size=VOCAB_SIZE, dim=args.dim, layers=args.layers, heads=args.dim // 64, hidden=args.hidden)
    corpus = data.load(data.prepare(args.data, args.out, VOCAB_SIZE), args.context)
    windows = corpus.train()
    (train_plainly if args.plain else train)(config, windows, args)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data.standard_library(), help="folder of text files to learn")
    parser.add_argument("--out", type=Path, default=Path("runs/train-big"), help="where states rest and results are written")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=54)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead")
    return parser.parse_args()


def train(config: ModelConfig, windows: data.Windows, args: argparse.Namespace) -> None:
    """Built on meta, so that nothing is in memory before it has a place; states rest in files that have no name."""
    ds_config = json.loads((HERE / "ds_config.json").read_text())
    for block in ("offload_optimizer", "offload_param"):
        ds_config["zero_optimization"][block]["nvme_path"] = str(args.out)
    with torch.device("meta"):
        model = LanguageModel(config)
    engine, *_ = slipstream.initialize(model=model, config=ds_config)
    report("ready", parameters=sum(parameter.numel() for parameter in model.parameters()))
    began = time.perf_counter()
    for step in range(args.steps):
        tokens, targets = windows[step * 997 % len(windows)]
        loss = engine(tokens.unsqueeze(0), targets.unsqueeze(0))
        engine.backward(loss)
        engine.step()
        report("step", step=step + 1, loss=loss.item(), seconds=time.perf_counter() - began)
        began = time.perf_counter()
    engine.destroy()
    report("done")


def train_plainly(config: ModelConfig, windows: data.Windows, args: argparse.Namespace) -> None:
    model = nn.parallel.DistributedDataParallel(LanguageModel(config).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    report("ready", parameters=sum(parameter.numel() for parameter in model.parameters()))
    for step in range(args.steps):
        tokens, targets = windows[step * 997 % len(windows)]
        loss = model(tokens.unsqueeze(0), targets.unsqueeze(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report("step", step=step + 1, loss=loss.item())
    report("done")


def report(event: str, **values: float) -> None:
    """A line for whoever watches."""
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main()

"""Pretrain a small Llama-style language model on real text, under any ZeRO stage.

    slipstream run --nproc 2 examples/pretrain/train.py            # or: make train
    slipstream run --nproc 2 examples/pretrain/train.py --resume   # resume from the last checkpoint
    slipstream run --nproc 2 examples/pretrain/train.py --experts 8 --ep 2   # a mixture of experts, half of them on each rank

The text is the source of the installed Python standard library, or `--data DIR`. How it trains (stage,
precision, batch, optimizer, schedule) is `ds_config.json`, in DeepSpeed's own format: to change the stage,
change one digit there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import data
import report
import slipstream
from model import Attention, First, LanguageModel, Last, Middle, ModelConfig, arithmetic_dtype
from slipstream.attention import causal_attention
from slipstream.checkpoint import latest_tag
from slipstream.moe import expert_loads
from slipstream.parallel.sequence import ulysses_attention

HERE = Path(__file__).parent
VOCAB_SIZE = 8192
CONTEXT = 256
EMBEDDING_LR = 30  # times the rate of the rest
LOG_EVERY = 5  # steps: the losses between are averaged over them and over the ranks
EVALUATION_BATCH = 4  # windows per rank
SLICES = [  # which layers tensor parallelism cuts, and how
    {"patterns": [r".*attention\.qkv\.weight"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r".*mlp\.up\.weight"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r".*attention\.out\.weight", r".*mlp\.down\.weight"], "partition_type": "row"},
]
GLANCE_BATCHES = 3  # per rank: a look at the validation loss in the middle of training


def main() -> None:
    args = parse_arguments()
    slipstream.init_distributed()
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)

    corpus = shared_corpus(args)
    forget_peak_memory()
    config = json.loads(args.config.read_text())
    steps = plan_steps(config, args)
    torch.manual_seed(args.seed)
    model_config = ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), experts=args.experts)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in LanguageModel(model_config).parameters())
    model = build(model_config, args.pp)
    own = config.setdefault("slipstream", {})
    own["monitors"] = {"report": {"path": str(args.out / "report.html"), "title": "Pretraining"}} | own.get("monitors", {})
    if args.pp * args.tp * args.sp > 1:
        if args.pp > 1:  # as many micro-batches in a step as keep the stages busy
            config["gradient_accumulation_steps"] = max(config.get("gradient_accumulation_steps", 1), 4 * args.pp)
        own["mesh"] = {"pp": args.pp, "tp": args.tp, "sp": args.sp}
        config["tensor_parallel"] = {"partition_config": {"layer_specs": SLICES, "use_default_specs": False}}
    if args.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": args.ep}
    engine, _, loader, _ = slipstream.initialize(
        model=model,
        model_parameters=parameter_groups(model, config["optimizer"]["params"]["lr"]),
        training_data=corpus.train(),
        config=config,
    )
    history = report.History()
    if args.resume:
        _, client_state = engine.load_checkpoint(args.out / "checkpoints")
        history = report.History(**client_state["history"])
    console.print(opening(engine, model_config, num_parameters, corpus))

    share_attention(engine)
    train(engine, loader, corpus, history, steps, args, console)
    save(engine, history, args)
    validation_loss = evaluate(engine, corpus)
    engine.log({"validation_loss": validation_loss})
    memory = peak_memory(engine.device)
    if rank == 0:
        report.plot(history, validation_loss, corpus.facts, args.out / "loss.png")
    console.print(report.summary(history, validation_loss, corpus.facts, memory))
    if args.pp == 1:  # a pipeline has no forward that returns logits to all ranks
        console.print("\nFrom the prompt, which is the first line, the model writes:\n")
        console.print(complete(engine, corpus, args), markup=False)
    checkpoint = f"{args.out}/checkpoints/{tag(engine)}"
    engine.destroy()
    console.print(f"\nWritten: {args.out}/report.html, {args.out}/loss.png, {checkpoint}")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data.standard_library(), help="folder of text files to learn")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), help="where everything is written")
    parser.add_argument("--config", type=Path, default=HERE / "ds_config.json", help="DeepSpeed configuration")
    parser.add_argument("--steps", type=int, help="last step (default: the schedule's total_num_steps)")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--glance-every", type=int, default=100, help="steps between looks at the validation loss")
    parser.add_argument("--prompt", default="def read_lines(path, encoding=None):", help="what the model goes on from")
    parser.add_argument("--new-tokens", type=int, default=120, help="how many tokens it writes")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; a step has at least 4 micro-batches for each")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--sp", type=int, default=1, help="ranks that share each sequence (Ulysses); they divide the heads")
    parser.add_argument("--experts", type=int, default=0, help="experts in place of each MLP, of which a token uses two")
    parser.add_argument("--ep", type=int, default=1, help="ranks that have different experts")
    return parser.parse_args()


def build(config: ModelConfig, stages: int) -> torch.nn.Module:
    """The model, or the layers of this rank's pipeline stage."""
    if stages == 1:
        return LanguageModel(config)
    specs = [slipstream.LayerSpec(First, config)]
    specs += [slipstream.LayerSpec(Middle, config) for _ in range(config.layers)]
    specs += [slipstream.LayerSpec(Last, config)]
    return slipstream.PipelineModule(specs, num_stages=stages, loss_fn=loss_of)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=data.IGNORED)


def share_attention(engine: slipstream.Engine, shared: bool = True) -> None:
    """With --sp, each rank has a part of every sequence; its attention computes a part of the heads on whole sequences."""
    if engine.mesh.sp.size > 1:
        attend = partial(ulysses_attention, causal_attention, exchange=engine.exchange("sp"))
        for module in engine.module.modules():
            if isinstance(module, Attention):
                module.attend = attend if shared else causal_attention


def own_part(engine: slipstream.Engine, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
    """This rank's part of some sequences, and its first position."""
    sp, device = engine.mesh.sp, engine.device
    length = tokens.shape[1] // sp.size
    part = slice(sp.index * length, (sp.index + 1) * length)
    return tokens[:, part].to(device), targets[:, part].to(device), part.start


def shared_corpus(args: argparse.Namespace) -> data.Corpus:
    """Each host's first process builds the packed text unless it is there, the others wait for it, and all
    ranks see that they have read the same."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        folder = data.prepare(args.data, args.out, VOCAB_SIZE)
    dist.barrier()
    if not first:
        folder = data.prepare(args.data, args.out, VOCAB_SIZE)
    folders: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(folders, folder.name)
    if len(set(folders)) > 1:
        raise ValueError(f"--data {args.data}: the ranks have read different text ({folders}); copy it to every host")
    return data.load(folder, CONTEXT)


def parameter_groups(model: torch.nn.Module, lr: float) -> list[dict[str, Any]]:
    """The embedding at EMBEDDING_LR times the rate, without decay: only the rows of tokens seen move."""
    embedding = [parameter for name, parameter in model.named_parameters() if "embedding." in name]
    body = [parameter for name, parameter in model.named_parameters() if "embedding." not in name]
    return [{"params": body}, {"params": embedding, "lr": EMBEDDING_LR * lr, "weight_decay": 0.0}]


def plan_steps(config: dict[str, Any], args: argparse.Namespace) -> int:
    """The step to train to, which the schedule is told. A run that is complete goes on for as long again."""
    schedule = config["scheduler"]["params"]
    steps: int = args.steps or schedule["total_num_steps"]
    if args.resume:
        latest = latest_tag(args.out / "checkpoints")
        if latest is None:
            raise ValueError(f"--resume: no checkpoint in {args.out}/checkpoints; run without --resume first")
        finished_steps = int(latest.removeprefix("step"))
        if finished_steps >= steps:
            steps = finished_steps + steps
    schedule["total_num_steps"] = steps
    return steps


def train(
    engine: slipstream.Engine,
    loader: Any,
    corpus: data.Corpus,
    history: report.History,
    steps: int,
    args: argparse.Namespace,
    console: Console,
) -> None:
    """Train to step `steps`, writing `history`, and checkpoints on the way."""
    accumulation = engine.plan.batch.accumulation
    num_batches = (steps - engine.global_steps) * accumulation
    meter = Meter(engine, history)
    batches = iter(slipstream.RepeatingLoader(loader))
    with report.display(console, rank=engine.rank, start=engine.global_steps, total=steps) as display:
        for _ in range(num_batches if engine.mesh.pp.size == 1 else num_batches // accumulation):
            if engine.mesh.pp.size > 1:
                micros = list(itertools.islice(batches, accumulation))
                meter.add(engine.train_batch(iter(micros)), sum(tokens.numel() for tokens, _ in micros))
            else:
                tokens, targets = next(batches)
                loss = engine(*own_part(engine, tokens, targets))
                engine.backward(loss)
                engine.step()
                meter.add(loss, tokens.numel())
                if engine.micro_steps % accumulation:
                    continue
            step = engine.global_steps
            glance_due = step % args.glance_every == 0 or step == steps
            save_due = step % args.save_every == 0 and step < steps
            if step % LOG_EVERY == 0 or glance_due or save_due:
                display.show(meter.read())
            if glance_due:
                history.validation_steps.append(step)
                history.validation_losses.append(evaluate(engine, corpus, GLANCE_BATCHES))
                engine.log({"validation_loss": history.validation_losses[-1]})
                meter.restart()
            if save_due:
                save(engine, history, args)
                meter.restart()


class Meter:
    """Mean loss, speed and memory between two readings, over all ranks."""

    def __init__(self, engine: slipstream.Engine, history: report.History) -> None:
        self.device, self.step = engine.device, lambda: engine.global_steps
        self.history = history
        self.engine = engine
        self.replica = dist.get_world_size() // engine.mesh.batch.size  # ranks that see the same tokens
        self.has_experts = engine.mesh.pp.size == 1 and bool(expert_loads(engine.module))
        self.restart()

    def restart(self) -> None:
        """Begin anew, so that what happened since the last reading does not count."""
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.micro_batches = self.tokens = 0
        self.began = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        self.loss += loss.detach()  # stays on its device: no waiting
        self.micro_batches += 1
        self.tokens += tokens

    def read(self) -> report.Moment:
        total = torch.stack([self.loss, torch.tensor(float(self.tokens), dtype=torch.float64, device=self.device)])
        dist.all_reduce(total)
        memory = peak_memory(self.device)
        loss = total[0].item() / (self.micro_batches * dist.get_world_size())
        tokens, seconds = int(total[1].item()) // self.replica, time.perf_counter() - self.began
        history, step = self.history, self.step()
        history.steps.append(step)
        history.losses.append(loss)
        history.tokens += tokens
        history.seconds += seconds
        if self.has_experts:
            by_layer = self.engine.expert_load()
            loads = torch.tensor([load.routes for load in by_layer.values()], dtype=torch.float64)
            loads /= loads.mean(1, keepdim=True)
            history.loads.append(loads.flatten().tolist())
            rows = zip(by_layer, loads.tolist(), strict=True)
            self.engine.log({f"expert_load/{layer}/{i}": load for layer, row in rows for i, load in enumerate(row)})
        self.restart()
        return report.Moment(
            step=step,
            loss=loss,
            validation_loss=history.validation_losses[-1] if history.validation_losses else None,
            tokens_per_second=tokens / seconds,
            memory=memory,
            grad_norm=self.engine.global_grad_norm or 0.0,
        )


@torch.no_grad()
def evaluate(engine: slipstream.Engine, corpus: data.Corpus, num_batches: int | None = None) -> float:
    """The validation loss in nats per token: of every token, or of about `num_batches` per rank spread over
    them. Each window starts without context. Collective: every rank has the same number of batches."""
    batches = corpus.validation(EVALUATION_BATCH, engine.mesh.batch.index, engine.mesh.batch.size)
    stride = 1 if num_batches is None else math.ceil(len(batches) / num_batches)
    if engine.mesh.pp.size > 1:
        return float(engine.eval_batch(iter(batches[::stride]), num_micro_batches=len(batches[::stride])))
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)  # nats, tokens
    engine.eval()
    for tokens, targets in batches[::stride]:
        tokens, targets, start = own_part(engine, tokens, targets)
        logits = engine(tokens, start=start)
        total[0] += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=data.IGNORED, reduction="sum")
        total[1] += (targets != data.IGNORED).sum()
    engine.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def complete(engine: slipstream.Engine, corpus: data.Corpus, args: argparse.Namespace) -> str:
    """The prompt and what the model writes after it. A forward pass is collective where weights are sharded,
    so every rank runs this loop, and draws the same random numbers."""
    generator = torch.Generator().manual_seed(args.seed)
    written = [corpus.end, *corpus.tokenizer.encode(args.prompt).ids]
    engine.eval()
    share_attention(engine, False)
    for _ in range(args.new_tokens):
        window = torch.tensor([written[-corpus.context :]], device=engine.device)
        likely = engine(window)[0, -1].float().cpu().topk(50)
        choice = torch.multinomial((likely.values / args.temperature).softmax(dim=0), 1, generator=generator)
        token = int(likely.indices[choice])
        if token == corpus.end:
            break
        written.append(token)
    engine.train()
    text: str = corpus.tokenizer.decode(written[1:])
    return text


def save(engine: slipstream.Engine, history: report.History, args: argparse.Namespace) -> None:
    engine.save_checkpoint(args.out / "checkpoints", tag=tag(engine), client_state={"history": asdict(history)})


def tag(engine: slipstream.Engine) -> str:
    return f"step{engine.global_steps}"


def peak_memory(device: torch.device) -> list[int]:
    """Bytes by rank: allocated on a GPU, else resident, where pages that ranks share count for each."""
    if device.type == "cuda":
        nbytes = torch.cuda.max_memory_allocated(device)
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        nbytes = int(status["VmHWM"].removesuffix("kB")) * 1024
    by_rank = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    by_rank[dist.get_rank()] = nbytes
    dist.all_reduce(by_rank)
    return [int(nbytes) for nbytes in by_rank.tolist()]


def forget_peak_memory() -> None:
    """So that the peak is of training, not of packing the text. A sandbox may not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def opening(engine: slipstream.Engine, config: ModelConfig, num_parameters: int, corpus: data.Corpus) -> str:
    facts = corpus.facts
    stored = engine.plan.precision.param_dtype
    arithmetic = arithmetic_dtype(engine.device, stored)
    lines = [
        f"model     {num_parameters / 1e6:.1f}M parameters, {config.layers} blocks of width {config.dim}",
        f"text      {facts.train_bytes / 1e6:.1f} MB in {facts.train_files} files, "
        f"{facts.train_tokens / 1e6:.2f}M tokens; "
        f"validation {facts.validation_bytes / 1e6:.2f} MB in {facts.validation_files}",
        f"training  ZeRO-{engine.plan.zero.stage} on {engine.world_size} x {engine.device.type}, "
        f"{engine.plan.batch.train_batch_size * corpus.context:,} tokens per step",
        f"numbers   weights, gradients and communication {name(stored)}, arithmetic {name(arithmetic)}"
        + (f": this CPU has no {name(stored)} instructions" if arithmetic != stored else ""),
    ]
    return "\n".join(lines) + "\n"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()

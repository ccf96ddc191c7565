"""The leg `clients`: seconds per step through accelerate and transformers' Trainer over the native loop's, on two ranks.

One Llama, one row of data, one JSON (ZeRO-3, fp32, AdamW, clipping). All three stay alive and take turns, the native loop before
each of the others; a client's figure is its turn over the mean of the native ones around it, and the noise is one native turn
over the one before. They run in the environment of `make test-clients`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from benchmarks import worker
from benchmarks.legs import Options
from benchmarks.ranks import Ranks
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import Failed

if TYPE_CHECKING:
    from benchmarks.worker import Channel

WORLD = 2
CLIENTS = {"accelerate": "accelerate, its DeepSpeed plugin", "trainer": "transformers' Trainer(deepspeed=...)"}
TARGET = 1.03
MICRO, LENGTH = 4, 64  # rows of a rank, and their tokens
VOCABULARY = 8192
LR = 1e-4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
}
ENDLESS = 1_000_000  # steps


# -- a rank, in the clients' environment --


def build_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """One row, repeated: every contender sees the same in every step, in any order."""

    def __init__(self) -> None:
        self.row = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.row, "labels": self.row}


class Turns:
    """Steps that are made on request, by a loop that the client owns."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.left, self.steps = channel, 0, 0

    def begin(self) -> None:
        """Before the first step."""
        self.channel.reply()
        self._wait()

    def step_done(self, loss: Any) -> None:
        self.left -= 1
        if not self.left:
            seconds = (time.perf_counter() - self.began) / self.steps
            self.channel.reply({"seconds": seconds, "loss": float(loss)})
            self._wait()

    def _wait(self) -> None:
        _, arguments = self.channel.receive()
        self.left = self.steps = arguments["count"]
        self.began = time.perf_counter()


def native(turns: Turns) -> None:
    import slipstream

    engine, _, loader, _ = slipstream.initialize(model=build_model(), config=CONFIG, training_data=Data())
    turns.begin()
    for batch in slipstream.RepeatingLoader(loader):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        turns.step_done(loss)


def with_accelerate(turns: Turns) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, InitProcessGroupKwargs

    accelerator = Accelerator(
        deepspeed_plugins=DeepSpeedPlugin(hf_ds_config=CONFIG), kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model = build_model()
    loader: Any = DataLoader(Data(), batch_size=MICRO, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    turns.begin()
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        turns.step_done(loss)


def with_trainer(turns: Turns, folder: str) -> None:
    import transformers
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.step_done(last[0])

    last = [torch.zeros(())]

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            last[0] = super().training_step(*args, **kwargs)
            return last[0]

    settings = transformers.TrainingArguments(
        deepspeed=CONFIG,
        per_device_train_batch_size=MICRO,
        learning_rate=LR,
        max_steps=ENDLESS,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        output_dir=folder,
        accelerator_config={"use_configured_state": True},
    )
    Trainer(model=build_model(), args=settings, train_dataset=Data(), callbacks=[Callback()]).train()


def train(channel: Channel, kind: str, folder: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    turns = Turns(channel)
    match kind:
        case "native":
            native(turns)
        case "accelerate":
            with_accelerate(turns)
        case "trainer":
            with_trainer(turns, folder)


# -- all of them --


def turn(ranks: Ranks, steps: int) -> dict[str, float]:
    """Of the slowest rank."""
    return dict(max(ranks.call("steps", count=steps), key=lambda reply: float(reply["seconds"])))


def run(options: Options) -> str:
    python, steps, rounds = options.clients, 3 if options.quick else 5, options.rounds or (3 if options.quick else 8)
    if not python.exists():
        raise RuntimeError(f"there is no {python}: `make test-clients` builds it")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contenders, failed = {}, {}
        for kind in ("native", *CLIENTS):
            try:
                arguments = {"kind": kind, "folder": folder}
                env = {"HF_HUB_OFFLINE": "1"}
                ranks = Ranks("benchmarks.clients:train", arguments, WORLD, name=kind, python=python, env=env)
                contenders[kind] = stack.enter_context(ranks)
            except Failed as error:
                if kind == "native":
                    raise
                print(error)
                failed[kind] = error.reason
        first = {kind: turn(ranks, steps)["loss"] for kind, ranks in contenders.items()}  # not counted: caches are cold
        if any(abs(loss / first["native"] - 1) > 1e-4 for loss in first.values()):
            raise RuntimeError(f"the contenders do not train alike: losses after {steps} steps {first}")
        natives = [turn(contenders["native"], steps)["seconds"]]
        turns: dict[str, list[float]] = {kind: [] for kind in CLIENTS if kind not in failed}
        for _ in range(rounds):
            for kind, seconds in turns.items():
                seconds.append(turn(contenders[kind], steps)["seconds"])
                natives.append(turn(contenders["native"], steps)["seconds"])
    return _words(natives, turns, failed, steps, python)


def _words(natives: list[float], turns: dict[str, list[float]], failed: dict[str, str], steps: int, python: Path) -> str:
    """`natives` has the turn before the first client's, and the one after each client's."""
    noise = Spread.of([after / before for before, after in itertools.pairwise(natives)])
    rows, goals = [["native loop", Spread.of([1e3 * each for each in natives]).show(1), noise.show()]], []
    rows += [[CLIENTS[kind], reason] for kind, reason in failed.items()]
    for place, (kind, seconds) in enumerate(turns.items()):
        around = zip(natives[place :: len(turns)], natives[place + 1 :: len(turns)], strict=False)
        ratios = Spread.of([ours / statistics.mean(two) for ours, two in zip(seconds, around, strict=True)])
        rows.append([CLIENTS[kind], Spread.of([1e3 * each for each in seconds]).show(1), ratios.show()])
        goals.append(verdict(f"a step through {kind}, over the native loop's", ratios.median, TARGET, digits=3))
    return "\n\n".join(
        [
            f"Llama of 8.5M parameters, {MICRO} x {LENGTH} tokens per rank, ZeRO-3 on {WORLD} ranks, fp32, AdamW, clipping. "
            f"Turns of {steps} steps; ms per step, and the ratio to the native turns before and after, median (min-max) of "
            f"{len(natives) // max(1, len(turns))} rounds; in the native row one turn over the turn before it: the noise. "
            f"{_versions(python)}; one thread per rank.",
            table(["", "ms per step", "ratio"], rows),
            verdicts(goals),
        ]
    )


def _versions(python: Path) -> str:
    names = ("accelerate", "transformers", "deepspeed")
    script = f"from importlib.metadata import version\nprint(', '.join(f'{{n}} {{version(n)}}' for n in {names}))"
    return worker.run([python, "-c", script]).strip()

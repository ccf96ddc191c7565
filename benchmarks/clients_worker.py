"""One rank of a contender of the leg `clients`: the native loop, accelerate's or the Trainer's, taking turns with the others.

    python -m benchmarks.clients_worker native|accelerate|trainer STEPS FOLDER [PROFILE]

A line in: `STEPS` training steps. A line of JSON out: the mean seconds of a step, and the loss of the last. The end of the input:
the end; with PROFILE, a file, rank 0 then leaves there what cProfile saw of all turns but the first.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

import slipstream
from benchmarks.clients import LENGTH, MICRO

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


def build_model() -> Any:
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
    """One row, again and again: every contender sees the same in every step, whatever its order."""

    def __init__(self) -> None:
        self.row = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.row, "labels": self.row}


class Turns:
    """When it is whose."""

    def __init__(self, steps: int, profile: str | None = None) -> None:
        self.steps, self.done, self.turns, self.file = steps, 0, 0, profile
        self.profile = cProfile.Profile()

    def begin(self) -> None:
        """Before the first step."""
        self._wait()

    def step_done(self, loss: Any) -> None:
        self.done += 1
        if self.done < self.steps:
            return
        seconds = (time.perf_counter() - self.began) / self.steps
        self.profile.disable()
        self._say({"seconds": seconds, "loss": float(loss)})
        self.done = 0
        self.turns += 1
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            if self.file and os.environ["RANK"] == "0":
                self.profile.dump_stats(self.file)
            os._exit(0)  # in the middle of training, as intended
        if self.file and self.turns:
            self.profile.enable()
        self.began = time.perf_counter()

    @staticmethod
    def _say(what: dict[str, float]) -> None:
        print("@" + json.dumps(what), flush=True)


def native(turns: Turns) -> None:
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
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")

    class Told(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.step_done(last[0])

    last = [torch.zeros(())]

    class Trainer(transformers.Trainer):  # type: ignore[misc]
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
    Trainer(model=build_model(), args=settings, train_dataset=Data(), callbacks=[Told()]).train()


def main() -> None:
    kind, steps, folder, *profile = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    turns = Turns(int(steps), *profile)
    match kind:
        case "native":
            native(turns)
        case "accelerate":
            with_accelerate(turns)
        case "trainer":
            with_trainer(turns, folder)


if __name__ == "__main__":
    main()

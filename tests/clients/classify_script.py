"""accelerate's nlp_example: sentences to classes, a metric over gathered predictions; beside the same batches in plain torch."""

import copy
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")  # of transformers, and of what it finds installed
import transformers  # noqa: E402
from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import gather_object  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

FOLDER = Path(os.environ.get("CLIENT_FOLDER", "."))
BATCH, EPOCHS, LR, CLIP = 8, 3, 2e-3, 1.0
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 2,
    "initializer_range": 0.1,
}


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Of 5 to 15 words, of which about four in five are of the kind that is the sentence's class."""
    generator, samples = torch.Generator().manual_seed(seed), []
    for i in range(count):
        label, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, 2), (5, 16)))
        is_own = torch.rand(length, generator=generator) < 0.8
        words = torch.randint(4, 34, (length,), generator=generator) + 30 * (is_own == bool(label))
        samples.append({"ids": [1, *words.tolist(), 2], "label": label, "index": i})
    return samples


def together(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample["ids"]) for sample in samples], batch_first=True)
    labels, index = (torch.tensor([sample[key] for sample in samples]) for key in ("label", "index"))
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels, "index": index}


TRAIN, HELD_OUT = sentences(256, 0), sentences(109, 1)  # which no two ranks share evenly


def schedule_of(optimizer: Any) -> Any:
    """Over the batches of one process: accelerate ticks it in each step as often as there are processes."""
    return transformers.get_linear_schedule_with_warmup(optimizer, 5, num_training_steps=len(TRAIN) // BATCH * EPOCHS)


def metric(predicted: list[int]) -> tuple[float, float]:
    """Accuracy and F1, of the held-out sentences in their order."""
    right = [sample["label"] for sample in HELD_OUT]
    assert len(predicted) == len(right), (len(predicted), len(right))
    both = sum(one & other for one, other in zip(predicted, right, strict=True))
    return sum(map(int.__eq__, predicted, right)) / len(right), 2 * both / (sum(predicted) + sum(right))


def train(stage: int) -> tuple[list[tuple[float, float]], list[float], list[list[int]]]:
    """Metrics after each epoch, the rate of each step, and the sentences of each step over all ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=CLIP, zero3_init_flag=True)
    accelerator = Accelerator(deepspeed_plugins=plugin)
    assert accelerator.num_processes == 2, "it is told the backend, which no script of accelerate's names"
    torch.manual_seed(42)
    train_loader = DataLoader(TRAIN, shuffle=True, collate_fn=together, batch_size=BATCH, drop_last=True)  # type: ignore[arg-type]
    eval_loader = DataLoader(HELD_OUT, shuffle=False, collate_fn=together, batch_size=2 * BATCH)  # type: ignore[arg-type]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(FOLDER / "base").to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=LR)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule_of(optimizer)
    )
    metrics, rates, order = [], [], []
    for _ in range(EPOCHS):
        model.train()
        for batch in train_loader:
            order.append(gather_object([batch.pop("index").tolist()]))
            rates.append(optimizer.param_groups[0]["lr"])
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        classes = []
        for batch in eval_loader:
            del batch["index"]
            with torch.no_grad():
                logits = model(**batch).logits
            predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            assert len(predictions) == len(references)
            classes += predictions.tolist()
        metrics.append(metric(classes))
    model.destroy()
    return metrics, rates, order


def plain(model: nn.Module, order: list[list[list[int]]]) -> tuple[list[tuple[float, float]], list[float]]:
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=LR)
    schedule, metrics, rates = schedule_of(optimizer), [], []
    for i, of_ranks in enumerate(order):
        rates.append(optimizer.param_groups[0]["lr"])
        for indices in of_ranks:
            batch = together([TRAIN[index] for index in indices])
            del batch["index"]
            (model(**batch).loss / len(of_ranks)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        for _ in of_ranks:
            schedule.step()
        optimizer.zero_grad()
        if (i + 1) % (len(order) // EPOCHS) == 0:
            batch = together(HELD_OUT)
            del batch["index"]
            with torch.no_grad():
                metrics.append(metric(model(**batch).logits.argmax(-1).tolist()))
    return metrics, rates


def everything() -> None:
    torch.manual_seed(0)
    if os.environ["RANK"] == "0":
        transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).save_pretrained(FOLDER / "base")
        (FOLDER / "base" / "ready").touch()
    while not (FOLDER / "base" / "ready").exists():
        time.sleep(0.05)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(FOLDER / "base")  # before a plugin says stage 3
    for stage in (2, 3):
        metrics, rates, order = train(stage)
        expected, expected_rates = plain(copy.deepcopy(base), order)
        assert rates == expected_rates and len(rates) == 48, (rates, expected_rates)
        assert metrics == expected, (stage, metrics, expected)
        assert metrics[-1][0] > 0.85 > metrics[0][0], metrics
    torch.distributed.destroy_process_group()

"""Fine-tune by accelerate's DeepSpeed plugin, over Slipstream's `deepspeed`.

slipstream run --nproc 2 examples/finetune/with_accelerate.py --base BASE --out OUT --mode full|lora
"""

import itertools
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from torch.utils.data import DataLoader

import lesson
import slipstream


def main() -> None:
    args = lesson.arguments(str(__doc__))
    config = lesson.config(args)
    gloo = InitProcessGroupKwargs(backend="gloo")  # accelerate picks no backend on a CPU by itself
    accelerator = Accelerator(
        deepspeed_plugins=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[] if torch.cuda.is_available() else [gloo]
    )
    model, tokenizer = lesson.open_model(args)
    data: Any = lesson.samples(tokenizer, lesson.lesson()[0])
    size = config["train_micro_batch_size_per_gpu"]
    loader: Any = DataLoader(data, batch_size=size, shuffle=True, drop_last=True, collate_fn=lesson.collate)
    optimizer = DummyOptim([param for param in model.parameters() if param.requires_grad])  # the JSON's
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, DummyScheduler(optimizer))

    for step, batch in enumerate(itertools.islice(slipstream.RepeatingLoader(loader), args.steps), start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.is_main_process and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    state = accelerator.get_state_dict(model)  # on the first rank, whole
    with lesson.partial_folder(args.out) as folder:
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()

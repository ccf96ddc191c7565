"""Fine-tune by transformers' Trainer, over Slipstream's `deepspeed`.

slipstream run --nproc 2 examples/finetune/with_trainer.py --base BASE --out OUT --mode full|lora
"""

import os

import torch
from accelerate import PartialState
from transformers import Trainer, TrainingArguments

import lesson


def main() -> None:
    args = lesson.arguments(str(__doc__))
    config = lesson.config(args)
    if not torch.cuda.is_available():  # accelerate picks no backend on a CPU by itself
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    settings = TrainingArguments(
        deepspeed=config,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        learning_rate=config["optimizer"]["params"]["lr"],
        warmup_steps=config["scheduler"]["params"]["warmup_num_steps"],
        max_steps=args.steps,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        output_dir=str(args.out.parent),
        accelerator_config={"use_configured_state": not torch.cuda.is_available()},
    )
    model, tokenizer = lesson.open_model(args)  # after the settings, which say stage 3: each rank reads its own ranges
    data = lesson.samples(tokenizer, lesson.lesson()[0])
    trainer = Trainer(model=model, args=settings, train_dataset=data, data_collator=lesson.collate)
    trainer.train()
    with lesson.partial_folder(args.out) as folder:
        trainer.save_model(str(folder))
        if trainer.is_world_process_zero():
            tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

"""transformers' run_clm in its shape: the arguments come from the command line, the model from a folder, DeepSpeed from a file."""

import json
from dataclasses import dataclass
from typing import Any

import torch
import transformers


@dataclass
class Source:
    folder: str = ""


def main() -> None:
    parser: Any = transformers.HfArgumentParser((Source, transformers.TrainingArguments))
    source, args = parser.parse_args_into_dataclasses()
    transformers.set_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(source.folder)
    rows = torch.randint(1, 128, (64, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"world": args.world_size, "losses": losses, "eval": metrics["eval_loss"]}), flush=True)


if __name__ == "__main__":
    main()

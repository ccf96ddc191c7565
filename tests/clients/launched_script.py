"""accelerate's nlp_example in its shape: everything about DeepSpeed is in the file that `accelerate launch` reads."""

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.clients.transformers_script import llama, samples


def main() -> None:
    accelerator = Accelerator()
    model = llama().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(64), batch_size=2, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 64)
    engine, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).float().mean().item())
    accelerator.save_state("state")
    accelerator.unwrap_model(engine).save_pretrained(
        "saved",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(engine),
    )
    facts = {
        "world": accelerator.num_processes,
        "stage": engine.zero_optimization_stage(),
        "losses": losses,
        "steps": engine.global_steps,
        "accumulation": engine.gradient_accumulation_steps(),
        "bf16": engine.bfloat16_enabled(),
        "rates": [schedule.get_last_lr()[0], engine.get_lr()[0]],
    }
    if accelerator.is_main_process:
        print(json.dumps(facts), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Fine-tune by Slipstream's own loop. All of DeepSpeed's JSON is in ds_config.json; its stage is one digit there.

slipstream run --nproc 2 examples/finetune/native.py --base BASE --out OUT --mode full|lora
"""

import itertools

import lesson
import slipstream


def main() -> None:
    args = lesson.arguments(str(__doc__))
    slipstream.init_distributed()
    model, tokenizer = lesson.open_model(args)
    engine, _, loader, _ = slipstream.initialize(
        model=model,
        config=lesson.config(args),
        training_data=lesson.samples(tokenizer, lesson.lesson()[0]),
        collate_fn=lesson.collate,
    )
    for batch in itertools.islice(slipstream.RepeatingLoader(loader), args.steps):
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.3f}", flush=True)

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with lesson.partial_folder(args.out) as folder:
        if args.mode == "full":
            engine.save_pretrained(str(folder))  # each rank writes what it holds
        else:
            with slipstream.zero.gathered(trained.values()):
                if engine.rank == 0:
                    model.save_pretrained(folder, state_dict=trained)
        if engine.rank == 0:
            tokenizer.save_pretrained(folder)
    engine.destroy()


if __name__ == "__main__":
    main()

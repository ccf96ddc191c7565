"""LoRA on a frozen base, and TRL's trainers, each as its documentation has it."""

from typing import Any

import torch
import transformers
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model

from tests.clients.transformers_script import FOLDER, InOrder, arguments, begin, llama, logs_of, samples

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=True)


def forget() -> None:
    """As after the arguments are gone: transformers loads as without DeepSpeed."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def source() -> str:
    folder = FOLDER / "source"
    if PartialState().process_index == 0 and not folder.exists():
        forget()
        llama().save_pretrained(folder)
    PartialState().wait_for_everyone()
    return str(folder)


def lora(stage: int) -> None:
    """Trains its adapters only, saves those only, resumes, and is loaded onto the base again."""
    base = source()
    name = f"lora_{stage}"
    losses = []
    for resume in (None, str(FOLDER / name / "checkpoint-2")):
        args = arguments(stage, name, optimizer=False)
        torch.manual_seed(11)  # the adapters' first values
        model = get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), LORA)
        trainer = InOrder(model=model, args=args, train_dataset=samples(), eval_dataset=samples(4))
        trainer.train(resume_from_checkpoint=resume)
        losses.append((logs_of(trainer)[3], logs_of(trainer)[4], trainer.evaluate()["eval_loss"]))
        assert sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) == 2 * 2 * 4 * 32 + 2 * 4 * (32 + 16)
    assert losses[0] == losses[1], losses
    folder = FOLDER / name / "saved"
    trainer.save_model(str(folder))
    PartialState().wait_for_everyone()
    assert (folder / "adapter_model.safetensors").stat().st_size < 16384
    forget()
    loaded = PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), folder).eval()
    ids = torch.stack([row["input_ids"] for row in samples(4)])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss.item(), losses[1][2], rtol=1e-4, atol=1e-5)


def tokenizer() -> Any:
    """Of words w0 to w99."""
    import tokenizers

    vocabulary = {f"w{i}": i for i in range(100)} | {"<pad>": 100, "<eos>": 101, "<unk>": 102}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(start: int, count: int) -> str:
    return " ".join(f"w{(start + i) % 100}" for i in range(count))


def common(stage: int, name: str) -> dict[str, Any]:
    training = arguments(stage, name, optimizer=False)
    names = ("output_dir", "deepspeed", "per_device_train_batch_size", "max_steps", "learning_rate", "logging_steps", "report_to")
    return {field: getattr(training, field) for field in names} | {
        "accelerator_config": {"use_configured_state": True},
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": stage == 3,
    }


def curve(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return list(logs_of(trainer).values())


def sft(stage: int, adapters: bool) -> list[tuple[float, float]]:
    import datasets
    import trl

    base = source()
    args = trl.SFTConfig(**common(stage, f"sft_{stage}"), max_length=32)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    data = datasets.Dataset.from_list([{"text": words(i, 12)} for i in range(64)])
    torch.manual_seed(11)
    trainer = trl.SFTTrainer(
        model=model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=LORA if adapters else None
    )
    logs = curve(trainer)
    generate(trainer)
    return logs


def generate(trainer: Any) -> None:
    """As TRL's online trainers do between steps: parameters whole, hooks off and on again; each rank as long as it takes."""
    from trl.models import unwrap_model_for_generation

    length = 3 + PartialState().process_index
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=length, min_new_tokens=length, do_sample=False)
    assert out.shape == (1, 3 + length)


def dpo(stage: int, adapters: bool) -> list[tuple[float, float]]:
    import datasets
    import trl

    base = source()
    args = trl.DPOConfig(**common(stage, f"dpo_{stage}"), max_length=32, beta=0.5)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    reference = None if adapters else transformers.LlamaForCausalLM.from_pretrained(base)
    rows = [{"prompt": words(i, 4) + " ", "chosen": words(i + 4, 6), "rejected": words(i + 50, 6)} for i in range(64)]
    torch.manual_seed(11)
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LORA if adapters else None,
    )
    logs = curve(trainer)
    assert abs(logs[0][0] - 0.6931) < 1e-3, logs  # log 2: the reference is the model
    return logs


def peft() -> None:
    begin()
    lora(2)
    lora(3)
    torch.distributed.destroy_process_group()


def trl_trainers() -> None:
    """Stage 3, whose model is in ranges from its first line and recomputes activations, trains as stage 2 does."""
    begin()
    for trainer in (sft, dpo):
        for adapters in (False, True):
            staged = [torch.tensor(trainer(stage, adapters)) for stage in (2, 3)]
            assert staged[0].shape == (4, 2)
            torch.testing.assert_close(staged[1], staged[0], rtol=2e-3, atol=1e-4)
    torch.distributed.destroy_process_group()


def on_meta() -> None:
    """LoRA put onto a model without memory starts from PEFT's own first values, and the base from its files; others are refused."""
    import pytest

    import slipstream
    from tests import toy

    slipstream.init_distributed()
    rank, folder = torch.distributed.get_rank(), FOLDER / "base"
    torch.manual_seed(3)
    base = transformers.LlamaForCausalLM(llama().config)
    if rank == 0:
        base.save_pretrained(folder)
    torch.distributed.barrier()

    def adapted(**more: Any) -> Any:
        with slipstream.zero.Init():
            model = transformers.LlamaForCausalLM(base.config)
        kinds = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
        return get_peft_model(model, LoraConfig(**(kinds | more)))

    def rename(name: str) -> str:
        return "base_model.model." + name.replace("q_proj.", "q_proj.base_layer.").replace("v_proj.", "v_proj.base_layer.")

    ids = torch.stack([row["input_ids"] for row in samples(4)])
    expected = base(input_ids=ids, labels=ids).loss
    weights = []
    for stage in (0, 3):
        for init in (True, "gaussian"):
            model = adapted(init_lora_weights=init)
            slipstream.zero.load(model, folder, rename=rename, strict=False)
            torch.manual_seed(rank)
            engine = toy.make(model, stage, "gloo")
            state = engine.state_dict()
            for name, value in state.items():
                if "lora_A" in name and init is True:
                    assert 0.8 < value.abs().max() * value.shape[1] ** 0.5 <= 1, "as nn.Linear's, which PEFT has for A"
                elif "lora_A" in name:
                    assert 0.8 < value.std() * 4 < 1.2
                elif "lora_B" in name:
                    assert not value.any(), name
            first = next(value for name, value in state.items() if "lora_A" in name)
            gathered = [torch.empty_like(first) for _ in range(2)]
            torch.distributed.all_gather(gathered, first)
            assert gathered[0].equal(gathered[1])
            with torch.no_grad():
                torch.testing.assert_close(engine(input_ids=ids, labels=ids).loss, expected)
            weights.append(first)
            engine.destroy()
    assert weights[0].equal(weights[2]) and weights[1].equal(weights[3]), "the same draws in every stage"
    for more in ({"use_dora": True}, {"init_lora_weights": False}, {"modules_to_save": ["lm_head"]}):
        model = adapted(**more)
        slipstream.zero.load(model, folder, rename=rename, strict=False)
        with pytest.raises(ValueError, match=r"was made on meta.*inside `with engine.surgery\(\):`"):
            toy.make(model, 3, "gloo")
    torch.distributed.destroy_process_group()

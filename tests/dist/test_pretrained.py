"""Hugging Face folders written from shards, and checkpoints converted without an engine."""

import json
import os
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.checkpoint import CheckpointError, convert, pretrained
from slipstream.launch import cli
from tests import deepspeed_checkpoints as ds
from tests import toy
from tests.dist.test_checkpoint_deepspeed import CLOSE, build, go_on
from tests.dist.test_checkpoint_engine import Noisy
from tests.pool import distributed, run


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read according to its index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(where.values())}
    assert {name: file for file, held in files.items() for name in held} == where
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(files)
    return {name: files[file][name] for name, file in where.items()}


@distributed(world_size=(2, 4), transports=("gloo",))
def test_every_stage_writes_the_same_folder(world_size: int, transport: str, tmp_path: Path) -> None:
    for stage in range(4) if world_size == 2 else (3,):
        engine = toy.make(toy.seeded(Noisy), stage, transport, dtype="bf16")
        toy.step(engine, toy.tokens(dist.get_rank(), 0))
        folder, exact = tmp_path / f"{stage}", tmp_path / f"{stage}-fp32"
        engine.save_pretrained(str(folder), max_shard_size="2KB")
        engine.save_pretrained(str(exact), dtype="fp32")
        expected = {name: value for name, value in engine.state_dict().items() if name != "head.weight"}  # tied: once
        masters = {name: engine.optimizer_state(name)["master"] for name, _ in engine.module.named_parameters()}
        if dist.get_rank() == 0:
            results, wide = content(folder), content(exact)
            assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
            assert results.keys() == wide.keys() == expected.keys()
            assert all(results[name].dtype is value.dtype and results[name].equal(value) for name, value in expected.items())
            assert all(wide[name].equal(value) for name, value in masters.items())
        # Again, into the same folder, with fewer files and trainable parameters only
        engine.save_pretrained(str(folder), only_trainable=True)
        if dist.get_rank() == 0:
            trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
            assert content(folder).keys() == trained and "blocks.1.up.weight" not in trained
            assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors"]
            assert not list(tmp_path.glob("*.tmp-*"))
        engine.destroy()


@distributed(world_size=2)
def test_an_existing_folder_may_be_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is a mount point: nothing is created next to it or renamed into it. Leftovers of a killed save are removed."""
    engine = toy.make(toy.seeded(toy.Lm), 3)
    there, link = tmp_path / "there", tmp_path / "link"
    if dist.get_rank() == 0:
        left, kept = there / f".tmp-{'0' * 16}", there / ".tmp-notes"
        left.mkdir(parents=True)
        kept.mkdir()
        link.symlink_to(there)
    dist.barrier()
    real = os.replace

    def replace(old: Path, new: Path) -> None:
        assert old.parent.parent == new.parent, (old, new)
        real(old, new)

    monkeypatch.setattr(pretrained.os, "replace", replace)
    monkeypatch.setattr(pretrained.os, "rename", None)
    for limit in ("2KB", "5GB", "2KB"):
        engine.save_pretrained(str(link), max_shard_size=limit)
    monkeypatch.undo()
    expected = engine.state_dict()
    if dist.get_rank() == 0:
        assert all(value.equal(expected[name]) for name, value in content(there).items())
        assert link.is_symlink() and [path.name for path in there.glob(".*")] == [".tmp-notes"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    engine.destroy()


@pytest.mark.parametrize("where", ["alone", "with a folder", "inside", "linked"])
def test_a_config_of_another_architecture_comes_with_its_weights(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Atomically if the folder can be exchanged. Other files, folders and the mode are kept everywhere."""
    folder = tmp_path / "there"
    folder.mkdir(mode=0o750)
    target = folder
    if where == "linked":
        target = tmp_path / "link"
        target.symlink_to(folder)
    seen: list[bool] = []
    real = pretrained._swap
    monkeypatch.setattr(pretrained, "_swap", lambda *given: seen.append(real(*given)) or seen[-1])
    for n in range(4):
        outs = {name: pretrained.Out(torch.full((600 * (n + 1),), float(n)), torch.float32) for name in "ab"}
        pretrained.write(target, outs, texts={"config.json": json.dumps({"n": n // 2})}, shard_nbytes=[10**6, 3000][n % 2])
        if n == 0:
            (folder / "notes.txt").write_text("kept")
        if n == 0 and where == "with a folder":
            (folder / "checkpoint-1").mkdir()
        if where == "inside":
            monkeypatch.chdir(folder)
        assert all(value.eq(n).all() and len(value) == 600 * (n + 1) for value in content(folder).values())
        assert json.loads((folder / "config.json").read_text()) == {"n": n // 2}
    assert seen == [where == "alone"], "only where config.json differs"
    assert (folder / "notes.txt").read_text() == "kept" and folder.stat().st_mode & 0o777 == 0o750
    assert (folder / "checkpoint-1").is_dir() == (where == "with a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == (["link", "there"] if where == "linked" else ["there"])


def save_llama(folder: Path) -> dict[str, torch.Tensor]:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)
    engine = toy.make(toy.seeded(lambda: transformers.LlamaForCausalLM(config)), 3, dtype="bf16")
    engine.save_pretrained(str(folder), max_shard_size=20_000)
    state: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return state


def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")
    expected = run(2, save_llama, tmp_path / "model")[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype is torch.bfloat16 and type(loaded) is transformers.LlamaForCausalLM
    assert all(value.equal(expected[name]) for name, value in loaded.state_dict().items())


def mixture(kind: str) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2}  # type: ignore[dict-item]
    if kind == "Mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
    else:
        config = transformers.Qwen2MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40)
    return toy.seeded(lambda: getattr(transformers, f"{kind}ForCausalLM")(config)).eval()


def save_mixtures(folder: Path) -> None:
    for kind in ("Mixtral", "Qwen2Moe"):
        engine = toy.make(mixture(kind), 3)
        engine.save_pretrained(str(folder / kind))
        engine.save_checkpoint(str(folder / f"{kind}-saved"), contents="weights")
        engine.destroy()


def test_transformers_loads_experts_that_are_one_tensor(tmp_path: Path) -> None:
    """transformers' form in memory; its folders have a tensor for each expert."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")
    run(2, save_mixtures, tmp_path, timeout=120)
    ids = torch.arange(24).view(2, 12)
    for kind in ("Mixtral", "Qwen2Moe"):
        convert(tmp_path / f"{kind}-saved", tmp_path / f"{kind}-converted", "hf", like=tmp_path / kind)
        for folder in (tmp_path / kind, tmp_path / f"{kind}-converted"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                assert loaded(input_ids=ids).logits.equal(mixture(kind)(input_ids=ids).logits)


def plain_llama(tied: bool = False) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.2)
    return toy.seeded(lambda: transformers.LlamaForCausalLM(config))


def adapted_llama(tied: bool = False, **lora: Any) -> Any:
    import peft

    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(plain_llama(tied), peft.LoraConfig(**(options | {"task_type": "CAUSAL_LM"} | lora)))


def save_adapted(folder: Path) -> dict[str, torch.Tensor]:
    """Save at stages 0 and 3; return the logits of the trained model."""
    warnings.simplefilter("ignore")  # from peft and the packages that it finds
    import peft

    ids, said = torch.arange(48).view(4, 12), {}
    for stage, dtype in ((0, "fp32"), (3, "fp32"), (3, "bf16")):
        model = adapted_llama()
        engine = toy.make(model, stage, "gloo", dtype=dtype, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        name = f"{stage}-{dtype}"
        engine.save_pretrained(str(folder / name / "whole"), max_shard_size=20_000)
        engine.save_pretrained(str(folder / name / "adapters"), only_trainable=True)
        engine.save_checkpoint(str(folder / name / "checkpoint"), contents="weights")
        with torch.no_grad():
            said[name] = engine.eval()(input_ids=ids).logits.float()
        engine.train()
        engine.module.base_model.model.model.norm.weight.requires_grad_(True)
        with pytest.raises(ValueError, match=r"model\.norm\.weight' are trained but belong to no adapter"):
            engine.save_pretrained(str(folder / "none"), only_trainable=True)
        engine.destroy()
    for wrong, words in (
        (lambda: adapted_llama(use_dora=True), "with DoRA"),
        (
            lambda: adapted_llama(tied=True, modules_to_save=["embed_tokens"]),
            "lm_head.weight' is tied to a module that PEFT trains",
        ),
        (
            lambda: peft.get_peft_model(plain_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
            "is a prompt",
        ),
    ):
        engine = toy.make(wrong(), 3, "gloo")
        with pytest.raises(ValueError, match=words):
            engine.save_pretrained(str(folder / "none"))
        engine.destroy()
    assert not (folder / "none").exists()
    return said


def test_adapters_are_saved_merged_or_as_peft_s_own_folder(tmp_path: Path) -> None:
    """Both load with the trained model's outputs. Offline conversion cannot merge and refuses them."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")
    peft: Any = pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    ids = torch.arange(48).view(4, 12)
    for name, expected in run(2, save_adapted, tmp_path, timeout=120)[0].items():
        whole, adapters = tmp_path / name / "whole", tmp_path / name / "adapters"
        assert json.loads((whole / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert len(list(whole.glob("model-*-of-*.safetensors"))) > 2
        assert sorted(path.name for path in adapters.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
            base = plain_llama().to(merged.dtype)
            loaded = peft.PeftModel.from_pretrained(base, adapters, autocast_adapter_dtype=False)
        assert content(whole).keys() == merged.state_dict().keys()
        close = {"rtol": 1e-5, "atol": 1e-5} if name.endswith("fp32") else {"rtol": 0.1, "atol": 0.1}
        for each in (merged, loaded):
            with torch.no_grad():
                torch.testing.assert_close(each.eval()(input_ids=ids).logits.float(), expected, **close)
        with pytest.raises(CheckpointError, match=r"is of a model with PEFT's adapters.*engine\.save_pretrained\(\) writes"):
            convert(tmp_path / name / "checkpoint", tmp_path / "converted", "hf")
    assert not (tmp_path / "converted").exists()


@distributed(world_size=1)
def test_codes_of_quantized_weights_are_not_converted(tmp_path: Path) -> None:
    engine = toy.make(slipstream.quantize(toy.seeded(toy.Lm).requires_grad_(False)), 0, optimizer=None)
    engine.save_checkpoint(str(tmp_path / "saved"), contents="weights")
    engine.destroy()
    with pytest.raises(CheckpointError, match=r"are codes of a quantized weight.*engine\.save_pretrained\(\) writes"):
        convert(tmp_path / "saved", tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


@distributed(world_size=2)
def test_a_failure_on_one_rank_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 3)

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        monkeypatch.setattr(pretrained.os, "pwrite", fail)
    with pytest.raises(CheckpointError, match=r"rank 1 of 2: cannot write .*No space left"):
        engine.save_pretrained(str(tmp_path / "model"))
    monkeypatch.undo()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    for wrong, words in (({"dtype": "int4"}, "bf16, fp16 or fp32"), ({"max_shard_size": "much"}, "write 5GB")):
        with pytest.raises(ValueError, match=words):
            engine.save_pretrained(str(tmp_path / "model"), **wrong)
    engine.destroy()


@distributed(world_size=1)
def test_conversions_keep_everything(tmp_path: Path) -> None:
    """Offline: DeepSpeed's -> ours -> DeepSpeed's universal -> ours, and each -> Hugging Face."""
    with tarfile.open(ds.ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for case in (ds.CASES[3], ds.CASES[4]):
        source, made = tmp_path / "deepspeed" / case.name, tmp_path / f"made-{case.name}"
        expected = json.loads((source / "losses.json").read_text())
        assert cli.main(["convert", str(source), str(made / "ours"), "--to", "slipstream"]) == 0
        convert(made / "ours", made / "universal", "deepspeed")
        convert(made / "universal" / "global_step3_universal", made / "back", "slipstream")
        for folder in (made / "ours", made / "universal", made / "back"):
            engine = build(case, 3)
            engine.load_checkpoint(str(folder))
            state = engine.optimizer_state("up.weight")
            assert go_on(engine, case) == pytest.approx(expected, rel=CLOSE[case.dtype])
            engine.destroy()
        assert cli.main(["convert", str(source), str(made / "hf"), "--dtype", "fp32"]) == 0
        convert(made / "back", made / "hf-bf16", "hf", dtype=torch.bfloat16, max_shard_size=200)
        one, two = content(made / "hf"), content(made / "hf-bf16")
        assert one.keys() == two.keys() == {name for name in ds.model().state_dict() if name != "head.weight"}
        assert one["up.weight"].equal(state["master"]) and two["up.weight"].equal(state["master"].bfloat16())


@distributed(world_size=1)
def test_a_hugging_face_folder_becomes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads at any stage and converts back bit for bit, also from the current folder."""
    engine = toy.make(toy.seeded(toy.Lm), 0)
    engine.save_pretrained(str(tmp_path / "hf"), max_shard_size="2KB")
    expected = engine.state_dict()
    engine.destroy()
    monkeypatch.chdir(tmp_path / "hf")
    assert cli.main(["convert", ".", "../ours", "--to", "slipstream"]) == 0
    engine = toy.make(toy.seeded(toy.Lm, seed=5), 3)
    engine.load_checkpoint(str(tmp_path / "ours"))
    state = engine.state_dict()
    assert all(state[name].equal(value) for name, value in expected.items()) and engine.global_steps == 0
    engine.destroy()
    monkeypatch.chdir(tmp_path / "ours" / "hf")
    like = {"config.json": b"{}", "tokenizer.model": b"\n\x0e\xff\xfe", "notes.txt": b""}  # sentencepiece's is binary
    (tmp_path / "like").mkdir()
    for name, held in like.items():
        (tmp_path / "like" / name).write_bytes(held)
    assert cli.main(["convert", ".", "../../back", "--like", "../../like"]) == 0
    results = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir() if path.suffix != ".safetensors"}
    assert results == {name: held for name, held in like.items() if name != "notes.txt"}
    there = content(tmp_path / "hf")
    assert all(value.equal(there[name]) for name, value in content(tmp_path / "back").items())
    shard = next((tmp_path / "hf").glob("model-00001-*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"no whole Hugging Face folder: .* claims bytes"):
        convert(tmp_path / "hf", tmp_path / "other", "slipstream")
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="is no safetensors file, or cut off"):
        convert(tmp_path / "hf", tmp_path / "other", "slipstream")


@distributed(world_size=1)
def test_weights_beside_a_checkpoint_do_not_hide_it(tmp_path: Path) -> None:
    """A Trainer's folder: `latest`, DeepSpeed's files, and 16-bit weights."""
    with tarfile.open(ds.ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    case = ds.CASES[3]
    source = tmp_path / "deepspeed" / case.name
    inner = source / (source / "latest").read_text().strip()
    for folder in (source, inner):
        save_file({"up.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    for made, folder in (("a", source), ("b", inner)):
        convert(folder, tmp_path / made, "slipstream")
        engine = build(case, 3)
        engine.load_checkpoint(str(tmp_path / made))
        state = engine.optimizer_state("up.weight")
        assert engine.global_steps == ds.STEPS and state["exp_avg"].any() and state["master"].any()
        engine.destroy()


@distributed(world_size=1)
def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy()
    file = tmp_path / "saved" / "global_step0" / "rank_00000.bin"
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="the checksum of tensor"):
        convert(tmp_path / "saved", tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob("*.tmp-*"))

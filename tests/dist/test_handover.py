"""Weight transfer from a training engine to a serving engine, unit by unit, and generation during training."""

import contextlib
import ctypes
import io
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.inference import SamplingParams, ServedForward, token_logprobs
from slipstream.inference.engine import ClosedError
from slipstream.quantized import QuantizedLinear
from tests import probe, toy
from tests.pool import distributed, run

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "grpo.py"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
PROMPTS = [[(7 * i + j * j) % 96 for j in range(length)] for i, length in enumerate((3, 18, 33))]
SERVING: dict[str, Any] = {"threads": 1, "kv_cache_bytes": "1M", "max_running": 8, "device": "cpu"}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, tie_word_embeddings=False))


def qwen() -> nn.Module:
    """A Qwen model, which has biases."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=False))


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(100 * rank + step))


def train(engine: Any, step: int) -> None:
    ids = tokens(engine.rank, step)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def answers(server: Any) -> list[list[int]]:
    return [one.token_ids for one in server.generate(PROMPTS, max_new_tokens=8)]


@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_a_server_answers_as_one_of_the_saved_folder(transport: str, tmp_path: Path) -> None:
    for model, kinds in ((llama, ("fp32", "int8", "int4")), (mixtral, ("fp32",)), (qwen, ("bf16",))):
        made = toy.seeded(model)
        servers = {kind: slipstream.init_inference(made.config, dtype=kind, **SERVING) for kind in kinds}
        engine = toy.make(made, 3, transport)
        with pytest.raises(ClosedError, match=r"call update_weights\(\)"):
            servers[kinds[0]].generate([1, 2, 3], max_new_tokens=1)
        said = []
        for step in range(2):
            train(engine, step)
            folder = tmp_path / f"{model.__name__}{step}"
            engine.save_pretrained(str(folder))
            for kind, server in servers.items():
                server.update_weights(engine.named_weights())
                with slipstream.init_inference(folder, dtype=kind, **SERVING) as fresh:
                    said.append(answers(server))
                    assert said[-1] == answers(fresh), (model, kind, step)
        assert said[0] != said[-1]
        for server in servers.values():
            server.close()
        engine.destroy()


SERVED: dict[str, Any] = {"llama": llama, "mixtral": mixtral, "qwen": qwen}


@distributed(world_size=2, transports=("gloo",), timeout=120)
def test_the_trainer_computes_the_servers_log_probabilities_bit_for_bit(transport: str) -> None:
    """In any sampling batch, before and after a step, under stage 3. The gradient is that of torch's own forward."""
    for name, model in SERVED.items():
        made, plain = toy.seeded(model), toy.seeded(model)
        server = slipstream.init_inference(made.config, dtype="fp32", **SERVING)
        engine = toy.make(made, 3, transport)
        served = ServedForward(engine.module, threads=1)
        for step in range(2):
            server.update_weights(engine.named_weights())
            settings = SamplingParams(max_tokens=6 + engine.rank, temperature=1.3, top_p=0.9, seed=engine.rank + step, logprobs=0)
            together, alone = server.generate(PROMPTS, settings, n=2), server.generate(PROMPTS[1], settings)
            for prompt, one in [*zip([p for p in PROMPTS for _ in range(2)], together, strict=True), (PROMPTS[1], alone)]:
                said = torch.tensor([each.logprob for each in one.logprobs])
                ids = torch.tensor([prompt + one.token_ids])
                with served, torch.no_grad():
                    logits = engine(input_ids=ids).logits
                ours = token_logprobs(logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])
                assert ours.equal(said), (name, step, ours - said)
            whole = [torch.tensor(PROMPTS[i // 2] + one.token_ids) for i, one in enumerate(together)]
            rows = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
            mask = torch.arange(rows.shape[1]) < torch.tensor([[len(each)] for each in whole])
            with served:
                logprobs = token_logprobs(engine(input_ids=rows, attention_mask=mask.long()).logits[:, :-1], rows[:, 1:])
                for row, prompt, one in zip(logprobs, [p for p in PROMPTS for _ in range(2)], together, strict=True):
                    said = torch.tensor([each.logprob for each in one.logprobs])
                    assert row[len(prompt) - 1 :][: len(said)].equal(said), (name, step)
                engine.backward(-(logprobs * mask[:, 1:]).sum())
            if step == 0:
                expected = plain(input_ids=rows, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
                expected = expected.gather(-1, rows[:, 1:, None])[..., 0]
                torch.testing.assert_close(logprobs[mask[:, 1:]], expected[mask[:, 1:]], rtol=1e-4, atol=1e-4)
                (-(expected * mask[:, 1:]).sum()).backward()
                for which in (
                    "model.layers.0.input_layernorm.weight",
                    "model.layers.2.self_attn.v_proj.weight",
                    "model.norm.weight",
                ):
                    wanted = plain.get_parameter(which).grad
                    dist.all_reduce(wanted)
                    torch.testing.assert_close(engine.gradient(which), wanted / 2, rtol=1e-3, atol=1e-3)
            engine.step()
        server.close()
        engine.destroy()


@distributed(world_size=2, transports=("shared",), timeout=120)
def test_another_process_serves_them(transport: str, tmp_path: Path) -> None:
    """Both ranks train; rank 0 sends, and a server thread in rank 1's process receives."""
    path, rank = tmp_path / "weights.sock", dist.get_rank()
    made = toy.seeded(llama)
    engine = toy.make(made, 3, transport)
    to = path if rank == 0 else None
    with contextlib.ExitStack() as stack:
        beside, apart = (stack.enter_context(slipstream.init_inference(made.config, dtype="bf16", **SERVING)) for _ in range(2))
        receiver = stack.enter_context(slipstream.handover.Receiver(apart, path)) if rank == 1 else None
        assert receiver is None or path.stat().st_mode & 0o777 == 0o600
        dist.barrier()
        for step in range(2):
            train(engine, step)
            slipstream.handover.send(engine.named_weights(), to=to)
            beside.update_weights(engine.named_weights())
            dist.barrier()
            assert rank == 0 or answers(apart) == answers(beside)
            dist.barrier()
        if rank == 0:
            with pytest.raises(slipstream.handover.HandoverError, match=r"were not taken: ValueError: .*up_proj.* is \[2, 2\]"):
                norm = ("model.norm.weight", torch.ones(SIZES["hidden_size"]))
                slipstream.handover.send([norm, ("model.layers.0.mlp.up_proj.weight", torch.ones(2, 2))], to=path)
        dist.barrier()
        if rank == 1:
            with pytest.raises(ClosedError, match=r"a weight update did not complete: ValueError"):
                answers(apart)
        dist.barrier()
        slipstream.handover.send(engine.named_weights(), to=to)
        dist.barrier()
        if receiver is not None:
            assert answers(apart) == answers(beside)
            receiver.close()
        dist.barrier()
        refused = pytest.raises(slipstream.handover.HandoverError, match="no receiver listens there")
        with refused if rank == 0 else contextlib.nullcontext():
            slipstream.handover.send(engine.named_weights(), to=to)
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_a_refused_update_leaves_the_trainer_as_it_was(transport: str) -> None:
    """Refused on one rank only: the others do not wait for it, and gradients are enabled."""
    made = toy.seeded(llama)
    engine = toy.make(made, 3, transport)
    with slipstream.init_inference(made.config, dtype="fp32", **SERVING) as server:

        def renamed() -> Iterator[tuple[str, Tensor]]:
            for i, (name, tensor) in enumerate(engine.named_weights()):
                yield "another" if i == 3 and engine.rank == 0 else name, tensor

        refused = pytest.raises(ValueError, match="'another' is none of this model's weights")
        with refused if engine.rank == 0 else contextlib.nullcontext():
            server.update_weights(renamed())
        assert torch.is_grad_enabled()
        for _, tensor in engine.named_weights():
            assert torch.is_grad_enabled() and not tensor.requires_grad
        train(engine, 0)
    engine.destroy()


WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}


def wide() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, tie_word_embeddings=True))


def resident() -> int:
    """Resident bytes, without memory that malloc keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_at_most_one_unit_is_complete_at_a_time(transport: str) -> None:
    """The server allocates no further memory, and frees its memory while it sleeps."""
    made = toy.seeded(wide)
    nbytes = sum(each.nbytes for each in made.parameters())
    server = slipstream.init_inference(made.config, dtype="fp32", **SERVING)
    engine = toy.make(made, 3, transport)

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in engine.named_weights():
            (whole,) = (unit for unit in probe.units(engine) if unit.is_gathered)
            assert name in whole.names
            yield name, tensor
        assert all(unit.is_released for unit in probe.units(engine))

    server.update_weights(watched())
    places = [tensor.data_ptr() for tensor in server.engine.runner._tensors]
    expected = answers(server)
    server.update_weights(watched())
    assert [tensor.data_ptr() for tensor in server.engine.runner._tensors] == places
    before = resident()
    server.sleep()
    assert resident() < before - 0.9 * nbytes
    with pytest.raises(ClosedError, match=r"the engine sleeps: call update_weights\(\)"):
        answers(server)
    server.update_weights(engine.named_weights())
    assert answers(server) == expected
    server.close()
    engine.destroy()


@pytest.mark.disk
@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_three_engines_on_the_same_ranks_sleep_in_turns(transport: str, tmp_path: Path) -> None:
    """A policy, its frozen reference and a reward model: sleeping frees an engine's memory, destroying affects no other."""
    ids = tokens(dist.get_rank(), 0)
    policy = toy.make(toy.seeded(wide), 3, transport)
    reference, reward = (toy.make(toy.seeded(wide, seed).requires_grad_(False), 3, transport, optimizer=None) for seed in (0, 1))
    train(policy, 0)
    with torch.no_grad():
        said = [each(input_ids=ids).logits for each in (policy, reference, reward)]
    for engine in (policy, reference, reward):
        before = resident()
        nbytes = engine.sleep(device="disk", path=str(tmp_path))
        assert nbytes > 1 << 22 and before - resident() > 0.9 * nbytes
        with torch.no_grad():
            others = [each(input_ids=ids).logits for each in (policy, reference, reward) if each is not engine]
        assert all(any(now.equal(then) for then in said) for now in others)
        engine.wake()
    reward.destroy()
    with torch.no_grad():
        assert policy(input_ids=ids).logits.equal(said[0]) and reference(input_ids=ids).logits.equal(said[1])
    train(policy, 1)
    reference.destroy()
    train(policy, 2)
    with torch.no_grad():
        assert not policy(input_ids=ids).logits.equal(said[0])
    policy.destroy()


@distributed(world_size=2, transports=("shared",))
def test_a_quantized_base_is_transferred_dequantized(transport: str) -> None:
    made = slipstream.quantize(toy.seeded(llama), bits=4)
    plain = toy.seeded(llama)
    for path, module in made.named_modules():
        if isinstance(module, QuantizedLinear):
            plain.get_parameter(f"{path}.weight").data.copy_(module.dequantized())
    engine = toy.make(made.requires_grad_(False), 3, transport, optimizer=None)
    with (
        slipstream.init_inference(plain, dtype="fp32", **SERVING) as expected,
        slipstream.init_inference(plain.config, dtype="fp32", **SERVING) as server,
    ):
        server.update_weights(engine.named_weights())
        assert answers(server) == answers(expected)
    engine.destroy()


def serve_adapted() -> None:
    warnings.simplefilter("ignore")  # from peft and the packages that it finds
    import peft

    some: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"], "task_type": "CAUSAL_LM"}
    with slipstream.init_inference(toy.seeded(llama), dtype="fp32", **SERVING) as server:
        base = answers(server)
    for config in (
        peft.LoraConfig(r=4, lora_alpha=8, **some),
        peft.LoHaConfig(r=4, alpha=8, rank_dropout=0.5, **some),
        peft.LoKrConfig(r=4, alpha=8, decompose_both=True, **some),
        peft.VeraConfig(r=8, d_initial=1.0, **some),
        peft.AdaLoraConfig(init_r=6, target_r=4, total_step=20, lora_alpha=8, **some),
    ):
        made = toy.seeded(llama)
        with slipstream.init_inference(made.config, dtype="fp32", **SERVING) as server:
            adapted: Any = peft.get_peft_model(made, config)
            engine = toy.make(adapted, 3, "gloo", optimizer={"type": "AdamW", "params": {"lr": 0.1}})
            for step in range(2):
                train(engine, step)
            server.update_weights(engine.named_weights())
            said = answers(server)
        engine.destroy()
        adapted.eval()
        whole = [adapted.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist() for prompt in PROMPTS]
        assert whole == [[*prompt, *answer] for prompt, answer in zip(PROMPTS, said, strict=True)], config.peft_type
        assert said != base, config.peft_type


def refuse_adapted() -> None:
    warnings.simplefilter("ignore")
    import peft

    modules: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    parameters: dict[str, Any] = {"r": 4, "target_modules": [], "target_parameters": ["experts.down_proj"]}
    for model, config, why in (
        (llama, peft.LoraConfig(**modules, use_dora=True), "q_proj' is adapted by adapter 'default' with DoRA"),
        (qwen, peft.LoraConfig(**modules, lora_bias=True), "q_proj' is adapted by adapter 'default' with lora_bias"),
        (llama, peft.LoraConfig(r=4, target_modules=["lm_head"]), "lm_head' is adapted by Linear on a weight that is not its own"),
        (llama, peft.LoraConfig(r=4, target_modules=["embed_tokens"]), "embed_tokens' is adapted by Embedding on a weight"),
        (mixtral, peft.LoraConfig(**parameters), "experts' is adapted by ParamWrapper on a weight that is not its own"),
        (llama, peft.OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]), r"is adapted by a layer of peft\.tuners\.oft"),
        (llama, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), r"is adapted by a layer of peft\.tuners\.ia3"),
    ):
        engine = toy.make(peft.get_peft_model(toy.seeded(model), config), 3, "gloo")
        with pytest.raises(ValueError, match=why):
            next(engine.named_weights())
        engine.destroy()


@pytest.mark.parametrize("served", [serve_adapted, refuse_adapted])
def test_adapters_are_transferred_merged_or_refused(served: Callable[[], None]) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    run(2, served)


@distributed(world_size=2, timeout=120)
def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example itself fails if the server's log-probabilities differ from the trainer's."""
    said = io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["grpo.py", "--steps", "2", "--prompts", "2", "--group", "3", "--tokens", "5"])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert dist.get_rank() or "the same bits in all 2 steps" in said.getvalue()

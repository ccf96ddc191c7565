"""PEFT's adapters beside a model: against the merged model, bits in every batch, prefixes, refusals, the engine and the server."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import slipstream
from slipstream.inference import adapters, families
from slipstream.inference.core import Batch
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.native import NativeDecoder
from slipstream.inference.weights import mapped
from slipstream.launch.cli import build_parser
from slipstream.ops import build, cpu
from slipstream.ops.matrices import dequantize
from tests.cases import every_other
from tests.inference import test_families, test_models
from tests.inference.test_native import Requests, weights_of
from tests.inference.twins import SIZES, check_against_generate, tiny

pytestmark = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def write(folder: Path, model: Any, modules: Sequence[str], *, rank: int = 4, seed: int = 0, **settings: Any) -> Any:
    """An adapter of these modules, in PEFT's form, and the model that has it merged."""
    generator, merged = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    named, tensors = dict(merged.named_modules()), dict[str, torch.Tensor]()
    alpha = settings.get("lora_alpha", 6)
    for name in modules:
        weight = named[name].weight.data
        turned = type(named[name]).__name__ == "Conv1D"
        out, features = weight.T.shape if turned else weight.shape
        a, b = (torch.randn(size, generator=generator) * 0.3 for size in ((rank, features), (out, rank)))
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        term = (b @ a) * (alpha / (rank**0.5 if settings.get("use_rslora") else rank))
        weight += term.T if turned else term
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / adapters.WEIGHTS)
    (folder / adapters.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **settings}))
    return merged


def served_modules(model: Any) -> list[str]:
    """The matrices of attention and dense MLPs, by the names in the table of families."""
    row = families.FAMILIES[model.config.model_type]
    names = {row.names.get(role, "-") for role in ("q", "k", "v", "qkv", "out", "gate", "up", "gate_up", "down")}
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{row.names['layers']}.")
        and ".".join(name.removeprefix(row.names["layers"]).split(".")[2:]) in names
        and module.weight.dim() == 2
    ]


class Adapted:
    """A runner whose requests all have one adapter."""

    def __init__(self, runner: NativeDecoder, adapter: Any) -> None:
        self.runner, self.adapter = runner, adapter
        self.num_blocks, self.block_size, self.vocab_size = runner.num_blocks, runner.block_size, runner.vocab_size
        self.max_context, self.put, self.generate = runner.max_context, runner.put, None

    def forward(self, batch: Batch) -> Any:
        for chunk in batch.chunks:
            chunk.request.adapter = self.adapter
        return self.runner.forward(batch)


LATENT = [case for case in test_families.CASES if case.startswith("deepseek")]
CASES = {**{f"families-{case}": test_families.model_of for case in test_families.CASES if case not in LATENT}}
CASES |= {f"models-{case}": test_models.model_of for case in test_models.CASES}


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    model = test_families.model_of(LATENT[0])
    write(tmp_path / "a", model, ["model.layers.0.self_attn.o_proj"], rank=2)
    with pytest.raises(ValueError, match="adapters of models with latent attention are not served; merge it"):
        adapters.read(tmp_path / "a", from_hf(model.config.to_dict()))


@pytest.mark.parametrize("case", CASES)
def test_as_the_merged_model_of_every_family(case: str, tmp_path: Path) -> None:
    """Greedy text and logits in fp32, to 2e-4, with terms on every matrix that may have one."""
    model = CASES[case](case.partition("-")[2])
    modules = served_modules(model)
    assert len(modules) >= 4
    merged = write(tmp_path / "a", model, modules, rank=5, use_rslora=case.endswith("a"))
    config = from_hf(model.config.to_dict())
    runner = NativeDecoder(config, from_state(config, model.state_dict()), num_blocks=64, cache_dtype=torch.float32, threads=2)
    packed = adapters.opener(config, torch.float32)("a", tmp_path / "a")
    check_against_generate(merged, Adapted(runner, packed), tolerance=5e-4)
    runner.close()


def llama(**changes: Any) -> Any:
    return tiny("Llama", **{**SIZES, "max_position_embeddings": 256, **changes})


def projections(num_layers: int = 2) -> list[str]:
    inside = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    return [f"model.layers.{i}.{name}" for i in range(num_layers) for name in inside]


def merged_with(matrix: Any, term: adapters.LowRank | None) -> torch.Tensor:
    weight = dequantize(matrix).float()
    return weight if term is None else weight + term.scale * term.b @ term.a


@pytest.mark.parametrize(
    ("isa", "kind"), every_other(("portable", "avx2", "avx512", "avx512bf16"), ("float32", "bfloat16", "int8", "int4"))
)
def test_bits_do_not_depend_on_others(isa: str, kind: str, tmp_path: Path) -> None:
    """Alone, and in a batch of prompts and single tokens with three adapters, of other ranks and places, and none. Beside the same
    base, merged in fp32, logits are off by what 8 and 16 bits are, which is little beside what an adapter changes."""
    used = cpu.isa()
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    try:
        config, weights = weights_of(kind)
        inner = config.intermediate_size
        model = llama(hidden_size=96, num_attention_heads=6, head_dim=16, vocab_size=113, intermediate_size=inner)
        opened: list[Any] = [None]
        for number, (rank, modules) in enumerate([(3, projections()), (19, projections()[:9]), (8, projections()[4:])]):
            write(tmp_path / str(number), model, modules, rank=rank, seed=number)
            opened.append(adapters.opener(config, torch.bfloat16)(str(number), tmp_path / str(number)))
        cache = torch.float32 if kind == "float32" else torch.bfloat16
        alone, many = (NativeDecoder(config, weights, num_blocks=96, cache_dtype=cache, threads=n) for n in (1, 3))
        rng = random.Random(kind)
        prompts = [[rng.randrange(113) for _ in range(rng.randint(2, 30))] for _ in range(13)]
        expected, together = [], Requests(many, 1)
        requests = [together.request(prompt) for prompt in prompts]
        for i, prompt in enumerate(prompts):
            batch = Requests(alone, 0)
            request = batch.request(prompt)
            request.adapter = requests[i].adapter = opened[i % 4]
            expected.append(batch.run([(request, 0, len(prompt))])[0])
        for cut in (2, 1):  # prompts, then their last tokens alone
            together.run([(request, 0, len(request.tokens) - 1) for request in requests])
            got = together.run([(r, max(0, len(r.tokens) - cut), len(r.tokens)) for r in requests])
            assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
        plain = Requests(alone, 2)
        others = [plain.run([(plain.request(prompts[i]), 0, len(prompts[i]))])[0] for i in range(13)]
        assert [a.equal(b) for a, b in zip(others, expected, strict=True)] == [i % 4 == 0 for i in range(13)]
        for i in range(1, 4):
            terms = adapters.read(tmp_path / str(i - 1), config)
            whole = mapped(weights, lambda role, m, terms=terms: merged_with(m, terms.get(role)))
            runner = NativeDecoder(config, whole, num_blocks=8, cache_dtype=torch.float32, threads=1)
            batch = Requests(runner, 0)
            (logits,) = batch.run([(batch.request(prompts[i]), 0, len(prompts[i]))])
            off, changed = ((logits - one[i]).norm() / logits.norm() for one in (expected, others))
            assert off < 0.1 < 0.5 < changed, (off, changed)
            runner.close()
        alone.close()
        many.close()
    finally:
        assert cpu.use_isa(used)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    """A model's folder, two adapters, and the merged models."""
    model = llama()
    model.save_pretrained(tmp_path / "model")
    merged = {name: write(tmp_path / name, model, projections(), seed=seed) for seed, name in enumerate(("red", "blue"))}
    return {"model": tmp_path / "model", "base": model, **{name: tmp_path / name for name in merged}, "merged": merged}


@pytest.fixture
def engine(folders: dict[str, Any]) -> Iterator[Any]:
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "threads": 2}
    with slipstream.init_inference(folders["model"], adapters={name: folders[name] for name in ("red", "blue")}, **options) as one:
        yield one


def greedy(model: Any) -> list[int]:
    ids: list[int] = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    return ids


def test_an_engine_answers_as_each_merged_model(folders: dict[str, Any], engine: Any) -> None:
    expected = {name: greedy(model) for name, model in {**folders["merged"], None: folders["base"]}.items()}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    assert engine.adapters == ("red", "blue")
    for name, ids in expected.items():
        assert engine.generate(PROMPT, adapter=name, max_new_tokens=8).token_ids == ids
    assert engine.generate([PROMPT, PROMPT], adapter="red", max_new_tokens=8)[1].token_ids == expected["red"]


def test_prefixes_are_of_one_adapter(folders: dict[str, Any], engine: Any) -> None:
    def cached(name: str | None) -> int:
        return engine.generate(PROMPT, adapter=name, max_new_tokens=1).usage.cached_tokens

    assert [cached(name) for name in ("red", None, "blue", "red", None, "blue")] == [0, 0, 0, 16, 16, 16]
    engine.load_adapter("red", folders["blue"], replace=True)
    assert cached("red") == 0
    assert engine.generate(PROMPT, adapter="red", max_new_tokens=8).token_ids == greedy(folders["merged"]["blue"])


def test_unloading_leaves_running_requests_alone(folders: dict[str, Any], engine: Any) -> None:
    stream = engine.generate(PROMPT, adapter="red", max_new_tokens=8, stream=True)
    engine.unload_adapter("red")
    assert [token for delta in stream for token in delta.token_ids] == greedy(folders["merged"]["red"])
    with pytest.raises(ValueError, match=r"no adapter 'red'; loaded: blue"):
        engine.generate(PROMPT, adapter="red")
    with pytest.raises(ValueError, match="'blue' is loaded already"):
        engine.load_adapter("blue", folders["red"])
    with pytest.raises(ValueError, match="a name of its own"):
        engine.load_adapter("model", folders["red"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is True"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "another kind": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "no number": ({"lora_alpha": "six"}, "lora_alpha of .* is 'six'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_served(case: str, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    model = llama()
    write(tmp_path / "a", model, projections())
    (tmp_path / "a" / adapters.CONFIG).write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 6, **settings}))
    with pytest.raises(ValueError, match=message):
        adapters.read(tmp_path / "a", from_hf(model.config.to_dict()))


def test_files_that_are_not_this_models(tmp_path: Path) -> None:
    model = llama()
    config = from_hf(model.config.to_dict())

    def message(folder: Path) -> str:
        with pytest.raises(ValueError) as error:
            adapters.read(folder, config)
        return str(error.value)

    write(tmp_path / "wide", llama(hidden_size=128), projections()[:1])
    assert "self_attn.q_proj has A [4, 128]" in message(tmp_path / "wide") and "[64, 64]" in message(tmp_path / "wide")
    write(tmp_path / "deep", llama(num_hidden_layers=3), projections(3))
    assert "changes model.layers.2.mlp.down_proj, which is not a matrix of this model" in message(tmp_path / "deep")
    write(tmp_path / "head", model, ["lm_head"])
    assert "changes lm_head; served are" in message(tmp_path / "head")
    write(tmp_path / "half", model, projections())
    one = "base_model.model.model.layers.0.self_attn.q_proj."
    save_file({f"{one}lora_A.weight": torch.ones(4, 64)}, tmp_path / "half" / adapters.WEIGHTS)
    assert "q_proj has no matrix lora_B" in message(tmp_path / "half")
    save_file({f"{one}lora_magnitude_vector": torch.ones(64)}, tmp_path / "half" / adapters.WEIGHTS)
    assert "lora_magnitude_vector is not a matrix A or B" in message(tmp_path / "half")
    (tmp_path / "half" / adapters.WEIGHTS).write_bytes(b"nothing")
    assert "is damaged or cut off" in message(tmp_path / "half")
    assert "it needs adapter_config.json and adapter_model.safetensors" in message(tmp_path)
    mixture = tiny("Mixtral", **{**SIZES, "num_local_experts": 4})
    write(tmp_path / "a", mixture, ["model.layers.0.self_attn.q_proj"])
    assert list(adapters.read(tmp_path / "a", from_hf(mixture.config.to_dict()))) == ["layers.0.q"]


def test_forwards_without_adapters_say_so(folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.inference import native

    monkeypatch.setattr(native, "why_not", lambda config: "it is switched off")
    with pytest.raises(ValueError, match="they need the native kernels of one process on a CPU, and here it is torch"):
        slipstream.init_inference(folders["model"], dtype="fp32", device="cpu", adapters={"red": folders["red"]})


def test_patterns_of_alpha(tmp_path: Path) -> None:
    model = llama()
    write(tmp_path / "a", model, projections(), alpha_pattern={"layers.1.mlp.up_proj": 10, "v_proj": 2})
    terms = adapters.read(tmp_path / "a", from_hf(model.config.to_dict()))
    scales = {role: terms[role].scale for role in ("layers.0.v", "layers.1.v", "layers.0.mlp.up", "layers.1.mlp.up")}
    assert scales == {"layers.0.v": 0.5, "layers.1.v": 0.5, "layers.0.mlp.up": 1.5, "layers.1.mlp.up": 2.5}


def test_over_http(folders: dict[str, Any], engine: Any) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from tests.inference.test_server import call, serving
    from tests.unit.test_inference_engine import byte_tokenizer

    engine.engine.tokenizer = byte_tokenizer()
    with serving(engine.engine, lora_root=str(folders["model"].parent)) as address:

        def post(path: str, **body: Any) -> Any:
            status, _, answer = call(address, "POST", path, json.dumps(body))
            return status, json.loads(answer)

        def listed() -> list[tuple[str, str | None]]:
            return [(one["id"], one.get("parent")) for one in json.loads(call(address, "GET", "/v1/models").body)["data"]]

        assert listed() == [("model", None), ("red", "model"), ("blue", "model")]
        ask: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        status, answer = post("/v1/completions", model="blue", **ask)
        assert (status, answer["model"]) == (200, "blue")
        assert answer["choices"][0]["logprobs"]["tokens"] == [chr(one) for one in greedy(folders["merged"]["blue"])]
        assert post("/v1/load_lora_adapter", lora_name="green", lora_path="blue")[0] == 200
        assert listed()[-1] == ("green", "model") and call(address, "GET", "/v1/models/green")[0] == 200
        assert post("/v1/completions", model="green", **ask)[1]["choices"] == answer["choices"]
        assert post("/v1/load_lora_adapter", lora_name="green", lora_path="red")[0] == 400
        assert post("/v1/load_lora_adapter", lora_name="green", lora_path="red", load_inplace=True)[0] == 200
        for path, message in (("a\0b", "embedded null byte"), ("a" * 1000, "File name too long")):
            status, answer = post("/v1/load_lora_adapter", lora_name="out", lora_path=path)
            assert status == 400 and message in answer["error"]["message"] and answer["error"]["param"] == "lora_path"
        status, answer = post("/v1/load_lora_adapter", lora_name="out", lora_path="../..")
        assert status == 400 and "below the server's --lora-root" in answer["error"]["message"]
        assert post("/v1/unload_lora_adapter", lora_name="green")[0] == 200
        assert post("/v1/unload_lora_adapter", lora_name="green")[0] == 404
        assert post("/v1/completions", model="green", **ask)[0] == 404
    with serving(engine.engine) as address:
        assert call(address, "POST", "/v1/load_lora_adapter", '{"lora_name": "x", "lora_path": "red"}')[0] == 403


def test_options_in_vllms_forms() -> None:
    words = ["serve", "smollm2", "--lora-modules", "red=a=b", '{"name": "blue", "path": "c", "base_model_name": "m"}']
    options = build_parser().parse_args([*words, "--lora-modules", "green=d"])
    assert options.lora_modules == [("red", "a=b"), ("blue", "c"), ("green", "d")]

"""Clients of OpenAI's API, unmodified: OpenAI's Agents SDK, pydantic-ai and lm-eval. Each is skipped where it is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from slipstream.inference import init_inference  # noqa: E402
from slipstream.inference.text import BYTE_OF  # noqa: E402
from tests.inference.fake_engine import FakeEngine  # noqa: E402
from tests.inference.test_server import serving  # noqa: E402
from tests.inference.twins import SIZES, tiny  # noqa: E402

pytestmark = pytest.mark.slow
QUESTION = "use a tool, please"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(FakeEngine()) as address:
        yield address


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_agents_sdk(address: str, api: str) -> None:
    """Its functions are strict by default. Runs and streamed runs: a call, its result, an answer."""
    agents = pytest.importorskip("agents", exc_type=ImportError)
    agents.set_tracing_disabled(True)
    called: list[int] = []

    @agents.function_tool
    def add(a: int) -> str:
        """Add."""
        called.append(a)
        return f"sum {a}"

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent(name="one", instructions="be brief", tools=[add], model=kind("fake/model", ai))
            first = await agents.Runner.run(agent, QUESTION)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            events = [event.type async for event in streamed.stream_events()]
            assert "raw_response_event" in events
            more = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "and now"}])
            return [first.final_output, streamed.final_output, more.final_output]

    outputs = asyncio.run(run())
    assert called == [7, 7] and all(outputs)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(address: str, api: str) -> None:
    models = pytest.importorskip("pydantic_ai.models.openai", exc_type=ImportError)
    from pydantic_ai import Agent
    from pydantic_ai.providers.openai import OpenAIProvider

    called: list[int] = []

    async def run() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
            kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
            agent = Agent(kind("fake/model", provider=OpenAIProvider(openai_client=ai)), instructions="be brief")

            @agent.tool_plain
            def add(a: int) -> str:
                called.append(a)
                return f"sum {a}"

            first = await agent.run(QUESTION)
            async with agent.run_stream("hello there", message_history=first.all_messages()) as streamed:
                text = "".join([part async for part in streamed.stream_text(delta=True)])
            return first.output, text

    first, text = asyncio.run(run())
    assert called == [7] and first and text


def test_lm_eval(tmp_path: Path) -> None:
    """Log-likelihoods are those of plain torch, generations are the engine's."""
    clients = pytest.importorskip("lm_eval.models.openai_completions", exc_type=ImportError)
    from lm_eval.api.instance import Instance

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={text: number for number, text in enumerate(BYTE_OF)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    model = tiny("Llama", **SIZES | {"vocab_size": 257, "eos_token_id": 256})
    model.save_pretrained(tmp_path)
    pairs = [("The sky is", " blue"), ("Water", " is wet"), ("a", "b")]

    def likelihood(context: str, continuation: str) -> float:
        ids = backend.encode(context + continuation).ids
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(backend.encode(context).ids)
        return sum(float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids)))

    with init_inference(tmp_path, device="cpu", model_name="tiny") as engine, serving(engine.engine) as address:  # type: ignore[arg-type]
        client = clients.LocalCompletionsAPI(
            model="tiny",
            base_url=f"http://{address}/v1/completions",
            tokenizer=str(tmp_path),
            tokenizer_backend="huggingface",
            batch_size=2,
            max_length=64,
        )
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        scores = client.loglikelihood(asked)
        wanted = [Instance("generate_until", {}, ("The sky", {"until": ["q"], "max_gen_toks": 8}), 0)]
        (text,) = client.generate_until(wanted)
        expected = engine.generate("The sky", max_new_tokens=8, temperature=0, stop=("q",)).text
    for pair, (score, _) in zip(pairs, scores, strict=True):
        assert score == pytest.approx(likelihood(*pair), abs=1e-3)
    assert text == expected

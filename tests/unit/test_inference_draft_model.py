"""A draft model: the same tokens as without, whatever it proposes; how many it proposes; its blocks."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.inference import draft_model
from slipstream.inference.core import Batch, Request, SamplingParams
from slipstream.inference.draft_model import DraftModel, best_number
from tests.inference.blocks import check_drafts, check_engine
from tests.unit.test_inference_engine import END, Answer, HashRunner, ask, running, wait

PROMPTS = ["a prompt of forty characters, more or less", "another", "x"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.3, "logit_bias": {ord("q"): 3.0}},
    {"temperature": 0, "stop": ("e", "ku"), "min_tokens": 6},
    {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "min_tokens": 20},
]


class Other(HashRunner):
    """Another model: it guesses right by chance."""

    def logits(self, history: list[int], num_generated: int) -> torch.Tensor:
        return super().logits([*history, 7], num_generated)


class Wide(HashRunner):
    """The same model, with logits of more tokens, which it likes best."""

    vocab_size = END + 40

    def logits(self, history: list[int], num_generated: int) -> torch.Tensor:
        logits = super().logits(history, num_generated)
        logits[END + 1 :] = 50.0
        return logits


class Narrow(HashRunner):
    """The same model without the end token."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch)[:, :END]


class Broken(HashRunner):
    def forward(self, batch: Batch) -> torch.Tensor:
        if len(self.sizes) == 20:
            raise RuntimeError("device lost")
        return super().forward(batch)


def told(answer: Answer) -> list[Any]:
    """All that a client sees, however it is cut."""
    outputs = answer.outputs[0]
    logprobs = [one for output in outputs for one in output.logprobs]
    return [answer.text(), answer.ids(), logprobs, outputs[0].prompt_logprobs, outputs[-1].finish, outputs[-1].usage]


def answers(draft: HashRunner | None, most: int = 8) -> tuple[list[list[Any]], int, int]:
    """Every prompt with all settings, one by one and then three at once; and the numbers of tokens proposed and accepted."""
    with running(draft=draft and DraftModel(draft, END + 1, most)) as engine:
        params = [SamplingParams(**{"max_tokens": 40, **settings}) for settings in SETTINGS]
        texts = [told(wait(ask(engine, prompt, one))) for prompt in PROMPTS for one in params]
        texts += [told(wait(answer)) for answer in [ask(engine, prompt, params[i]) for i, prompt in enumerate(PROMPTS)]]
        check_engine(engine)
        stats = engine.stats()
    return texts, stats.draft_tokens, stats.accepted_tokens


@pytest.mark.parametrize("draft", [HashRunner, Wide, Narrow, Other, Broken])
def test_a_draft_model_changes_nothing(draft: Callable[..., HashRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Free drafts, so that as many as possible are proposed."""
    monkeypatch.setattr(draft_model, "best_number", lambda likely, most, *_: most)
    expected, proposed, _ = answers(None)
    assert not proposed
    actual, proposed, accepted = answers(draft())
    assert actual == expected
    if draft in (HashRunner, Wide):
        assert proposed == accepted > 200
    elif draft is Other:
        assert 0 < accepted < proposed / 4
    elif draft is Broken:
        assert 0 < proposed < 60


def test_few_blocks_and_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "best_number", lambda likely, most, *_: most)
    monkeypatch.setattr(draft_model, "CATCH_UP", 8)
    expected, *_ = answers(None)
    for blocks in (22, 9):  # one request and a half; less than one
        actual, proposed, accepted = answers(HashRunner(num_blocks=blocks), 3)
        assert actual == expected and proposed == accepted > 0
    actual, proposed, accepted = answers(HashRunner(max_context=30))
    assert actual == expected and proposed == accepted > 0


def test_many_requests_and_grammars_get_no_drafts() -> None:
    with running(draft=DraftModel(HashRunner(), END + 1)) as engine:
        for _ in range(2):
            wait(ask(engine, "x", SamplingParams(json_schema='{"type": "integer"}', max_tokens=9, temperature=0)))
        assert not engine.stats().draft_tokens
        wait(ask(engine, "x", SamplingParams(max_tokens=30, ignore_eos=True), n=5))
        assert not engine.stats().draft_tokens
        wait(ask(engine, "x", SamplingParams(max_tokens=30, ignore_eos=True), n=4))
        assert engine.stats().draft_tokens


def test_the_number_of_best_rate() -> None:
    def seconds(tokens: int) -> float:
        return 1.0 + 0.1 * tokens

    assert best_number(0.9, 8, 1, lambda tokens: 0.0, 0.1) == 0, "first, a plain forward is measured"
    assert best_number(0.9, 0, 1, seconds, 0.0) == 0
    assert best_number(1.0, 8, 1, seconds, 0.1) == 8
    assert best_number(0.0, 8, 1, seconds, 0.1) == 0
    assert best_number(1.0, 8, 1, seconds, 1.2) == 0, "a draft model as slow as the model"
    chosen = [best_number(likely / 10, 8, 1, seconds, 0.1) for likely in range(11)]
    assert chosen == sorted(chosen) and len(set(chosen)) > 3
    assert best_number(0.6, 8, 4, seconds, 0.1) <= best_number(0.6, 8, 1, seconds, 0.1)
    for likely in (0.3, 0.6, 0.9):  # by brute force
        rates = [sum(likely**i for i in range(k + 1)) / (seconds(k + 1) + 0.1 * k) for k in range(9)]
        assert best_number(likely, 8, 1, seconds, 0.1) == rates.index(max(rates))


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    """A draft model as slow as the model: PROBES tokens after every PROBE."""
    drafts, request = DraftModel(HashRunner(), END + 1), Request(id="r", tokens=[1, 2, 3], params=SamplingParams(temperature=0))
    drafts._step = 1.0
    numbers = []
    for token in range(100):
        request.tokens.append(token)
        numbers.append(len(drafts.guess({request: 5}, lambda tokens: 1.0).get(request, ())))
    assert [at for at, number in enumerate(numbers) if number] == [32, 64, 96] and set(numbers) == {0, 2}
    drafts.forget(request)
    check_drafts(drafts)
    assert drafts._pool.num_free == drafts._pool.num_blocks


def test_a_common_prefix_is_computed_once() -> None:
    runner = HashRunner()
    drafts, tokens = DraftModel(runner, END + 1), [ord(c) for c in "the same beginning of two"]
    computed: list[int] = []
    runner.before = lambda batch: computed.append(batch.num_tokens)
    for end in ("prompts", "requests"):
        request = Request(id=end, tokens=tokens + [ord(c) for c in end], params=SamplingParams(temperature=0))
        assert len(drafts.guess({request: 1}, lambda tokens: 1.0)[request]) == 1
    assert computed == [32, 33 - 24]
    digest = hashlib.blake2b(repr(request.tokens).encode(), digest_size=8).digest()
    assert drafts._twins[request].proposed == (ord("a") + digest[7] % 26,) or digest[0] < 8

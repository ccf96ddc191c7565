"""Tokenizer, chat template, streamed text and stop strings, on small vocabularies made here."""

import ctypes
import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from slipstream.inference.text import GGUF_SPLITS, StopStrings, Stream, Tokenizer

TEXT = """Hello world, it's the year 2024 and 12345 tokens don't stream themselves. We're here: don't panic!
def f(x):\n    return x + 1\n\n  Grüße aus Köln, naïve café — 你好，世界。こんにちは 안녕하세요 👩‍👩‍👧‍👦 🎉
e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947
"""  # noqa: RUF001
HARD = "Grüße 你好 👩‍👩‍👧‍👦🎉 e\u0301x \u0928\u092e\u0938\u094d\u0924\u0947   spaces\n\n\ttab 2024 \ufffd and �x"
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained() -> Backend:
    """Byte-level BPE in SmolLM2's shape."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=CONTROLS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    return backend


BACKEND = trained()


def byte_level() -> Tokenizer:
    return Tokenizer(BACKEND, special={"eos_token": "<|im_end|>"}, end_ids=[2], templates={"default": CHATML})


def gguf_metadata(pre: str = "smollm") -> dict[str, Any]:
    vocab = BACKEND.get_vocab()
    merges = json.loads(BACKEND.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=lambda token: vocab[token]),
        "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(vocab) - len(CONTROLS)),
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["▁", *"abcdehlmnorstuwy.,'", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁the", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(len(pieces) - i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": Tokenizer.from_gguf(sentencepiece_metadata())}


def splits(items: Sequence[Any], seed: int) -> Iterator[Sequence[Any]]:
    rng, start = random.Random(seed), 0
    while start < len(items):
        stop = start + rng.choice((1, 1, 1, 2, 3, 7))
        yield items[start:stop]
        start = stop


def streamed(tokenizer: Tokenizer, ids: Sequence[int], seed: int, prompt: Sequence[int] = ()) -> list[str]:
    stream = Stream(tokenizer, prompt)
    return [*(stream.push(part) for part in splits(ids, seed)), stream.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from((TEXT, HARD, HARD * 3, "hello world" * 30, "   hello")), seed=st.integers(0, 99))
def test_a_stream_gives_the_whole_text(kind: str, text: str, seed: int) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, special=False)
    pieces = streamed(tokenizer, ids, seed)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces), "no half characters"
    cut = seed % (len(ids) + 1)  # what was generated goes on from a prompt, with the space of its first token
    full, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    if full.startswith(before) and not before.endswith("\ufffd"):
        assert before + "".join(streamed(tokenizer, ids[cut:], seed, ids[:cut])) == full


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=150), seed=st.integers(0, 99))
def test_a_stream_of_any_tokens_gives_the_whole_text(ids: list[int], seed: int) -> None:
    """Special ones, ones the tokenizer does not have, bytes that are no text."""
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(streamed(tokenizer, ids, seed)) == tokenizer.decode(ids)


@pytest.mark.parametrize("flood", [[2], [0, 1, 2], [5000], "\x80", "\ufffd", "a", "好"])
def test_a_stream_does_constant_work(flood: list[int] | str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    byte = {"\x80": [BACKEND.get_vocab()["Ģ"]]}  # a byte that only goes on
    ids = flood if isinstance(flood, list) else byte.get(flood, tokenizer.encode(flood))
    stream = Stream(tokenizer, tokenizer.encode("Hello"))
    text = "".join(stream.push([token]) for _ in range(400) for token in ids)
    assert len(stream._ids) <= 2 * stream.WINDOW
    assert text + stream.finish() == tokenizer.decode(ids * 400)
    assert len(text) >= len(tokenizer.decode(ids * 400)) - 2 * stream.WINDOW


def test_stream_waits_for_whole_characters_and_keeps_spaces() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = Stream(tokenizer)
    pushed = [stream.push([token]) for token in tokenizer.encode("hello world 🎉!", special=False)]
    assert pushed == ["hello", " world", " ", "", "", "", "🎉", "!"] and stream.finish() == ""
    half = tokenizer.encode("🎉", special=False)[1:3]
    stream = Stream(tokenizer, tokenizer.encode("hello"))
    assert [stream.push(tokenizer.encode("world", special=False)), stream.push(half[:1])] == [" world", ""]
    assert stream.finish() == "\ufffd"
    assert Stream(tokenizer).push([2]) == ""


def cut(text: str, stops: Sequence[str], seed: int) -> tuple[str, str | None]:
    stop = StopStrings(stops)
    parts = [*(stop.push("".join(part)) for part in splits(text, seed)), stop.finish()]
    return "".join(parts), stop.matched


@given(
    text=st.text("ab\n🎉", max_size=30),
    stops=st.lists(st.text("ab\n🎉", min_size=1, max_size=6), max_size=4),
    seed=st.integers(0, 99),
)
def test_stop_strings(text: str, stops: list[str], seed: int) -> None:
    ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    _, begin, matched = min(ends, default=(0, len(text), None))
    assert cut(text, stops, seed) == (text[:begin], matched)


def test_stop_strings_keep_back_no_more_than_needed() -> None:
    stop = StopStrings(["</s>", "abab!"])
    assert [stop.push(c) for c in "x<</ababab!"] == ["x", "", "<", "", "</", "", "", "", "ab", "", ""][:11]
    assert stop.matched == "abab!" and stop.push("more") == "" and stop.finish() == ""
    stop = StopStrings(["###"])
    assert (stop.push("a##"), stop.push(""), stop.finish(), stop.matched) == ("a", "", "##", None)


def write_folder(folder: Path, **files: Any) -> Path:
    BACKEND.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<|im_start|>", "special": True},
            "eos_token": "<|im_end|>",
            "pad_token": None,
            "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}"}],
            "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True}, "400": {"content": "<think>"}},
        },
        generation_config={"eos_token_id": [2, 0]},
        config={"eos_token_id": 1},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.end_ids == {0, 2} and tokenizer.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("a<think><|im_end|>")[1:] == [400, 2] and tokenizer.vocab_size == 401
    assert tokenizer.decode([400, 2]) == "<think>" and tokenizer.decode([2], skip_special=False) == "<|im_end|>"
    ids = tokenizer.encode(HARD)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == HARD.encode()
    assert [tokenizer.token_bytes(token) for token in (400, 2, 9999)] == [b"<think>", b"<|im_end|>", b""]
    assert tokenizer.chat([{"role": "user", "content": "x"}], tools=[{"a": "<'é'>"}]) == '[{"a": "<\'é\'>"}]'
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.end_ids == {1} and tokenizer.chat([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    (tmp_path / "config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).end_ids == {2}
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; write one with transformers"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("templates", "tells"),
    [
        ({"default": "{% for message in messages %}{{ message.tools }}{% endfor %}"}, False),
        ({"default": "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | tojson }}"}, True),  # as Llama's
        ({"default": "{{ messages }}", "tool_use": "{%- for tool in tools %}{{ tool }}{% endfor %}"}, True),
    ],
)
def test_whether_a_template_reads_tools(templates: dict[str, str], tells: bool) -> None:
    assert Tokenizer(BACKEND, templates=templates).supports_tools is tells


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize("pair", [False, True])
def test_cutting_a_long_text_takes_no_memory_for_what_is_cut_off(pair: bool) -> None:
    """The tokenizer's own truncation keeps the rest in pieces, of which each is an object: more than 100 MB in both cases."""

    def megabytes(cut: int | None) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed hides what is taken
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        expected = tokenizer.encode(text, special=False)
        if cut is not None and pair:
            assert tokenizer.pair(text, "b", cut)[0] == [*expected[: cut - 1], *tokenizer.encode("b")]
        elif cut is not None:
            assert tokenizer.cut(text, cut, "left", special=True) == expected[-cut:]
        lines = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) >> 10

    tokenizer, text = byte_level(), "a " * 200_000
    assert megabytes(2) < megabytes(None) + (250 if pair else 50)


def test_texts_are_cut_and_words_spelled_with_the_special_tokens_of_a_prompt() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.cut(TEXT, 9, "left", special=True) == ids[-9:] and tokenizer.cut(TEXT, 9, "right", special=False) == ids[:9]
    assert tokenizer.cut("a", 9, "left", special=True) == tokenizer.encode("a")
    backend = Backend.from_str(BACKEND.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    assert Tokenizer(backend).cut(TEXT, 9, "left", special=True) == [1, *ids[-8:]]
    assert Tokenizer(backend).cut("<|im_start|>" + TEXT, 9, "right", special=True) == [1, 1, *ids[:7]]
    assert [Tokenizer(backend).cut(text, 1, "left", special=True) for text in ("", TEXT)] == [[1], [1]]
    assert Tokenizer(backend).cut(TEXT, 9, "left", special=False) == ids[-9:]
    spelled = tokenizer.spell((" world", "x", "the"), tokenizer.vocab_size)
    words = ["world", " world", "x", " x", "the"]
    assert sorted(tokenizer.decode(ids) for same in spelled.values() for ids in same) == sorted(words)
    assert all([-1, *ids][-2] == before for before, same in spelled.items() for ids in same)
    assert tokenizer.spell((" world", "x", "the"), tokenizer.vocab_size) is spelled, "a request's prompts share them"
    assert not tokenizer.spell(("x",), min(tokenizer.encode("x") + tokenizer.encode(" x")))
    with pytest.raises(ValueError, match="bad_words has ' ', which has no tokens"):
        tokenizer.spell((" ",), tokenizer.vocab_size)
    with pytest.raises(ValueError, match="bad_words has more than 8,192 tokens; give fewer or shorter words"):
        tokenizer.spell(("€" * 256,) * 100, tokenizer.vocab_size)
    with pytest.raises(ValueError, match="thinking_token_budget needs a model whose chat template has <think> and </think>"):
        tokenizer.thought_marks  # noqa: B018


def test_a_gguf_file() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    for text in (TEXT, HARD, "1234 12,5", "<|im_start|>user\nx<|im_end|>"):
        assert tokenizer.encode(text) == BACKEND.encode(text).ids, text
    assert tokenizer.end_ids == {2} and tokenizer.special["eos_token"] == "<|im_end|>" and tokenizer.decode([1, 2]) == ""
    assert tokenizer.chat([{"role": "user", "content": "x"}]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    both = Tokenizer.from_gguf({**gguf_metadata(), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("a") == [1, *tokenizer.encode("a"), 2] and both.encode("a", special=False) == tokenizer.encode("a")
    spm = TOKENIZERS["sentencepiece"]
    assert spm.decode(spm.encode(HARD)) == HARD and spm.encode("hello")[0] == 1
    assert b"".join(spm.token_bytes(token) for token in spm.encode("hello 好", special=False)) == " hello 好".encode()
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre is 'klingon'; supported are .*smollm"):
        Tokenizer.from_gguf(gguf_metadata("klingon"))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model is 't5'; supported are gpt2, llama"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "t5"})


def test_gguf_tokenizers_agree_with_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    if not hasattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
        pytest.skip("transformers 5.17 has no such converter")

    def convert(metadata: dict[str, Any]) -> Backend:
        names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
        fields = {names[k]: v for key, v in metadata.items() if (k := key.removeprefix("tokenizer.")) in names}
        return mapping.convert_gguf_tokenizer("llama", fields)[0]

    texts = [TEXT, HARD, " it'S 12345 x\r\n\r\n  y\u0301  ", "ThisIs CamelCase/\n ßÀÉ's WE'LL"]
    for pre in GGUF_SPLITS.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys():
        metadata = gguf_metadata(pre)
        expected = convert(metadata)
        for text in texts:
            if pre in ("qwen2", "deepseek-r1-qwen"):  # as in their tokenizer.json; transformers forgets it for GGUF
                text = unicodedata.normalize("NFC", text)
            assert Tokenizer.from_gguf(metadata).encode(text) == expected.encode(text, add_special_tokens=False).ids, (pre, text)
    assert Tokenizer.from_gguf(gguf_metadata("qwen2")).decode(Tokenizer.from_gguf(gguf_metadata("qwen2")).encode("e\u0301")) == "é"
    actual, expected = TOKENIZERS["sentencepiece"], convert(sentencepiece_metadata())
    for text in (*texts, "hello world. the hellohello"):
        assert actual.encode(text, special=False) == expected.encode(text, add_special_tokens=False).ids, text


def chat(template: str, messages: Any = ({"role": "user", "content": "Hi"},), **kwargs: Any) -> str:
    return Tokenizer(BACKEND, templates={"default": template}).chat(messages, **kwargs)


def test_chat_templates_have_what_transformers_gives_them() -> None:
    assert chat("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}") == "Hi\n"
    assert chat("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert chat("a{% generation %}{{ messages[0]['content'] }}{% endgeneration %}b") == "aHib"
    assert len(chat("{{ strftime_now('%Y') }}")) == 4
    assert chat("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}") == '{"a": 1, "b": "<é>"}'
    assert chat("{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}", enable_thinking=False) == "FalseTrueNone"
    assert chat("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]) == "a\nb"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
    assert chat("{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[0].content is none }}", [call]) == "1True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% if %}", "is not valid Jinja: line 1"),
        ("{{ messages[0].nothing.more }}", "refuses these messages: .*no attribute"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses these messages: .*unsafe"),
        ("{{ messages[0].update(role='system') }}", "refuses these messages: .*unsafe"),
        ("{{ raise_exception.__globals__['os'] }}", "refuses these messages: .*unsafe"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "refuses these messages: .*unsafe"),
        ("{% for i in range(100000000) %}{% endfor %}", "fails on these messages: OverflowError"),
        ("{{ 1 / 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "fails on these messages: TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages: RecursionError"),
        ("{% include 'secret' %}", "fails on these messages: TypeError|refuses these messages"),
    ],
)
def test_a_template_that_fails_is_one_sentence(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"the model's chat template ({message})" if "|" in message else message):
        chat(template)


def test_messages_that_no_template_can_take() -> None:
    with pytest.raises(ValueError, match="no chat template; use plain completions"):
        Tokenizer(BACKEND).chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="content part of type 'image_url'; this model supports only parts of type 'text'"):
        chat(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(ValueError, match="arguments of the tool call 'f' are not JSON"):
        chat(CHATML, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])

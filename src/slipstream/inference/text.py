"""Tokenizers, chat templates and detokenization of streams.

A `Tokenizer` is read from a Hugging Face folder or from a GGUF file's metadata, without transformers. `Stream` turns tokens into
text, and `StopStrings` cuts it at stop strings. The results of both do not depend on how the input is split into pushes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import huggingface
from slipstream.world.extras import needs

with needs("text", extra="serve"):
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    import jinja2

logger = logging.getLogger(__name__)

BROKEN = "\ufffd"  # written by decoders for bytes that are not a complete character
LONGEST_PART = 3  # the most bytes of an incomplete character: UTF-8 has up to 4
LONG = 2_000  # characters; from this length, encoding is worth a thread without the GIL
SLICE = 1 << 16  # characters encoded at once when checking whether a text is too long
DENSE = 8  # characters per token of the limit; a shorter text is encoded as a whole
MAX_SPELLED = 8_192  # tokens of bad words, each word counted once: every step compares those that may end with its token
MARKS = ("<think>", "</think>"), ("[THINK]", "[/THINK]")  # around reasoning
DEEPSEEK = [f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")]
CALLS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", DEEPSEEK[0])  # at the beginning of calls
# Special tokens of chat templates that are part of an answer, not of its frame.
SHOWN = frozenset((*CALLS, "</tool_call>", "[CALL_ID]", "[ARGS]", *DEEPSEEK, *MARKS[0], *MARKS[1]))
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """The marks around the reasoning of a model with this chat template, if it reasons."""
    return next((marks for marks in MARKS if marks[1] in template), None)


class TooLongError(ValueError):
    """A text exceeds the allowed number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"the text has more than {max_tokens} tokens")


class Tokenizer:
    """Thread-safe: its only state are the caches of `chat` and `spell`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,  # role -> text, for templates: {"bos_token": "<s>"}
        end_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,  # name -> Jinja source: "default", optionally "tool_use"
    ) -> None:
        self.backend = backend
        self.special = dict(special or {})
        self.end_ids = frozenset(end_ids)  # generation stops at these
        self.templates = dict(templates or {})
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps
        self._compiled: dict[str, jinja2.Template] = {}
        self.spell = lru_cache(maxsize=1)(self._spell)  # the latest, because a request's prompts share their bad_words

    def digest(self) -> str:
        """Equal for tokenizers with the same tokens under the same numbers."""
        tokens = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        backend = _backend(folder / "tokenizer.json")
        config = huggingface.read_tokenizer_config(folder / "tokenizer_config.json")
        generation = huggingface.read_generation(folder / "generation_config.json")
        model = huggingface.read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
        backend.no_truncation()  # it is set for training; here, too long prompts are rejected, not truncated
        backend.no_padding()
        for token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if backend.token_to_id(token[1]["content"]) is None:
                added = AddedToken(**{key: value for key, value in token[1].items() if key in huggingface.TOKEN})
                (backend.add_special_tokens if added.special else backend.add_tokens)([added])
        stated = {name: config[name] for role in ROLES if config.get(name := f"{role}_token") is not None}
        special = {name: value["content"] if isinstance(value, dict) else str(value) for name, value in stated.items()}
        ends = generation.get("eos_token_id", model.get("eos_token_id"))
        if ends is None:
            ends = backend.token_to_id(special.get("eos_token", ""))
        end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return cls(backend, special=special, end_ids=end_ids, templates=_folder_templates(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """`metadata`: a GGUF file's key-value pairs; strings decoded, arrays as sequences or numpy arrays."""
        prefix = "tokenizer.ggml."
        kind = metadata.get(prefix + "model")
        if kind not in GGUF_KINDS:
            raise ValueError(f"the GGUF file's tokenizer.ggml.model is {kind!r}; supported are {', '.join(sorted(GGUF_KINDS))}")
        tokens = [str(token) for token in metadata[prefix + "tokens"]]
        backend = GGUF_KINDS[kind](tokens, metadata)
        types = [int(value) for value in metadata.get(prefix + "token_type", ())]
        for number, add in ((3, backend.add_special_tokens), (4, backend.add_tokens)):  # CONTROL, USER_DEFINED
            of_type = [token for token, kind_of in zip(tokens, types, strict=False) if kind_of == number]
            add([AddedToken(token, normalized=False, special=number == 3) for token in of_type])

        def token_id(name: str) -> int | None:
            value = metadata.get(f"{prefix}{name}_token_id")
            return None if value is None or int(value) >= len(tokens) else int(value)

        ids = {role: token_id(name) for role, name in zip(ROLES, GGUF_ROLES, strict=True)}
        special = {f"{role}_token": tokens[value] for role, value in ids.items() if value is not None}
        ends = [ids["eos"], token_id("eot"), token_id("eom")]
        # As in llama.cpp: a sentencepiece vocabulary starts texts with BOS unless the file disables it.
        around = {
            role: [tokens[value]]
            for role, default in (("bos", kind == "llama"), ("eos", False))
            if (value := ids[role]) is not None and bool(metadata.get(f"{prefix}add_{role}_token", default))
        }
        if around:
            backend.post_processor = processors.TemplateProcessing(
                single=[*around.get("bos", []), "$A", *around.get("eos", [])],
                special_tokens=[(text, backend.token_to_id(text)) for [text] in around.values()],
            )
        template = metadata.get("tokenizer.chat_template")
        templates = {} if template is None else {"default": str(template)}
        for key, value in metadata.items():
            if key.startswith("tokenizer.chat_template."):
                templates[key.removeprefix("tokenizer.chat_template.")] = str(value)
        return cls(backend, special=special, end_ids=[i for i in ends if i is not None], templates=templates)

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Special tokens that decode to nothing."""
        return frozenset(i for i, token in self._added.items() if token.special and token.content not in SHOWN)

    @cached_property
    def marks(self) -> dict[str, int]:
        """The tokens that a grammar cannot write as text: special tokens, and tokens that llguidance treats as special."""
        added = {token.content: (i, token.special) for i, token in self._added.items()}
        return {text: i for text, (i, special) in added.items() if special or (text.startswith("<") and text.endswith(">"))}

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    def prepare(self) -> None:
        """Fill the caches that later calls use."""
        import jinja2

        _ = self.hidden, self._is_byte_level
        for name in self.templates:
            with suppress(jinja2.TemplateError):  # `chat` reports it
                self._template(name)

    def encode(self, text: str, *, special: bool = True, max_tokens: int | None = None) -> list[int]:
        """`special`: add the tokens that start every text (BOS); not for `chat`'s text, where the template writes them.

        Raises TooLongError, without encoding all of the text, if it has many more than `max_tokens`; a few more are returned. A
        long text is encoded without the GIL."""
        if max_tokens is not None and self._exceeds(text, max_tokens):
            raise TooLongError(max_tokens)
        if len(text) < LONG:
            return list(self.backend.encode(text, add_special_tokens=special).ids)
        return list(self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def cut(self, text: str, most: int, side: str, *, special: bool) -> list[int]:
        """As `encode`, without the tokens of the text at its `side` ("left" or "right") that exceed `most` tokens in all."""
        [whole] = self.backend.encode_batch_fast([text], add_special_tokens=special)
        ids, added = whole.ids, whole.special_tokens_mask  # 1 for tokens that are not of the text
        begin = added.index(0) if 0 in added else len(ids)
        end = begin + added.count(0)
        kept = min(max(most - len(ids) + end - begin, 0), end - begin)
        first = end - kept if side == "left" else begin
        return [*ids[:begin], *ids[first : first + kept], *ids[end:]]

    def pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """The tokens of two texts as one, and the type of each token. `most`: a limit, for which the longer is cut first."""
        # A batch frees the GIL.
        encode = self.backend.encode_batch_fast if len(first) + len(second) >= LONG else self._encode_each
        a, b = encode([first, second], add_special_tokens=False)
        whole = self.backend.post_process(a, b)
        ids, types, added = whole.ids, whole.type_ids, whole.special_tokens_mask  # 1 for tokens that are of neither text
        room = len(ids) if most is None else max(most - self.backend.num_special_tokens_to_add(is_pair=True), 0)
        short = min(len(a), len(b), room // 2)
        sizes = (short, room - short) if len(a) <= len(b) else (room - short, short)
        end = 0
        for text, size in zip((len(a), len(b)), sizes, strict=True):
            if text:
                rest, end = max(0, text - size), added.index(0, end) + min(size, text)
                for row in (ids, types, added):  # `Encoding.truncate` would keep the rest, in pieces
                    del row[end : end + rest]
        return ids, types

    def _encode_each(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        return [self.backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def _exceeds(self, text: str, max_tokens: int) -> bool:
        """Encode slice by slice. Slices have the tokens of the whole text plus a few at the cuts, so more than twice the limit is
        too long. (Spaces that a special token would absorb count too; no real prompt has thousands of them.)"""
        if len(text) <= max(SLICE, DENSE * max_tokens):
            return False
        count = 0
        for begin in range(0, len(text), SLICE):
            count += len(self.backend.encode_batch_fast([text[begin : begin + SLICE]], add_special_tokens=False)[0])
            if count > 2 * max_tokens:
                return True
        return False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, even if they are an incomplete character (OpenAI's logprobs)."""
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._is_byte_level:
            return bytes(BYTE_OF[c] for c in text) if BYTE_OF.keys() >= set(text) else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return self.backend.decoder is not None and b'"ByteLevel"' in self.backend.decoder.__getstate__()

    def _template_name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self.templates else "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self.templates[name])
        return self._compiled[name]

    @property
    def template(self) -> str:
        """The source of the chat template that renders tools; "" if there is none."""
        return self.templates.get(self._template_name(True), "")

    @property
    def thought_marks(self) -> tuple[int, ...]:
        """The tokens that open and close the model's reasoning, then those that begin a call, which ends it, too. Raises ValueError
        if there are none of the first two."""
        marks = reasoning_marks(self.template)
        if marks is None or not self.marks.keys() >= set(marks):
            either = ", or ".join(map(" and ".join, MARKS))
            raise ValueError(f"thinking_token_budget needs a model whose chat template has {either}, each one token")
        return tuple(self.marks[mark] for mark in (*marks, *CALLS) if mark in self.marks)

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens the model's reasoning, apart from white space."""
        marks = reasoning_marks(self.template)
        return marks is not None and self.decode(ids[-4:], skip_special=False).rstrip().endswith(marks[0])

    def _spell(self, words: Sequence[str], vocab_size: int) -> Mapping[int, Sequence[Sequence[int]]]:
        """`Request.bad_words` for a model of `vocab_size` tokens: each word at the beginning of a text, and after a space if that
        changes only its first token, as in vLLM; without those that the model cannot write. Raises ValueError for a word without
        tokens, and for words of more than MAX_SPELLED tokens in all."""
        found, num = dict[int, list[list[int]]](), 0
        for word in words:
            first, spaced = (self.encode(space + word.lstrip(), special=False) for space in ("", " "))
            if not first:
                raise ValueError(f"bad_words has {word!r:.100}, which has no tokens")
            if (num := num + len(first)) > MAX_SPELLED:
                raise ValueError(f"bad_words has more than {MAX_SPELLED:,} tokens; give fewer or shorter words")
            for ids in [first, spaced] if len(spaced) == len(first) and spaced[0] != first[0] else [first]:
                if max(ids) < vocab_size:
                    found.setdefault([-1, *ids][-2], []).append(ids)
        return found

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the chat template reads."""
        with needs("a chat template", extra="serve"):
            import jinja2
            from jinja2 import meta

        try:
            return frozenset(meta.find_undeclared_variables(_environment().parse(self.template)))
        except jinja2.TemplateSyntaxError:  # `chat` reports it
            return frozenset()

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template passes tools on to the model; many ignore them."""
        return "tools" in self.variables

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation as text, which must be encoded with special=False. `messages`: as in OpenAI's API, plain JSON
        values.

        Raises ValueError if there is no template, if it rejects the messages (with its message) or if it fails.
        """
        with needs("a chat template", extra="serve"):
            import jinja2

        name = self._template_name(bool(tools))
        if name not in self.templates:
            raise ValueError("this model has no chat template; use plain completions, or a folder with chat_template.jinja")
        messages = [_plain_message(message) for message in messages]
        try:
            return self._template(name).render(
                **{**self.special, **variables},
                messages=messages,
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error}") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # any exception of the template's own arithmetic, lookups and calls
            raise ValueError(f"the model's chat template fails on these messages: {type(error).__name__}: {error}") from error


class Stream:
    """Detokenizes a stream. Text is returned as soon as it is complete, without partial characters, and with the same spaces as the
    text decoded at once.

    Only a window is decoded, from before the last position at which the text was complete: constant work per token. The results of
    `push` and `finish` add up to `decode(prompt + tokens)` without the prompt's text. (A decoder may replace a whole run of byte
    tokens because of a wrong one; text returned before is then not changed.)
    """

    WINDOW = 24  # tokens; a longer run without complete text is not an incomplete character

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
        self._decode = tokenizer.backend.decode
        self._hidden = tokenizer.hidden if skip_special else frozenset[int]()
        # Decoders strip the space of a text's first token. The first generated token is not the first, so prepend the prompt.
        shown = [i for i in prompt[-self.WINDOW :] if i not in self._hidden]
        for num in range(8, self.WINDOW + 1):
            self._ids = shown[-num:]
            self._text = self._decode(self._ids, skip_special_tokens=False)
            if BROKEN not in self._text:  # otherwise it may start within a character
                break
        self._complete = len(self._ids)  # the text of the ids before this ends with a complete character
        self._sent = len(self._text)  # characters of the window's text that were returned

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is complete now and was not returned before."""
        shown = [i for i in ids if i not in self._hidden]  # hidden ones would fill the window
        if not shown:
            return ""
        self._ids += shown
        self._text = self._decode(self._ids, skip_special_tokens=False)
        # Hold back all of them: a run of byte tokens is broken as a whole until its last character is complete.
        num_withheld = len(self._text) - len(self._text.rstrip(BROKEN))
        if len(self._ids) > 2 * self.WINDOW:
            num_withheld = min(num_withheld, LONGEST_PART)
        end = len(self._text) - num_withheld
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        if new and not num_withheld:
            self._trim(self._complete, num_withheld)
            self._complete = len(self._ids)
        elif len(self._ids) > 2 * self.WINDOW:
            self._trim(len(self._ids) - self.WINDOW, num_withheld)
            self._complete = 0
        return new

    def finish(self) -> str:
        """Return the remaining text, with incomplete characters as U+FFFD."""
        new = self._text[self._sent :]
        self._sent = len(self._text)
        return new

    def _trim(self, start: int, num_withheld: int) -> None:
        if start:
            del self._ids[:start]
            self._text = self._decode(self._ids, skip_special_tokens=False)
            self._sent = len(self._text) - num_withheld


class StopStrings:
    """Passes text through up to the first stop string, and holds back a possible beginning of one.

    First means completed first (the longest of several), so the result does not depend on the split. Pass no text before min_tokens
    are reached.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """`keep`: the text includes the stop string."""
        self.matched: str | None = None  # the stop string that was found; push returns no text after it
        self._keep = keep
        self._stops = stops
        self._begun = [0] * len(stops)  # the length of the longest prefix of each that the text ends with
        self._held = ""  # the end of the text with the longest of these prefixes

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        buffer, self._held = self._held + text, ""
        if found := [(begin + len(stop), begin, stop) for stop in self._stops if (begin := buffer.find(stop)) >= 0]:
            end, begin, self.matched = min(found)
            return buffer[: end if self._keep else begin]
        each = zip(self._stops, self._begun, strict=True)  # no prefix grows by more than `text`: amortized, constant work
        self._begun = [overlap(buffer, stop, begun + len(text)) for stop, begun in each]
        safe = len(buffer) - max(self._begun, default=0)
        self._held = buffer[safe:]
        return buffer[:safe]

    def finish(self) -> str:
        """Return the text that was held back."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, mark: str, most: int = sys.maxsize) -> int:
    """The length of the longest proper prefix of `mark` that `text` ends with; it is `most` or less."""
    longest = min(len(text), len(mark) - 1, most)
    return next((num for num in range(longest, 0, -1) if text.endswith(mark[:num])), 0)


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no subclass
        raise ValueError(f"{file} is not a tokenizer that the package tokenizers can read: {error}") from None


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files override the configuration's entries, as in transformers."""
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update({one["name"]: one["template"] for one in entry})
    elif isinstance(entry, dict):
        templates.update(entry)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to the form that templates expect: content is a string, a tool call's arguments an object."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"a message has a content part of type {kind!r}; this model supports only parts of type 'text'")
        plain["content"] = "\n".join(part["text"] for part in content)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"arguments of the tool call {function.get('name')!r} are not JSON: {error}") from error
    return {**call, "function": function}


def _environment() -> jinja2.Environment:
    """Jinja with transformers' settings, sandboxed: a template comes with the model and must not run Python."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the text to train on; here it renders its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own tojson escapes <, >, & and ' for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


# A GGUF file has the vocabulary and the name of a pre-tokenizer. llama.cpp has the list of names (src/llama-vocab.cpp),
# transformers has the same patterns in the syntax of `tokenizers`.

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS % "{1,3}"
_QWEN2 = _CONTRACTIONS + _WORDS % ""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "", "") + _REST
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}") + _REST
GGUF_SPLITS: dict[str, tuple[str, ...]] = {  # patterns to split by, applied one after the other
    **dict.fromkeys(("gpt-2", "gpt2", "default", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "lfm2", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
GGUF_ROLES = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")  # GGUF's names of ROLES, in its spelling


def _gguf_byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in GGUF_SPLITS:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(GGUF_SPLITS))}. "
            "Use the model's Hugging Face folder, whose tokenizer.json has the pre-tokenizer"
        )
    if name == "default":
        logger.warning("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); GPT-2's is used")
    merges = [(left, right) for left, right in (str(merge).split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in GGUF_SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE. Its merges are not stored: a pair can merge if the result is a token, the best score first."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = [float(score) for score in metadata["tokenizer.ggml.scores"]]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    pairs = [
        (-scores[merged], vocab[token[:cut]], vocab[token[cut:]], (token[:cut], token[cut:]))
        for merged, token in enumerate(tokens)
        if types[merged] in (1, 4)  # NORMAL, USER_DEFINED
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair[-1] for pair in pairs],
            unk_token=None if unknown is None else tokens[int(unknown)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if prefix else []),
        ]
    )
    return backend


GGUF_KINDS = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}


def _byte_alphabet() -> dict[str, int]:
    """Characters that represent bytes in a byte-level vocabulary (GPT-2): printable ones themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + n): b for n, b in enumerate(others)}}


BYTE_OF = _byte_alphabet()

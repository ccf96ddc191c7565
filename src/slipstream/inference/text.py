"""Text to tokens and back: a model's tokenizer and chat template, and text streamed as its tokens come.

A `Tokenizer` comes from a Hugging Face folder or from a GGUF file's metadata, without transformers. `Stream` turns tokens
into text and `StopStrings` cuts it; both give the same text however the tokens or the text were split into pushes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import huggingface
from slipstream.extras import needs

with needs("text", extra="serve"):
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    import jinja2

logger = logging.getLogger(__name__)

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no whole character
LONGEST_PART = 3  # bytes that may still become a character: UTF-8 has at most 4
LONG = 2_000  # characters from which on encoding is worth a thread without the interpreter's lock
SLICE = 1 << 16  # characters that are encoded at once to see whether a text is too long
DENSE = 8  # characters for each token of the limit; a text of fewer is encoded as a whole
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TooLongError(ValueError):
    """A text has more tokens than it may have."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the text has more than {most} tokens")


class Tokenizer:
    """Thread-safe; only `chat`'s compiled templates are kept."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,  # role to text: {"bos_token": "<s>"}; templates may use them
        end_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,  # name to Jinja source: "default", perhaps "tool_use"
    ) -> None:
        self.backend = backend
        self.special = dict(special or {})
        self.end_ids = frozenset(end_ids)  # generation stops at these
        self.templates = dict(templates or {})
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1  # ids may have gaps
        self._reach = _reach(backend, vocab)
        self._compiled: dict[str, jinja2.Template] = {}

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
        backend.no_truncation()  # of training; a prompt that is too long is refused, not cut
        backend.no_padding()
        for token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if backend.token_to_id(token[1]["content"]) is None:
                added = AddedToken(**{key: value for key, value in token[1].items() if key in huggingface.TOKEN})
                (backend.add_special_tokens if added.special else backend.add_tokens)([added])
        special = {}
        for role in ROLES:
            value = config.get(f"{role}_token")
            if value is not None:
                special[f"{role}_token"] = value["content"] if isinstance(value, dict) else str(value)
        ends = generation.get("eos_token_id", model.get("eos_token_id"))
        if ends is None:
            ends = backend.token_to_id(special.get("eos_token", ""))
        end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return cls(backend, special=special, end_ids=end_ids, templates=_folder_templates(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """`metadata`: a GGUF file's key-value pairs, strings decoded and arrays as sequences (numpy's too)."""
        prefix = "tokenizer.ggml."
        kind = metadata.get(prefix + "model")
        if kind not in GGUF_KINDS:
            raise ValueError(f"the GGUF file's tokenizer.ggml.model is {kind!r}; served are {', '.join(sorted(GGUF_KINDS))}")
        tokens = [str(token) for token in metadata[prefix + "tokens"]]
        backend = GGUF_KINDS[kind](tokens, metadata)
        types = [int(value) for value in metadata.get(prefix + "token_type", ())]
        for wanted, add in ((3, backend.add_special_tokens), (4, backend.add_tokens)):  # CONTROL, USER_DEFINED
            add(
                [
                    AddedToken(token, normalized=False, special=wanted == 3)
                    for token, of_type in zip(tokens, types, strict=False)
                    if of_type == wanted
                ]
            )

        def token_id(name: str) -> int | None:
            value = metadata.get(f"{prefix}{name}_token_id")
            return None if value is None or int(value) >= len(tokens) else int(value)

        ids = {role: token_id(name) for role, name in zip(ROLES, GGUF_ROLES, strict=True)}
        special = {f"{role}_token": tokens[value] for role, value in ids.items() if value is not None}
        ends = [ids["eos"], token_id("eot"), token_id("eom")]
        # llama.cpp: a sentencepiece vocabulary begins with BOS unless the file says otherwise.
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
        """Special tokens: decoded to nothing."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    def prepare(self) -> None:
        """Compute now what is kept for later calls."""
        import jinja2

        _ = self.hidden, self._is_byte_level
        for name in self.templates:
            with suppress(jinja2.TemplateError):  # `chat` says what is wrong with it
                self._template(name)

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """`special`: with the tokens that begin every text (BOS). Not for `chat`'s text: templates write them themselves.

        Raises TooLongError, without encoding all of it, for a text that has many more than `most` tokens; one that has a few more
        is returned. A long text is encoded without the interpreter's lock."""
        if most is not None and self._exceeds(text, most):
            raise TooLongError(most)
        if len(text) < LONG:
            return list(self.backend.encode(text, add_special_tokens=special).ids)
        return list(self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _exceeds(self, text: str, most: int) -> bool:
        """Slices have the whole text's tokens and a few more where they are cut, so twice the limit is over it. (Spaces that a
        special token takes up, count: nobody's prompt has thousands of them.)"""
        if len(text) > most * self._reach:
            return True
        if len(text) <= max(SLICE, DENSE * most):
            return False
        count = 0
        for begin in range(0, len(text), SLICE):
            count += len(self.backend.encode_batch_fast([text[begin : begin + SLICE]], add_special_tokens=False)[0])
            if count > 2 * most:
                return True
        return False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text; half a character's bytes are given as they are (OpenAI's logprobs)."""
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

    @cached_property
    def tells_tools(self) -> bool:
        """Whether the model hears of the tools that `chat` is given: many templates never read them."""
        with needs("a chat template", extra="serve"):
            from jinja2 import meta

        template = _environment().parse(self.templates[self._template_name(True)])
        return "tools" in meta.find_undeclared_variables(template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, to be encoded with special=False. Messages as in OpenAI's API, plain JSON values.

        Raises ValueError when there is no template, when it refuses (its own words) or when it fails.
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
        except Exception as error:  # whatever a template's own arithmetic, lookups and calls may raise
            raise ValueError(f"the model's chat template fails on these messages: {type(error).__name__}: {error}") from error


class Stream:
    """Tokens in, text out as soon as it is whole: no half characters, and spaces as in the text decoded at once.

    Only a window is decoded, from before the last place at which the text was whole: constant work per token.
    What was pushed and finished is `decode(prompt + tokens)` without the prompt's text. (Where a decoder replaces a whole
    run of byte tokens because of one that is wrong, what was already given stays.)
    """

    WINDOW = 24  # tokens; more than this without whole text are no character that is still to come

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.backend.decode
        self._hidden = tokenizer.hidden
        # A decoder strips the space of a text's first token, which the first generated token is not.
        shown = [i for i in prompt[-self.WINDOW :] if i not in self._hidden]
        for num in range(8, self.WINDOW + 1):
            self._ids = shown[-num:]
            self._text = self._decode(self._ids, skip_special_tokens=False)
            if BROKEN not in self._text:  # else it may begin within a character
                break
        self._whole = len(self._ids)  # the text of the ids before this has no half character at its end
        self._sent = len(self._text)  # characters of the window's text that were given

    def push(self, ids: Sequence[int]) -> str:
        """The text that is whole now and was not given before."""
        shown = [i for i in ids if i not in self._hidden]  # never to the window, or a flood of them would fill it
        if not shown:
            return ""
        self._ids += shown
        self._text = self._decode(self._ids, skip_special_tokens=False)
        # All of them: a run of byte tokens is broken as a whole until its last character is complete.
        held = len(self._text) - len(self._text.rstrip(BROKEN))
        if len(self._ids) > 2 * self.WINDOW:
            held = min(held, LONGEST_PART)
        end = len(self._text) - held
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        if new and not held:
            self._begin_at(self._whole, held)
            self._whole = len(self._ids)
        elif len(self._ids) > 2 * self.WINDOW:
            self._begin_at(len(self._ids) - self.WINDOW, held)
            self._whole = 0
        return new

    def finish(self) -> str:
        """The rest, half characters too (as U+FFFD)."""
        new = self._text[self._sent :]
        self._sent = len(self._text)
        return new

    def _begin_at(self, start: int, held: int) -> None:
        if start:
            del self._ids[:start]
            self._text = self._decode(self._ids, skip_special_tokens=False)
            self._sent = len(self._text) - held


class StopStrings:
    """Passes text on up to the first stop string, keeping back what may be the beginning of one.

    First is the one that is complete first (of several, the longest), so the splitting does not matter. One Knuth-Morris-
    Pratt automaton for each: constant work per character. While min_tokens is not reached, do not pass text through it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None  # the stop string that was met; nothing is given after
        self._stops = list(stops)
        self._fallback = [_borders(stop) for stop in stops]
        self._progress = [0] * len(stops)  # characters of each that the text so far ends with
        self._held = ""

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer, begin = self._held + text, len(self._held)
        for position in range(begin, len(buffer)):
            for j, stop in enumerate(self._stops):
                n = self._progress[j]
                while n and stop[n] != buffer[position]:
                    n = self._fallback[j][n - 1]
                self._progress[j] = n + (stop[n] == buffer[position])
            complete = [stop for stop, n in zip(self._stops, self._progress, strict=True) if n == len(stop)]
            if complete:
                self.matched, self._held = max(complete, key=len), ""
                return buffer[: position + 1 - len(self.matched)]
        given = len(buffer) - max(self._progress)
        self._held = buffer[given:]
        return buffer[:given]

    def finish(self) -> str:
        """What was kept back and became no stop string."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=128)
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix the length of its longest proper prefix that is also its suffix. Computed once for a request's n answers."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        n = borders[i - 1]
        while n and text[i] != text[n]:
            n = borders[n - 1]
        borders[i] = n + (text[i] == text[n])
    return tuple(borders)


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more exact
        raise ValueError(f"{file} is no tokenizer that the package tokenizers reads: {error}") from None


def _reach(backend: tokenizers.Tokenizer, vocab: Iterable[str]) -> float:
    """Characters of a text that one token stands for at most; infinity where there may be any number: unknown ones that become one
    token or none, spaces that a special token takes, a normalizer that drops some."""
    known, split, normalizer = set(vocab), backend.pre_tokenizer, backend.normalizer
    how = b"" if split is None else split.__getstate__()
    by_bytes = b'"ByteLevel"' in how and known >= BYTE_OF.keys() and not any(word in how for word in (b"Removed", b"Whitespace"))
    falls_back = isinstance(split, (type(None), pre_tokenizers.Metaspace)) and "<0xFF>" in known
    whole = isinstance(backend.model, models.BPE) and (by_bytes or (falls_back and backend.model.byte_fallback))
    takes = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if not whole or takes or not isinstance(normalizer, (type(None), normalizers.NFC)):
        return math.inf
    return max(map(len, known), default=1) * (1 if normalizer is None else 4)  # NFC makes one character of four at most


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files go before the configuration's entry, as in transformers."""
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
    """As templates expect it: content one string, a tool call's arguments an object."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"a message has a content part of type {kind!r}; this model reads parts of type 'text' only")
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
    """Jinja as transformers sets it up: a template comes with a model and is not trusted with Python."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what training is to learn; here it is only its content."""

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
        # Jinja's own writes <, >, & and ' as escapes, for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


# GGUF: the file has the vocabulary, and names how text is split before the merges; llama.cpp has the list of names
# (src/llama-vocab.cpp), transformers has the same patterns in its tokenizers' own words.

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
GGUF_SPLITS: dict[str, tuple[str, ...]] = {  # patterns, one after the other; what matches is split off
    **dict.fromkeys(("gpt-2", "gpt2", "default", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "lfm2", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
GGUF_ROLES = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")  # GGUF's names of ROLES; its spelling


def _gguf_byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in GGUF_SPLITS:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.pre is {name!r}; served are {', '.join(sorted(GGUF_SPLITS))}. "
            "Use the model's Hugging Face folder, whose tokenizer.json says how text is split"
        )
    if name == "default":
        logger.warning("the GGUF file does not say how text is split into words (tokenizer.ggml.pre); GPT-2's way is taken")
    merges = [_pair(str(merge)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in GGUF_SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: merges are not stored; a pair may merge when the whole is a token, best score first."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = [float(score) for score in metadata["tokenizer.ggml.scores"]]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    pairs = [
        (-scores[whole], vocab[token[:cut]], vocab[token[cut:]], (token[:cut], token[cut:]))
        for whole, token in enumerate(tokens)
        if types[whole] in (1, 4)  # NORMAL, USER_DEFINED
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


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _byte_alphabet() -> dict[str, int]:
    """Characters that stand for bytes in a byte-level vocabulary (GPT-2): itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + n): b for n, b in enumerate(others)}}


BYTE_OF = _byte_alphabet()

"""Real text that every machine has, as packed tokens: the source of the installed Python standard library.

`prepare(source, cache)` reads the text files under a folder, splits them by file into training and
validation, trains a byte-level BPE on the training files, and packs every file once into memory-mapped uint16
tokens.

Invariants
- A file's split depends on its name, so a corpus that grows keeps its validation files.
- Nothing is learned from validation text: the tokenizer sees training files only.
- A cache folder is named after its content and appears by one rename: it is whole or it is not there.
- The same files give the same bytes in the cache.

A cache folder holds `train.bin` and `validation.bin` (uint16: of each file one END, then its tokens),
`tokenizer.json` and `corpus.json` (the `Facts`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

END = "<|end|>"
IGNORED = -100  # a target that counts for nothing, as in F.cross_entropy
VALIDATION_PERCENT = 3
TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
# Some distributions leave out the standard library's own tests, so they are left out everywhere.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
FORMAT = 1  # part of the cache's name: raise it when the packing changes

Tokens = NDArray[np.uint16]  # 1D


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the report needs to know of a corpus, from `corpus.json`."""

    train_files: int
    train_bytes: int
    train_tokens: int
    validation_files: int
    validation_bytes: int
    validation_tokens: int
    validation_gzip_bytes: int  # sum over the files, each through `gzip -9` by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A cache folder, to be read in windows of `context` tokens."""

    folder: Path
    context: int
    facts: Facts
    tokenizer: Tokenizer

    @property
    def end(self) -> int:
        token = self.tokenizer.token_to_id(END)
        assert token is not None, f"{self.folder}/tokenizer.json has no {END}"
        return token

    def train(self) -> Windows:
        return Windows(_tokens(self.folder / "train.bin"), self.context)

    def validation(self, batch: int, rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's batches of `batch` windows. All ranks have equally many, and together every token once:
        the last windows are filled up with targets that are IGNORED."""
        tokens = _tokens(self.folder / "validation.bin").astype(np.int64)
        share = batch * self.context * world_size
        missing = -(len(tokens) - 1) % share
        inputs = np.concatenate([tokens[:-1], np.zeros(missing, np.int64)])
        targets = np.concatenate([tokens[1:], np.full(missing, IGNORED, np.int64)])
        dealt = [torch.from_numpy(part.reshape(-1, world_size, batch, self.context)[:, rank]) for part in (inputs, targets)]
        return list(zip(*dealt, strict=True))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of `length` tokens, each with its targets: the same one token later. A last short
    window is left out."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        if len(tokens) <= length:
            raise ValueError(f"{len(tokens)} tokens do not fill one window of {length}; give --data more text")
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


def _tokens(path: Path) -> Tokens:
    return np.memmap(path, dtype=np.uint16, mode="r")


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def validation_names(names: Iterable[str]) -> set[str]:
    """The files to hold out, by the hash of their relative names: the same on every machine. At least one."""
    drawn = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) for name in names}
    return {name for name, number in drawn.items() if number % 100 < VALIDATION_PERCENT} or {min(drawn, key=drawn.__getitem__)}


def read_texts(source: Path) -> dict[str, bytes]:
    """Every non-empty UTF-8 text file under `source`, by relative name, in the order of the names."""
    texts = {name: path.read_bytes() for name, path in sorted(_text_files(source))}
    texts = {name: text for name, text in texts.items() if text and _is_utf8(text)}
    if len(texts) < 2:
        raise ValueError(
            f"{source}: {len(texts)} text files ({', '.join(sorted(TEXT_SUFFIXES))}), too few to hold some out for "
            f"validation; give --data a folder with more"
        )
    return texts


def _text_files(source: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if path.suffix in TEXT_SUFFIXES and path.is_file():
                yield path.relative_to(source).as_posix(), path


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def cache_name(texts: dict[str, bytes], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {vocab_size} {VALIDATION_PERCENT}".encode())
    for name, text in texts.items():
        digest.update(f"\0{name}\0{len(text)}\0".encode())
        digest.update(text)
    return f"corpus-{digest.hexdigest()[:16]}"


def prepare(source: Path, cache: Path, vocab_size: int) -> Path:
    """Build the cache folder of this text unless it exists. Several processes may call it at once: each builds its own
    and the first rename wins."""
    texts = read_texts(source)
    folder = cache / cache_name(texts, vocab_size)
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=cache, prefix="draft-"))
    try:
        _build(texts, draft, vocab_size)
        draft.rename(folder)
    except OSError:
        if not folder.exists():  # no one else was first: the failure is real
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load(folder: Path, context: int) -> Corpus:
    facts = Facts(**json.loads((folder / "corpus.json").read_text()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Corpus(folder=folder, context=context, facts=facts, tokenizer=tokenizer)


def _build(texts: dict[str, bytes], folder: Path, vocab_size: int) -> None:
    held_out = validation_names(texts)
    train = {name: text for name, text in texts.items() if name not in held_out}
    validation = {name: text for name, text in texts.items() if name in held_out}
    tokenizer = train_tokenizer(train, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = Facts(
        train_files=len(train),
        train_bytes=sum(map(len, train.values())),
        train_tokens=pack(train, tokenizer, folder / "train.bin"),
        validation_files=len(validation),
        validation_bytes=sum(map(len, validation.values())),
        validation_tokens=pack(validation, tokenizer, folder / "validation.bin"),
        validation_gzip_bytes=sum(len(gzip.compress(text, 9)) for text in validation.values()),
    )
    (folder / "corpus.json").write_text(json.dumps(asdict(facts), indent=2) + "\n")


def train_tokenizer(texts: dict[str, bytes], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text.decode() for text in texts.values()), trainer)
    return tokenizer


def pack(texts: dict[str, bytes], tokenizer: Tokenizer, path: Path) -> int:
    """Write all texts as one run of tokens, END before each; the number of tokens written."""
    if tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise ValueError(f"a vocabulary of {tokenizer.get_vocab_size()} does not fit uint16 tokens (65536)")
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch([text.decode() for text in texts.values()], add_special_tokens=False)
    runs = [np.asarray([end, *encoding.ids], dtype=np.uint16) for encoding in encodings]
    tokens = np.concatenate(runs)
    tokens.tofile(path)
    return len(tokens)

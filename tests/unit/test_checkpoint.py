"""Checkpoints of one process: exact values, atomic folders, refusals that change nothing."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
import random
import re
import time
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from slipstream.checkpoint import CheckpointError, FlatSlice, Staging, latest_tag, load, load_metadata, save
from slipstream.checkpoint.values import decode, encode

# Values


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, set):
        return a == b  # its order depends on the process's hash seed
    return repr(a) == repr(b)  # tells -0.0 from 0.0, and nan is nan


def there_and_back(value: Any) -> Any:
    skeleton, tensors = encode(value, "value", "$t")
    return decode(json.loads(json.dumps(skeleton, allow_nan=False)), tensors.__getitem__, "value")


keys = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.bfloat16, Path("a/b"), torch.Size((2, 3)), numpy.float32("nan"), numpy.int64(-5)])
)
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=3) | st.lists(v, max_size=3).map(tuple) | st.dictionaries(keys, v, max_size=3),
    max_leaves=12,
)


@given(values)
def test_values_come_back_exactly(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(3).getstate(),
        numpy.random.default_rng(3).bit_generator.state,
        numpy.random.RandomState(3).get_state(),
        torch.get_rng_state(),
        {1: "int", "1": "str", None: 0, (1, "a"): torch.float16, "$tuple": [1]},
        OrderedDict(b=torch.ones(2, 3), a=[torch.zeros(0), torch.tensor(1j)]),
        Counter({4: 2, 8: 1}),
        [{1, "a", (2, None)}, frozenset({b"x"}), set(), argparse.Namespace(lr=0.1, names={"a"}, nested=argparse.Namespace())],
        [math.inf, -math.inf, -0.0, 5e-324, 2**200],
        numpy.arange(6, dtype=">f4").reshape(2, 3),
        numpy.array(3, dtype="u2"),
        torch.zeros(3, dtype=torch.float8_e4m3fn).view(torch.uint8),
        "\ud800 \u2028 \x00",
    ],
)
def test_states_that_training_has(value: Any) -> None:
    assert same(there_and_back(value), value)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_states_of_torch_schedulers_fit(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    state = SCHEDULERS[name](optimizer).state_dict()
    assert same(there_and_back(state), state)


def test_a_dict_with_a_default_comes_back_without_it() -> None:
    loaded = there_and_back({"counts": defaultdict(int, {"a": 1, 2: 3})})
    assert loaded == {"counts": {"a": 1, 2: 3}} and type(loaded["counts"]) is dict


class Custom:
    pass


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, Custom()]}, r"value\['a'\]\[1\]: a value of type .*Custom"),
        ({"f": print}, r"value\['f'\]: a value of type builtin_function_or_method"),
        ({"s": {1, Custom()}}, r"value\['s'\]: a set with a value of type .*Custom"),
        (argparse.Namespace(model=Custom()), r"value\['model'\]: a value of type .*Custom"),
        ({Custom(): 1}, r"value: a key of type .*Custom"),
        ([numpy.array([Custom()])], r"value\[0\]: a value of type numpy\.ndarray"),
        ([torch.zeros(2, device="meta")], r"value\[0\]: a tensor with layout .* meta"),
        ([torch.eye(2).to_sparse()], r"value\[0\]: a tensor with layout torch.sparse"),
        (1 << 5000, "an int of 5001 bits"),
        (cyclic(), "nested deeper than 100 levels"),
    ],
    ids=lambda value: value if isinstance(value, str) and "value" in value else type(value).__name__,
)
def test_what_cannot_be_stored_is_named(value: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        encode(value, "value", "$t")


# Round trips


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "w": torch.randn(5, 3, 7, generator=generator),
        "b": torch.randn(11, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "big": torch.randn(700_000, generator=generator),  # several blocks
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "flag": torch.tensor([True, False]),
    }


def saved(directory: Path, tag: str = "a") -> dict[str, torch.Tensor]:
    tensors = state()
    save(
        directory,
        tag,
        tensors=tensors,
        shared={"step": 3, "ema": {"w": torch.arange(5.0)}, "array": numpy.arange(3)},
        per_rank={"rng": torch.get_rng_state(), "position": (1, 2)},
    )
    return tensors


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def test_round_trip(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    assert latest_tag(tmp_path) == "a" and (tmp_path / "latest").read_text() == "a\n"
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    assert sorted(os.listdir(tmp_path / "a")) == ["metadata.json", "rank_00000.bin"]
    json.loads((tmp_path / "a" / "metadata.json").read_bytes())  # one JSON value

    metadata = load_metadata(tmp_path, "a")
    assert metadata.world_size == 1 and metadata.shared["step"] == 3 and metadata.shared["ema"]["w"].is_meta
    assert {name: (entry.shape, entry.dtype) for name, entry in metadata.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    target = blank(tensors)
    versions = {name: tensor._version for name, tensor in target.items()}
    loaded = load(tmp_path, "a", tensors=target)
    for name, tensor in tensors.items():
        assert torch.equal(target[name], tensor), name
        assert target[name]._version > versions[name], name
    assert same(loaded.shared["ema"]["w"], torch.arange(5.0)) and same(loaded.shared["array"], numpy.arange(3))
    assert loaded.per_rank is not None and loaded.per_rank["position"] == (1, 2)
    assert torch.equal(loaded.per_rank["rng"], torch.get_rng_state())


@given(st.integers(0, 105), st.integers(0, 105))
@settings(max_examples=30, deadline=None)
def test_any_slice_loads(tmp_path_factory: Any, one: int, other: int) -> None:
    directory = tmp_path_factory.getbasetemp() / "slices"
    values = state()["w"]
    if not directory.exists():
        save(directory, "t", tensors={"w": FlatSlice(values.flatten(), (5, 3, 7), 0)}, shared={}, per_rank={})
    start, stop = sorted((one, other))
    part = FlatSlice(torch.zeros(stop - start), (5, 3, 7), start)
    load(directory, "t", tensors={"w": part})
    assert torch.equal(part.data, values.flatten()[start:stop])


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = saved(tmp_path)
    read, real = [0], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: (n := real(*a), read.__setitem__(0, read[0] + n))[0])
    part = FlatSlice(torch.zeros(100), (700_000,), 300_000)
    loaded = load(tmp_path, "a", tensors={"big": part})
    assert torch.equal(part.data, tensors["big"][300_000:300_100])
    values = sum(t.nbytes for t in (loaded.shared["ema"]["w"], loaded.shared["array"], torch.get_rng_state()))
    assert read[0] == (1 << 20) + 400 + 2 * values  # one block verified, then 400 bytes; small values whole, twice


def test_dtypes_are_converted_only_when_asked(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    for target in (torch.ones(700_000).bfloat16(), torch.ones(1_400_000).bfloat16()[::2]):
        with pytest.raises(
            CheckpointError, match=r"'big' is torch\.float32 in the checkpoint and torch\.bfloat16 in the model; pass convert"
        ):
            load(tmp_path, "a", tensors={"big": target})
        assert bool((target == 1).all())
        load(tmp_path, "a", tensors={"big": target}, convert=True)
        assert torch.equal(target, tensors["big"].bfloat16())


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, direct: bool) -> None:
    """Several stages and ends that fill none, by each engine, and where the file system refuses to go past the page cache."""
    from slipstream.checkpoint import writer
    from slipstream.ops.disk import Disk, aligned

    monkeypatch.setattr(writer, "Disk", partial(Disk, engine=engine))
    if not direct:
        monkeypatch.setattr(writer.os, "O_DIRECT", 0)
    monkeypatch.setattr(writer, "_STAGE", 3 * 4096)
    for i, sizes in enumerate(([], [1], [4096], [3 * 4096], [5000, 0, 100_000, 7], [3 << 20, (1 << 20) + 5])):
        parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        values = torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])
        with writer.DataFile(tmp_path / f"{i}", values.numel()) as file:
            for part in parts:
                raw = part.numpy().tobytes()
                assert file.append(part) == [zlib.crc32(raw[at : at + (1 << 20)]) for at in range(0, len(raw), 1 << 20)]
        memory = aligned(-(-values.numel() // 4096) * 4096)
        memory[: values.numel()] = values
        with writer.DataFile(tmp_path / f"{i}-at-once", values.numel()) as file:
            file.begin(memory)
        for name in (f"{i}", f"{i}-at-once"):
            assert (tmp_path / name).read_bytes() == values.numpy().tobytes()


def test_staged_reads_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read in place comes in stages; here many of them, and several boxes."""
    from slipstream.checkpoint import box_reader

    tensors = saved(tmp_path)
    monkeypatch.setattr(box_reader, "STAGE", 1000)
    full = FlatSlice(torch.zeros(700_000, dtype=torch.float64), (700_000,), 0)
    part = FlatSlice(torch.zeros(60, dtype=torch.float64), (5, 3, 7), 11)
    load(tmp_path, "a", tensors={"big": full, "w": part}, convert=True)
    assert torch.equal(full.data, tensors["big"].double())
    assert torch.equal(part.data, tensors["w"].flatten()[11:71].double())


# Folders


def test_a_tag_is_replaced_and_others_stay(tmp_path: Path) -> None:
    for step, tag in enumerate(["a", "b", "a"]):
        save(tmp_path, tag, tensors={"w": torch.full((3,), step)}, shared={"step": step}, per_rank={})
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "latest"] and latest_tag(tmp_path) == "a"
    target = torch.zeros(3, dtype=torch.int64)
    assert load(tmp_path, "a", tensors={"w": target}).shared == {"step": 2} and target.tolist() == [2, 2, 2]
    assert load(tmp_path, "b", tensors={"w": target}).shared == {"step": 1} and target.tolist() == [1, 1, 1]


def test_latest_is_kept_when_asked(tmp_path: Path) -> None:
    assert latest_tag(tmp_path) is None
    save(tmp_path, "a", tensors={}, shared={}, per_rank={}, save_latest=False)
    assert latest_tag(tmp_path) is None
    save(tmp_path, "b", tensors={}, shared={}, per_rank={})
    save(tmp_path, "c", tensors={}, shared={}, per_rank={}, save_latest=False)
    assert latest_tag(tmp_path) == "b" and os.listdir(tmp_path / "c") == ["metadata.json"]


def test_keep_leaves_the_newest(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("stays")
    for step in range(5):
        save(tmp_path, f"step{step}", tensors={}, shared={}, per_rank={}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "mine", "step3", "step4"]
    save(tmp_path, "other", tensors={}, shared={}, per_rank={}, save_latest=False, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "mine", "other", "step4"]  # what latest names stays
    with pytest.raises(CheckpointError, match="keep=0"):
        save(tmp_path, "x", tensors={}, shared={}, per_rank={}, keep=0)


def test_leftovers_of_crashes_are_ignored_and_swept(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "b.tmp-0123456789abcdef").mkdir()
    (tmp_path / "b.tmp-0123456789abcdef" / "rank_00000.bin").write_bytes(b"half")
    os.rename(tmp_path / "a", tmp_path / "a.old-0123456789abcdef")  # killed between the two renames
    assert latest_tag(tmp_path) == "a" and load(tmp_path, "a", tensors={}).shared["step"] == 3
    save(tmp_path, "c", tensors={}, shared={}, per_rank={})
    assert sorted(os.listdir(tmp_path)) == ["a", "c", "latest"]
    assert load(tmp_path, "a", tensors={}).shared["step"] == 3


def test_a_save_in_progress_elsewhere_is_left_alone(tmp_path: Path) -> None:
    from slipstream.checkpoint.directory import Draft

    draft = Draft(tmp_path, "theirs")
    save(tmp_path, "ours", tensors={}, shared={}, per_rank={})
    assert draft.folder.is_dir()
    draft.discard()
    assert sorted(os.listdir(tmp_path)) == ["latest", "ours"]


def test_folders_that_are_not_checkpoints_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="src exists and is not a Slipstream checkpoint"):
        save(tmp_path, "src", tensors={}, shared={}, per_rank={})
    assert sorted(os.listdir(tmp_path)) == ["src"] and os.listdir(tmp_path / "src") == ["thesis.tex"]


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        "../up",
        "/etc",
        "a/b",
        "a\\b",
        " a",
        "a\n",
        "latest",
        ".hidden",
        "x" * 201,
        "a.tmp-0123456789abcdef",
        "a.old-0123456789abcdef",
        "nul\0",
        None,
        7,
    ],
)
def test_tags_that_are_no_names_are_refused(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        save(tmp_path / "new", tag, tensors={}, shared={}, per_rank={})
    with pytest.raises(CheckpointError, match="tag"):
        load(tmp_path, tag, tensors={})
    assert os.listdir(tmp_path) == []


def test_an_empty_latest_says_so(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("\n")
    with pytest.raises(CheckpointError, match="latest is damaged: it is empty"):
        latest_tag(tmp_path)


def test_a_hostile_latest_is_refused(tmp_path: Path) -> None:
    for text in (b"../../etc", b"", b"\xff\xfe", b"a\nb", b"x" * 5000):
        (tmp_path / "latest").write_bytes(text)
        with pytest.raises(CheckpointError, match="latest"):
            latest_tag(tmp_path)


def test_nothing_is_left_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    real, failing = os.fsync, [""]

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(failing[0]):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    for name in (".bin", "metadata.json", "latest"):  # in the order of their writing
        failing[0] = name
        for tag in ("a", "b"):
            with pytest.raises(CheckpointError, match=r"was not saved: .*No space left on device") as raised:
                save(tmp_path, tag, tensors={"w": torch.ones(4)}, shared={"step": 9}, per_rank={})
            if name == ".bin":
                sizes = rf"device: it needs 16 bytes, and {tmp_path}/{tag}\.tmp-\w+ had [1-9]\d+ free"
                assert re.search(sizes, str(raised.value)) and raised.value.__cause__ is None and raised.value.__context__ is None
            assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
            assert load(tmp_path, latest_tag(tmp_path) or "", tensors={}).shared["step"] == 3


# Refusals


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ({"w": torch.ones(3, 5, 7)}, r"'w' has shape \(5, 3, 7\) in the checkpoint and \(3, 5, 7\) in the model"),
        ({"w": FlatSlice(torch.ones(10), (105,), 0)}, r"'w' has shape \(5, 3, 7\) in the checkpoint and \(105,\) in the model"),
        ({"W": torch.ones(5, 3, 7)}, "it has no tensor 'W'"),
        ({"bug": torch.ones(700_000)}, "no tensor 'bug'; the nearest of its 7 names is 'big'"),
        ({"$shared/0": torch.ones(5)}, r"does not begin with '\$'"),
        ({"w": [1.0]}, "tensor 'w' is a list"),
        ({"w": torch.ones(5, 3, 7, device="meta")}, "only dense tensors"),
    ],
)
def test_wrong_targets_change_nothing(tmp_path: Path, target: dict[str, Any], match: str) -> None:
    saved(tmp_path)
    good = torch.ones(11).bfloat16()
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, "a", tensors={"b": good, **target})
    assert bool((good == 1).all())


def test_what_is_missing_or_foreign_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"directory .*nowhere does not exist"):
        load(tmp_path / "nowhere", "a", tensors={})
    assert latest_tag(tmp_path / "nowhere") is None  # a first start
    with pytest.raises(CheckpointError, match="has no checkpoint 'b'; it has none"):
        load(tmp_path, "b", tensors={})
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint 'b'; it has a"):
        load_metadata(tmp_path, "b")

    for files, match in [
        (
            ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "mp_rank_00_model_states.pt is truncated, damaged, or of a torch older than 1.6",
        ),
        (["layer_00-model_00-model_states.pt"], "it has no mp_rank_00_model_states.pt"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "has no metadata.json, it has bf16_zero"),
        ([".metadata", "__0_0.distcp"], "pickle, which is not read"),
        (["model.safetensors"], "has no metadata.json, it has model.safetensors"),
        ([], "it is empty"),
    ]:
        folder = tmp_path / f"foreign{len(os.listdir(tmp_path))}"
        folder.mkdir()
        for name in files:
            (folder / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path, folder.name, tensors={})
    assert not Bomb.went_off


class Bomb:
    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


def contents(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metadata.json").read_bytes())["content"]


def rewrite(folder: Path, content: Any, *, version: int = 2, text: str | None = None) -> None:
    """metadata.json with a right checksum, as an attacker would write it."""
    body = (json.dumps(content) if text is None else text).encode()
    head = f'{{"format": "slipstream-checkpoint", "version": {version}, "crc32": {zlib.crc32(body)}, '
    head += '"content":\n'
    (folder / "metadata.json").write_bytes(head.encode() + body + b"\n}\n")


def at(content: dict[str, Any], *path: Any) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    *where, value = path

    def change(content: dict[str, Any]) -> None:
        at(content, *where)[where[-1]] = value

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: at(content, *path).__delitem__(path[-1])


def twice(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: at(content, *path, None).append(at(content, *path, None)[0])


W = ("tensors", "w", "pieces", 0)
HOSTILE = {
    "traversal": (lambda c: c["files"].update({"../../passwd": 10}), "a data file named '../../passwd'"),
    "absolute": (lambda c: c["files"].update({"/etc/passwd": 10}), "a data file named '/etc/passwd'"),
    "not a data file": (lambda c: c["files"].update({"metadata.json": 10}), "file named 'metadata.json'"),
    "piece elsewhere": (put(*W, "file", "../rank_00000.bin"), "not a file of this checkpoint"),
    "missing file": (lambda c: c["files"].update({"rank_00007.bin": 10}), "rank_00007.bin: No such file"),
    "absurd file": (put("files", "rank_00000.bin", 1 << 40), "truncated"),
    "endless file": (put("files", "rank_00000.bin", 1 << 62), "must be a whole number"),
    "negative file": (put("files", "rank_00000.bin", -1), "must be a whole number"),
    "offset outside": (put(*W, "at", 1 << 40), r"bytes \[1099511627776, \d+\) of rank_00000.bin, which has"),
    "negative offset": (put(*W, "at", -64), "an offset is -64"),
    "fractional offset": (put(*W, "at", 0.5), "an offset is 0.5"),
    "boolean offset": (put(*W, "at", True), "an offset is True"),
    "shared bytes": (put(*W, "at", 64), "lie in the same bytes of rank_00000.bin"),
    "duplicate box": (twice("tensors", "w", "pieces"), "overlap"),
    "no pieces": (put("tensors", "w", "pieces", []), "nothing of it is there"),
    "part missing": (put("tensors", "w", "shape", [6, 3, 7]), "only 105 of 126 elements are there"),
    "box outside": (put("tensors", "w", "shape", [4, 3, 7]), "is outside it"),
    "box of other dims": (put(*W, "offsets", [0]), "is outside it"),
    "absurd shape": (put("tensors", "w", "shape", [1 << 40, 1 << 40]), "a shape of"),
    "endless dim": (put("tensors", "w", "shape", [1 << 62]), "a size is"),
    "negative dim": (put("tensors", "w", "shape", [-5, -21]), "a size is -5"),
    "many dims": (put("tensors", "w", "shape", [1] * 100), "where a shape belongs"),
    "no shape": (put("tensors", "w", "shape", "5x3x7"), "where a shape belongs"),
    "dtype": (put("tensors", "w", "dtype", "qint8"), "dtype 'qint8'"),
    "fewer checksums": (put("tensors", "big", "pieces", 0, "crc32", [1]), "1 checksums for 2800000 bytes"),
    "checksum": (put(*W, "crc32", [12345]), "damaged: the checksum of tensor 'w' does not match"),
    "checksum type": (put(*W, "crc32", ["x"]), "a checksum is x"),
    "big endian": (put("byteorder", "big"), "big-endian"),
    "block of one": (put("block", 1), "block is 1"),
    "world": (put("mesh", {"batch": 3}), "values of 1 ranks for a mesh of"),
    "no values": (put("per_rank", None), "damaged or hostile"),
    "no tensors": (drop("tensors"), "KeyError: 'tensors'"),
    "tensors as a list": (put("tensors", []), "damaged or hostile"),
    "entry as a list": (put("tensors", "w", []), "damaged or hostile"),
    "save_id": (put("save_id", []), "save_id"),
    "unknown mark": (put("shared", "step", {"$pickle": "gASV"}), r"an object marked '\$pickle'"),
    "two marks": (put("shared", "step", {"$tuple": [], "x": 1}), "an object with the keys"),
    "someone else's tensor": (put("shared", "step", {"$tensor": "$rank/0/0"}), "KeyError"),
    "a parameter": (put("shared", "step", {"$tensor": "w"}), "KeyError"),
    "unhashable": (put("shared", "step", {"$tensor": []}), "TypeError"),
    "array of objects": (put("shared", "step", {"$array": ["|O8", [1], "$shared/0"]}), "a numpy dtype"),
    "long array": (put("shared", "step", {"$array": ["<f4", [1 << 40], "$shared/0"]}), "in a tensor of"),
    "key of a list": (put("shared", "step", {"$dict": [[[1], 2]]}), "a key of type list"),
    "no such dtype": (put("shared", "step", {"$dtype": "save"}), "a dtype 'save'"),
    "values in a list": (put("shared", [1, 2]), "it is not a dict with string keys"),
    "rank's values": (put("per_rank", [3]), "it is not a dict with string keys"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_changes_nothing(tmp_path: Path, name: str) -> None:
    change, match = HOSTILE[name]
    target = blank(saved(tmp_path))
    content = contents(tmp_path / "a")
    change(content)
    rewrite(tmp_path / "a", content)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, "a", tensors=target)
    assert all(bool((tensor == 1).all()) for tensor in target.values())


@pytest.mark.parametrize("times", [1, 1000])
def test_a_tag_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, times: int) -> None:
    """By another process, between its values and its tensors; one that is replaced for ever is not waited for for ever."""

    def write(number: int) -> None:
        values = torch.full((1000,), float(number))
        save(tmp_path, "t", tensors={"w": values}, shared={"number": number}, per_rank={})

    write(0)
    calls: list[int] = []

    def accept(loaded: Any) -> None:
        calls.append(loaded.shared["number"])
        if len(calls) <= times:
            write(len(calls))

    target = {"w": torch.zeros(1000)}
    if times == 1:
        loaded = load(tmp_path, "t", tensors=target, accept=accept)
        assert calls == [0, 1] and loaded.shared["number"] == 1 and bool((target["w"] == 1).all())
        return
    with pytest.raises(CheckpointError, match=r"is damaged.*replaced each of 5 times while it was read"):
        load(tmp_path, "t", tensors=target, accept=accept)
    assert calls == [0, 1, 2, 3, 4] and not target["w"].any()


def test_metadata_is_bounded_by_the_data(tmp_path: Path) -> None:
    """200,000 empty tensors in 25 MB are refused before a byte of them is parsed, and no save writes what a load refuses."""
    save(tmp_path, "t", tensors={"w": torch.zeros(3)}, shared={}, per_rank={})
    path = tmp_path / "t" / "metadata.json"
    empty = '{"dtype":"float32","shape":[0],"pieces":[{"offsets":[0],"sizes":[0],"file":"rank_00000.bin","at":0,"crc32":[]}]}'
    head, body = path.read_text().removesuffix("\n}\n").split("\n", 1)
    more = body.replace('"tensors":{', '"tensors":{' + ",".join(f'"{i}":{empty}' for i in range(200_000)) + ",")
    path.write_text(re.sub(r'"crc32": \d+', f'"crc32": {zlib.crc32(more.encode())}', head) + f"\n{more}\n}}\n")
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"metadata\.json has more than 16,\d+,\d+ bytes for 12 of data"):
        load_metadata(tmp_path, "t")
    assert time.process_time() - began < 1
    with pytest.raises(CheckpointError, match=r"has 17,\d+,\d+ bytes; for 12 bytes of tensors the limit is 16,777,264"):
        save(tmp_path, "u", tensors={"w": torch.zeros(3)}, shared={"notes": "a" * (17 << 20)}, per_rank={})
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "not the metadata of a Slipstream checkpoint"),
        (pickle.dumps(Bomb()), "not the metadata of a Slipstream checkpoint"),
        (b'{"a": 1}', "not the metadata of a Slipstream checkpoint"),
        (b"[" * 100_000, "not the metadata"),
    ],
)
def test_foreign_metadata_is_refused(tmp_path: Path, raw: bytes, match: str) -> None:
    saved(tmp_path)
    (tmp_path / "a" / "metadata.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=match):
        load_metadata(tmp_path, "a")
    assert not Bomb.went_off


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"a": 1, "a": 2}', "a name occurs twice"),
        ('{"a": NaN}', "the number NaN"),
        ('{"a": ' + "9" * 5000 + "}", "damaged or hostile"),
        ("null", "damaged or hostile"),
        ("{}", "KeyError"),
        ("{", "damaged or hostile"),
    ],
)
def test_hostile_json_is_refused(tmp_path: Path, text: str, match: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path / "a", None, text=text)
    with pytest.raises(CheckpointError, match=match):
        load_metadata(tmp_path, "a")


def test_versions_and_damage_are_told_apart(tmp_path: Path) -> None:
    saved(tmp_path)
    metadata = tmp_path / "a" / "metadata.json"
    raw = metadata.read_bytes()
    metadata.write_bytes(raw.replace(b'"step":3', b'"step":4'))
    with pytest.raises(CheckpointError, match="truncated, damaged or edited"):
        load_metadata(tmp_path, "a")
    for stop in (len(raw) - 1, len(raw) // 2, 90):
        metadata.write_bytes(raw[:stop])
        with pytest.raises(CheckpointError, match=r"truncated|not the metadata"):
            load_metadata(tmp_path, "a")
    rewrite(tmp_path / "a", {}, version=3)
    with pytest.raises(CheckpointError, match="format version 3; this one reads versions 1 to 2"):
        load(tmp_path, "a", tensors={})


def test_version_1_is_read(tmp_path: Path) -> None:
    """Its ranks were on one axis, and it named their number only."""
    state = saved(tmp_path)
    content = contents(tmp_path / "a")
    assert content.pop("mesh") == {"batch": 1}
    rewrite(tmp_path / "a", content | {"world_size": 1}, version=1)
    target = blank(state)
    loaded = load(tmp_path, "a", tensors=target)
    assert loaded.per_rank is not None and load_metadata(tmp_path, "a").world_size == 1
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name


def test_values_per_rank_belong_to_a_mesh(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={}, shared={}, per_rank={"seed": 7}, mesh={"pp": 1, "batch": 1})
    assert load(tmp_path, "a", tensors={}).per_rank is None
    assert load(tmp_path, "a", tensors={}, mesh={"pp": 1, "batch": 1}).per_rank == {"seed": 7}


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove", "pipe", "folder"])
def test_damaged_data_changes_nothing(tmp_path: Path, damage: str) -> None:
    target = blank(saved(tmp_path))
    data = tmp_path / "a" / "rank_00000.bin"
    raw = bytearray(data.read_bytes())
    data.unlink()
    if damage == "flip":
        raw[2_000_000] ^= 1  # in the second block of "big", which comes after other tensors
        data.write_bytes(raw)
    elif damage == "truncate":
        data.write_bytes(raw[:-1])
    elif damage == "grow":
        data.write_bytes(raw + b"x")
    elif damage == "pipe":
        os.mkfifo(data)
    elif damage == "folder":
        data.mkdir()
    match = {
        "flip": "checksum of tensor 'big'",
        "truncate": "truncated",
        "grow": "not the file that was saved",
        "remove": "No such file",
        "pipe": "not a regular file",
        "folder": "not a regular file",
    }[damage]
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, "a", tensors=target)
    assert all(bool((tensor == 1).all()) for tensor in target.values())
    if damage == "flip":  # a load that needs no damaged byte is a good load
        load(tmp_path, "a", tensors={"w": target["w"], "big": FlatSlice(torch.ones(9), (700_000,), 0)})


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(torch, "load", None)
    load(tmp_path, "a", tensors=blank(state()))


def test_parameters_and_leaves_that_need_gradients_can_be_filled(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save(tmp_path, "a", tensors=dict(model.named_parameters()), shared={}, per_rank={})
    other = torch.nn.Linear(3, 2)
    load(tmp_path, "a", tensors=dict(other.named_parameters()))
    assert torch.equal(other.weight, model.weight) and other.weight.requires_grad


def test_bytes_written_are_the_tensors(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"x": torch.arange(3, dtype=torch.int32)}, shared={}, per_rank={})
    assert io.BytesIO((tmp_path / "a" / "rank_00000.bin").read_bytes()).read() == bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])


# Staging


def resident() -> int:
    """Bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.alone
def test_staging_brings_its_pages_in_before_they_are_needed() -> None:
    nbytes, staging, before = 256 << 20, Staging(pinned=False), resident()
    assert not staging.prepared
    staging.prepare(nbytes)
    deadline = time.monotonic() + 60
    while resident() - before < nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert staging.prepared and nbytes <= resident() - before < nbytes + (16 << 20)
    block = staging.take(nbytes + 5000)  # values besides
    first = block.data_ptr()
    assert first % 4096 == 0 and block.numel() == nbytes + 8192
    assert staging.take(nbytes).data_ptr() == first, "kept between saves"
    del block
    staging.close()
    assert resident() - before < 16 << 20


def test_staging_is_the_save_s_alone_once_it_is_taken() -> None:
    """Whatever was being brought in: nothing is written to it any more."""
    staging = Staging(pinned=False)
    staging.prepare(512 << 20)
    block = staging.take(512 << 20)
    block[:: 1 << 20] = 7
    time.sleep(0.05)
    assert bool((block[:: 1 << 20] == 7).all())
    staging.close()
    staging.prepare(1 << 20)
    assert staging.take(3 << 20).numel() == 3 << 20, "another size than was expected"

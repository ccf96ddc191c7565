"""DeepSpeed's checkpoints (ZeRO-1, 2, 3 and universal) as a `Document`: the same tensors by name, in DeepSpeed's own files.

Every function that loads our checkpoints so also loads DeepSpeed's, at any world size and stage, and each rank reads only the byte
ranges that it needs. The formats, as DeepSpeed 0.19.8 writes them:

ZeRO-1, 2  [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt: rank R's part of each flat parameter group in fp32 and of its states;
           `param_slice_mappings` gives the offset and length of each parameter's next elements. mp_rank_00_model_states.pt:
           16-bit weights (frozen ones only there), buffers, counters
ZeRO-3     the same files, with ceil(numel / world) elements of every parameter of `param_shapes` in turn; frozen parameters as
           such fragments in zero_pp_rank_R_mp_rank_00_model_states.pt
no ZeRO    mp_rank_00_model_states.pt: the weights, and an optimizer of numbered parameters, in bf16 with its masters
universal  zero/NAME/{fp32,exp_avg,...}.pt: whole parameters, flat or in their shape, alone or as "param" of a dictionary

With pipelines and slices, each model-parallel rank has such files of its own (deepspeed_parts.py), and so has each expert
(deepspeed_experts.py).

Each zip record has a CRC-32, which box_reader.py verifies. The files hold no random states.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.deepspeed_experts import ExpertFiles, ExpertSlot, numbered, unwrapped
from slipstream.checkpoint.deepspeed_parts import Cuts, DeepSpeedPart, PartPlace, layers_of, parts_of
from slipstream.checkpoint.document import SLACK, Document, Entry, Piece, ZipRecord
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Shape, boxes_in, check_cover, whole_box
from slipstream.checkpoint.pickled import Array, Record, Stored, read
from slipstream.checkpoint.values import encode

logger = logging.getLogger(__name__)

_NODES = 1_000_000  # limit of the values in a client_state
# Keys that DeepSpeed itself stores beside those of the caller's client_state
_OWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"),
        *("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size"),
        *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
        *("num_experts", "ds_autoep_layers", "autoep_layers", "folding"),
    }
)
# Optimizers by the states they keep. For other sets of states the class is unknown, and not checked at load
_CLASSES = {
    frozenset({"exp_avg", "exp_avg_sq"}): ["AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "Lamb", "FusedLamb", "NAdam", "RAdam"],
    frozenset({"exp_avg"}): ["Lion", "FusedLion", "DeepSpeedCPULion"],
    frozenset({"momentum_buffer"}): ["SGD", "Muon"],
    frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"}): ["Muon"],
    frozenset({"sum"}): ["Adagrad", "DeepSpeedCPUAdagrad"],
}


def read_document(folder: Path) -> Document:
    """The checkpoint's document. Reads the pickled structures, and no tensor data except scalars. Raises CheckpointError."""
    try:
        return _Import(folder).document()
    except CheckpointError as error:
        where = "" if str(folder) in str(error) else f"{folder}: "
        raise CheckpointError(f"{where}{error}") from error
    except Exception as error:  # the structure comes from the file: any key or type may be wrong
        raise CheckpointError(f"{folder} is not as DeepSpeed 0.19 writes checkpoints: {type(error).__name__}: {error}") from error


class _Import:
    """Builds the document of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = sorted(os.listdir(folder))
        self.parts = parts_of(folder, self.names)
        self.model = self.parts[0].model
        self.degree = max(part.slice for part in self.parts) + 1
        self.experts = ExpertFiles.open(folder, self.parts, self.degree)
        self.files: dict[str, int] = {}
        self.shapes: dict[str, tuple[torch.dtype, Shape]] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.owners: dict[str, tuple[int, int]] = {}  # tensor -> (first stage that has it, slice whose copy counts, or -1)
        self.steps: dict[str, dict[str, Any]] = {}  # parameter -> the non-tensor values of its optimizer state
        self.groups: list[dict[str, Any]] | None = None
        self.scaler: Any = None
        self._nodes = 0
        self._names: dict[Path, str] = {}  # file -> its name relative to the folder
        self._records: dict[ZipRecord, ZipRecord] = {}  # as read -> with the file's relative name

    def document(self) -> Document:
        if (self.folder / "zero").is_dir():
            self._universal()
        elif all(part.optim_files for part in self.parts):
            for first in range(0, len(self.parts), self.degree):
                self._optimizer_files(self.parts[first : first + self.degree])
        else:
            self._without_zero()
        self._name_states()
        for part in self.parts:
            self._whole_tensors(part)
        self._experts()
        self._layers()
        for name, (_, shape) in self.shapes.items():
            check_cover(name, shape, [piece.box for piece in self.pieces[name]])
        shared = self._shared()
        self._check_bytes()
        entries = {
            name: Entry(dtype=dtype, shape=shape, pieces=tuple(self.pieces[name])) for name, (dtype, shape) in self.shapes.items()
        }
        facts = [(name, (self.folder / name).stat().st_size, (self.folder / name).stat().st_mtime_ns) for name in self.files]
        return Document(
            save_id=hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16], files=self.files, tensors=entries, shared=shared
        )

    # -- tensors --

    @functools.cached_property
    def cuts(self) -> Cuts:
        infos = (part.model.get("universal_checkpoint_info") for part in self.parts)
        return Cuts(next(filter(None, infos), None), self.degree)

    def _place(self, name: str, part: DeepSpeedPart, shapes: Callable[[DeepSpeedPart], Shape]) -> PartPlace | None:
        """The place of a part's tensor in the whole; None if another part supplies it. shapes: of the parts of a stage."""
        stage = self.parts.index(part) // self.degree
        stage_parts = self.parts[stage * self.degree : (stage + 1) * self.degree]
        place = self.cuts.place(name, part.slice, [shapes(other) for other in stage_parts])
        owner = stage, part.slice if place.is_copy else -1
        return place if self.owners.setdefault(name, owner) == owner else None

    def _add(self, name: str, place: PartPlace, stored: Stored, start: int = 0, first: int = 0, numel: int | None = None) -> None:
        """Record that elements [first, first + numel) of a stored tensor (default: all) are those of `place` from `start` on."""
        shape, numel = place.whole, stored.numel if numel is None else numel
        if stored.at < 0 or first + numel > stored.numel:
            raise CheckpointError(
                f"{name!r}: {numel} elements from {first} of a tensor of shape {stored.shape} in {stored.path.name}"
            )
        if self.shapes.setdefault(name, (stored.dtype, shape)) != (stored.dtype, shape):
            raise CheckpointError(f"{name!r} is both {self.shapes[name]} and {(stored.dtype, shape)}")
        if stored.path not in self._names:
            self._names[stored.path] = stored.path.relative_to(self.folder).as_posix()
            self.files[self._names[stored.path]] = stored.path.stat().st_size
        file, record = self._names[stored.path], stored.record
        if record is not None:
            record = self._records.setdefault(record, record._replace(file=file))
        at, parts = stored.at + first * stored.dtype.itemsize, self.pieces.setdefault(name, [])
        for box in boxes_in(place.boxes or (whole_box(shape),), start, start + numel):
            parts.append(Piece(box=box, file=file, at=at, crc32=(), zip_record=record))
            at += box.numel * stored.dtype.itemsize

    def _check_bytes(self) -> None:
        """Refuse a file whose tensors are many views of one storage: small on disk, vast when each is loaded."""
        loaded = dict.fromkeys(self.files, 0)
        for name, parts in self.pieces.items():
            for piece in parts:
                loaded[piece.file] += piece.box.numel * self.shapes[name][0].itemsize
        for file, nbytes in loaded.items():
            if nbytes > 2 * self.files[file] + SLACK:
                raise CheckpointError(
                    f"damaged or hostile: the tensors of {file} have {nbytes:,} bytes, and the file {self.files[file]:,}: many of "
                    f"them are the same bytes; save copies (clone()) of a client_state's views"
                )

    def _optimizer_files(self, parts: Sequence[DeepSpeedPart]) -> None:
        """Read the optimizer files of a stage's slices, in the order of its ranks."""
        num_read: dict[ExpertSlot, int] = {}  # elements of each parameter on lower ranks
        world = len(parts[0].optim_files)
        for rank, part in itertools.product(range(world), parts):
            state = read(self.folder / part.optim_files[rank])["optimizer_state_dict"]
            count = state["partition_count"]
            if world not in (count if isinstance(count, list) else [count]):
                raise CheckpointError(f"it was saved by {count} ranks and has the files of {world}")
            is_stage_3 = "fp32_flat_groups" in state
            masters = state["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
            base = state["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
            if not isinstance(base, dict):
                raise CheckpointError("it was saved with zero_optimization.elastic_checkpoint, which is not imported")
            self._values(base["param_groups"], state)
            for index, master in enumerate(masters):
                param_state = base["state"].get(index, {})
                spans = list(_stage_3(part, state, index, rank, world) if is_stage_3 else self._stage_1(part, state, index))
                wholes = _wholes(part, param_state, [name for name, _, _ in spans])
                for name, first, numel in spans:
                    slot = self._slot(name, part, rank, world)
                    if slot is not None:
                        start = num_read.get(slot, 0)
                        num_read[slot] = start + numel
                        at = wholes[name] + start if wholes else first
                        self._parameter(slot, start, master, param_state, base["param_groups"], first, numel, at)

    def _slot(self, name: str, part: DeepSpeedPart, rank: int, world: int) -> ExpertSlot | None:
        """A trained parameter of a part, and its place in the whole; None if another part supplies it."""
        if self.experts.is_autoep(name):  # over all ranks of a stage, including its slices
            return self.experts.slot(name, PartPlace(part.trained[name]), rank * self.degree + part.slice, world * self.degree)
        place = self._place(name, part, lambda other: other.trained[name])
        if place is None:
            return None
        return self.experts.slot(name, place, rank, world) or ExpertSlot(self.experts.known_as(name), place)

    def _stage_1(self, part: DeepSpeedPart, state: Mapping[str, Any], index: int) -> Iterator[tuple[str, int, int]]:
        zero = (self.model.get("ds_config") or {}).get("zero_optimization") or {}
        if zero.get("round_robin_gradients") and len(part.optim_files) > 1:
            raise CheckpointError(
                "it was saved with zero_optimization.round_robin_gradients, under which DeepSpeed's own map of its slices is of "
                "another order; convert it with DeepSpeed's ds_to_universal and load that"
            )
        for name, place in state["param_slice_mappings"][index].items():
            yield name, place.get("start"), place.get("numel")

    def _parameter(
        self,
        slot: ExpertSlot,
        start: int,
        master: Stored | None,
        state: Mapping[str, Any],
        groups: list[dict[str, Any]],
        first: int,
        numel: int,
        at: int | None = None,
    ) -> None:
        """Add elements [first, first + numel) of a parameter, and of its states those from `at` on (None: as the parameter's); they
        begin at `start` in the slot."""
        name, place = slot
        if master is not None:
            self._add(f"model.{name}", place, master, start, first, numel)
        scalars = self.steps.setdefault(name, {})
        for key, value in state.items():
            if isinstance(value, Stored) and value.shape:
                self._add(f"optim.{key}.{name}", place, value, start, first if at is None else at, numel)
            elif key not in scalars:
                scalars[key] = value
        if state and "step" not in scalars and "step" in groups[0]:  # DeepSpeed's Adam keeps the step in the group
            scalars["step"] = groups[0]["step"]

    def _without_zero(self) -> None:
        """Add trained weights and the states of optimizers of numbered parameters."""
        if len(self.parts) > 1:
            raise CheckpointError(
                "it is of ZeRO stage 0 in several pipeline stages or slices: its optimizer states have no names. Load its weights "
                "alone (torch.load with weights_only=True), or save it at stage 1"
            )
        module, buffers, experts = self.model["module"], self.model["buffer_names"], self.experts
        dense = {
            name: stored
            for name, stored in module.items()
            if isinstance(stored, Stored) and name not in buffers and not experts.is_alias(name, module)
        }
        files = experts.optimizers() if experts else []
        for rank, saved in enumerate([read(self.folder / file)["optimizer"] for file in files] or [self.model["optimizer"]]):
            state, masters = unwrapped(saved)
            if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
                raise CheckpointError(
                    "it is of ZeRO stage 0, and its optimizer has no states by parameter: load its weights alone (torch.load with "
                    "weights_only=True), or save it at stage 1"
                )
            groups = state["param_groups"]
            self._values(groups, {"loss_scaler": saved})
            own = experts.on_rank(rank) if files else {}
            shapes = experts.in_order(dense, state) if rank == 0 else []
            for number, name, values in numbered(state, shapes, [(name, shape) for name, (shape, _) in own.items()]):
                master = masters.get(number, None if name in own else dense[name])
                shape, slot = own.get(name) or (dense[name].shape, ExpertSlot(experts.known_as(name), PartPlace(dense[name].shape)))
                self._parameter(slot, 0, master, values, groups, 0, math.prod(shape))

    def _experts(self) -> None:
        """Add the experts' weights for which no optimizer has a master: frozen ones, and all of them without ZeRO."""
        known = set(self.shapes)
        for index, name, slices in self.experts.weights():
            shapes = [stored.shape for stored in slices]
            place = PartPlace(shapes[0]) if self.experts.is_autoep(name) else self.cuts.place(name, index, shapes)
            slot = self.experts.slot(name, place)
            if slot is not None and f"model.{slot.name}" not in known and not (place.is_copy and index):
                self._add(f"model.{slot.name}", slot.place, slices[index])

    def _universal(self) -> None:
        trained = {name: shape for part in self.parts for name, shape in part.trained.items()}
        common = read(self.folder / "zero" / "optimizer_state.pt")
        self._values(common["param_groups"], common)
        states = common.get("optimizer_state_dict", {}).get("state", {})
        for name, shape in trained.items():
            if Path(name).name != name:
                raise CheckpointError(f"a parameter named {name!r}")
            folder = self.folder / "zero" / name
            if self.degree > 1:  # the parts know the shapes of slices
                shape = self._whole_shape(folder)
            place = PartPlace(self.experts.whole_shape(name, shape))
            slot = self.experts.slot(name, place) or ExpertSlot(self.experts.known_as(name), place)
            numel = math.prod(place.whole)
            scalars = {key: value for key, value in states.get(0, {}).items() if not isinstance(value, Stored) or not value.shape}
            tensors = {}
            for file in sorted(folder.glob("*.pt")):
                value = read(file)
                value = value["param"] if isinstance(value, dict) else value
                if isinstance(value, Stored) and value.numel == numel and file.stem != "step":
                    tensors[file.stem] = value
                else:
                    scalars[file.stem] = value
            self._parameter(slot, 0, tensors.pop("fp32"), scalars | tensors, common["param_groups"], 0, numel)

    @staticmethod
    def _whole_shape(folder: Path) -> Shape:
        value = read(folder / "fp32.pt")
        shape: Shape = (value["param"] if isinstance(value, dict) else value).shape
        return shape

    def _name_states(self) -> None:
        """Rename Adagrad's sum, which DeepSpeed stores as exp_avg_sq; drop the exp_avg_sq that its Lion never uses."""
        kinds = {key.split(".", 2)[1] for key in self.shapes if key.startswith("optim.")}
        is_lion = kinds == {"exp_avg", "exp_avg_sq"} and not any("eps" in group for group in self.groups or [])
        for name in self.steps if is_lion or kinds == {"exp_avg_sq"} else ():
            shape, pieces = self.shapes.pop(f"optim.exp_avg_sq.{name}", None), self.pieces.pop(f"optim.exp_avg_sq.{name}", [])
            if shape is not None and not is_lion:
                self.shapes[f"optim.sum.{name}"], self.pieces[f"optim.sum.{name}"] = shape, pieces

    def _whole_tensors(self, part: DeepSpeedPart) -> None:
        """Add buffers, and frozen parameters: from each rank's fragments if weights were sharded, else from the module's state."""
        module, aliases = part.model["module"] or {}, part.model["shared_params"] or {}
        fragments = part.model.get("frozen_param_fragments") or {}
        if fragments:
            self._fragments(part)
        buffers = part.model["buffer_names"]
        other_names = {*part.trained, *fragments, *buffers, *aliases}
        for name, stored in module.items():
            is_other = name in other_names or self.experts.known_as(name) in self.steps or self.experts.is_alias(name, module)
            if not is_other and isinstance(stored, Stored) and len(part.model_files) == 1:
                place = self._place(name, part, lambda other, name=name: other.model["module"][name].shape)  # type: ignore[misc]
                if place is not None:
                    self._add(f"model.{self.experts.known_as(name)}", place, stored)
        for name in buffers if module else ():
            target = f"buffer.{self.experts.known_as(name)}"
            if part.slice == 0 and target not in self.pieces and not self.experts.is_alias(name, module):
                self._add(target, PartPlace(module[name].shape), module[name])

    def _fragments(self, part: DeepSpeedPart) -> None:
        """Add the frozen parameters; each rank's file has one range of each."""
        num_read = dict[str, int]()
        for file in part.model_files:
            state = part.model if file == part.model_files[0] else read(self.folder / file)
            for name, stored in self.experts.others(state["frozen_param_fragments"]):
                shape, start = tuple(state["frozen_param_shapes"][name]), num_read.get(name, 0)
                num_read[name] = start + stored.numel
                place = self._place(name, part, lambda other, name=name: tuple(other.model["frozen_param_shapes"][name]))  # type: ignore[misc]
                target = f"model.{self.experts.known_as(name)}"
                if place is not None and (start < math.prod(shape) or target not in self.pieces):
                    self._add(target, place, stored, start, numel=min(stored.numel, math.prod(shape) - start))

    def _layers(self) -> None:
        """Add the frozen parameters and the buffers of a pipeline's layers, which have files of their own."""
        trained = {name for part in self.parts for name in part.trained}
        buffers = {name for part in self.parts for name in part.model["buffer_names"]}
        files: dict[str, dict[int, str]] = {}
        for layer, index, file in layers_of(self.names):
            files.setdefault(layer, {})[index] = file
        for layer, by_slice in files.items():
            states = {index: read(self.folder / file) for index, file in by_slice.items()}
            prefix = _prefix(layer, states[0], trained | buffers)
            for index, state in states.items():
                for key, stored in state.items():
                    name = f"{prefix}.{key}"
                    if name in trained or not isinstance(stored, Stored):
                        continue
                    place = self.cuts.place(name, index, [states[i][key].shape for i in range(self.degree)])
                    is_buffer = name in buffers
                    if index == 0 or not (is_buffer or place.is_copy):
                        kind, part = ("buffer", PartPlace(stored.shape)) if is_buffer else ("model", place)
                        self._add(f"{kind}.{name}", part, stored)

    # -- values --

    def _values(self, groups: list[dict[str, Any]], state: Mapping[str, Any]) -> None:
        if self.groups is None:
            self.groups = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
            self.scaler = state.get("loss_scaler")

    def _shared(self) -> dict[str, Any]:
        model = self.model
        states = [name.split(".", 2)[1:] for name in self.shapes if name.startswith("optim.")]  # (state, parameter)
        with_states = {param for _, param in states}
        scaler = self.scaler or {}
        clean = int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1
        values = {
            "counters": {name: int(model[name]) for name in ("global_steps", "skipped_steps", "global_samples")},
            "loss_scale": {
                "scale": float(scaler.get("cur_scale", 1.0)),
                "clean_steps": clean,
                "patience": int(scaler.get("cur_hysteresis", 1)),
            },
            "scheduler": model["lr_scheduler"],
            "aliases": {
                self.experts.known_as(name): self.experts.known_as(first)
                for part in self.parts
                for name, first in (part.model["shared_params"] or {}).items()
            },
            "data": None,
            "model_config": None,
            "optimizer": {
                "classes": _CLASSES.get(frozenset(kind for kind, _ in states)),
                "groups": self.groups,
                "params": {name: scalars for name, scalars in self.steps.items() if scalars or name in with_states},
            },
        }
        return {key: self._skeleton(value, key) for key, value in values.items()} | {"client": self._client()}

    def _client(self) -> dict[str, Any]:
        client = {}
        for key, value in self.model.items():
            if key not in _OWN:
                num_tensors = len(self.shapes)
                try:
                    client[key] = self._skeleton(value, f"client_state[{key!r}]")
                except CheckpointError as error:
                    while len(self.shapes) > num_tensors:
                        self.pieces.pop(self.shapes.popitem()[0], None)
                    logger.warning("client_state[%r] of %s is left out: %s", key, self.folder, error)
        return client

    def _skeleton(self, value: Any, path: str) -> Any:
        """The value as `values.encode` writes it. A tensor becomes an entry, an object a dictionary, a numpy array a list."""
        self._nodes += 1
        if self._nodes > _NODES:
            raise CheckpointError(f"more than {_NODES} values besides its tensors")
        if type(value) in (list, tuple):
            items = [self._skeleton(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if isinstance(value, dict) and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self._skeleton(item, f"{path}[{key!r}]") for key, item in value.items()}
        if isinstance(value, dict):
            return {"$dict": [[encode(key, path, "")[0], self._skeleton(item, f"{path}[{key!r}]")] for key, item in value.items()]}
        if isinstance(value, Array):
            return value.value.tolist()
        if isinstance(value, Stored):
            name = f"$shared/{len(self.shapes)}"
            self._add(name, PartPlace(value.shape), value)
            return {"$tensor": name}
        if isinstance(value, Record):
            return self._skeleton({key: item for key, item in vars(value).items() if key != "args"}, path)
        return encode(value, path, "$shared")[0]


def _wholes(part: DeepSpeedPart, state: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Where each parameter begins in a state of whole parameters, as ZeRO 1 and 2 keep the momentum of all parameters that a rank
    has a part of, for Muon. Empty if there is none."""
    *begins, end = itertools.accumulate((math.prod(part.trained[name]) for name in names), initial=0)
    momentum = state.get("momentum_buffer")
    return dict(zip(names, begins, strict=True)) if isinstance(momentum, Stored) and momentum.numel == end else {}


def _stage_3(part: DeepSpeedPart, state: Mapping[str, Any], index: int, rank: int, world: int) -> Iterator[tuple[str, int, int]]:
    """(name, first element in the rank's flat group, number of elements) of each parameter's part.

    A group of experts has as many parts as there are ranks with the same experts.
    """
    groups = state.get("ds_zero_partition_groups") or []
    group = groups[index] if index < len(groups) else {}
    world, rank = int(group.get("partition_count", world)), int(group.get("partition_rank", rank))
    first = 0
    for name, shape in part.model["param_shapes"][index].items():
        numel = math.prod(shape)
        length = -(-numel // world)
        yield name, first, max(0, min(length, numel - rank * length))
        first += length


def _prefix(layer: str, state: Mapping[str, Any], known: Collection[str]) -> str:
    """The name of a pipeline's layer: its number, or that of the tied module whose names its file contains."""
    if any(name.startswith(f"{layer}.") for name in known):
        return layer
    for tied in {".".join(name.split(".")[:2]) for name in known if name.startswith("tied_modules.")}:
        if {f"{tied}.{key}" for key in state} <= set(known):
            return tied
    return layer

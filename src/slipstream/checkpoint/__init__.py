"""Checkpoints that any world size, stage or topology can load: named tensors, atomic commits, no pickle.

Independent of the engine: an entry is a `FlatSlice` (this rank's flat range of a named tensor), a whole tensor, a DTensor, or a
plain value. `save` and `load` are collective over a group. plan.py chooses the writer of each box, writer.py writes and
box_reader.py reads the bytes, document.py defines metadata.json, directory.py handles tags and atomic renames, values.py lists the
types a value may have; hosts.py keeps checkpoints in the memory of several hosts.
"""

from slipstream.checkpoint.background import AsyncSave, Staging
from slipstream.checkpoint.conversion import convert
from slipstream.checkpoint.document import Entry
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import FlatSlice
from slipstream.checkpoint.hosts import Hosts, complete_newest, completed
from slipstream.checkpoint.load import Loaded, Metadata, latest_tag, load, load_metadata, retry_if_replaced
from slipstream.checkpoint.save import Content, save, save_async

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "Content",
    "Entry",
    "FlatSlice",
    "Hosts",
    "Loaded",
    "Metadata",
    "Staging",
    "complete_newest",
    "completed",
    "convert",
    "latest_tag",
    "load",
    "load_metadata",
    "retry_if_replaced",
    "save",
    "save_async",
]

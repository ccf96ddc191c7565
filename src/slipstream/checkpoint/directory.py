"""A directory of checkpoints: tags, `latest`, and the renames that make a save atomic.

    DIR/latest                      one line: the tag that a load without a tag uses (DeepSpeed's converter: latest_universal)
    DIR/TAG/metadata.json           see document.py
    DIR/TAG/rank_00000.bin ...      tensor bytes
    DIR/TAG.tmp-<16 hex digits>     a save in progress, or the leftover of a crashed one
    DIR/TAG.old-<16 hex digits>     a checkpoint that is being replaced

Order of a save, each step on disk before the next: data files, metadata.json, [old TAG renamed away], folder renamed to TAG,
`latest` replaced. A crash before the first rename leaves the old state. A crash between the two folder renames leaves the old
checkpoint under its `.old-` name, where `locate` finds it; the next save renames it back. So every folder named like a tag is
complete. Only rank 0 writes here, except for data files. If each host has its own directory (hosts.py), one rank of each host
writes there; in memory, a folder holds the files of two hosts.

A save in progress holds a lock on its folder, so `sweep` removes crashed saves and never another engine's running save; the
kernel releases the lock when the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from slipstream.checkpoint.document import METADATA, SLACK, Document, is_ours, parse, render, size_limit
from slipstream.checkpoint.errors import ONE_PLACE, CheckpointError

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_WORKING = re.compile(r"(?P<tag>.+)\.(?P<role>tmp|old)-[0-9a-f]{16}", re.DOTALL)
_INSIDE = re.compile(r"\.tmp-[0-9a-f]{16}")  # drafts inside a Hugging Face folder (pretrained.py)

_DEEPSPEED = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|layer_\d+-model.*\.pt")


def check_tag(tag: object) -> str:
    """Return `tag`. Raises CheckpointError if it cannot name a folder."""
    if not isinstance(tag, str):
        raise CheckpointError(f"tag {tag!r} is a {type(tag).__name__}; a tag is a string")
    bad = (
        not tag
        or tag != tag.strip()
        or tag.startswith(".")
        or tag == LATEST
        or not tag.isprintable()
        or any(separator in tag for separator in "/\\")
        or len(tag.encode(errors="surrogatepass")) > 200
        or _WORKING.fullmatch(tag) is not None
    )
    if bad:
        raise CheckpointError(
            f"tag {tag[:80]!r} cannot name a checkpoint: it must be a plain folder name of at most 200 "
            f"bytes, without '/' or '\\', not beginning with '.', not '{LATEST}'"
        )
    return tag


def read_latest(path: Path, universal: bool = False) -> str | None:
    """The tag in `latest`, else in `latest_universal` (with `universal`: in the other order); None if neither exists."""
    first, second = (LATEST_UNIVERSAL, LATEST) if universal else (LATEST, LATEST_UNIVERSAL)
    pointer = path / first if (path / first).exists() else path / second
    try:
        with open(pointer, "rb") as file:
            raw = file.read(1024)
        if not raw.strip():
            raise CheckpointError("it is empty")
        return check_tag(raw.decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {pointer}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{pointer} is damaged: {error}") from error


def state_of(parent: Path, tag: str | None) -> list[tuple[str, int, int, int]] | None:
    """(name, inode, size, mtime) of a checkpoint's files (tag None: the latest's), which change if it is replaced. None if the
    checkpoint cannot be read."""
    try:
        tag = read_latest(parent) if tag is None else check_tag(tag)
        with os.scandir(parent if tag is None else parent / tag) as files:
            facts = [(file.name, file.stat()) for file in files]
    except (OSError, CheckpointError):
        return None
    return sorted((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in facts)


def locate(parent: Path, tag: str) -> Path:
    """The folder of a checkpoint. Raises CheckpointError, which tells what the directory holds instead."""
    folder = parent / check_tag(tag)
    if not parent.is_dir():
        raise CheckpointError(f"checkpoint directory {parent} does not exist")
    if not folder.exists():
        for name, match in _working(parent):
            if match["tag"] == tag and match["role"] == "old":
                return parent / name
        present = ", ".join(committed_tags(parent)[-8:]) or "none"
        raise CheckpointError(f"{parent} has no checkpoint {tag!r}; it has {present}")
    if not (folder / METADATA).is_file() and not is_deepspeed(folder):
        raise CheckpointError(f"{folder} is not a Slipstream checkpoint: {_description(folder)}")
    return folder


def _description(folder: Path) -> str:
    if not folder.is_dir():
        return "it is a file"
    names = sorted(os.listdir(folder))
    if ".metadata" in names:
        return "it is in torch.distributed.checkpoint's own format, whose metadata is a pickle, which is not read"
    return f"it has no {METADATA}" + (f", it has {', '.join(names[:5])}" if names else ", it is empty")


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint itself, not a directory of checkpoints."""
    return (folder / METADATA).is_file() or is_deepspeed(folder)


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint, by its file names."""
    return folder.is_dir() and not (folder / METADATA).exists() and any(_DEEPSPEED.fullmatch(name) for name in os.listdir(folder))


def read_document(folder: Path) -> Document:
    """The validated document of a checkpoint, from metadata.json or from DeepSpeed's files."""
    document = _read_document(folder)
    _check_values(folder, document)
    return document


def _check_values(folder: Path, document: Document) -> None:
    """Refuse value tensors larger than the bytes on disk: a sparse file would use memory but no disk."""
    nbytes: dict[str, int] = {}
    for name, entry in document.tensors.items():
        for piece in entry.pieces if name.startswith("$") else ():
            nbytes[piece.file] = nbytes.get(piece.file, 0) + entry.nbytes(piece)
    for file, needed in nbytes.items():
        try:
            status = os.stat(folder / file)
        except OSError:
            continue  # opening it raises the error
        on_disk = status.st_blocks * 512 or status.st_size  # some file systems report no blocks
        if needed > 2 * on_disk + SLACK:
            raise CheckpointError(
                f"{folder / file} is damaged or hostile: values of {needed:,} bytes besides its tensors, of which {on_disk:,} are "
                f"on disk (or the disk compresses: copy it to one that does not)"
            )


def _read_document(folder: Path) -> Document:
    path = folder / METADATA
    if is_deepspeed(folder):
        from slipstream.checkpoint import deepspeed

        return deepspeed.read_document(folder)
    try:
        data_nbytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name != METADATA)
        with open(path, "rb") as file:
            raw = file.read(size_limit(data_nbytes) + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > (limit := size_limit(data_nbytes)):
        raise CheckpointError(
            f"{path} has more than {limit:,} bytes for {data_nbytes:,} of data; it is hostile, or data files are missing"
        )
    try:
        return parse(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def committed_tags(directory: Path) -> list[str]:
    """Tags of the complete checkpoints in a directory, oldest first."""
    tags = [name for name in os.listdir(directory) if not _WORKING.fullmatch(name) and _holds_checkpoint(directory / name)]
    return sorted(tags, key=lambda name: ((directory / name / METADATA).stat().st_mtime_ns, name))


def _holds_checkpoint(folder: Path) -> bool:
    try:
        with open(folder / METADATA, "rb") as file:
            return is_ours(file.read(256))
    except OSError:
        return False


class Draft:
    """A checkpoint being written, until it is committed or discarded. On rank 0 only, or on one rank of each host (hosts.py)."""

    def __init__(self, directory: Path, tag: str, save_id: str = "") -> None:
        self.directory, self.tag = directory, check_tag(tag)
        self.target = directory / tag
        directory.mkdir(parents=True, exist_ok=True)
        if self.target.exists() and not _holds_checkpoint(self.target) and not _is_empty(self.target):
            raise CheckpointError(
                f"{self.target} exists and is not a Slipstream checkpoint: {_description(self.target)}; "
                "choose another tag or remove it"
            )
        sweep(directory, tag)
        self.save_id = save_id or secrets.token_hex(8)
        self.folder = directory / f"{tag}.tmp-{self.save_id}"
        try:
            self.folder.mkdir()
        except FileExistsError:  # made by another host's rank, for the same save_id
            raise CheckpointError(
                f"{directory} is not this host's own: {ONE_PLACE}, or another one on each host, and "
                "checkpoint.use_node_local_storage says which"
            ) from None
        self._lock = lock_folder(self.folder)
        if self._lock is None:
            raise CheckpointError(f"another process is removing {self.folder}; save again")

    def commit(self, document: Document, files: Mapping[str, int], *, save_latest: bool) -> None:
        """Rename the draft to its tag. All writes that need disk space come first. files: the local ones, and their sizes."""
        for name, size in files.items():
            actual = (self.folder / name).stat().st_size if (self.folder / name).exists() else None
            if actual != size:
                raise CheckpointError(f"{self.folder / name} was written with {size} bytes, rank 0 sees {actual}; {ONE_PLACE}")
        write_synced(self.folder / METADATA, render(document))
        if save_latest:
            write_synced(self.folder / LATEST, f"{self.tag}\n".encode())
        sync(self.folder)
        replaced = self._rename()
        sync(self.directory)
        if save_latest:
            os.replace(self.target / LATEST, self.directory / LATEST)
            sync(self.directory)
        if replaced is not None:
            remove(replaced)
        self._release()

    def _rename(self) -> Path | None:
        replaced = None
        while True:
            try:
                os.rename(self.folder, self.target)
                return replaced
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                replaced = self.directory / f"{self.tag}.old-{self.save_id}"
                os.rename(self.target, replaced)

    def discard(self) -> None:
        """Remove an uncommitted draft; a no-op after a commit."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.target.exists():
            for name, match in _working(self.directory):
                if match["tag"] == self.tag and match["role"] == "old":
                    os.rename(self.directory / name, self.target)
                    break
        self._release()

    def _release(self) -> None:
        unlock(self._lock)
        self._lock = None


def sweep(directory: Path, tag: str) -> None:
    """Remove the leftovers of crashed saves; restore a checkpoint whose replacement was interrupted.

    If the file system has no locks, only leftovers of `tag` itself are removed.
    """
    for name, match in _working(directory):
        path, target = directory / name, directory / match["tag"]
        if match["role"] == "old" and not target.exists():
            os.rename(path, target)
            continue
        remove_dead(path, own=match["tag"] == tag)


def sweep_drafts(target: Path) -> None:
    """Remove drafts that killed writers left in a folder and, if it is writable, in its parent."""
    parent = target.absolute().parent
    siblings = _working(parent) if os.access(parent, os.R_OK | os.W_OK) else []
    drafts = [parent / name for name, match in siblings if match["tag"] == target.name and match["role"] == "tmp"]
    drafts += [path for path in target.glob(".tmp-*") if _INSIDE.fullmatch(path.name)]
    for path in drafts:
        remove_dead(path, own=True)


def remove_dead(path: Path, own: bool) -> None:
    """Remove a folder whose process has ended. own: also if the file system has no locks, which would tell."""
    lock = lock_folder(path)
    if lock is not None and (lock != NO_LOCKS or own):
        shutil.rmtree(path, ignore_errors=True)
    unlock(lock)


def retain(directory: Path, keep: int, tag: str) -> None:
    """Remove all but the newest `keep` checkpoints. `tag` and the one in `latest` always stay."""
    tags, latest = committed_tags(directory), read_latest(directory)
    others = [name for name in tags if name not in (tag, latest)]
    for name in others[: max(0, min(len(tags) - keep, len(others)))]:
        remove(directory / name)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that its tag never names a partial one."""
    match = _WORKING.fullmatch(folder.name)
    tag = folder.name if match is None else match["tag"]
    renamed = folder.with_name(f"{tag}.tmp-{secrets.token_hex(8)}")
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def exchange(first: Path, second: Path) -> None:
    """Swap two names atomically. Raises OSError if the system or the file system does not support it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux; glibc from 2.28
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    working_folder, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(working_folder, os.fsencode(first), working_folder, os.fsencode(second), flag):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def sync(path: Path) -> None:
    """fsync a file, or a folder's entries; ignored by file systems that do not support it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` atomically by the file that `write` creates at the path passed to it, synced to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.half-{secrets.token_hex(8)}")
    try:
        write(partial)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _working(directory: Path) -> list[tuple[str, re.Match[str]]]:
    return [(name, match) for name in sorted(os.listdir(directory)) if (match := _WORKING.fullmatch(name))]


NO_LOCKS = -1


def lock_folder(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process holds it, NO_LOCKS if locks are not supported."""
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            os.close(handle)
        except OSError:
            os.close(handle)
            return NO_LOCKS
    return None


def unlock(lock: int | None) -> None:
    if lock is not None and lock != NO_LOCKS:
        os.close(lock)

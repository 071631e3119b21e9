"""The token cache: a folder with the tokens of texts or conversations, which are tokenised once and then memory-mapped.

The folder (:mod:`partool.plan.token_cache`) has a sidecar with checksums, so it can be used as a ``tokens`` source. It
is written under another name and renamed when complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from partool.plan.data_files import SourceFile
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.shards import Shard, checksum, open_tokens
from partool_runtime.tokens.sources import TokenSource
from partool_runtime.tokens.writer import Writer

_TALK_EVERY_S = 30.0
_FULL = {errno.ENOSPC, errno.EDQUOT}


class TokenCache:
    """The cached tokens that one tokenizer gives for some files; two processes never build the same cache at once."""

    def __init__(self, folder: Path, source: TokenSource) -> None:
        self.folder = folder
        self._source = source
        self._alone = False

    @property
    def vocab(self) -> int:
        """Exclusive upper bound of the tokens."""
        return self._source.vocab

    @contextlib.contextmanager
    def lock(self, *, wait: bool, share: bool = False) -> Iterator[bool]:
        """Hold the cache's lock file; yields False if another process has it and ``wait`` is False.

        Where the file system does not support locks, yields True; the final rename still prevents conflicts between
        builders. Yields True also for an existing cache in a folder that cannot be written.
        """
        path = self.folder.with_suffix(".lock")
        try:
            with _cannot_write(self.folder.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("ab")
        except ConfigurationError:
            if not self.folder.is_dir():
                raise
            yield True
            return
        with file:
            mode = (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
            try:
                fcntl.flock(file, mode)
            except BlockingIOError:
                yield False
                return
            except OSError:
                yield True
                return
            self._alone = not share
            yield True
            self._alone = False

    def open(self) -> Shard:
        """Open the cache; raises ConfigurationError PT602 if the cache is missing or its files have wrong sizes."""
        return open_tokens(self.folder / "tokens.bin")

    def is_sound(self) -> bool:
        """Return True if the cache exists, is complete, and its checksums match."""
        try:
            self.open()
            sums = json.loads((self.folder / "tokens.json").read_text())["crc32"]
            return all(checksum(self.folder / name) == value for name, value in sums.items())
        except (ConfigurationError, OSError, ValueError, KeyError, AttributeError):
            return False

    def ensure(self) -> None:
        """Build the cache unless a valid cache exists; the caller must hold the lock.

        Raises ConfigurationError PT613 if the cache cannot be written. The build then leaves only a note of the
        error, which :meth:`built` reads on the ranks that wait.
        """
        if self.is_sound():
            return
        note = self._note_of_failure
        try:
            with _cannot_write(self.folder.parent):
                note.unlink(missing_ok=True)
                self._rebuild()
        except ConfigurationError as error:
            with contextlib.suppress(OSError):
                note.write_text(json.dumps([error.code, error.message, error.help]))
            raise

    def built(self) -> Shard:
        """Open the cache that another rank of this node has built; raises the build's error if the build failed."""
        if (self.folder / "tokens.json").is_file():
            return self.open()
        try:
            code, message, help = json.loads(self._note_of_failure.read_text())
        except (OSError, ValueError):
            code, message = "PT613", f"this node's token cache {self.folder} was not built"
            help = "every rank of a node must see the same files under data.source and the same cache folder"
        raise ConfigurationError(code, message, help)

    @property
    def _note_of_failure(self) -> Path:
        return self.folder.with_suffix(".failed")

    def _rebuild(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._alone:  # without the lock, these folders may belong to another builder
            for stale in self.folder.parent.glob(f"{self.folder.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.tmp-", dir=self.folder.parent))
        try:
            self._build(temporary)
            self._publish(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _publish(self, temporary: Path) -> None:
        temporary.chmod(0o755)
        try:
            temporary.rename(self.folder)
        except OSError:
            if not self.is_sound():  # a valid cache: another builder, unseen without locks, was faster
                raise
        _sync_folder(self.folder.parent)

    def _build(self, folder: Path) -> None:
        talk = _Progress(self._source.files)
        with Writer(folder, self._source.vocab) as writer:
            for part in self._source.parts():
                writer.add(part)
                talk.at(writer.count)
        sidecar = {
            **writer.description,
            "crc32": {name: checksum(folder / name) for name in writer.names},
            "tokenizer": self._source.identity,
            "notes": self._source.notes(),
        }
        with (folder / "tokens.json").open("w") as file:
            file.write(json.dumps(sidecar, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)


class _Progress:
    """Reports the progress of a long build to stderr every half minute."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._what = f"{len(files)} files, {sum(file.size_bytes for file in files) / 2**20:.0f} MiB"
        self._next_s = time.monotonic() + _TALK_EVERY_S

    def at(self, tokens: int) -> None:
        """Report if half a minute has passed."""
        if time.monotonic() >= self._next_s:
            print(f"tokenising {self._what}: {tokens:,} tokens so far", file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + _TALK_EVERY_S


@contextlib.contextmanager
def _cannot_write(root: Path) -> Iterator[None]:
    """Turn an OSError while writing the cache into ConfigurationError PT613."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"the disk is full: the token cache in {root} cannot be written"
        else:
            message = f"the token cache in {root} cannot be written: {error.strerror or error}"
        raise ConfigurationError(
            "PT613", message, "free some space, or set data.cache to a folder elsewhere"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

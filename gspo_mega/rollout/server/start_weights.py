"""The weights that a start of a server loads: the run's committed version, or the folder with which the run began.

`current_weights` chooses them. `CopyWait` waits for a copy of the model, if `model.path` has another form than servers
hold. Server 0 of an attempt makes the copy, and the others read in its registration how far it is. The wait ends
without a copy if the maker has failed, left or fallen silent, or gets no further. Which run needs a copy, and how one
is made, is in `checkpoint/served_folders.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gspo_mega.base.errors import CheckpointError, ConfigError
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.models.huggingface import read_stored
from gspo_mega.models.spec import BlockFp8
from gspo_mega.rollout.registration import Registration, format_bytes_done
from gspo_mega.rollout.server.multinode import SILENCE_SECONDS, UnchangedFor

MAKER_ID = "server-0"


def current_weights(attempt: Attempt, start_folder: str, layout: BlockFp8 | None) -> tuple[int | None, str]:
    """Return the version and the folder of the weights that this start loads. The version is None if this attempt has
    not committed one for that folder. `layout`: the blocks that the run's servers hold, or None; a folder in another
    form is not used.

    The folder to start from has no version, not even 0: the trainer may begin with other weights (`model.weights`).
    What an earlier attempt committed has none either: this attempt gives the same numbers to other weights. A version
    whose folder is not where the file says is looked for in the run's folder, and otherwise not used. Raises
    ConfigError if the file that names the current weights is not valid.
    """
    current_file = attempt.run_folder.current_weights_file
    committed = _modified(current_file)  # read before the content, which may be replaced in between
    current = read_json(current_file)
    if current is None:
        return None, start_folder
    try:
        version, path = int(current["weight_version"]), str(current["path"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{current_file}: needs weight_version and path: {error!r}") from error
    if not Path(path).is_dir():  # the run's folder has moved, or the disk has lost this one
        path = str(attempt.run_folder.weights_version_dir(version))
        if not Path(path).is_dir():
            return None, start_folder
    found = read_stored(path)
    if (found and replace(found, kept=())) != layout:  # what is kept plain depends on the model
        return None, start_folder
    # The attempt begins with its key. Both files are in the run folder, so that one clock wrote both times.
    began = _modified(attempt.api_key_file)
    is_of_this_attempt = committed is not None and began is not None and committed >= began
    return version if is_of_this_attempt else None, path


def _modified(path: Path) -> int | None:
    """Return the time of the file's last change in nanoseconds; None if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


class CopyWork(Protocol):
    """A process that makes the copy."""

    def look(self) -> tuple[int, int]:
        """Return the bytes done, and the total (0 while it is not known). Raises GspoMegaError if the process ended
        without making the copy.
        """
        ...

    def end(self) -> None:
        """End the process if it still runs. What it has made is kept, and the next one uses it."""
        ...


@dataclass(frozen=True)
class StartCopy:
    """A copy to start from. The folder `path` appears whole or not at all. `make` begins to make it; None on all
    servers except server 0.
    """

    path: Path
    make: Callable[[], CopyWork] | None


class CopyWait:
    """Waits for a copy. Call `look` until it returns None, and `end` in any case. `seconds` is the longest time without
    progress.
    """

    def __init__(self, copy: StartCopy, attempt: Attempt, seconds: float) -> None:
        self._copy, self._attempt, self._seconds = copy, attempt, seconds
        self._work = copy.make() if copy.make is not None else None
        self._maker = UnchangedFor()
        self._best, self._since = 0, time.monotonic()
        self.what = f"the copy {copy.path.name} of the model, which {MAKER_ID} makes"

    def look(self) -> tuple[int, int] | None:
        """Return the bytes done and the total, or None once the copy is there. Raises GspoMegaError, which names
        the maker.
        """
        if self._copy.path.is_dir():
            return None
        done, total = self._work.look() if self._work is not None else self._maker_progress()
        now = time.monotonic()
        if done > self._best:
            self._best, self._since = done, now
        if now - self._since > self._seconds:
            raise CheckpointError(
                f"{self._copy.path}: {MAKER_ID}, which makes it, got no further for {self._seconds:g} s"
                f" (server.start_deadline_seconds), at {format_bytes_done(done, total)}. For a large model, write it"
                " once with gspo-mega quantize and name that folder as model.path, which must have the same"
                " files and times on every node"
            )
        return done, total

    def end(self) -> None:
        if self._work is not None:
            self._work.end()

    def _maker_progress(self) -> tuple[int, int]:
        """Return the bytes done and the total, by the maker's registration. Raises CheckpointError if the maker is
        gone.
        """
        try:
            found = read_json(self._attempt.server_file(MAKER_ID))
        except OSError:  # the file system fails now; it is tried again
            found = None
        if found is None:
            return 0, 0
        try:
            maker, maker_gone = Registration.from_json(found), None
        except ValueError as error:
            file = self._attempt.server_file(MAKER_ID)
            raise CheckpointError(f"{file}: not a server's registration: {error}") from error
        if maker.state in ("failed", "stopped", "draining"):
            maker_gone = f"has ended: {(maker.error or maker.state).strip().splitlines()[0]}"
        elif (silent := self._maker.seconds(maker.heartbeat)) > SILENCE_SECONDS:
            maker_gone = f"is silent for {silent:.0f} s (process {maker.pid})"
        if maker_gone is not None and not self._copy.path.is_dir():
            raise CheckpointError(f"{self._copy.path}: {MAKER_ID}, which makes it, {maker_gone}")
        return (maker.done_bytes, maker.total_bytes) if maker.is_preparing else (0, 0)

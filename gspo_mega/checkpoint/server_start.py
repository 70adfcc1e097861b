"""The folder that a server starts from: `model.path`, or a copy in the form that the run's servers hold.

Owns when a copy is needed, where it lies in the run folder, and the process that makes it, one at a time in a run.
Light: torch is imported in that process alone. Who waits for it, and how long, is `rollout/server/copy_wait.py`'s.

SGLang loads FP8 blocks only from a folder that holds them, and plain weights only from a plain one. A server therefore
starts from `model.path` where that is in the run's form already, and otherwise from `weights/start-...`, which holds
the same values that a publish of these weights would send. Versions on disk are in that form as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from gspo_mega.base import durable
from gspo_mega.base.errors import CheckpointError, GspoMegaError
from gspo_mega.base.importing import uncollected
from gspo_mega.base.process_death import die_with_parent
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import DTYPES, server_dtype
from gspo_mega.models.block_fp8 import is_quantized, served_layout
from gspo_mega.models.families import hf_tensors
from gspo_mega.models.huggingface import folder_needs_plain_copy, read_model_spec, read_stored
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.weights_stamp import weights_stamp

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_LOG_SECONDS = 10.0


def needed_copy(config: Config, folder: RunFolder) -> Path | None:
    """The copy that a server of the run starts from before anything is published, whether or not it has been made; None
    where that is `model.path` itself. Raises ModelError, CheckpointError or OSError.
    """
    source, layout = Path(config.model.path), served_layout(config)
    if not folder_needs_plain_copy(source, DTYPES[server_dtype(config)]):
        if layout is None and read_stored(source) is None:
            return None
        if has_layout(read_model_spec(source), layout):
            return None
    return start_folder(config, folder)


def start_folder(config: Config, folder: RunFolder) -> Path:
    """Where the copy lies. Its name has what its content depends on: the form, and the weights of `model.path`."""
    layout = served_layout(config)
    form = "plain" if layout is None else "blocks-power-of-two" if layout.power_of_two else "blocks-float32"
    trainer = "fp32" if config.precision == "fp32" else "bf16"
    name = f"start-{form}-{trainer}-{server_dtype(config)}-{weights_stamp(config.model.path)}"
    return folder.weights_dir.absolute() / name


def has_layout(spec: ModelSpec, layout: BlockFp8 | None) -> bool:
    """Does the model's folder hold the same tensors quantised, in the same blocks with the same scales, as `layout`?"""
    stored = spec.stored
    if stored is None or layout is None:
        return stored is None and layout is None
    if (stored.block, stored.power_of_two) != (layout.block, layout.power_of_two):
        return False
    return all(is_quantized(stored, entry) == is_quantized(layout, entry) for entry in hf_tensors(spec))


class CopyMaker:
    """Makes the copy `out` in a process of its own, which gives back the memory that torch takes. That process ends
    with this one, and with the thread that constructs this object. A stopped or killed one is continued by the next.
    """

    def __init__(self, config: Config, out: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._out, self._amounts = out, (0, 0)
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(config, out, os.getpid(), sender), daemon=True)
        self._process.start()
        sender.close()

    def look(self) -> tuple[int, int]:
        """Bytes done, and in total; a total of 0 is not known. Raises ModelError or CheckpointError where the process
        has failed, and CheckpointError where something killed it.
        """
        has_ended = not self._process.is_alive()  # first, so that its last words are heard
        with contextlib.suppress(EOFError):
            while self._receiver.poll():
                said = self._receiver.recv()
                if isinstance(said, GspoMegaError):
                    raise said
                self._amounts = said
        if has_ended and not self._out.is_dir():
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            if code == -signal.SIGKILL:
                how += ". The usual reason for a SIGKILL from outside is that the machine ran out of memory"
            raise CheckpointError(f"{self._out}: its maker, process {self._process.pid}, {how}")
        return self._amounts

    def end(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self._receiver.close()


def _run(config: Config, out: Path, parent: int, sender: Connection) -> None:
    """The maker's process, which ends with its process `parent`: sends (bytes done, in total) and its error."""
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole group: the parent ends this process
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _make(config, out, lambda done, total: sender.send((done, total)))
    except GspoMegaError as error:
        sender.send(error)
    except OSError as error:
        sender.send(CheckpointError(f"{out}: cannot be made: {error}"))


def _make(config: Config, out: Path, report: Callable[[int, int], object]) -> None:
    """Make the copy unless another maker has, for whom this one waits. `report` gets bytes done, and in total."""
    with uncollected():
        from gspo_mega.checkpoint.quantize import to_form
        from gspo_mega.checkpoint.quantize_published import published_form
        from gspo_mega.checkpoint.tensor_sources import open_checkpoint

    logger.info("%s: weights of %s in the form that servers hold", out, config.model.path)
    reported, shown = float("-inf"), time.monotonic()

    def progress(done: int, total: int, name: str) -> None:
        nonlocal reported, shown
        now = time.monotonic()
        if now - reported > _REPORT_SECONDS:
            reported = now
            report(done, total)
        if now - shown > _LOG_SECONDS:
            shown = now
            logger.info("%s: %d %%", out.name, 100 * done // max(total, 1))

    with _only_maker(out.parent, lambda: report(_written_bytes(out), 0)):
        if out.is_dir():
            return
        _remove_others(out)
        source, form = open_checkpoint(Path(config.model.path)), published_form(config)
        has_remains = any(out.parent.glob(f"{out.name}.*"))
        try:
            to_form(source, out, form, progress=progress)
        except CheckpointError as error:
            if not has_remains:
                raise
            logger.warning("%s; it is made from the beginning", error)
            _remove_others(out, remains=True)
            to_form(source, out, form, progress=progress)


@contextlib.contextmanager
def _only_maker(weights: Path, waits: Callable[[], object]) -> Iterator[None]:
    """Wait until no other process makes a copy in this folder, and call `waits` meanwhile. The lock ends with its
    process.
    """
    durable.make_folder(weights, at="publish.folder")
    with durable.operation("publish.folder"):
        lock = (weights / "start.lock").open("a")
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                time.sleep(_POLL_SECONDS)
                continue
            except OSError as error:
                logger.warning("%s has no locks (%s): another maker of the same copy is not waited for", weights, error)
            break
        yield


def _remove_others(out: Path, remains: bool = False) -> None:
    """Remove copies of other weights or in other forms, whole or not: each is as large as the model. `remains`: and
    what an interrupted maker of this one left.
    """
    for path in (*out.parent.glob("start-*"), *out.parent.glob(".start-*")):
        if path.is_dir() and path != out and (remains or not path.name.startswith(out.name)):
            durable.remove_tree(path, at="publish.prune")


def _written_bytes(out: Path) -> int:
    with contextlib.suppress(OSError):  # it is renamed, or removed, at this moment
        return sum(file.stat().st_size for part in out.parent.glob(f"{out.name}.*") for file in part.rglob("*"))
    return 0

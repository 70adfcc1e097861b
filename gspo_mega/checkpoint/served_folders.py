"""The folder that a server starts from: `model.path`, or a copy in the form that the run's servers hold.

SGLang loads FP8 blocks only from a folder that has them, and plain weights only from a plain folder. A server therefore
starts from `model.path` if that is already in the run's form, and otherwise from the copy `weights/start-...` in the
run folder. The copy has the same values that a publish of these weights would send. Published versions on disk have
that form too.

`CopyMaker` makes the copy in its own process, with one maker at a time in a run. `rollout/server/start_weights.py`
waits for it. `to_blocks` and `to_form`, at the end, write a checkpoint of any format as FP8 blocks. They refuse what
FP8 cannot represent.

Importing this file is quick: only functions that write import torch.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import CheckpointError, GspoMegaError, ModelError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.processes import die_with_parent
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.precision import SERVER_DTYPES, ServerDtype, server_dtype
from gspo_mega.config.schema import Config
from gspo_mega.models.block_fp8 import SERVED_BLOCK, is_quantizable, is_quantized, served_layout
from gspo_mega.models.huggingface import folder_needs_plain_copy, read_model_spec, read_stored, weights_stamp
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, is_stacked

if TYPE_CHECKING:
    import torch

    from gspo_mega.checkpoint.convert import Progress
    from gspo_mega.checkpoint.quantized import PublishedForm, Rule
    from gspo_mega.checkpoint.tensor_sources import TensorSource

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class StartWeights:
    """What servers hold before anything is published: the weights of `source` (`model.path`), rounded to the dtype in
    which the `trainer` sends weights, in the servers' `dtype`, or in the blocks of `layout`. Needs no torch, and can be
    sent to another process.
    """

    source: Path
    trainer: ServerDtype
    dtype: ServerDtype
    layout: BlockFp8 | None

    @classmethod
    def of(cls, config: Config) -> StartWeights:
        """Those of a run."""
        trainer: ServerDtype = "fp32" if config.precision == "fp32" else "bf16"
        dtype = server_dtype(config.server, config.precision)
        return cls(Path(config.model.path), trainer, dtype, served_layout(config))


def needed_copy(weights: StartWeights, folder: RunFolder) -> Path | None:
    """Return the copy that a server of the run starts from before anything is published, whether it exists or not.

    Returns None if servers start from `model.path` itself. Raises ModelError, CheckpointError or OSError.
    """
    source, layout = weights.source, weights.layout
    if not folder_needs_plain_copy(source, SERVER_DTYPES[weights.dtype]):
        if layout is None and read_stored(source) is None:
            return None
        if has_layout(read_model_spec(source), layout):
            return None
    return start_folder(weights, folder)


def start_folder(weights: StartWeights, folder: RunFolder) -> Path:
    """Return the path of the copy. Its name has what its content depends on: the form and the weights of
    `model.path`.
    """
    layout = weights.layout
    form = "plain" if layout is None else "blocks-power-of-two" if layout.power_of_two else "blocks-float32"
    name = f"start-{form}-{weights.trainer}-{weights.dtype}-{weights_stamp(weights.source)}"
    return folder.weights_dir.absolute() / name


def has_layout(spec: ModelSpec, layout: BlockFp8 | None) -> bool:
    """Whether the model's folder has the same tensors quantised as `layout`, in the same blocks with the same
    scales.
    """
    stored = spec.stored
    if stored is None or layout is None:
        return stored is None and layout is None
    if (stored.block, stored.power_of_two) != (layout.block, layout.power_of_two):
        return False
    return all(is_quantized(stored, entry) == is_quantized(layout, entry) for entry in hf_tensors(spec))


class CopyMaker:
    """Makes the copy `out` of `weights` in its own process, whose end gives back the memory that torch takes.

    That process ends with this one, and with the thread that constructs this object. If it is stopped or killed, the
    next maker continues.
    """

    def __init__(self, weights: StartWeights, out: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._out, self._amounts = out, (0, 0)
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(weights, out, os.getpid(), sender), daemon=True)
        self._process.start()
        sender.close()

    def look(self) -> tuple[int, int]:
        """Return the bytes done and the bytes in total, which are 0 while they are not known.

        Raises ModelError or CheckpointError if the process has failed, and CheckpointError if something killed it.
        """
        has_ended = not self._process.is_alive()  # read this first, so that its last messages are received below
        with contextlib.suppress(EOFError):
            while self._receiver.poll():
                message = self._receiver.recv()
                if isinstance(message, GspoMegaError):
                    raise message
                self._amounts = message
        if has_ended and not self._out.is_dir():
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            if code == -signal.SIGKILL:
                how += ". The usual reason for a SIGKILL from outside is that the machine ran out of memory"
            raise CheckpointError(f"{self._out}: its maker, process {self._process.pid}, {how}")
        return self._amounts

    def end(self) -> None:
        """Kill the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self._receiver.close()


def _run(weights: StartWeights, out: Path, parent: int, sender: Connection) -> None:
    """Run the maker's process, which ends with the process `parent`. It sends (bytes done, in total) and its error."""
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # such a signal goes to the whole group; the parent ends this process
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _make(weights, out, lambda done, total: sender.send((done, total)))
    except GspoMegaError as error:
        sender.send(error)
    except OSError as error:
        sender.send(CheckpointError(f"{out}: cannot be made: {error}"))


def _make(weights: StartWeights, out: Path, report: Callable[[int, int], object]) -> None:
    """Make the copy, unless another maker has made it while this one waited. `report` gets bytes done, and in total."""
    with uncollected():
        from gspo_mega.checkpoint.quantized import form_of
        from gspo_mega.checkpoint.tensor_sources import open_checkpoint

    logger.info("%s: weights of %s in the form that servers hold", out, weights.source)
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
        source, form = open_checkpoint(weights.source), form_of(weights.trainer, weights.dtype, weights.layout)
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
    """Wait until no other process makes a copy in this folder, and call `waits` during the wait. The lock ends with the
    process that has it.
    """
    atomic_io.make_folder(weights, at="publish.folder")
    with atomic_io.operation("publish.folder"):
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
    """Remove copies of other weights or in other forms, complete or not, because each is as large as the model.

    With `remains`, also remove what an interrupted maker of this copy left.
    """
    for path in (*out.parent.glob("start-*"), *out.parent.glob(".start-*")):
        if path.is_dir() and path != out and (remains or not path.name.startswith(out.name)):
            atomic_io.remove_tree(path, at="publish.prune")


def _written_bytes(out: Path) -> int:
    with contextlib.suppress(OSError):  # a file may be renamed or removed at this moment
        return sum(file.stat().st_size for part in out.parent.glob(f"{out.name}.*") for file in part.rglob("*"))
    return 0


def to_blocks(
    source: TensorSource,
    out: Path,
    *,
    rule: Rule,
    dtype: torch.dtype | None = None,
    progress: Progress,
    file_bytes: int | None = None,
) -> None:
    """Write `source` to the new folder `out`, with its linear layers as FP8 blocks with scales by `rule`.

    `dtype` is that of tensors that stay plain, and the one from which the others are rounded to FP8. By default it is
    the one that config.json names. Raises ModelError if the source is already quantised, CheckpointError, also for a
    weight that is not finite, and OSError. A staging folder may then stay, and the same call continues from it.
    """
    if source.spec.stored is not None:
        raise ModelError(
            f"{source.description}: its weights are already FP8; quantising them again would round twice. If you want"
            " other scales, make plain weights of it first (gspo-mega convert)"
        )
    if is_stacked(source.spec):
        raise ModelError(
            f"{source.description}: the experts of {source.spec.family} are stacked in files, and FP8 blocks do not"
            " support stacks; valid: leave it plain (gspo-mega convert)"
        )
    import torch

    from gspo_mega.checkpoint.quantized import PublishedForm

    plain = dtype or getattr(torch, source.spec.torch_dtype)
    form = PublishedForm(plain, plain, BlockFp8(SERVED_BLOCK, power_of_two=rule == "power_of_two"), rule)
    to_form(source, out, form, progress=progress, file_bytes=file_bytes, carries=True)


def to_form(
    source: TensorSource,
    out: Path,
    form: PublishedForm,
    *,
    progress: Progress,
    file_bytes: int | None = None,
    carries: bool = False,
) -> None:
    """Write `source` to the new folder `out` in `form`. Errors are those of `to_blocks`, `carries` that of
    `to_huggingface`.
    """
    if not any(is_quantizable(entry) for entry in hf_tensors(source.spec)):
        raise ModelError(f"{source.description}: the model has no linear layer to quantise")
    from gspo_mega.checkpoint.convert import FILE_BYTES, to_huggingface

    to_huggingface(
        _Finite(source), out, form=form, progress=progress, file_bytes=file_bytes or FILE_BYTES, carries=carries
    )


class _Finite:
    """A source that raises an error for a weight that would be quantised but is not finite."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.kind: str = source.kind
        self.spec: ModelSpec = source.spec
        self.description: Path = source.description
        self.files: list[Path] = source.files
        self.tensors: list[TensorEntry] = source.tensors
        self.written: list[TensorEntry] = source.written

    def carried(self) -> list[TensorEntry]:
        return self._source.carried()

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        return self._source.config_json(raw)

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        return self._source.dtype(entry)

    def read(self, entry: TensorEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        tensor = self._source.read(entry, dtype)
        if is_quantizable(entry) and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{entry.name}: has a value that is not finite, for which FP8 blocks have no representation"
            )
        return tensor

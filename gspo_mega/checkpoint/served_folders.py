"""The folder that a server starts from: `model.path`, or a copy in the form that the run's servers hold.

Owns when a copy is needed, where it lies in the run folder, and the process that makes it, one at a time in a run.
Light: torch is imported in that process alone. Who waits for it, and how long, is `rollout/server/start_weights.py`'s.

SGLang loads FP8 blocks only from a folder that holds them, and plain weights only from a plain one. A server therefore
starts from `model.path` where that is in the run's form already, and otherwise from `weights/start-...`, which holds
the same values that a publish of these weights would send. Versions on disk are in that form as well.

A checkpoint of any format as a Hugging Face folder of FP8 blocks, streamed.

Owns what is refused before anything is written, and that no tensor is quantised that FP8 cannot stand for. The layout
is `models/block_fp8.py`'s, the rule `checkpoint/quantized.py`'s, writing and continuation are `convert.py`'s.
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
from typing import Any

import torch

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import CheckpointError, GspoMegaError, ModelError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.processes import die_with_parent
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.convert import FILE_BYTES, Progress, to_huggingface
from gspo_mega.checkpoint.quantized import PublishedForm, Rule
from gspo_mega.checkpoint.tensor_sources import TensorSource
from gspo_mega.config.derived import SERVER_DTYPES, server_dtype
from gspo_mega.config.schema import Config
from gspo_mega.models.block_fp8 import SERVED_BLOCK, is_quantizable, is_quantized, served_layout
from gspo_mega.models.huggingface import folder_needs_plain_copy, read_model_spec, read_stored, weights_stamp
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, is_stacked


def to_blocks(
    source: TensorSource,
    out: Path,
    *,
    rule: Rule,
    dtype: torch.dtype | None = None,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `source` to the new folder `out`, its linear layers as FP8 blocks with scales by `rule`.

    `dtype`: of tensors that stay plain, and the one from which the others are rounded to FP8; by default the one that
    config.json names. Raises ModelError for a source that is quantised already, CheckpointError, also for a weight that
    is not finite, and OSError. A staging folder may stay, and the same call continues from it.
    """
    if source.spec.stored is not None:
        raise ModelError(
            f"{source.description}: its weights are FP8 already; quantising them again would round twice. Make plain"
            " weights of it first (tools/megatron_to_hf.py) if you want other scales"
        )
    if is_stacked(source.spec):
        raise ModelError(
            f"{source.description}: the experts of {source.spec.family} are stacked in files, which FP8 blocks are not"
            " for; valid: leave it plain (tools/megatron_to_hf.py)"
        )
    plain = dtype or getattr(torch, source.spec.torch_dtype)
    form = PublishedForm(plain, plain, BlockFp8(SERVED_BLOCK, power_of_two=rule == "power_of_two"), rule)
    to_form(source, out, form, progress=progress, file_bytes=file_bytes, carries=True)


def to_form(
    source: TensorSource,
    out: Path,
    form: PublishedForm,
    *,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
    carries: bool = False,
) -> None:
    """Write `source` to the new folder `out` in `form`; errors as of `to_blocks`. `carries`: as of `to_huggingface`."""
    if not any(is_quantizable(entry) for entry in hf_tensors(source.spec)):
        raise ModelError(f"{source.description}: the model has no linear layer to quantise")
    to_huggingface(_Finite(source), out, form=form, progress=progress, file_bytes=file_bytes, carries=carries)


class _Finite:
    """`source`, where a weight that is to be quantised and not finite is an error."""

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
        tensor = self._source.read(entry, dtype)
        if is_quantizable(entry) and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{entry.name}: has a value that is not finite, for which FP8 blocks have no representation"
            )
        return tensor


logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_LOG_SECONDS = 10.0


def needed_copy(config: Config, folder: RunFolder) -> Path | None:
    """The copy that a server of the run starts from before anything is published, whether or not it has been made; None
    where that is `model.path` itself. Raises ModelError, CheckpointError or OSError.
    """
    source, layout = Path(config.model.path), served_layout(config)
    if not folder_needs_plain_copy(source, SERVER_DTYPES[server_dtype(config)]):
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
        from gspo_mega.checkpoint.quantized import published_form
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
    """Remove copies of other weights or in other forms, whole or not: each is as large as the model. `remains`: and
    what an interrupted maker of this one left.
    """
    for path in (*out.parent.glob("start-*"), *out.parent.glob(".start-*")):
        if path.is_dir() and path != out and (remains or not path.name.startswith(out.name)):
            atomic_io.remove_tree(path, at="publish.prune")


def _written_bytes(out: Path) -> int:
    with contextlib.suppress(OSError):  # it is renamed, or removed, at this moment
        return sum(file.stat().st_size for part in out.parent.glob(f"{out.name}.*") for file in part.rglob("*"))
    return 0

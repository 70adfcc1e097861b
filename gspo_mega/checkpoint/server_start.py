"""The folder that a server starts from: `model.path`, or a copy in the form that the run's servers hold.

Owns when a copy is needed, where it lies in the run folder, and that one process of the run makes it. Light: torch is
imported in the process that converts, not in that which waits.

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
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gspo_mega import durable
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import DTYPES, server_dtype
from gspo_mega.errors import CheckpointError
from gspo_mega.importing import uncollected
from gspo_mega.model.block_fp8 import is_quantized, served_layout
from gspo_mega.model.families import hf_tensors
from gspo_mega.model.huggingface import folder_needs_plain_copy, read_model_spec, read_stored
from gspo_mega.model.spec import BlockFp8, ModelSpec
from gspo_mega.model.weights_stamp import weights_stamp
from gspo_mega.process_death import die_with_parent
from gspo_mega.run_folder import RunFolder

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_LOG_SECONDS = 10.0


def server_start(config: Config, folder: RunFolder, *, makes: bool) -> Path:
    """The folder that a server of the run starts from before anything is published.

    `makes`: this process makes the copy if one is needed; any other waits for it, as long as some of it is written
    within `server.start_deadline_seconds`. Raises ModelError, CheckpointError or OSError.
    """
    source, layout = Path(config.model.path), served_layout(config)
    if not folder_needs_plain_copy(source, DTYPES[server_dtype(config)]):
        if layout is None and read_stored(source) is None:
            return source
        if has_layout(read_model_spec(source), layout):
            return source
    out = start_folder(config, folder)
    if not out.is_dir():
        if makes:
            _make_apart(config, out)
        else:
            _wait(out, config.server.start_deadline_seconds)
    return out


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


def _make_apart(config: Config, out: Path) -> None:
    """Make the copy in a process of its own, which gives back the memory that torch takes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_make, config, out, os.getpid()).result()


def _make(config: Config, out: Path, parent: int) -> None:
    """Make the copy unless another maker has, for whom this one waits. It ends with its process `parent`."""
    die_with_parent(parent)
    with uncollected():
        from gspo_mega.checkpoint.quantize import to_form
        from gspo_mega.checkpoint.tensor_sources import open_checkpoint
        from gspo_mega.weights.quantize_published import published_form

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logger.info("%s: weights of %s in the form that servers hold", out, config.model.path)
    shown = time.monotonic()

    def progress(done: int, total: int, name: str) -> None:
        nonlocal shown
        if time.monotonic() - shown > _LOG_SECONDS:
            shown = time.monotonic()
            logger.info("%s: %d %%", out.name, 100 * done // max(total, 1))

    with _only_maker(out.parent):
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
def _only_maker(weights: Path) -> Iterator[None]:
    """Wait until no other process makes a copy in this folder. The lock ends with its process."""
    durable.make_folder(weights, at="publish.folder")
    with durable.operation("publish.folder"):
        lock = (weights / "start.lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s has no locks (%s): another maker of the same copy is not waited for", weights, error)
        yield


def _remove_others(out: Path, remains: bool = False) -> None:
    """Remove copies of other weights or in other forms, whole or not: each is as large as the model. `remains`: and
    what an interrupted maker of this one left.
    """
    for path in (*out.parent.glob("start-*"), *out.parent.glob(".start-*")):
        if path.is_dir() and path != out and (remains or not path.name.startswith(out.name)):
            durable.remove_tree(path, at="publish.prune")


def _wait(out: Path, seconds: float) -> None:
    """Wait for the copy, as long as some of it is written every so many seconds."""
    written, deadline = -1, 0.0
    while not out.is_dir():
        if written != (now := _written_bytes(out)):
            written, deadline = now, time.monotonic() + seconds
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{out}: the run's first server has not made it, and nothing of it was written for {seconds:g} s"
                " (server.start_deadline_seconds). For a large model, write it once with tools/quantize_checkpoint.py"
                " and name that folder as model.path, which must have the same files and times on every node"
            )
        time.sleep(_POLL_SECONDS)


def _written_bytes(out: Path) -> int:
    with contextlib.suppress(OSError):  # it is renamed, or removed, at this moment
        return sum(file.stat().st_size for part in out.parent.glob(f"{out.name}.*") for file in part.rglob("*"))
    return 0

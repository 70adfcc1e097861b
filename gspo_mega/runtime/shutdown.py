"""The two ways a rank ends: in order, or at once with a record of what went wrong.

Owns the error record and the exit. A failed rank must not run Python's ordinary end: destructors of process
groups and atexit hooks wait for peers that are themselves waiting for this rank.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from gspo_mega.errors import GspoMegaError, RankError
from gspo_mega.run_folder import Attempt, atomic_write_json

logger = logging.getLogger(__name__)


def error_record(error: BaseException, rank: int) -> dict:
    """What errors/rank_<r>.json holds.

    `is_user_error`: the text alone is for the user (GspoMegaError but for RankError, whose traceback matters);
    anything else is a defect and shows `traceback`. `exit_code` is what the command returns. `time`: unix seconds.
    """
    is_user_error = isinstance(error, GspoMegaError) and not isinstance(error, RankError)
    return {
        "rank": rank,
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "is_user_error": is_user_error,
        "exit_code": error.exit_code if isinstance(error, GspoMegaError) else RankError.exit_code,
    }


def fail(error: BaseException, rank: int, attempt: Attempt) -> NoReturn:
    """Record `error` for the supervisor and end this process at once, past every destructor.

    The record is durable before the process ends, and carries the earliest time of all: peers whose collective
    breaks because of this end write theirs later.
    """
    record = error_record(error, rank)
    logger.error("rank %d failed\n%s", rank, record["traceback"])
    code = record["exit_code"]
    try:
        # A folder that cannot be written must not keep the rank alive: its log then has the traceback.
        atomic_write_json(attempt.error_file(rank), record)
    except OSError:
        logger.error("the error record of rank %d could not be written\n%s", rank, traceback.format_exc())
    _exit(code)


def leave(exit_code: int, last: Sequence[Callable[[], None]] = ()) -> NoReturn:
    """End after the work is done: agree with the other ranks, call `last`, take the process groups down, exit.

    Collective over all ranks, so that none tears down connections that another still reads from. The interpreter's
    own end is skipped here as well: with Megatron and its threads loaded it takes seconds and can only fail.
    """
    import torch.distributed as dist  # late: a rank whose torch does not import can still record that

    if dist.is_initialized():
        dist.barrier()
    for call in last:
        call()
    if dist.is_initialized():
        dist.destroy_process_group()
    _exit(exit_code)


def _exit(code: int) -> NoReturn:
    """End past Python's ordinary end, which is also what ends multiprocessing's children: what a library has started,
    as Megatron's checkpoint writer does for a save of several files, would wait for us for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    os._exit(code)

"""The two ways a rank ends: in order, or at once with a record of what went wrong.

Owns the error record and the exit. A failed rank must skip the normal shutdown of Python: destructors of process groups
and atexit hooks wait for peers that wait for this rank.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from gspo_mega.base.errors import GspoMegaError, RankError
from gspo_mega.base.run_folder import Attempt, atomic_write_json

logger = logging.getLogger(__name__)


def error_record(error: BaseException, rank: int) -> dict:
    """What errors/rank_<r>.json holds.

    `is_user_error`: the user needs the text alone (GspoMegaError, except RankError, whose traceback matters). Any other
    error is a defect and shows `traceback`. `exit_code` is what the command returns. `time`: unix seconds.
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
    """Record `error` for the supervisor and end this process at once, without running destructors.

    The record is durable before the process ends, and its time is the earliest: peers whose collective breaks because
    of this end write theirs later.
    """
    record = error_record(error, rank)
    logger.error("rank %d failed\n%s", rank, record["traceback"])
    code = record["exit_code"]
    try:
        # A folder that cannot be written must not keep the rank alive; the log has the traceback then.
        atomic_write_json(attempt.error_file(rank), record)
    except OSError:
        logger.error("the error record of rank %d could not be written\n%s", rank, traceback.format_exc())
    _exit(code)


def leave(exit_code: int, last: Sequence[Callable[[], None]] = ()) -> NoReturn:
    """End after the work is done: agree with the other ranks, call `last`, take the process groups down, exit.

    Collective over all ranks, so that none closes connections that another still reads from. Python's normal shutdown
    is skipped here as well: with Megatron and its threads loaded it takes seconds and can only fail.
    """
    import torch.distributed as dist  # late: a rank whose torch import fails can still record that

    if dist.is_initialized():
        dist.barrier()
    for call in last:
        call()
    if dist.is_initialized():
        dist.destroy_process_group()
    _exit(exit_code)


def _exit(code: int) -> NoReturn:
    """End without Python's normal shutdown, which also ends the children of multiprocessing. They are killed here:
    children of a library, such as Megatron's checkpoint writers, would wait for this process for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    os._exit(code)

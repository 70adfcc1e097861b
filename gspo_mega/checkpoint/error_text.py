"""An error of Megatron's or torch's checkpoint code in one line. Owns the text only, not what is caught where."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def first_cause(error: BaseException) -> str:
    """The error in one line. A CheckpointException, which is not an Exception, has the errors of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]

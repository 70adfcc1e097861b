"""A policy's first weights from a Megatron checkpoint: a converted folder, or weights alone of another run's
checkpoint.

Megatron's own loader reads them into this layout, each rank its shares. Optimizer, counters and random states stay
those of a fresh run; continuing a run is `train_state.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from gspo_mega.checkpoint.safe_pickle import refuse_code
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.errors import CheckpointError
from gspo_mega.weights.collectives import raise_together

_EXTRA_STATE = "_extra_state"


def load_weights(folder: Path, engine: PolicyEngine) -> None:
    """Fill the engine's parameters, cast to their dtype, from `folder`/megatron; `after_weights_loaded` must follow.
    Collective.

    Raises CheckpointError, the same on every rank, where something is missing, of another shape, or damaged, or where
    loading it could run a program: Megatron's loader is given nothing that was not looked at before.
    """
    host = engine.groups.host
    raise_together(
        refuse_code(folder / MEGATRON_FOLDER, engine.groups.world.rank, engine.groups.world.size),
        host,
        CheckpointError,
        f"{folder} cannot be loaded",
    )
    problems: list[str] = []
    try:
        for chunk in engine.chunks:
            wanted = chunk.sharded_state_dict(metadata={"dp_cp_group": engine.groups.data_context.group})
            # Transformer Engine's scaling states are not weights, and a converted checkpoint has none.
            wanted = {name: value for name, value in wanted.items() if not isinstance(value, ShardedObject)}
            # Megatron declares a tuple too, for a strictness that is not asked for.
            loaded = cast(dict[str, Any], dist_checkpointing.load(wanted, str(folder / MEGATRON_FOLDER)))
            odd = chunk.load_state_dict({name: loaded[name] for name in wanted}, strict=False)
            problems += [f"{name} is not filled" for name in odd.missing_keys if not name.endswith(_EXTRA_STATE)]
    except (
        CheckpointException,
        dist_checkpointing.core.CheckpointingException,
        EOFError,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        problems.append(_first_line(error))
    raise_together(problems, host, CheckpointError, f"{folder} cannot be loaded")


def _first_line(error: BaseException) -> str:
    """The error in a line. A CheckpointException (not even an Exception) carries those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]

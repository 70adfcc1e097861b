"""A policy's first weights from a Megatron checkpoint: a converted folder, or only the weights of another run's
checkpoint.

Megatron's loader reads them into this layout, each rank its shards. Optimizer, counters and random states stay those of
a fresh run; `train_state.py` continues a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from gspo_mega.base.errors import CheckpointError
from gspo_mega.checkpoint.error_text import first_cause
from gspo_mega.checkpoint.quantized import keep_exact
from gspo_mega.checkpoint.safe_pickle import refuse_code
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER
from gspo_mega.engine.collectives import raise_together
from gspo_mega.engine.policy import PolicyEngine

_EXTRA_STATE = "_extra_state"


def load_weights(folder: Path, engine: PolicyEngine) -> None:
    """Fill the engine's parameters, cast to their dtype, from `folder`/megatron; `after_weights_loaded` must follow.
    Collective.

    Raises CheckpointError, the same on every rank, if a parameter is missing, of another shape, or damaged, or if
    loading could run a program: every file is checked before Megatron's loader gets it.
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
            # Transformer Engine's scaling states are not weights; a converted checkpoint has none.
            wanted = {name: value for name, value in wanted.items() if not isinstance(value, ShardedObject)}
            # Megatron declares a tuple too, for a strictness that is not asked for.
            loaded = cast(dict[str, Any], dist_checkpointing.load(wanted, str(folder / MEGATRON_FOLDER)))
            odd = chunk.load_state_dict({name: loaded[name] for name in wanted}, strict=False)
            problems += [f"{name} is not filled" for name in odd.missing_keys if not name.endswith(_EXTRA_STATE)]
            for name, parameter in chunk.named_parameters():
                if name in loaded:  # all but the ones named in `problems`
                    keep_exact(parameter, loaded[name])
    except (
        CheckpointException,
        dist_checkpointing.core.CheckpointingException,
        EOFError,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        problems.append(first_cause(error))
    raise_together(problems, host, CheckpointError, f"{folder} cannot be loaded")

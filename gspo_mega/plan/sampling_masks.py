"""What the sets of kept tokens take (`rollout.top_k`): over HTTP, in the journal, on their way to the ranks, and the
time to read and check them.

Lengths are not known beforehand, so these are upper bounds: every response has its longest length, and every set
`rollout.top_k` tokens. With top_p or min_p they are smaller; response/kept_tokens_mean shows the real size.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.config.derived import filters_groups, has_sampling_masks
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.memory import GIB

# Per token: the size of its set (int32).
COUNT_BYTES = 4
# The names of a turn's two arrays in the journal, with their types and shapes.
MASK_NAME_BYTES = 110
# Core-seconds per token id, on one core of the machine on which the package was written: to parse its JSON and check it
# on the collector's event loop, and to decode it on each last-stage rank.
READ_SECONDS, DECODE_SECONDS = 190e-9, 400e-9


@dataclass(frozen=True)
class MaskCost:
    """The most that the sets of one step take. `http`, `held`, `handed_out`: bytes that servers send, that the journal
    and rank 0 hold, and that leave rank 0 if each set is sent once. `read_seconds`: on the collector's event loop;
    `decode_seconds`: of all last-stage ranks together.
    """

    http: int
    held: int
    handed_out: int
    read_seconds: float
    decode_seconds: float


def coded_bytes(top_k: int, vocab_size: int) -> float:
    """Return the most bytes that `base/sampling_masks.py` needs for a set of `top_k` of `vocab_size` ids: its size, and
    the differences between the ids. All bytes together are most if the differences are alike.
    """
    step, per_id = vocab_size / min(top_k, vocab_size), 1
    while step >= 128:
        step, per_id = step / 128, per_id + 1
    # Differences just below and above a limit of the code may need a byte more for some ids.
    return COUNT_BYTES + min(top_k, vocab_size) * min(per_id + 0.5, 5)


def mask_cost(config: Config, spec: ModelSpec) -> MaskCost | None:
    """Return the cost of a step; None if tokens are sampled from all tokens."""
    rollout, batch = config.rollout, config.batch
    if not has_sampling_masks(rollout):
        return None
    response, turns = rollout.max_new_tokens, 1
    if rollout.episode.function != "one_turn":
        turns = config.episodes.max_turns
        response = max(response, (config.episodes.max_tokens or 0) - config.data.max_prompt_tokens)
    sampled = rollout.max_oversampling if filters_groups(rollout) else 1.0
    trained = batch.prompts_per_step * batch.group_size
    ids = min(rollout.top_k, spec.vocab_size)
    tokens, coded = trained * response * sampled, coded_bytes(rollout.top_k, spec.vocab_size)
    return MaskCost(
        http=int(tokens * ids * (len(str(spec.vocab_size)) + 1)),
        held=int(tokens * coded + trained * sampled * turns * MASK_NAME_BYTES),
        handed_out=int(trained * response * coded),
        read_seconds=tokens * ids * READ_SECONDS,
        # The sets are decoded for the old pass and for the training pass.
        decode_seconds=2 * trained * response * ids * DECODE_SECONDS,
    )


def mask_lines(cost: MaskCost | None) -> list[str]:
    """Return the report's line about the sets."""
    if cost is None:
        return []
    return [
        f"sampling masks per step: at most {_size(cost.http)} over HTTP, {cost.read_seconds:.2g} s of the collector's"
        f" event loop to read, {_size(cost.held)} in the journal, {_size(cost.handed_out)} handed out,"
        f" {cost.decode_seconds:.2g} core-seconds on the last stages' ranks to decode"
    ]


def _size(size: float) -> str:
    unit, factor = next(((u, f) for u, f in (("GiB", GIB), ("MiB", 2**20)) if size >= 0.1 * f), ("KiB", 1024))
    return f"{size / factor:.1f} {unit}"

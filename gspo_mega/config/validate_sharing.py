"""The rules of `batch.share_prefixes`: with what settings shared prefixes are not computed once, and what is valid.

What follows from the model or the device is in `plan/validate.py`, in a function of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.derived import is_one_turn
from gspo_mega.config.schema import Config


def validate_sharing(config: Config) -> Iterator[Violation]:
    """Yield what contradicts `batch.share_prefixes`: what it was not compared with, or leaves it without effect."""
    mode, batch = config.batch.share_prefixes, config.batch
    if mode == "off":
        return
    sharing = f"with `batch.share_prefixes: {mode}`"
    off = "or `share_prefixes: off`"
    if batch.group_size == 1 and (mode == "prompts" or is_one_turn(config.rollout)):
        yield Violation(
            "batch.share_prefixes", f"{mode} with `group_size: 1`: no two rows have a prompt in common; valid: off"
        )
    if batch.num_mini_batches > batch.prompts_per_step:
        yield Violation(
            "batch.num_mini_batches",
            f"{batch.num_mini_batches} {sharing}, which deals whole groups to mini-batches, and a step has"
            f" {batch.prompts_per_step}; at most {batch.prompts_per_step}, {off}",
        )
    if config.engine.batch_invariant:
        yield Violation(
            "engine.batch_invariant",
            f"true {sharing}: servers add in the order of whole rows; valid: false, {off}",
        )
    if config.lora is not None and config.lora.dropout > 0:
        yield Violation(
            "lora.dropout",
            f"{config.lora.dropout:g} {sharing}: rows would share the inputs that are left out; valid: 0, {off}",
        )

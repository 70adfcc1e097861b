"""Rules between the keys about rollouts that lag behind the trainer: what contradicts, and what changes meaning."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.old_pass import makes_old_pass
from gspo_mega.config.on_publish import on_publish
from gspo_mega.config.schema import Config


def staleness_violations(config: Config) -> Iterator[Violation]:
    """What `diagnostics.exact_staleness` cannot measure."""
    if not config.diagnostics.exact_staleness:
        return
    if not makes_old_pass(config):
        yield Violation(
            "diagnostics.exact_staleness",
            "true, but no pass measures the gap that it splits; valid: false, or `old_log_probs: trainer` with several"
            " mini-batches or a mismatch.correction",
        )
    if config.precision == "fp8":
        yield Violation(
            "diagnostics.exact_staleness",
            "true with `precision: fp8`: earlier weights are kept in bf16 or fp32 only; valid: false",
        )
    if config.rollout.max_staleness > 0 and on_publish(config.rollout) == "continue_with_cache":
        yield Violation(
            "diagnostics.exact_staleness",
            "true with `rollout.on_publish: continue_with_cache`: tokens behind a publish are of no version, so no kept"
            " weights reproduce them; valid: false, or `on_publish: continue`",
        )


def staleness_notices(config: Config) -> Iterator[str]:
    """One line for each setting that is allowed and changes what the numbers mean, or does nothing."""
    rollout = config.rollout
    if rollout.max_staleness == 0:
        for key, acts in (
            ("rollout.order", rollout.order != "admission"),
            ("rollout.on_publish", rollout.on_publish not in (None, "wait")),
            ("diagnostics.exact_staleness", config.diagnostics.exact_staleness),
        ):
            if acts:
                yield f"{key} has no effect with `rollout.max_staleness: 0`: no token is older than the weights"
        return
    yield (
        f"rollout.max_staleness {rollout.max_staleness}: tokens of weights up to that many versions old are trained on,"
        " which the paper does not do; rollout/staleness_mean shows how old they are"
    )
    if rollout.order == "completion":
        yield (
            "rollout.order completion: short responses are trained earlier than long ones, and a run that is killed and"
            " continued forms other batches than one that is not"
        )
    if on_publish(rollout) == "continue_with_cache":
        yield (
            "rollout.on_publish continue_with_cache: tokens behind a publish are sampled by new weights over the old"
            " weights' cache, a hybrid that no weights reproduce"
        )
    if config.old_log_probs == "rollout":
        yield (
            "old_log_probs: rollout with max_staleness above 0: the clip range is around the weights that sampled, so"
            " stale responses begin outside it; `trainer` clips this step's own movement"
        )

"""Whether a step makes an old log-prob pass, and whether the engine gap is corrected: what follows from several keys.

One place for the loop, the engine, the plan and the notices. Owns no default and no refusal.
"""

from __future__ import annotations

from gspo_mega.config.critic_config import penalises_kl
from gspo_mega.config.schema import Config


def corrects(config: Config) -> bool:
    """Whether the gap between the two engines is corrected at all. With the server's log-probs as old ones it is in
    the policy ratio, and nothing is left to correct.
    """
    return config.mismatch.correction != "none" and config.old_log_probs == "trainer"


def makes_old_pass(config: Config) -> bool:
    """Whether the trainer computes log-probs at the start of a rollout batch in a pass of its own.

    With one optimizer step per rollout batch old is current, so the pass is needed for the correction only: it judges a
    response by the whole batch, before the first gradient. `may_correct_in_training` says where it can be left out. A
    penalty in the rewards (`critic.kl_coefficient`) needs it, because advantages come before the first gradient, too.
    """
    needed = not old_is_current(config) or corrects(config) or penalises_kl(config)
    return config.old_log_probs == "trainer" and needed


def may_correct_in_training(config: Config) -> bool:
    """Whether a step in which every rank has a single pack needs no old pass: the training pass measures the gap of the
    whole batch before its gradients, and the correction is decided between the two. Diagnostics of staleness compare
    with the log-probs of a pass of their own, and so does a penalty in the rewards.
    """
    needs_own = config.diagnostics.exact_staleness or penalises_kl(config)
    return corrects(config) and old_is_current(config) and not needs_own


def old_is_current(config: Config) -> bool:
    """Whether the policy that is trained is the old one: one optimizer step per rollout batch. Then the ratio is 1
    exactly, and no second forward pass may put its noise there.
    """
    return config.old_log_probs == "trainer" and config.batch.num_mini_batches == 1

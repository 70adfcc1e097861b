"""What PPO's critic does in a step: it values the whole rollout batch, writes advantages into the packs, and trains on
them.

`CriticStep` does this on every rank, in this order. It also collects the rank's part of the step's report, which
`reports.py` turns into metrics. `engine/critic.py` has the passes and the estimation of advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gspo_mega.algorithm.losses import value_sums
from gspo_mega.algorithm.objective import sequence_coefficients
from gspo_mega.algorithm.terms import ObjectiveSettings
from gspo_mega.base.errors import ModelError
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.derived import critic_config, critic_path
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.learning import Critic
from gspo_mega.engine.critic import AdvantageEstimator, CriticEngine, LogProbs, TokenRewards, Values, estimate_returns
from gspo_mega.engine.optimizer import StepResult
from gspo_mega.engine.policy import OldState
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.spec import ModelSpec, shape_differences
from gspo_mega.models.value_models import read_critic_spec
from gspo_mega.train.batches import MiniBatch


def build_critic(config: Config, spec: ModelSpec, groups: ParallelGroups) -> CriticEngine:
    """The critic of a training run, before its weights are loaded. Collective.

    Raises ModelError if its folder does not have the policy's shape, because it uses the policy's layout, packs and
    vocabulary.
    """
    assert config.train is not None
    path = critic_path(config)
    if different := shape_differences(read_critic_spec(path), spec):
        raise ModelError(f"critic.path {path} does not have the policy's shape: {', '.join(different)}")
    return CriticEngine(critic_config(config), spec, groups, config.train.num_steps * config.batch.num_mini_batches)


@dataclass
class CriticPart:
    """One rank's part of a step's report.

    Attributes:
        old_sums: [6] float64, `VALUE_SUMS` of the values that the advantages were computed with.
        step_sums: [mini-batches, 8] float64, the sums of each value step (`CriticEngine.train_mini_batch`).
        penalty: [2] float64, the sum of log policy - log reference over tokens in nats, and the number of tokens.
        rows, advantages: rows of the rollout batch, int64, and the mean advantage of their tokens, float64. Each row is
            on one rank.
    """

    old_sums: np.ndarray = field(default_factory=lambda: np.zeros(6))
    step_sums: np.ndarray = field(default_factory=lambda: np.zeros((0, 8)))
    penalty: np.ndarray = field(default_factory=lambda: np.zeros(2))
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))


def estimator_of(settings: Critic, std_ddof: int) -> AdvantageEstimator:
    """The estimator of advantages for these settings. `std_ddof`: `advantage.std_ddof`."""
    return AdvantageEstimator(
        discount=settings.gamma,
        trace=settings.gae_lambda,
        bootstraps=settings.bootstrap_truncated,
        whitens=settings.whiten,
        kl_coefficient=settings.kl_coefficient,
        std_ddof=std_ddof,
    )


def value_coefficients(settings: Critic, mini_batch: MiniBatch, returns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weight of each sequence in the value loss: one tensor [S] float64 per pack that has `returns`, on the device
    of these.
    """
    averaged = ObjectiveSettings(aggregation=settings.aggregation)
    coefficients = []
    for pack, own in zip(mini_batch.micro_batches, returns, strict=False):
        length, weight = (torch.from_numpy(pack.sequence[name]).to(own.device) for name in ("length", "weight"))
        coefficients.append(
            sequence_coefficients(averaged, length, mini_batch.value_denominator, branch_weights=weight)
        )
    return coefficients


class CriticStep:
    """The critic's part of one step, on every rank. `results`: the results of its optimizer steps. `part`: this rank's
    part of the report.
    """

    def __init__(self, engine: CriticEngine, settings: Critic, std_ddof: int) -> None:
        self._engine, self._settings, self._groups = engine, settings, engine.groups
        self._estimator = estimator_of(settings, std_ddof)
        self._values: list[list[Values]] = []
        self._returns: list[list[torch.Tensor]] = []
        self.results: list[StepResult] = []
        self.part = CriticPart()

    def estimate(
        self,
        mini_batches: Sequence[MiniBatch],
        old: Sequence[OldState | None],
        reference: Sequence[list[torch.Tensor] | None],
    ) -> None:
        """Compute the values under the critic's present weights, and from them the advantages of every pack.
        Collective.

        `old`, `reference`: log-probs per mini-batch, as for the policy's steps. They are needed only for a KL penalty
        in the rewards.
        """
        for mini_batch, before, frozen in zip(mini_batches, old, reference, strict=True):
            packs = mini_batch.micro_batches
            values = self._engine.values(packs)
            returns: list[torch.Tensor] = []
            if self._groups.is_last_stage:
                rewards = [TokenRewards.from_pack(pack) for pack in packs]
                log_probs = self._log_probs(before, frozen)
                returns = estimate_returns(packs, values, rewards, self._estimator, self._groups, log_probs)
                self._add_to_part(packs, values, returns, log_probs)
            self._values.append(values)
            self._returns.append(returns)

    def train(self, place: int, mini_batch: MiniBatch) -> StepResult:
        """Make the value step of the mini-batch at `place`, and return its result. Collective."""
        coefficients = value_coefficients(self._settings, mini_batch, self._returns[place])
        result, sums = self._engine.train_mini_batch(
            mini_batch.micro_batches,
            [one.before for one in self._values[place]],
            self._returns[place],
            coefficients,
            self._settings.clip_range,
        )
        self.results.append(result)
        self.part.step_sums = np.concatenate([self.part.step_sums, sums.numpy()[None]])
        return result

    def _log_probs(self, old: OldState | None, reference: list[torch.Tensor] | None) -> list[LogProbs] | None:
        if self._settings.kl_coefficient == 0:
            return None
        assert old is not None and reference is not None
        return [LogProbs(one.log_probs, frozen) for one, frozen in zip(old.micro_batches, reference, strict=True)]

    def _add_to_part(
        self,
        packs: Sequence[MicroBatch],
        values: Sequence[Values],
        returns: Sequence[torch.Tensor],
        log_probs: Sequence[LogProbs] | None,
    ) -> None:
        """Add the numbers of one mini-batch to `part`, on ranks of the last pipeline stage. All tensor-parallel ranks
        have the same numbers, so only the first one adds them.
        """
        if self._groups.tensor.rank != 0:
            return
        for value, target in zip(values, returns, strict=True):
            self.part.old_sums += torch.stack([*value_sums(value.before, target).values()]).cpu().numpy()
        for one in log_probs or ():
            gap = one.old.double() - one.reference.double()
            self.part.penalty += np.array([float(gap.sum()), gap.numel()])
        if self._groups.context.rank != 0:
            return
        for pack in packs:
            assert pack.token_advantages is not None
            sums = np.bincount(pack.sequence_ids, pack.token_advantages, pack.num_sequences)
            real = pack.trajectory_index >= 0
            means = sums / np.maximum(pack.sequence["length"], 1)
            self.part.rows = np.concatenate([self.part.rows, pack.trajectory_index[real]])
            self.part.advantages = np.concatenate([self.part.advantages, means[real]])

"""Measure the critic of a case and compare it with the reference: values of the recorded batch, the advantages that
follow from them, value gradients, and weights after a few value steps. `measure.py` measures the policy with these
advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.critic import CriticTensors, import_critic
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder, open_folder
from gspo_mega.config.derived import critic_config, critic_of, critic_path
from gspo_mega.config.schema import Config, Run
from gspo_mega.engine.critic import CriticEngine, TokenRewards, ValueModel, Values, estimate_returns, own_part
from gspo_mega.engine.device_batch import to_device
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.value_models import SCORE
from gspo_mega.train.batches import MiniBatch
from gspo_mega.train.critic_step import estimator_of, value_coefficients
from gspo_mega.verify.certify.compare import CaseComparison, CaseDifference, Reference
from gspo_mega.verify.certify.measure import Measurement, Take, gather_tokens
from gspo_mega.verify.certify.steps import CaseSteps, StepWatch, complete_gradients

# Distance of the old values, around which the loss is clipped, from the critic's values, in clip ranges. The last two
# bits of a token's recorded log-prob, which are the same in every layout, choose one.
_OFFSETS = (-1.5, -0.5, 0.5, 1.5)


@dataclass
class CriticNumbers:
    """A critic's numbers, the same on every rank. `values` [sum R] float64: value of the state before each response
    token, 0 at masked tokens; `after` [n] float64: value of the state after each trajectory's last token; `advantages`
    [sum R] float64, as `values`; `grad_norms`: one per value step.
    """

    values: np.ndarray
    after: np.ndarray
    advantages: np.ndarray
    grad_norms: list[float]


def build_critic(config: Config, spec: ModelSpec, groups: ParallelGroups) -> CriticEngine | None:
    """Return the critic of a case, without weights; None if its algorithm has none. Collective."""
    if critic_of(config.algorithm, config.critic) is None:
        return None
    return CriticEngine(critic_config(config), spec, groups, 2 * config.certify.num_steps)


def _load(critic: CriticEngine, config: Config) -> None:
    """Load the critic's weights; replace a head of zeros, which would leave everything else without a gradient, by a
    random one. Collective.
    """
    import_critic(critic_path(config), critic.spec, critic.groups, critic.chunks)
    if critic.groups.is_last_stage:
        weight = cast(ValueModel, critic.chunks[-1]).value_weight()
        with torch.no_grad():
            if not weight.any():
                weight.copy_(_drawn_head(critic.spec, config.run))
    critic.after_weights_loaded()


def _drawn_head(spec: ModelSpec, run: Run) -> torch.Tensor:
    """Draw a head from the run's seed: [1, H] float32, so that values are about 1."""
    generator = torch.Generator().manual_seed(run.seed)
    return torch.randn(1, spec.hidden_size, generator=generator) / spec.hidden_size**0.5


class CriticMeasurement:
    """Measures a critic on the batch and in the packing of `policy`. All methods are collective over all ranks."""

    def __init__(self, engine: CriticEngine, config: Config, policy: Measurement) -> None:
        settings = critic_of(config.algorithm, config.critic)
        assert settings is not None
        self.engine, self.config, self.settings, self.policy = engine, config, settings, policy
        # Whether `run` begins with the initial weights. A critic that goes on already has its own.
        self.begins = True

    def run(
        self,
        take_gradient: Take,
        take_weights: Take,
    ) -> tuple[CriticNumbers, CaseSteps]:
        """Load the weights if it `begins`, and return all numbers, like `Measurement.run`. From then on the policy uses
        the token advantages that follow from these values.
        """
        engine, groups = self.engine, self.engine.groups
        if self.begins:
            _load(engine, self.config)
        self.policy.token_advantages = None
        mine = self.policy.shard()
        packs = mine.micro_batches
        values = engine.values(packs)
        old, returns, coefficients = self._targets(mine, values)
        if groups.is_last_stage:
            self.policy.token_advantages = [pack.token_advantages for pack in packs]
        numbers = CriticNumbers(
            values=gather_tokens(engine, self.policy.batch, packs, [one.before for one in values]),
            after=self._after(mine, values),
            advantages=gather_tokens(engine, self.policy.batch, packs, self._advantages(packs)),
            grad_norms=[],
        )
        clip = self.settings.clip_range
        engine.value_gradients(packs, old, returns, coefficients, clip)
        complete_gradients(engine)
        gradients = CriticTensors(engine.spec, groups, engine.chunks, _main_grad)
        take_gradient(gradients.stream(torch.float32))
        watch = StepWatch(engine, gradients)
        for _ in range(self.config.certify.num_steps):
            result, _ = engine.train_mini_batch(packs, old, returns, coefficients, clip)
            watch.after(result, {})
            numbers.grad_norms.append(result.grad_norm)
        steps = watch.finish()
        take_weights(CriticTensors(engine.spec, groups, engine.chunks).stream(torch.float32))
        return numbers, steps

    def _targets(
        self, mine: MiniBatch, values: Sequence[Values]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return (old values, returns, coefficients) per micro-batch on last-stage ranks; set the packs' advantages."""
        groups, packs = self.engine.groups, mine.micro_batches
        if not groups.is_last_stage:
            return [], [], []
        estimator = estimator_of(self.settings, self.config.advantage.std_ddof)
        returns = estimate_returns(packs, values, [TokenRewards.from_pack(pack) for pack in packs], estimator, groups)
        width, old = self.settings.clip_range or 0.0, []
        for pack, one in zip(packs, values, strict=True):
            bits = to_device(pack, groups).rollout_log_probs.float().contiguous().view(torch.int32) & 3
            old.append(one.before + width * torch.tensor(_OFFSETS).to(one.before)[bits.long()])
        return old, returns, value_coefficients(self.settings, mine, returns)

    def _advantages(self, packs: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the advantages of this rank's active tokens, on last-stage ranks."""
        groups = self.engine.groups
        wholes = [(pack, pack.token_advantages) for pack in packs if pack.token_advantages is not None]
        return [own_part(pack, torch.from_numpy(whole[pack.loss_mask > 0]), groups) for pack, whole in wholes]

    def _after(self, mine: MiniBatch, values: Sequence[Values]) -> np.ndarray:
        groups = self.engine.groups
        whole = torch.zeros(len(self.policy.batch.trajectories), dtype=torch.float64)
        if groups.reports and groups.context.rank == 0:
            for pack, one in zip(mine.micro_batches, values, strict=True):
                real = torch.from_numpy(pack.trajectory_index >= 0)
                rows = torch.from_numpy(pack.trajectory_index)[real].long()
                whole[rows] = one.after.double().cpu()[real]
        dist.all_reduce(whole, group=groups.host.group)
        return whole.numpy()


def record_critic(measurement: CriticMeasurement, reference: Reference) -> CriticNumbers:
    """Measure the reference's critic and save its numbers beside the policy's. Collective."""
    own = reference.beside("critic")
    numbers, steps = measurement.run(
        lambda tensors: own.save_tensors("gradient", tensors),
        lambda tensors: own.save_tensors("weights", tensors),
    )
    if measurement.engine.groups.is_lead:
        own.save("numbers", numbers)
        own.save("steps", steps)
    return numbers


def compare_critic(
    measurement: CriticMeasurement, reference: Reference, stopped_at: Reference | None = None
) -> dict[str, Any]:
    """Return how far a case's critic is from the reference's, on rank 0: {"values" | "value_gradient" |
    "value_weights" | "value_norm" | "value_steps" | "value_state": {value, place}}. `stopped_at`: where the reference
    was when the case's run stopped, of a case that continues one. Collective.
    """
    config, own = measurement.config, reference.beside("critic")
    comparison = CaseComparison(own, (0.0, 0.0))
    spec = measurement.engine.spec
    with open_folder(critic_path(config), spec) as folder:
        start = _Start(folder, spec, config) if stopped_at is None else stopped_at.beside("critic").weights("weights")
        numbers, steps = measurement.run(
            comparison.take_gradient, lambda tensors: comparison.take_weights(tensors, start)
        )
    assert comparison.weights is not None
    values = CaseDifference()
    if measurement.engine.groups.is_lead:
        comparison.take_steps(steps, measurement.engine.config)
        want, begin = own.load("numbers", CriticNumbers), 0
        for row, trajectory in enumerate(measurement.policy.batch.trajectories):
            end = begin + trajectory.num_response_tokens
            apart = np.abs(numbers.values[begin:end] - want.values[begin:end]).max(initial=0.0)
            values.note(float(apart), trajectory.trajectory_id)
            values.note(float(abs(numbers.after[row] - want.after[row])), trajectory.trajectory_id)
            begin = end
    return {
        "values": asdict(values),
        "value_gradient": asdict(comparison.gradient),
        "value_weights": asdict(comparison.weights),
        **{f"value_{kind}": asdict(one) for kind, one in comparison.of_steps.items()},
    }


class _Start:
    """The critic's initial weights, as `_load` makes them from a folder."""

    def __init__(self, folder: HuggingFaceFolder, spec: ModelSpec, config: Config) -> None:
        self._folder, self._spec, self._config = folder, spec, config

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor."""
        if name == SCORE and (name not in self._folder.files or not self._folder.read(name).any()):
            return _drawn_head(self._spec, self._config.run)
        return self._folder.read(name)


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return cast(Any, parameter).main_grad  # Megatron's data parallelism adds the attribute

"""The metrics of a step, from the reports of all ranks: gathered on rank 0, computed once, written and shown.

`StepReport` is filled while the step runs, and `write` gives each number its name of the catalogue. After it come the
metrics of its parts as functions: episodes, experts, the critic, adapters and held-out results, and the run's summary
for the final table. `gspo_mega.algorithm` has the statistics, and `mismatch_report.py` the metrics of the mismatch. The
collector counts turns, tools and failures while it samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from gspo_mega.algorithm.correction import SUM_NAMES, effective_sample_fraction
from gspo_mega.algorithm.diagnostics import log_ratio_summary, policy_metrics
from gspo_mega.algorithm.distillation import has_token_terms, teacher_metrics
from gspo_mega.algorithm.losses import KL_SUMS, VALUE_SUMS, explained_variance
from gspo_mega.algorithm.terms import (
    ENTROPY_SUM,
    KEPT_MASS,
    LOG_S,
    MISMATCH_SUMS,
    STALENESS_SUMS,
    merge_columns,
    objective_settings,
)
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.config.clip_range import band_of
from gspo_mega.config.derived import (
    compares_within_groups,
    critic_of,
    leaves_out_by_covariance,
    needs_old_log_prob_pass,
    train_config,
)
from gspo_mega.config.schema import Moe
from gspo_mega.data.journal.steps import write_token_gaps
from gspo_mega.engine.adapters import adapter_norm
from gspo_mega.engine.optimizer import StepResult
from gspo_mega.engine.policy import PassReport, PolicyEngine
from gspo_mega.metrics.reductions import is_constant, reduced, sampled_metrics
from gspo_mega.metrics.writer import progress_line
from gspo_mega.plan.state import num_adapter_parameters
from gspo_mega.sync.publish import PublishResult
from gspo_mega.train.critic_step import CriticPart, CriticStep
from gspo_mega.train.final_table import responses_to_show
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.mismatch_report import (
    GapRows,
    correction_metrics,
    correction_notice,
    gap_metrics,
    gap_warnings,
    record_correction,
)
from gspo_mega.train.rank0 import Rank0
from gspo_mega.train.scatter import Sharing
from gspo_mega.train.session import RankSession

Sums = dict[str, float]

# Places in `CriticPart.step_sums`.
_TOKENS, _CLIPPED, _LOSS = VALUE_SUMS.index("value_tokens"), len(VALUE_SUMS), len(VALUE_SUMS) + 1

# The metrics whose means, over the steps that have them, are in the final table.
SUMMARISED = (
    "policy/clip_fraction",
    "policy/kept_fraction",
    "policy/mini_batch/0/clip_fraction_positive",
    "policy/mini_batch/0/clip_fraction_negative",
    "mismatch/k3",
    "mismatch/abs_log_ratio_mean",
)


@dataclass
class MiniBatchPasses:
    """One rank's reports of one mini-batch: of the pass that measured the mismatch, and of the training pass."""

    old: PassReport
    train: PassReport

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> MiniBatchPasses:
        """From a dictionary of `dataclasses.asdict`, as another rank sent it."""
        return cls(PassReport(**value["old"]), PassReport(**value["train"]))


class StepReport:
    """The report of one step, filled while the step runs; one object on every rank. `batch`: the rollout batch on rank
    0, None on other ranks.

    Attributes:
        evaluations: results of sets that were evaluated while training waited, by the set's name.
        late: metrics of asynchronous evaluations that ended in this step, and evaluated the weights of earlier steps.
        published: the result of the step's publish. `critic`: the critic's part of the step, if there is a critic.
    """

    def __init__(
        self, session: RankSession, batch: RolloutBatch | None, num_positions: int, sharing: Sharing | None = None
    ) -> None:
        self._session, self._batch, self._num_positions = session, batch, num_positions
        self._sharing = sharing or Sharing()
        self._version = session.state.weight_version
        self._results: list[StepResult] = []
        self._passes: list[MiniBatchPasses] = []
        self._gathered: list[list[MiniBatchPasses]] = []
        self._gap: GapRows | None = None
        self._adapter_metrics: dict[str, float] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.late: list[dict[str, float]] = []
        self.published: PublishResult | None = None
        self.critic: CriticStep | None = None
        self._critic_parts: list[CriticPart] = []

    def add(self, result: StepResult, old: PassReport, train: PassReport) -> None:
        """Add one mini-batch: its optimizer step, the pass that measured the mismatch, and the training pass."""
        self._results.append(result)
        self._passes.append(MiniBatchPasses(old, train))

    def gather(self) -> None:
        """Collect every rank's part on rank 0. Collective."""
        self._adapter_metrics = adapter_metrics(self._session.engine)
        gathered = self._session.exchange.gather([asdict(passes) for passes in self._passes])
        if gathered is not None:
            self._gathered = [[MiniBatchPasses.from_wire(passes) for passes in rank] for rank in gathered]
        if self.critic is not None:
            parts = self._session.exchange.gather(vars(self.critic.part))
            self._critic_parts = [CriticPart(**part) for part in parts or ()]

    def write(self) -> None:
        """Compute, write and show the step's metrics on rank 0. On every rank, end the timer's step."""
        session = self._session
        seconds = session.phases.timer.finish_step()
        if session.lead is None or self._batch is None:
            return
        session.lead.check_newest_attempt()
        if self.critic is not None:
            fill_mean_advantages(self._batch, self._critic_parts)
        tokens = sum(t.num_tokens for t in self._batch.trajectories)
        metrics = self._step_metrics(self._batch, session.lead, seconds, tokens)
        if self.evaluations:
            metrics |= evaluation_metrics(self.evaluations, session.eval_sets[0].name)
        elif self.late:
            metrics |= self.late.pop()
        if session.config.diagnostics.token_mismatch and self._results:
            write_token_gaps(session.run_folder.journal_dir, self._batch, self._token_gaps())
        step = session.state.step
        for late in self.late:  # a line of metrics has room for one evaluation; the others get lines of their own
            session.lead.writer.write(step - 1, late)
            add_to_summary(session.state.summary, late, 0, step - 1)
        session.lead.keep_samples(step, self._batch)
        session.lead.writer.write(step, metrics)
        session.lead.shown_responses = responses_to_show(self._batch, step)
        add_to_summary(session.state.summary, metrics, tokens, step)
        session.say(progress_line(step, metrics, train_config(session.config).train.num_steps))
        self._show_notices(metrics)

    def _step_metrics(
        self, batch: RolloutBatch, lead: Rank0, seconds: dict[str, float], num_tokens: int
    ) -> dict[str, float]:
        """Rank 0: the metrics of the step, except those of evaluations. `seconds`: by phase. `num_tokens`: of the
        batch's trajectories.
        """
        session = self._session
        metrics = {
            **self._batch_metrics(batch),
            **self._optimizer_metrics(),
            **seconds,
            **session.saving.take_seconds(),
        }
        if self._results:
            metrics |= self._policy_metrics() | self._adapter_metrics
        if self.critic is not None:
            settings = critic_of(session.config.algorithm, session.config.critic)
            assert settings is not None
            metrics |= critic_metrics(
                self._critic_parts, self.critic.results, session.state.num_critic_steps, settings.kl_coefficient
            )
        step_seconds = seconds["time/step_seconds"]
        prompts = lead.source.state_dict()
        metrics |= {
            "speed/tokens_per_second": num_tokens / step_seconds,
            "speed/tokens_per_second_per_rank": num_tokens / step_seconds / session.layout.world_size,
            "run/num_restarts": lead.num_restarts,
            "data/epoch": _epochs(prompts),
            "data/num_unreadable_answers": _num_unreadable(prompts),
            **session.servers.metrics(),
        }
        if lead.num_standby_ranks is not None:
            metrics["run/num_standby_ranks"] = lead.num_standby_ranks
        if lead.keeps_servers:  # servers answer later than ranks start
            metrics["run/num_kept_servers"] = lead.attempt.num_kept_servers()
        if session.prefetch is not None:
            metrics["time/assemble/ahead_seconds"] = session.prefetch.ahead_seconds
        if self._num_positions:
            saved = self._sharing.num_saved_positions
            metrics["speed/packing_efficiency"] = (num_tokens - saved) / self._num_positions
            if session.config.batch.share_prefixes != "off":
                metrics["speed/shared_prefix_fraction"] = saved / (self._num_positions + saved)
                metrics["speed/num_repeated_prefixes"] = self._sharing.num_repeated_prefixes
        if self.published is not None:
            metrics |= {
                "publish/weight_version": session.state.weight_version,
                "publish/num_bytes": self.published.num_bytes,
                "publish/num_bytes_sent": self.published.num_bytes_sent,
                "publish/num_bytes_sent_per_rank": max(self.published.bytes_sent_by_rank.values(), default=0),
                "publish/num_bytes_hashed": self.published.num_bytes_hashed,
                "publish/hash_seconds": self.published.hash_seconds,
                "publish/num_tensors_compared": self.published.num_tensors_compared,
                "publish/is_full": float(self.published.is_full),
            }
            if session.config.publish.full_every > 1:
                metrics |= {
                    "publish/changed_share": self.published.changed_share,
                    "publish/num_delta_bytes": self.published.num_delta_bytes,
                    "publish/num_fallbacks": float(self.published.fallback is not None),
                }
        return metrics

    def _show_notices(self, metrics: dict[str, float]) -> None:
        """Rank 0: show what the mismatch and its correction give reason to say."""
        session = self._session
        record_correction(session.state.summary, metrics)
        if notice := correction_notice(session.config.mismatch, session.state.summary):
            session.say(notice)
        if self._gap is not None:
            warnings = gap_warnings(
                session.config,
                session.run_folder.config_file,
                self._gap,
                metrics,
                session.state.summary,
                session.state.step,
                max(session.run_folder.huggingface_steps_dir.glob("step_" + "[0-9]" * 8), default=None),
            )
            for line in warnings:
                session.say(line)

    @functools.cached_property
    def _staleness(self) -> list[np.ndarray]:
        assert self._batch is not None
        return token_staleness(self._batch, self._version)

    def _batch_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        episodes = batch.episodes
        rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
        lengths = np.array([episode.num_sampled_tokens for episode in episodes], dtype=np.float64)
        advantages = np.array([sum(row.weight * (row.advantage or 0.0) for row in e.rows()) for e in episodes])
        config = self._session.config
        numbers: dict[str, ArrayLike] = {
            "reward/trained_mean": rewards,
            "response/trained_length_mean": lengths,
            "groups/num_groups": [len(batch.groups)],
            **episode_shapes(batch),
            **staleness_shapes(batch, self._staleness),
        }
        if compares_within_groups(config):
            numbers["groups/trained_constant_fraction"] = [
                is_constant(group, config.advantage) for group in batch.groups
            ]
        for name, chosen in (("positive", advantages > 0), ("negative", advantages < 0)):
            if chosen.any():
                numbers[f"response/length_{name}_mean"] = lengths[chosen]
        numbers |= {f"rollout/{name}": [value] for name, value in batch.counts.items()}
        numbers |= cached_contexts(batch.counts)
        numbers |= {f"time/rollout/{part}_seconds": [value] for part, value in batch.phase_seconds.items()}
        # All tokens generated since the last batch. With staleness they may be those of another batch, or none.
        generated = batch.counts.get("num_generated_tokens", float(lengths.sum()))
        seconds = batch.phase_seconds["generate"]
        speed = generated / seconds if seconds > 0 else 0.0
        # Records of earlier releases lack `sampled`: use what is trained on.
        sampled = batch.sampled or sampled_metrics(batch.groups, config.advantage, compares_within_groups(config))
        return {**sampled, **reduced(numbers), "speed/generated_tokens_per_second": speed}

    def _optimizer_metrics(self) -> dict[str, float]:
        if not self._results:
            return {}
        norms = [r.grad_norm for r in self._results]
        return {
            **reduced({"optimizer/grad_norm": norms, "optimizer/grad_norm_max": norms}),
            "optimizer/lr": self._results[-1].lr,
            "optimizer/num_optimizer_steps": self._session.state.num_optimizer_steps,
            "optimizer/num_skipped": sum(r.skipped for r in self._results),
        }

    def _policy_metrics(self) -> dict[str, float]:
        config = self._session.config
        num_mini_batches = len(self._results)
        sums = [
            _total([rank[m].train.totals.get("policy_sums") for rank in self._gathered])
            for m in range(num_mini_batches)
        ]
        metrics = {f"policy/{name}": value for name, value in policy_metrics(functools.reduce(torch.add, sums)).items()}
        # J of each mini-batch has its own denominator: over the step it is their mean.
        metrics["policy/objective"] /= num_mini_batches
        for m, part in enumerate(sums):
            metrics |= {f"policy/mini_batch/{m}/{name}": value for name, value in policy_metrics(part).items()}

        # The last mini-batch is the one in which the policy is furthest from the old pass.
        last = [rank[-1].train.routing for rank in self._gathered]
        metrics |= changed_routes("rollout", self._routing("old")) | changed_routes("old", last)
        metrics |= replaced_experts(last)
        metrics |= router_losses(config.moe, self._routing("train")) | expert_loads(self._routing("train"))
        if config.kl.coefficient > 0:
            kl = _total([report.totals.get("kl_sums") for report in self._reports("train")])
            metrics["policy/kl_reference"] = float(kl[KL_SUMS.index("k")] / max(kl[KL_SUMS.index("num_tokens")], 1.0))
        if config.objective.entropy_coefficient > 0:
            mean = (
                float(_total([part.totals.get("entropy_sums") for part in self._reports("train")])) / num_mini_batches
            )
            metrics["policy/entropy_bonus"] = config.objective.entropy_coefficient * mean
        if leaves_out_by_covariance(config.algorithm):
            chosen, candidates, tokens = _total(
                [report.totals.get("covariance_sums") for report in self._reports("train")]
            ).tolist()
            metrics["policy/covariance_clip_fraction"] = chosen / max(tokens, 1.0)
            metrics["policy/covariance_candidate_fraction"] = candidates / max(tokens, 1.0)
        if config.teacher is not None:
            taught = _total([report.totals.get("teacher_sums") for report in self._reports("train")])
            second = not has_token_terms(objective_settings(config.algorithm, config.objective))
            whole = config.teacher.divergence != "sampled_token"
            some = bool(config.teacher.by_source)
            found = teacher_metrics(taught.tolist(), has_second_term=second, has_divergence=whole, by_source=some)
            metrics |= {f"teacher/{name}": value for name, value in found.items()}
        old, train = self._columns("old"), self._columns("train")
        sums = old[MISMATCH_SUMS.name]
        tokens = sums[:, SUM_NAMES.index("tokens")]
        present = tokens > 0
        self._gap = self._measured_gap(old, train)
        metrics |= gap_metrics(band_of(config.algorithm, config.objective), self._gap) | correction_metrics(
            config.mismatch, config.old_log_probs, train, present
        )
        metrics["policy/entropy"] = float(old[ENTROPY_SUM.name].sum() / max(float(tokens.sum()), 1.0))
        if KEPT_MASS.name in old:
            metrics["policy/kept_mass"] = float(old[KEPT_MASS.name].sum() / max(float(tokens.sum()), 1.0))
        log_s = torch.from_numpy(train[LOG_S.name])[torch.from_numpy(present)]
        metrics["policy/ess"] = effective_sample_fraction(log_s)
        if config.old_log_probs == "rollout":
            parts = {"log_ratio": log_s}  # the old log-probs are the server's, so the two parts cannot be told apart
        else:
            gap = torch.from_numpy(sums[present, SUM_NAMES.index("log_ratio")] / tokens[present])
            parts = {"log_ratio": gap + log_s, "log_ratio/update": log_s, "log_ratio/gap": gap}
        if STALENESS_SUMS.name in old:
            for name, part in zip(("staleness", "mismatch"), old[STALENESS_SUMS.name][present].T, strict=True):
                parts[f"log_ratio/{name}"] = torch.from_numpy(part / tokens[present])
        for name, values in parts.items():
            metrics |= {f"policy/{name}/{k}": v for k, v in log_ratio_summary(values).items()}
        return metrics

    def _measured_gap(self, old: dict[str, np.ndarray], train: dict[str, np.ndarray]) -> GapRows:
        """The mismatch of the responses that were measured before any update of the step: all of them if there is an
        old pass, and those of the first mini-batch if the training passes measure it.
        """
        assert self._batch is not None
        trajectories = self._batch.trajectories
        rows = np.full(len(trajectories), needs_old_log_prob_pass(self._session.config))
        for rank in self._gathered:
            rows[rank[0].old.trajectory_index] = True
        stale = np.array([staleness.any() for staleness in self._staleness], dtype=bool)
        advantages = np.array([t.advantage for t in trajectories], dtype=np.float64)
        return GapRows.measured(old, train, rows, advantages, stale)

    def _token_gaps(self) -> list[dict[str, np.ndarray]]:
        """The ranks' reports of tokens that were measured before any update of the step."""
        all_are = needs_old_log_prob_pass(self._session.config)
        measured = [part.old.tokens for rank in self._gathered for part in (rank if all_are else rank[:1])]
        return [tokens for tokens in measured if tokens]

    def _reports(self, which: Literal["old", "train"]) -> list[PassReport]:
        """The reports of all ranks on one of the two passes, for every mini-batch."""
        return [part.old if which == "old" else part.train for rank in self._gathered for part in rank]

    def _routing(self, which: Literal["old", "train"]) -> list[dict[str, float]]:
        return [report.routing for report in self._reports(which)]

    def _columns(self, which: Literal["old", "train"]) -> dict[str, np.ndarray]:
        """The columns of all trajectories from one of the two passes, [N] or [N, K], in the rollout batch's order."""
        assert self._batch is not None
        parts = ((report.trajectory_index, report.columns) for report in self._reports(which))
        return merge_columns(parts, len(self._batch.trajectories))


def _total(parts: Sequence[np.ndarray | None]) -> torch.Tensor:
    """The sum of the parts, [K] float64. A part is None if its rank reports nothing; at least one is not None."""
    present = [torch.from_numpy(part) for part in parts if part is not None]
    return functools.reduce(torch.add, present, torch.zeros_like(present[0]))


def _num_unreadable(stream: dict[str, Any]) -> int:
    return sum(source.get("num_unreadable", 0) for source in stream.get("sources", {}).values())


def _epochs(stream: dict[str, Any]) -> float:
    """How often the prompts have been passed over, the mean over sources. With `data.source`, the number of prompts
    that it chose over the number of rows.
    """
    sources = stream["sources"].values()
    if "chosen" in stream:
        return stream["chosen"]["num_drawn"] / max(sum(s["num_rows"] for s in sources), 1)
    return sum(s["epoch"] + s["position"] / max(s["num_rows"], 1) for s in sources) / len(sources)


def episode_shapes(batch: RolloutBatch) -> dict[str, ArrayLike]:
    """Numbers of the episodes that are trained on, by name of the catalogue, before they are reduced to one value."""
    turns = [episode.num_turns for episode in batch.episodes]
    longest = [max((row.num_tokens for row in episode.rows()), default=0) for episode in batch.episodes]
    masks = [np.asarray(row.response_mask, np.uint8) for row in batch.trajectories]
    return {
        "episode/turns_mean": turns,
        "episode/turns_max": turns,
        "episode/rows_mean": [len(episode.rows()) for episode in batch.episodes],
        "episode/context_tokens_mean": longest,
        "episode/context_tokens_max": longest,
        "episode/masked_fraction": np.concatenate(masks) == 0,
    }


def cached_contexts(counts: Mapping[str, float]) -> dict[str, ArrayLike]:
    """What servers read from their prefix caches of the contexts of first turns (prompts) and later ones (histories).
    `counts`: those of a batch. Recordings of earlier releases, and servers that do not say it, have neither.
    """
    found: dict[str, ArrayLike] = {}
    for kind in ("prompt", "history"):
        if read := counts.get(f"num_{kind}_tokens_read", 0):
            cached = counts.get(name := f"num_{kind}_tokens_cached", 0)
            found |= {f"rollout/{name}": [cached], f"rollout/cached_{kind}_fraction": [cached / read]}
    return found


def token_staleness(batch: RolloutBatch, weight_version: int) -> list[np.ndarray]:
    """For every row, [tokens that it trains] int64: how many versions older than `weight_version` each token is."""
    active = (
        (np.asarray(row.weight_versions, np.int64), np.asarray(row.response_mask, bool)) for row in batch.trajectories
    )
    return [weight_version - versions[mask] for versions, mask in active]


def staleness_shapes(batch: RolloutBatch, staleness: Sequence[np.ndarray]) -> dict[str, ArrayLike]:
    """As `episode_shapes`, for the staleness of tokens. `staleness`: from `token_staleness`."""
    rows = iter(staleness)
    of_episodes = [np.concatenate([next(rows) for _ in episode.rows()]) for episode in batch.episodes]
    tokens = np.concatenate(of_episodes)
    return {
        "rollout/staleness_mean": tokens,
        "rollout/staleness_max": tokens,
        "rollout/multi_version_fraction": [(values != values[:1]).any() for values in of_episodes],
    }


def changed_routes(since: str, reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/changed_since_<since>` (`rollout` or `old`); empty if no rank compared."""
    compared = _routing_total(f"compared_with_{since}", reports)
    if compared <= 0:
        return {}
    return {f"routing/changed_since_{since}": _routing_total(f"changed_since_{since}", reports) / compared}


def replaced_experts(reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/layer/<layer>/replaced_since_old` for every layer whose routes were compared with the old pass."""
    names = {name for report in reports for name in report if name.startswith("choices/")}
    choices = {int(name.removeprefix("choices/")): _routing_total(name, reports) for name in names}
    return {
        f"routing/layer/{layer}/replaced_since_old": _routing_total(f"replaced/{layer}", reports) / choices[layer]
        for layer in sorted(choices)
        if choices[layer] > 0
    }


def router_losses(moe: Moe, reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/load_balancing_loss` and `routing/z_loss`, each if it is part of the loss."""
    count = _routing_total("num_router_losses", reports)
    names = {"load_balancing_loss": moe.load_balancing != "none", "z_loss": moe.z_loss_coefficient > 0}
    return {
        f"routing/{name}": _routing_total(name, reports) / count for name, is_on in names.items() if is_on and count > 0
    }


def expert_loads(reports: Sequence[Sums]) -> dict[str, float]:
    """`routing/load_max_over_mean` if the expert bias is moved, and with expert parallelism the loads of its ranks."""
    metrics = {}
    for name, count_name in (("load_max_over_mean", "num_loads"), ("rank_load_max_over_mean", "num_rank_loads")):
        if (count := _routing_total(count_name, reports)) > 0:
            metrics[f"routing/{name}"] = _routing_total(name, reports) / count
    if loads := [report["rank_load_max"] for report in reports if "rank_load_max" in report]:
        metrics["routing/rank_load_max"] = max(loads)
    return metrics


def _routing_total(name: str, reports: Sequence[Sums]) -> float:
    return sum(report.get(name, 0.0) for report in reports)


def critic_metrics(
    parts: Sequence[CriticPart], results: Sequence[StepResult], num_critic_steps: int, kl_coefficient: float
) -> dict[str, float]:
    """The metrics of the critic. `parts`: of all ranks. `results`: of the value steps, the same on all ranks."""
    old = np.sum([part.old_sums for part in parts], axis=0)
    steps = np.sum([part.step_sums for part in parts], axis=0)
    sums: dict[str, float] = dict(zip(VALUE_SUMS, old.tolist(), strict=True))
    count = max(sums["value_tokens"], 1.0)
    norms = [result.grad_norm for result in results]
    metrics = {
        # The loss of each mini-batch has its own denominator: over the step it is their mean.
        "critic/value_loss": float(steps[:, _LOSS].mean()),
        "critic/clip_fraction": float(steps[:, _CLIPPED].sum() / max(steps[:, _TOKENS].sum(), 1.0)),
        "critic/value_mean": sums["value_sum"] / count,
        "critic/return_mean": sums["return_sum"] / count,
        **reduced({"critic/grad_norm": norms, "critic/grad_norm_max": norms}),
        "critic/lr": results[-1].lr,
        "critic/num_optimizer_steps": num_critic_steps,
        "critic/num_skipped": sum(result.skipped for result in results),
    }
    if (explained := explained_variance(sums)) is not None:
        metrics["critic/explained_variance"] = explained
    if kl_coefficient > 0:
        gap, tokens = np.sum([part.penalty for part in parts], axis=0).tolist()
        metrics["critic/kl_reference"] = gap / max(tokens, 1.0)
    return metrics


def fill_mean_advantages(batch: RolloutBatch, parts: Sequence[CriticPart]) -> None:
    """Set `advantage` of every row to the mean advantage of its tokens, or to 0 if no rank reports the row."""
    rows = batch.trajectories
    for row in rows:
        row.advantage = 0.0
    for part in parts:
        for place, advantage in zip(part.rows.tolist(), part.advantages.tolist(), strict=True):
            rows[place].advantage = advantage


def adapter_metrics(engine: PolicyEngine) -> dict[str, float]:
    """How many numbers a policy's adapters have, and their norm, on every rank; empty without `lora`. Collective."""
    lora = engine.config.lora
    if lora is None:
        return {}
    return {
        "lora/norm": adapter_norm(engine.chunks, engine.groups),
        "lora/num_parameters": num_adapter_parameters(lora, engine.spec),
    }


def due_sets(session: RankSession, step: int, is_last: bool) -> list[str]:
    """The sets to evaluate after `step`: by the cadence of each set, and all of them after the last step. The same on
    all ranks.
    """
    return [one.name for one in session.eval_sets if is_last or one.is_due(step)]


def evaluation_metrics(found: Mapping[str, Evaluation], first: str) -> dict[str, float]:
    """The metrics of the sets that were evaluated. Those of the set `first` also get the names without the set."""
    metrics: dict[str, float] = {}
    for name, evaluation in found.items():
        own = _metrics_of(evaluation)
        if name == first:
            metrics |= {f"eval/{key}": value for key, value in own.items()}
        metrics |= {f"eval/set/{name}/{key}": value for key, value in own.items()}
        for k, (value, error) in evaluation.pass_at.items():
            metrics |= {f"eval/set/{name}/pass_at/{k}": value, f"eval/set/{name}/pass_at_standard_error/{k}": error}
        if evaluation.majority is not None:
            value, error = evaluation.majority
            metrics |= {f"eval/set/{name}/majority": value, f"eval/set/{name}/majority_standard_error": error}
    return metrics


def _metrics_of(evaluation: Evaluation) -> dict[str, float]:
    return {
        "accuracy": evaluation.accuracy,
        "accuracy_standard_error": evaluation.standard_error,
        "reward_mean": evaluation.reward_mean,
        "response_length_mean": evaluation.response_tokens_mean,
        "turns_mean": evaluation.turns_mean,
        "truncated_fraction": evaluation.truncated_fraction,
        "num_samples": evaluation.num_samples,
        "num_reward_failures": evaluation.num_reward_failures,
    }


def add_to_summary(summary: dict[str, Any], metrics: dict[str, float], num_tokens: int, step: int) -> None:
    """Add a step's metrics to what the final table shows. The summary is in the checkpoint, so it covers all attempts
    of the run.
    """
    totals = summary.setdefault("totals", {})
    for name, value in metrics.items():
        if name.startswith("time/") and name.count("/") == 1:
            totals[name] = totals.get(name, 0.0) + value
    totals["num_tokens"] = totals.get("num_tokens", 0) + num_tokens
    for name in SUMMARISED:
        if name in metrics:
            totals[name] = totals.get(name, 0.0) + metrics[name]
            totals[name + "/count"] = totals.get(name + "/count", 0) + 1
    largest = metrics.get("mismatch/abs_log_ratio_max", 0.0)
    totals["mismatch/abs_log_ratio_max"] = max(totals.get("mismatch/abs_log_ratio_max", 0.0), largest)
    measured = int(metrics.get("eval/measured_step", step))
    if "eval/accuracy" in metrics and measured > 0:  # the accuracy of the start is `accuracy_before`
        summary["evaluated_step"] = measured
        summary["accuracy_after"] = [metrics["eval/accuracy"], metrics["eval/accuracy_standard_error"]]

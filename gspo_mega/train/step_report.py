"""The metrics of a step from the reports of all ranks: gathered on rank 0, computed once, written, shown.

Owns which number gets which name of the catalogue. The statistics themselves are `gspo_mega.algorithm`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from gspo_mega.algorithm.columns import ENTROPY_SUM, LOG_S, MISMATCH_SUMS, STALENESS_SUMS, merge_columns
from gspo_mega.algorithm.diagnostics import log_ratio_summary, policy_metrics
from gspo_mega.algorithm.kl import KL_SUMS
from gspo_mega.algorithm.mismatch import SUM_NAMES, effective_sample_fraction
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.config.command_types import train_config
from gspo_mega.config.critic_config import compares_within_groups, critic_of
from gspo_mega.config.old_pass import makes_old_pass
from gspo_mega.data.journal.token_gaps import write_token_gaps
from gspo_mega.engine.megatron_optimizer import StepResult
from gspo_mega.engine.pass_report import PassReport
from gspo_mega.metrics.console import progress_line
from gspo_mega.metrics.reduction import reduced
from gspo_mega.metrics.sampled import is_constant, sampled_metrics
from gspo_mega.sync.publish import PublishResult
from gspo_mega.train.adapter_report import adapter_metrics
from gspo_mega.train.correction_report import correction_metrics, correction_notice, note_correction
from gspo_mega.train.critic_report import critic_metrics, fill_mean_advantages
from gspo_mega.train.critic_step import CriticPart, CriticStep
from gspo_mega.train.episode_report import episode_shapes, staleness_shapes, token_staleness
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.held_out_report import evaluation_metrics
from gspo_mega.train.mismatch_report import GapRows, gap_metrics, gap_warnings
from gspo_mega.train.routing_report import changed_routes, expert_loads, replaced_experts, router_losses
from gspo_mega.train.session import Session


@dataclass
class MiniBatchPasses:
    """One rank's reports of one mini-batch: the pass that measured the engine gap, and the training pass."""

    old: PassReport
    train: PassReport

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> MiniBatchPasses:
        """From the dictionary of `dataclasses.asdict`, as another rank sent it."""
        return cls(PassReport(**value["old"]), PassReport(**value["train"]))


class StepReport:
    """The report of one step, filled as it goes. Every rank has one; rank 0's `batch` is the rollout batch."""

    def __init__(self, session: Session, batch: RolloutBatch | None, num_positions: int) -> None:
        self._session, self._batch, self._num_positions = session, batch, num_positions
        self._version = session.state.weight_version
        self._results: list[StepResult] = []
        self._passes: list[MiniBatchPasses] = []
        self._gathered: list[list[MiniBatchPasses]] = []
        self._gap: GapRows | None = None
        self._of_adapters: dict[str, float] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.late: list[dict[str, float]] = []  # metrics of evaluations beside training, which measured earlier steps
        self.published: PublishResult | None = None
        self.critic: CriticStep | None = None
        self._critic_parts: list[CriticPart] = []

    def add(self, result: StepResult, old: PassReport, train: PassReport) -> None:
        """One mini-batch: its optimizer step, the pass that measured the engine gap, the training pass."""
        self._results.append(result)
        self._passes.append(MiniBatchPasses(old, train))

    def gather(self) -> None:
        """Bring every rank's part to rank 0. Collective."""
        self._of_adapters = adapter_metrics(self._session.engine)
        gathered = self._session.exchange.gather([asdict(passes) for passes in self._passes])
        if gathered is not None:
            self._gathered = [[MiniBatchPasses.from_wire(passes) for passes in rank] for rank in gathered]
        if self.critic is not None:
            parts = self._session.exchange.gather(vars(self.critic.part))
            self._critic_parts = [CriticPart(**part) for part in parts or ()]

    def write(self) -> None:
        """Rank 0: compute, write and show the step's metrics; nothing elsewhere. Ends the timer's step everywhere."""
        session = self._session
        seconds = session.phases.timer.finish_step()
        if session.lead is None or self._batch is None:
            return
        session.lead.check_held()
        if self.critic is not None:
            fill_mean_advantages(self._batch, self._critic_parts)
        metrics = {
            **self._batch_metrics(self._batch),
            **self._optimizer_metrics(),
            **seconds,
            **session.saving.take_seconds(),
        }
        if self._results:
            metrics |= self._policy_metrics() | self._of_adapters
        if self.critic is not None:
            settings = critic_of(session.config)
            assert settings is not None
            metrics |= critic_metrics(
                self._critic_parts, self.critic.results, session.state.num_critic_steps, settings.kl_coefficient
            )
        tokens = sum(t.num_tokens for t in self._batch.trajectories)
        step_seconds = seconds["time/step_seconds"]
        metrics |= {
            "speed/tokens_per_second": tokens / step_seconds,
            "speed/tokens_per_second_per_rank": tokens / step_seconds / session.layout.world_size,
            "run/num_restarts": session.lead.num_restarts,
            "data/epoch": _epochs(stream := session.lead.source.state_dict()),
            "data/num_unreadable_answers": _num_unreadable(stream),
            **session.servers.metrics(),
        }
        if session.preparation is not None:
            metrics["time/assemble/ahead_seconds"] = session.preparation.ahead_seconds
        if self._num_positions:
            metrics["speed/packing_efficiency"] = tokens / self._num_positions
        if self.published is not None:
            metrics |= {
                "publish/weight_version": session.state.weight_version,
                "publish/num_bytes": self.published.num_bytes,
                "publish/num_bytes_sent": self.published.num_bytes_sent,
                "publish/num_bytes_sent_per_rank": max(self.published.bytes_sent_by_rank.values(), default=0),
            }
        if self.evaluations:
            metrics |= evaluation_metrics(self.evaluations, session.eval_sets[0].name)
        elif self.late:
            metrics |= self.late.pop()
        if session.config.diagnostics.token_mismatch and self._results:
            write_token_gaps(session.run_folder.journal_dir, self._batch, self._token_gaps())
        step = session.state.step
        for late in self.late:  # a line has room for one
            session.lead.writer.write(step - 1, late)
            add_to_summary(session.state.summary, late, 0, step - 1)
        session.lead.writer.write(step, metrics)
        add_to_summary(session.state.summary, metrics, tokens, step)
        session.say(progress_line(step, metrics, train_config(session.config).train.num_steps))
        note_correction(session.state.summary, metrics)
        if notice := correction_notice(session.config.mismatch, session.state.summary):
            session.say(notice)
        if self._gap is not None:
            warnings = gap_warnings(
                session.config,
                session.run_folder.config_file,
                self._gap,
                metrics,
                session.state.summary,
                step,
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
            numbers["groups/trained_constant_fraction"] = [is_constant(group, config) for group in batch.groups]
        for name, chosen in (("positive", advantages > 0), ("negative", advantages < 0)):
            if chosen.any():
                numbers[f"response/length_{name}_mean"] = lengths[chosen]
        numbers |= {f"rollout/{name}": [value] for name, value in batch.counts.items()}
        numbers |= {f"time/rollout/{part}_seconds": [value] for part, value in batch.phase_seconds.items()}
        # Of all that was generated since the last batch: with staleness that is another batch's, or nothing.
        generated = batch.counts.get("num_generated_tokens", float(lengths.sum()))
        seconds = batch.phase_seconds["generate"]
        speed = generated / seconds if seconds > 0 else 0.0
        sampled = batch.sampled or sampled_metrics(batch.groups, config)  # older records: only what was trained on
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

        # In the last mini-batch the policy is furthest from where it was in the old pass.
        last = [rank[-1].train.routing for rank in self._gathered]
        metrics |= changed_routes("rollout", self._routing("old")) | changed_routes("old", last)
        metrics |= replaced_experts(last)
        metrics |= router_losses(config.moe, self._routing("train")) | expert_loads(self._routing("train"))
        if config.kl.coefficient > 0:
            kl = _total([report.totals.get("kl_sums") for report in self._reports("train")])
            metrics["policy/kl_reference"] = float(kl[KL_SUMS.index("k")] / max(kl[KL_SUMS.index("num_tokens")], 1.0))
        old, train = self._columns("old"), self._columns("train")
        sums = old[MISMATCH_SUMS.name]
        tokens = sums[:, SUM_NAMES.index("tokens")]
        present = tokens > 0
        self._gap = self._measured_gap(old, train)
        metrics |= gap_metrics(config, self._gap) | correction_metrics(config, train, present)
        metrics["policy/entropy"] = float(old[ENTROPY_SUM.name].sum() / max(float(tokens.sum()), 1.0))
        log_s = torch.from_numpy(train[LOG_S.name])[torch.from_numpy(present)]
        metrics["policy/ess"] = effective_sample_fraction(log_s)
        if config.old_log_probs == "rollout":
            parts = {"log_ratio": log_s}  # old is the server's: the two parts cannot be told apart
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
        """The gap of the responses measured before any update: all of them in an old pass of its own, those of the
        first mini-batch where the training passes measure it.
        """
        assert self._batch is not None
        trajectories = self._batch.trajectories
        rows = np.full(len(trajectories), makes_old_pass(self._session.config))
        for rank in self._gathered:
            rows[rank[0].old.trajectory_index] = True
        stale = np.array([staleness.any() for staleness in self._staleness], dtype=bool)
        advantages = np.array([t.advantage for t in trajectories], dtype=np.float64)
        return GapRows.measured(old, train, rows, advantages, stale)

    def _token_gaps(self) -> list[dict[str, np.ndarray]]:
        """The ranks' parts, of tokens measured before any update."""
        all_are = makes_old_pass(self._session.config)
        measured = [part.old.tokens for rank in self._gathered for part in (rank if all_are else rank[:1])]
        return [tokens for tokens in measured if tokens]

    def _reports(self, which: Literal["old", "train"]) -> list[PassReport]:
        """The reports of all ranks on one pass of every mini-batch."""
        return [part.old if which == "old" else part.train for rank in self._gathered for part in rank]

    def _routing(self, which: Literal["old", "train"]) -> list[dict[str, float]]:
        return [report.routing for report in self._reports(which)]

    def _columns(self, which: Literal["old", "train"]) -> dict[str, np.ndarray]:
        """Per-trajectory columns of one pass over all mini-batches and ranks, in the rollout batch's order."""
        assert self._batch is not None
        parts = ((report.trajectory_index, report.columns) for report in self._reports(which))
        return merge_columns(parts, len(self._batch.trajectories))


def _total(parts: Sequence[np.ndarray | None]) -> torch.Tensor:
    """The sum of the parts, [K] float64. A rank that reports nothing has None; at least one rank has a part."""
    present = [torch.from_numpy(part) for part in parts if part is not None]
    return functools.reduce(torch.add, present, torch.zeros_like(present[0]))


# Means over the steps that have them, for the final table.
SUMMARISED = (
    "policy/clip_fraction",
    "policy/kept_fraction",
    "policy/mini_batch/0/clip_fraction_positive",
    "policy/mini_batch/0/clip_fraction_negative",
    "mismatch/k3",
    "mismatch/abs_log_ratio_mean",
)


def add_to_summary(summary: dict[str, Any], metrics: dict[str, float], num_tokens: int, step: int) -> None:
    """Keep what the final table shows, over all attempts of the run (the summary is in the checkpoint)."""
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
    if "eval/accuracy" in metrics and measured > 0:  # that of the start is `accuracy_before`
        summary["evaluated_step"] = measured
        summary["accuracy_after"] = [metrics["eval/accuracy"], metrics["eval/accuracy_standard_error"]]


def _num_unreadable(stream: dict[str, Any]) -> int:
    return sum(source.get("num_unreadable", 0) for source in stream.get("sources", {}).values())


def _epochs(stream: dict[str, Any]) -> float:
    """Passes over the prompts, the mean over sources."""
    sources = stream["sources"].values()
    return sum(s["epoch"] + s["position"] / max(s["num_rows"], 1) for s in sources) / len(sources)

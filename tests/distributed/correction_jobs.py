"""What ranks run in the tests of the mismatch correction: known log-probs, and a model's own, through the old pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from layout_jobs import layout_config, pack, recorded_sequences

from gspo_mega.algorithm.correction import CorrectionRule
from gspo_mega.algorithm.covariance import trajectory_key
from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.device_batch import to_device
from gspo_mega.engine.losses import OldPass, choose_by_covariance, correct_batch
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.certify.steps import complete_gradients

NUM_ROWS = 12


def mini_batches(data_rank: int, data_size: int, align: int, per_pack: int) -> list[list[MicroBatch]]:
    """Two mini-batches of the twelve recorded sequences, this data rank's packs of each; filler where one runs out."""
    sequences = recorded_sequences()
    parts = []
    for rows in ((0, 3, 5, 7, 8, 9), (1, 2, 4, 6, 10, 11)):
        mine = list(rows)[data_rank::data_size]
        packs = [mine[i : i + per_pack] for i in range(0, len(mine), per_pack)] or [[-1]]
        parts.append([pack(sequences, [*p, -1] if per_pack == 2 else p, align) for p in packs])
    return parts


def in_training(folder: str, rule: dict, parallel: dict, settings: ObjectiveSettings = ObjectiveSettings()) -> dict:
    """All twelve sequences in one mini-batch of one pack per rank, once with an old pass and once with the correction
    decided in the training pass. For both: this rank's gradients, and the columns of its reports by name.
    """
    batch = dict(prompts_per_step=3, group_size=4, num_mini_batches=1, micro_batch_tokens=512)
    config = layout_config(folder, {"expert_tensor": 1, **parallel}, mismatch=rule, batch=batch)
    groups = create_groups(context=parallel.get("context", 1), pipeline=parallel.get("pipeline", 1))
    try:
        engine = PolicyEngine(config, read_model_spec(folder), groups, num_optimizer_steps=10)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        engine.after_weights_loaded()
        mine = list(range(NUM_ROWS))[groups.data.rank :: groups.data.size]
        packs = [pack(recorded_sequences(), mine, 2 * groups.context.size)]
        results: dict[str, Any] = {
            "can": engine.can_correct_in_training([packs]),
            "can_not": engine.can_correct_in_training([packs * 2]),
        }
        for name in ("old_pass", "training"):
            old = None
            if name == "old_pass":
                old = engine.old_pass(packs)
                engine.correct([old])
            report = engine.policy_gradients(packs, settings, 11.0, old, corrects=old is None)
            complete_gradients(engine)
            columns = report.columns | (old.report.columns if old is not None else {})
            parameters: list[Any] = [p for chunk in engine.wrapped for p in chunk.parameters() if p.requires_grad]
            gradients = [p.main_grad.numpy().copy() for p in parameters]
            routing = report.routing | (old.report.routing if old is not None else {})
            results[name] = dict(columns=columns, gradients=gradients, totals=report.totals, routing=routing)
        return results
    finally:
        destroy_groups()


def of_known_log_probs(
    rules: dict[str, dict], context: int = 1, per_pack: int = 3, num_versions: int = 1
) -> dict[str, dict]:
    """The correction by each rule where trainer and server have known log-probs: nothing but its own arithmetic depends
    on the layout. By rule and trajectory: weight, keep, deviation; the centre. With two versions the later one sampled
    from position 14 on, and also the number of segments judged and whether one alone decided.
    """
    groups = create_groups(context=context)
    try:
        return {name: _by_rule(CorrectionRule(**rule), groups, per_pack, num_versions) for name, rule in rules.items()}
    finally:
        destroy_groups()


def _by_rule(rule: CorrectionRule, groups: ParallelGroups, per_pack: int, num_versions: int) -> dict:
    old_pass = OldPass(groups, rule)
    gaps, rows, owners = [], [], []
    for packs in mini_batches(groups.data.rank, groups.data.size, 2 * groups.context.size, per_pack):
        for micro_batch in packs:
            # From certain tokens, 1e-12 nats, to rare ones, so that plain sums would depend on their order. The trainer's
            # differ in proportion, and at one token in eleven by much.
            if num_versions > 1:
                later = (micro_batch.position_ids >= 14).astype(np.int64)
                micro_batch = dataclasses.replace(micro_batch, versions=np.arange(2), version_index=later)
            x = micro_batch.rollout_log_probs.astype(np.float64)
            theirs = -np.minimum(np.exp(40 * (x + 6.4)), 8.0)
            noise = 0.02 * theirs * np.sin(1e4 * x) + np.where(micro_batch.labels % 11 == 0, 1.7 * np.cos(x), 0.0)
            server, trainer = (
                to_device(dataclasses.replace(micro_batch, rollout_log_probs=values.astype(np.float32)), groups)
                for values in (theirs, theirs + noise)
            )
            ours = trainer.rollout_log_probs
            gaps.append(old_pass.measure(server, ours, torch.zeros_like(ours))[1].gap)
            rows.append(micro_batch.trajectory_index)
            owners.append(trainer.sequence_ids)
    decided = correct_batch(rule, gaps, groups)
    by_version = num_versions > 1 and rule.mode in ("mask", "truncate")
    names = ("weights", "deviations", *(("judged", "by_segment") if by_version else ()))
    result = {name: np.full(NUM_ROWS, np.nan) for name in names}
    result["tokens"] = np.zeros(NUM_ROWS)  # of this rank: the sum of their weights
    for index, part, owner in zip(rows, decided, owners, strict=True):
        values_of = dict(weights=part.weights, deviations=part.deviations, tokens=torch.zeros(len(index)))
        if part.token_weights is not None:
            values_of["tokens"] = torch.zeros(len(index)).double().index_add(0, owner, part.token_weights)
        if by_version:
            assert part.segments is not None
            values_of |= dict(judged=part.segments[:, 0], by_segment=part.segments[:, 1])
        real = index >= 0
        assert part.keep[~real].all() and (part.weights[~real] == 1).all(), "filler is not corrected"
        assert torch.equal(part.keep, part.weights > 0)
        for name, values in result.items():
            values[index[real]] = values_of[name].numpy()[real]
    return result | dict(centre=float(decided[0].centre[0]))


COVARIANCE = ObjectiveSettings(
    ratio="token", clip_low=1.0, clip_high=1.0, covariance_low=0.1, covariance_high=2.0, covariance_share=0.1
)


def chosen_by_covariance(context: int = 1, per_pack: int = 3) -> dict:
    """Which tokens Clip-Cov leaves out of two mini-batches of known log-probs: {mini-batch: [(trajectory, position in
    its sequence)]}, this rank's; and how many tokens and candidates it has.
    """
    groups = create_groups(context=context)
    try:
        old_pass, found = OldPass(groups, CorrectionRule("none"), by_covariance=True), {}
        counts = np.zeros(2)
        for place, packs in enumerate(
            mini_batches(groups.data.rank, groups.data.size, 2 * groups.context.size, per_pack)
        ):
            batches, inputs = [], []
            for micro_batch in packs:
                rows = np.maximum(micro_batch.trajectory_index, 0)
                micro_batch.sequence["draw"] = np.array([trajectory_key(1, 0, f"t{row}") for row in rows], np.float64)
                batch = to_device(micro_batch, groups)
                ours = batch.rollout_log_probs
                output = old_pass(batch, ours, torch.zeros_like(ours))
                assert output.covariance is not None
                batches.append(batch)
                inputs.append(output.covariance)
            chosen = []
            for batch, choice in zip(batches, choose_by_covariance(COVARIANCE, inputs, groups), strict=True):
                rows = torch.from_numpy(batch.trajectory_index)[batch.sequence_ids]
                positions = batch.position_ids[0, batch.rows]
                chosen += list(zip(rows[choice.chosen].tolist(), positions[choice.chosen].tolist(), strict=True))
                counts += (len(choice.chosen), int(choice.candidates.sum()))
            found[place] = chosen
        return dict(chosen=found, counts=counts)
    finally:
        destroy_groups()


def of_a_model(folder: str, rule: dict, parallel: dict, per_pack: int = 3) -> dict:
    """The correction in the engine: old passes of two mini-batches, then what the training passes report. By
    trajectory, this rank's: weight and deviation; the kept and all sequences of this rank's part.
    """
    config = layout_config(folder, {"expert_tensor": 1, **parallel}, mismatch=rule)
    groups = create_groups(context=parallel.get("context", 1), pipeline=parallel.get("pipeline", 1))
    try:
        engine = PolicyEngine(config, read_model_spec(folder), groups, num_optimizer_steps=10)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        engine.after_weights_loaded()
        parts = mini_batches(groups.data.rank, groups.data.size, 2 * groups.context.size, per_pack)
        old = [engine.old_pass(packs) for packs in parts]
        engine.correct(old)
        result = dict(weights=np.full(NUM_ROWS, np.nan), deviations=np.full(NUM_ROWS, np.nan))
        sums = np.zeros(len(POLICY_SUMS))
        for packs, state in zip(parts, old, strict=True):
            report = engine.policy_gradients(packs, ObjectiveSettings(), 11.0, state)
            if report.columns:
                result["weights"][report.trajectory_index] = report.columns["correction_weight"]
                result["deviations"][report.trajectory_index] = report.columns["correction_deviation"]
                sums += report.totals["policy_sums"]
        totals = torch.from_numpy(sums)
        torch.distributed.all_reduce(totals, group=groups.host.group)
        return result | dict(sums=dict(zip(POLICY_SUMS, totals.tolist(), strict=True)))
    finally:
        destroy_groups()

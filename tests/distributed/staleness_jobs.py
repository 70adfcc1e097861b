"""What ranks run in the tests of exact staleness: tokens of three weight versions whose log-probs are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from layout_jobs import layout_config, recorded_sequences, shard

from gspo_mega.algorithm.correction import SUM_NAMES
from gspo_mega.algorithm.terms import MISMATCH_SUMS, STALENESS_SUMS, ObjectiveSettings, local_rows
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.reference import Snapshots
from gspo_mega.models.huggingface import read_model_spec

NUM_VERSIONS = 3


def of_injected_mismatch(
    folder: str, parallel: dict, injected: list[float], most: int = NUM_VERSIONS, overlap: bool = False
) -> list[dict]:
    """For each size of the injected mismatch (nats, on every third active token, of both signs): the two parts and the
    gap of each sequence, summed over all ranks. The versions are those before each of two steps, and the last.
    """
    optimizer = dict(distributed=True, overlap=True) if overlap else {}
    diagnostics = dict(token_mismatch=True)
    config = layout_config(folder, {"expert_tensor": 1, **parallel}, optimizer=optimizer, diagnostics=diagnostics)
    groups = create_groups(context=parallel.get("context", 1), pipeline=parallel.get("pipeline", 1))
    try:
        engine = PolicyEngine(config, read_model_spec(folder), groups, num_optimizer_steps=10)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        engine.after_weights_loaded()
        sequences = recorded_sequences()
        packs = [
            dataclasses.replace(
                pack, versions=np.arange(NUM_VERSIONS), version_index=np.minimum(pack.position_ids // 8, 2)
            )
            for pack in shard(sequences, groups.data.rank, groups.data.size, 2 * groups.context.size)
        ]
        snapshots = Snapshots(engine, most)
        sampled = [np.zeros(pack.num_tokens, np.float32) for pack in packs]
        for version in range(NUM_VERSIONS):
            if version:
                engine.train_mini_batch(packs, ObjectiveSettings(clip_low=0.5, clip_high=0.5), 11.0, None)
            snapshots.keep(version)
            exact = _whole(groups, packs, engine.old_pass(packs).micro_batches)
            for values, now, pack in zip(sampled, exact, packs, strict=True):
                values[pack.version_index == version] = now[pack.version_index == version]
        results = []
        for size in injected:
            old_packs = []
            for values, pack in zip(sampled, packs, strict=True):
                error = size * np.where(pack.labels % 3 == 0, np.where(pack.labels % 2 == 0, 1.0, -1.0), 0.0)
                served = np.where(pack.loss_mask > 0, values - error, 0.0).astype(np.float32)
                old_packs.append(dataclasses.replace(pack, rollout_log_probs=served))
            assert snapshots.missing(old_packs) == list(range(NUM_VERSIONS - most))
            if most < NUM_VERSIONS:
                return []
            old = engine.old_pass(old_packs)
            before = [part.log_probs.clone() for part in old.micro_batches]
            snapshots.measure([old_packs], [old], NUM_VERSIONS - 1)
            again = engine.old_pass(old_packs)
            unchanged = all(torch.equal(x, y.log_probs) for x, y in zip(before, again.micro_batches, strict=True))
            tokens = _tokens_are_right(groups, old, old_packs)
            results.append(
                _totals(groups, old.report, old_packs, len(sequences)) | dict(unchanged=unchanged, tokens=tokens)
            )
        return results
    finally:
        destroy_groups()


def _whole(groups, packs: list[MicroBatch], parts) -> list[np.ndarray]:
    """[T] of each pack on every rank: the log-probs of its active tokens, 0 elsewhere."""
    result = []
    for index, pack in enumerate(packs):
        values = torch.zeros(pack.num_tokens, dtype=torch.float64)
        if groups.reports:
            held = local_rows(torch.from_numpy(pack.cu_seqlens), groups.context.size, groups.context.rank).numpy()
            values[held[pack.loss_mask[held] > 0]] = parts[index].log_probs.double()
        if groups.world.size > 1 and groups.data.size == 1:
            torch.distributed.all_reduce(values, group=groups.host.group)
        result.append(values.numpy().astype(np.float32))
    return result


def _tokens_are_right(groups, old, packs: list[MicroBatch]) -> bool:
    """Whether the reported gap of every active token is that of its place in its row, and none is missing."""
    expected = {}
    for pack, values in zip(packs, _whole(groups, packs, old.micro_batches), strict=True):
        for place, row in enumerate(pack.trajectory_index.tolist()):
            begin = int(pack.cu_seqlens[place])
            for at in range(begin, int(pack.cu_seqlens[place + 1])):
                if pack.loss_mask[at] > 0:
                    expected[row, at - begin + 1] = float(np.float16(values[at] - pack.rollout_log_probs[at]))
    found = old.report.tokens
    names = list(zip(found["rows"].tolist(), found["places"].tolist(), strict=True)) if groups.reports else []
    gaps = found["gaps"].tolist() if groups.reports else []
    number = torch.tensor([len(set(names))])
    if groups.data.size == 1:
        torch.distributed.all_reduce(number, group=groups.host.group)
    return int(number) == len(expected) and all(
        abs(expected[name] - gap) <= 1e-3 for name, gap in zip(names, gaps, strict=True)
    )


def _totals(groups, report, packs: list[MicroBatch], count: int) -> dict:
    whole = torch.zeros(count, 3, dtype=torch.float64)
    if groups.reports:
        gap = report.columns[MISMATCH_SUMS.name][:, SUM_NAMES.index("log_ratio")]
        parts = np.concatenate([report.columns[STALENESS_SUMS.name], gap[:, None]], axis=1)
        whole.index_add_(0, torch.from_numpy(report.trajectory_index), torch.from_numpy(parts))
    injected = torch.zeros(count, dtype=torch.float64)
    torch.distributed.all_reduce(whole, group=groups.host.group)
    for pack in packs:  # what was injected, from the labels alone
        for place, row in enumerate(pack.trajectory_index.tolist()):
            if row >= 0:
                span = slice(int(pack.cu_seqlens[place]), int(pack.cu_seqlens[place + 1]))
                labels = pack.labels[span][pack.loss_mask[span] > 0]
                injected[row] = float(np.where(labels % 3 == 0, np.where(labels % 2 == 0, 1.0, -1.0), 0.0).sum())
    if groups.data.size > 1:
        torch.distributed.all_reduce(injected, group=groups.data.group)
    staleness, mismatch, gap = whole.T
    return dict(staleness=staleness.numpy(), mismatch=mismatch.numpy(), gap=gap.numpy(), unit=injected.numpy())

"""What ranks run in the layout tests: one recorded batch through the engine in a given layout."""

from __future__ import annotations

import numpy as np
import torch
from run_configs import make_config

from gspo_mega.algorithm.correction import SUM_NAMES
from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.schema import Config
from gspo_mega.engine.losses import PolicyLoss
from gspo_mega.engine.policy import PassReport, PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec

CLIP_LOW, CLIP_HIGH = 0.04, 0.05
FUSIONS = ("bias_activation_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")


def layout_config(folder: str, parallel: dict, **sections) -> Config:
    """The smallest configuration of the model in `folder`, in the layout `parallel`; nothing is corrected unless said."""
    sections = {"mismatch": dict(correction="none"), **sections}
    return make_config(model=dict(path=folder), parallel=parallel, **sections)


def recorded_sequences(seed: int = 0, vocab: int = 512) -> list[dict]:
    """Twelve sequences of uneven groups: lengths 1 to 40, one fully masked, interior masked tokens, both signs."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index, (prompt, response) in enumerate(
        [(5, 1), (3, 40), (7, 12), (4, 9), (6, 33), (2, 5), (9, 17), (5, 8), (3, 3), (8, 21), (4, 14), (6, 26)]
    ):
        mask = np.ones(response, np.float32)
        if index == 7:
            mask[:] = 0
        if index in (1, 4, 9):
            mask[response // 3 : response // 3 + 2] = 0
        sequences.append(
            dict(
                tokens=rng.integers(3, vocab, prompt + response),
                prompt=prompt,
                mask=mask,
                rollout=rng.normal((-6.7, -5.9)[index // 2 % 2], 0.3, response).astype(np.float32),
                advantage=(-1.3, 0.7, -0.4, 1.6)[index % 4],
            )
        )
    return sequences


def pack(sequences: list[dict], rows: list[int], align: int) -> MicroBatch:
    """One micro-batch of the given rows, each padded to `align`; -1 is filler."""
    parts: dict[str, list] = {name: [] for name in ("tokens", "positions", "ids", "labels", "mask", "rollout")}
    lengths, values = [], {"advantage": [], "length": [], "group_size": []}
    for place, row in enumerate(rows):
        s = (
            sequences[row]
            if row >= 0
            else dict(
                tokens=np.zeros(2, np.int64),
                prompt=1,
                mask=np.zeros(1, np.float32),
                rollout=np.zeros(1, np.float32),
                advantage=0.0,
            )
        )
        real = len(s["tokens"])
        size = -(-real // align) * align
        active, rollout = np.zeros(size, np.float32), np.zeros(size, np.float32)
        active[s["prompt"] - 1 : real - 1] = s["mask"]
        rollout[s["prompt"] - 1 : real - 1] = s["rollout"]
        tokens = np.pad(s["tokens"], (0, size - real))
        parts["tokens"].append(tokens)
        parts["positions"].append(np.arange(size))
        parts["ids"].append(np.full(size, place))
        parts["labels"].append(np.append(tokens[1:], 0))
        parts["mask"].append(active)
        parts["rollout"].append(rollout)
        lengths.append(size)
        values["advantage"].append(s["advantage"])
        values["length"].append(int(s["mask"].sum()))
        values["group_size"].append(1)
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return MicroBatch(
        token_ids=joined["tokens"],
        position_ids=joined["positions"],
        sequence_ids=joined["ids"],
        labels=joined["labels"],
        loss_mask=joined["mask"],
        rollout_log_probs=joined["rollout"],
        trajectory_index=np.array(rows),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sequence={name: np.array(v, np.float64 if name == "advantage" else np.int64) for name, v in values.items()},
    )


def shard(sequences: list[dict], data_rank: int, data_size: int, align: int, per_pack: int = 3) -> list[MicroBatch]:
    """Uneven shards, the same number of micro-batches on every data rank (filler where one runs out)."""
    rows = [list(range(len(sequences)))[r::data_size] for r in range(data_size)]
    rows[0], rows[-1] = rows[0] + rows[-1][:1] if data_size > 1 else rows[0], rows[-1][1:] if data_size > 1 else rows[0]
    packs = [[r[i : i + per_pack] for i in range(0, len(r), per_pack)] for r in rows]
    count = max(len(p) for p in packs)
    mine = packs[data_rank] + [[-1]] * (count - len(packs[data_rank]))
    return [pack(sequences, p, align) for p in mine]


def run_layout(
    folder: str, parallel: dict, steps: int = 3, align: int = 2, per_pack: int = 3, **sections
) -> dict | None:
    """Log-probs, loss, gradient and weights after `steps` optimizer steps. Whole on rank 0, None elsewhere.

    Every sequence is padded to a multiple of `align` x context size x tensor size. `megatron`: the fused operations of
    the TransformerConfig.
    """
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    spec = read_model_spec(folder)
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=100)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        sequences = recorded_sequences()
        multiple = align * groups.context.size * groups.tensor.size
        batch = shard(sequences, groups.data.rank, groups.data.size, multiple, per_pack)
        denominator = float(sum(s["mask"].any() for s in sequences))
        # A clip range as wide as the spread of the recorded ratios: some clipped on each side, some not.
        settings = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)

        old = engine.old_pass(batch)
        head = PolicyLoss(groups, settings, denominator, engine._old_pass(), use_rollout=True, old=old.micro_batches)
        outputs = engine.accumulate_gradients(batch, head)
        report = PassReport.collect(batch, outputs, groups)
        gradient = None
        if not config.optimizer.distributed:
            tensors = PolicyTensors(spec, groups, engine.chunks, values=lambda parameter: parameter.main_grad)
            gradient = {name: value.clone() for name, value in tensors.stream(torch.float32)}
        old_columns = _merge(groups, old.report.trajectory_index, old.report.columns, len(sequences))
        log_s = _merge(
            groups,
            report.trajectory_index,
            {"log_s": report.columns["log_s"] / groups.context.size} if report.columns else {},
            len(sequences),
        )
        totals = _total(report.totals.get("policy_sums"))
        results = [engine.train_mini_batch(batch, ObjectiveSettings(), denominator, None)[0] for _ in range(steps)]
        weights = {
            name: value.clone() for name, value in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32)
        }
        if groups.world.rank:
            return None
        return dict(
            mismatch=old_columns["mismatch_sums"].numpy(),
            log_s=log_s["log_s"].numpy(),
            totals=totals.numpy(),
            gradient={n: v.numpy() for n, v in (gradient or {}).items()},
            weights={n: v.numpy() for n, v in weights.items()},
            grad_norms=[r.grad_norm for r in results],
            megatron={name: getattr(engine.megatron_config, name) for name in FUSIONS},
        )
    finally:
        destroy_groups()


def _merge(groups, index: np.ndarray, columns: dict, count: int) -> dict[str, torch.Tensor]:
    """Add the parts of all ranks by trajectory row."""
    merged = {}
    widths = {"mismatch_sums": len(SUM_NAMES), "log_s": 1}
    for name in ("mismatch_sums", "log_s"):
        whole = torch.zeros(count, widths[name], dtype=torch.float64)
        if name in columns:
            whole.index_add_(0, torch.from_numpy(index), torch.from_numpy(columns[name]).reshape(len(index), -1))
        torch.distributed.all_reduce(whole, group=groups.host.group)
        merged[name] = whole
    return merged


def _total(part: np.ndarray | None) -> torch.Tensor:
    whole = torch.zeros(len(POLICY_SUMS), dtype=torch.float64) if part is None else torch.from_numpy(part.copy())
    torch.distributed.all_reduce(whole)
    return whole

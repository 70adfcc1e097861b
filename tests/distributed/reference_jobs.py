"""What ranks run in the tests of the reference policy."""

from __future__ import annotations

import numpy as np
import torch
from routing_jobs import SETTINGS, Run

from gspo_mega.algorithm.losses import KL_SUMS
from gspo_mega.train.session import load_reference


def kl_run(
    folder: str,
    reference: str | None,
    parallel: dict,
    estimator: str = "k3",
    coefficient: float = 0.5,
    steps: int = 0,
    **sections,
) -> dict:
    """KL sums and gradient of the first training pass, and the KL per token after each of `steps` optimizer steps."""
    kl = dict(coefficient=coefficient, estimator=estimator, reference_path=reference)
    with Run(folder, parallel, algorithm="custom", objective=dict(ratio="sequence"), kl=kl, **sections) as run:
        frozen = load_reference(run.config, run.spec, run.groups) if coefficient > 0 else None
        packs = run.packs()
        old = run.engine.old_pass(packs)
        log_probs = frozen.log_probs(packs) if frozen else None
        if run.groups.is_last_stage and frozen:
            assert all(not values.requires_grad for values in log_probs)
        report = run.engine.policy_gradients(packs, SETTINGS, run.denominator, old, log_probs)
        result = dict(sums=_sums(run, report), gradient=run.gradient(), per_token=[])
        for _ in range(steps):
            _, passed = run.engine.train_mini_batch(packs, SETTINGS, run.denominator, old, log_probs)
            sums = _sums(run, passed)
            result["per_token"].append(sums[0] / sums[1])
        if frozen and steps:
            again = frozen.log_probs(packs)
            result["reference_stands_still"] = all(torch.equal(a, b) for a, b in zip(log_probs, again, strict=True))
            trained = {id(p) for chunk in run.engine.chunks for p in chunk.parameters()}
            result["shared_parameters"] = sum(id(p) in trained for chunk in frozen.chunks for p in chunk.parameters())
            result["reference_bytes"] = frozen.num_bytes
            result["policy_bytes"] = sum(
                p.numel() * p.element_size() for chunk in run.engine.chunks for p in chunk.parameters()
            )
        return result


def _sums(run: Run, report) -> np.ndarray:
    whole = torch.zeros(len(KL_SUMS), dtype=torch.float64)
    if "kl_sums" in report.totals:
        whole += torch.from_numpy(report.totals["kl_sums"])
    torch.distributed.all_reduce(whole, group=run.groups.host.group)
    return whole.numpy()


def refused(folder: str, reference: str) -> str:
    """The error of a reference of another shape, and of a KL term without log-probs of the reference."""
    with Run(folder, {}, algorithm="custom", kl=dict(coefficient=0.1, reference_path=reference)) as run:
        texts = []
        for attempt in (
            lambda: load_reference(run.config, run.spec, run.groups),
            lambda: run.engine.policy_gradients(
                run.packs(), SETTINGS, run.denominator, run.engine.old_pass(run.packs())
            ),
        ):
            try:
                attempt()
                texts.append("nothing was refused")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        return "\n".join(texts)

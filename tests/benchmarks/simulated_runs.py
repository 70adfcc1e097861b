"""The simulation against runs that were measured: this repository's quickstarts, and NeMo-RL's published steps.

    python tests/benchmarks/simulated_runs.py

Prints tables of RESULTS.md, "Against measured runs". Rates are fitted on rows that are not validated. Starts nothing; some 10 s.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from gspo_mega.config import load_config
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import plan_run
from gspo_mega.plan.state import ModelShares
from gspo_mega.verify.simulate.events import RunEvents
from gspo_mega.verify.simulate.job import Job, job_of, log_normal
from gspo_mega.verify.simulate.outcome import MeasuredStep, fit

REPOSITORY = Path(__file__).resolve().parents[2]

# tests/benchmarks/RESULTS.md, "Sampling ahead": servers and ranks on a core of their own. on_publish, rollout and
# training (publish included) with max_staleness 0, the step with 1.
PINNED = [
    ("continue", 1.57, 0.93, 2.09),
    ("continue", 1.65, 0.95, 2.24),
    ("wait", 1.94, 0.91, 1.92),
    ("wait", 1.87, 0.97, 1.61),
    ("continue_with_cache", 2.00, 0.99, 2.08),
    ("continue_with_cache", 1.49, 0.88, 1.75),
]
# NeMo-RL 0.6 on H100, BF16: tokens per second and GPU. Nodes of trainer and servers, pipeline, staleness; on-policy all
# GPUs do both. 64 prompts x 32 responses, 4096 tokens at most and some 3200 on average, servers on 2 GPUs each.
PUBLISHED = [
    ("on-policy, colocated", 4, 16, 32, 1, 0, 1102),
    ("one off", 2, 8, 32, 2, 1, 1414),
    ("eight off", 16, 32, 192, 1, 8, 1025),
]
PROMPT, RESPONSE, MOST = 128, 3070, 3968


def job(config: str, *overrides: str, model: str | None = None) -> Job:
    loaded = load_config(REPOSITORY / "configs" / config, overrides, "train")
    plan = plan_run(loaded, None, None if model is None else REPOSITORY / "configs/models" / model)
    return job_of(plan.config, ModelShares(plan.spec), plan.layout, count_parameters(plan.spec))


def mean_step(of: Job, steps: int = 60, skip: int = 10) -> float:
    return float(np.mean(RunEvents(of).run(num_steps=steps).steps[skip:]))


def quickstart(**values: object) -> Job:
    """The quickstart's batch, with responses of the measured 34.5 tokens. Its seconds are fitted."""
    of = job("quickstart.yaml", model="quickstart_moe.json")
    return replace(of, lengths=log_normal(34.5, 0.2, 48), save_every=0, **values)


def pinned() -> list[tuple[str, float, float]]:
    """(on_publish, measured, simulated) step with K = 1: rates of the same pair's run with K = 0."""
    found = []
    for mode, rollout, training, step in PINNED:
        fitted, _ = fit(quickstart(on_publish=mode), MeasuredStep(rollout, training, 0.0))
        found.append((mode, step, mean_step(replace(fitted, max_staleness=1))))
    return found


def shared() -> list[tuple[str, str, float, float]]:
    """(seed, arm, measured, simulated) of docs/studies/ahead_runs.csv: rates of the same seed's run with K = 0."""
    with (REPOSITORY / "docs/studies/ahead_runs.csv").open() as file:
        rows = {(row["seed"], row["arm"]): row for row in csv.DictReader(file)}
    found = []
    for seed in sorted({seed for seed, _ in rows}):
        wait, step = (float(rows[seed, "k0"][name]) for name in ("wait_seconds", "step_seconds"))
        fitted, _ = fit(quickstart(on_publish="continue"), MeasuredStep(wait, step - wait, 0.0))
        # With k4 five batches were open on the server at a time.
        for arm, staleness in (("k0", 0), ("k1", 1), ("k4", 4)):
            of = replace(fitted, max_staleness=staleness, shared=True)
            found.append((seed, arm, float(rows[seed, arm]["step_seconds"]), mean_step(of)))
    return found


def reading() -> tuple[float, float, float]:
    """(seconds per token that is read again, measured, simulated) step with K = 1 and `continue`: the first is fitted on
    the first pair, the rest is the second pair's.
    """
    (mode, _, _, step), second = PINNED[:2]

    def with_reading(pair: tuple[str, float, float, float], prefill: float) -> float:
        fitted, _ = fit(quickstart(on_publish=mode), MeasuredStep(pair[1], pair[2], 0.0))
        server = replace(fitted.server, prefill=prefill)
        return mean_step(replace(fitted, max_staleness=1, server=server))

    low, high = 0.0, 1e-3
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if with_reading(PINNED[0], middle) < step else (low, middle)
    return low, second[3], with_reading(second, low)


def published_jobs() -> list[tuple[str, float, Job]]:
    """(row, measured tokens/s/GPU, its job)."""
    found = []
    for name, nodes, servers, gpus, pipeline, staleness, measured in PUBLISHED:
        of = job(
            "qwen3_30b_a3b_4nodes.yaml",
            *("batch.prompts_per_step=64", "batch.group_size=32", "batch.micro_batch_tokens=8192"),
            *(f"data.max_prompt_tokens={2 * PROMPT}", f"rollout.max_new_tokens={MOST}"),
            *(f"cluster.num_nodes={nodes}", f"cluster.num_rollout_nodes={max(1, servers // 4)}"),
            *(f"server.num_servers={servers}", "server.tensor=2", "server.memory_fraction=0.8"),
            *("parallel.tensor=1", f"parallel.pipeline={pipeline}", "parallel.expert=8"),
            *(f"rollout.max_staleness={staleness}", "rollout.on_publish=continue_with_cache"),
        )
        of = replace(of, lengths=log_normal(RESPONSE, 0.7, MOST), save_every=0, num_gpus=gpus, publish=1.0)
        found.append((name, measured, of))
    return found


def rate(of: Job) -> float:
    """Tokens per second and GPU, behind the first steps."""
    record = RunEvents(of).run(num_steps=40)
    return record.tokens / 40 / float(np.mean(record.steps[12:])) / of.num_gpus


def published() -> list[tuple[str, float, float]]:
    """(row, measured, simulated tokens/s/GPU), nothing fitted."""
    return [(name, measured, rate(of)) for name, measured, of in published_jobs()]


def published_fitted() -> tuple[float, float, list[tuple[str, float, float]]]:
    """(servers' factor, trainer's factor, rows): the factors follow from the first two rows, the third is validated."""
    jobs = published_jobs()
    decode = train = 1.0

    def factor(place: int, made: Callable[[float], Job]) -> float:
        low, high = 0.1, 20.0
        for _ in range(24):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if rate(made(middle)) > jobs[place][1] else (low, middle)
        return low

    for _ in range(2):
        decode = factor(1, lambda value: jobs[1][2].scaled(value, train))
        train = factor(0, lambda value: jobs[0][2].scaled(decode, value))
    return decode, train, [(name, measured, rate(of.scaled(decode, train))) for name, measured, of in jobs]


def main() -> None:
    print("quickstart, a core each; K = 1 from rates fitted on K = 0 of the same pair")
    for mode, measured, simulated in pinned():
        print(f"  {mode:<20} measured {measured:5.2f} s  simulated {simulated:5.2f} s  {simulated / measured - 1:+.0%}")
    seconds, measured, simulated = reading()
    print(
        f"  continue, second pair, {1e6 * seconds:.0f} us per token read again fitted on the first: measured"
        f" {measured:5.2f} s  simulated {simulated:5.2f} s  {simulated / measured - 1:+.0%}"
    )
    print("quickstart, shared cores; K = 1 and 4 from rates fitted on K = 0 of the same seed")
    for seed, arm, measured, simulated in shared():
        print(
            f"  seed {seed} {arm}  measured {measured:5.2f} s  simulated {simulated:5.2f} s  {simulated / measured - 1:+.0%}"
        )
    print("NeMo-RL 0.6, Qwen3-30B-A3B, H100: nothing fitted")
    for name, measured, simulated in published():
        print(f"  {name:<22} published {measured:5.0f}  simulated {simulated:5.0f}  {simulated / measured - 1:+.0%}")
    decode, train, rows = published_fitted()
    print(f"the same; servers {decode:.2f} times and trainer {train:.2f} times as slow, fitted on the first two rows")
    for name, measured, simulated in rows:
        print(f"  {name:<22} published {measured:5.0f}  simulated {simulated:5.0f}  {simulated / measured - 1:+.0%}")


if __name__ == "__main__":
    main()

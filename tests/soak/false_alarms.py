"""How often the alert `collapse` and the report's verdicts are wrong, and how soon a fall is found.

    python tests/soak/false_alarms.py [--runs 1000] [--seed 1]

For every kind of curve in which nothing fell: the share of runs of 2000 steps in which an alert would have been told,
without and with the standard errors that a run records, and the share of shorter runs that the report calls learning,
falling, collapsed or set back. Stated is 1 % for each. Then the share of falls from .5 to .3 that are found within 50
steps. Exits with 1 where a share is above the stated one by more than three standard errors.

`waves` are not promised anything: the policy itself drifts to and fro by a third of its rate, and 64 or 512 responses
are drawn from that.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np

from gspo_mega.metrics.trends import find_falls, setbacks_of, trend_of

STATED = 0.01


def correlated(chance: np.random.Generator, runs: int, steps: int, rho: float, spread: float) -> np.ndarray:
    noise = chance.standard_normal((runs, steps)) * spread
    for step in range(1, steps):
        noise[:, step] = rho * noise[:, step - 1] + math.sqrt(1 - rho**2) * noise[:, step]
    return noise


def curves(chance: np.random.Generator, runs: int, steps: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, values, their standard errors), [runs, steps] each."""

    def counted(name: str, probability: np.ndarray | float, size: int) -> tuple[str, np.ndarray, np.ndarray]:
        values = chance.binomial(size, np.broadcast_to(probability, (runs, steps))) / size
        return f"{name} of {size}", values, np.sqrt(values * (1 - values) / size)

    for size in (64, 512):
        for probability in (0.0, 0.0005, 0.002, 0.005, 0.02, 0.1, 0.3, 0.5, 0.9, 0.99):
            yield counted(f"{probability:g}", probability, size)
        for probability in (0.02, 0.1, 0.5):
            spread = math.sqrt(probability * (1 - probability) / size)
            for rho in (0.3, 0.5):
                values = probability + correlated(chance, runs, steps, rho, spread)
                yield f"{probability:g}, rho {rho:g}, of {size}", values, np.full(values.shape, spread)
                swaying = probability + correlated(chance, runs, steps, rho, probability / 3)
                yield counted(f"waves {probability:g}, rho {rho:g},", np.clip(swaying, 0, 1), size)
        for low, high in ((0.01, 0.5), (0.15, 0.83), (0.02, 0.2), (0.3, 0.99)):
            rising = low + (high - low) * np.minimum(np.arange(steps) / (steps / 10), 1)
            yield counted(f"rise {low:g} to {high:g}", rising, size)
        late = 0.01 + 0.49 * np.clip((np.arange(steps) - steps / 2) / 40, 0, 1)
        yield counted("late rise .01 to .5", late, size)
        for name, alpha, beta in (("even", 0.5, 0.5), ("mostly hard", 0.05, 1.0)):
            right = chance.binomial(8, chance.beta(alpha, beta, (runs, steps, size // 8)))
            errors = (right / 8).std(axis=-1) / math.sqrt(size // 8 - 1)
            yield f"groups, {name}, of {size}", right.sum(axis=-1) / size, errors
    for probability in (0.9, 0.99, 0.999):
        name, values, errors = counted(f"{probability:g} - 1", probability, 64)
        yield name, values - 1, errors
    for rho in (0.0, 0.5):
        yield f"around 0, rho {rho:g}", correlated(chance, runs, steps, rho, 0.1), np.full((runs, steps), 0.1)
    yield "exponential", chance.exponential(0.1, (runs, steps)), np.full((runs, steps), 0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, most = np.random.default_rng(args.seed), STATED + 3 * math.sqrt(STATED * (1 - STATED) / args.runs)
    worst, is_wrong = 0.0, False
    print(f"{'kind':<32} alert in 2000 steps  with errors")
    for name, values, errors in curves(chance, args.runs, 2000):
        plain, known = (find_falls(values, of).fallen.any(axis=1).mean() for of in (None, errors))
        print(f"{name:<32} {plain:19.2%}  {known:11.2%}", flush=True)
        if not name.startswith("waves"):
            worst, is_wrong = max(worst, plain, known), is_wrong or max(plain, known) > most
    print(f"the largest of those that are promised something: {worst:.2%}\n")
    few = max(args.runs // 5, 20)
    for steps in (8, 20, 80, 200):
        said: Counter[str] = Counter()
        total = 0
        for name, values, _ in curves(chance, few, steps):
            if "rise" not in name and "waves" not in name:
                total += few
                said.update(trend_of(range(steps), one.tolist()).kind for one in values)
                said["set back"] += sum(bool(setbacks_of(range(steps), one.tolist())) for one in values)
        shares = {kind: said[kind] / total for kind in ("learns", "falls", "collapsed", "set back")}
        is_wrong |= max(shares.values()) > STATED
        print(f"{steps} steps: " + ", ".join(f"{kind} {share:.2%}" for kind, share in shares.items()), flush=True)
    for size in (64, 512):
        for before in (20, 30, 50, 100, 500):
            probability = np.where(np.arange(before + 50) < before, 0.5, 0.3)
            found = []
            for rho in (0.0, 0.5):
                values = chance.binomial(size, np.broadcast_to(probability, (args.runs, before + 50))) / size
                if rho:
                    spread = 0.5 / math.sqrt(size)
                    values = probability + correlated(chance, args.runs, before + 50, rho, spread)
                found.append(float(find_falls(values).fallen[:, before:].any(axis=1).mean()))
            print(
                f"a fall of .2 after {before} steps, {size} responses: {found[0]:.1%}; rho .5: {found[1]:.1%}",
                flush=True,
            )
            is_wrong |= before >= 50 and found[0] < 0.95
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())

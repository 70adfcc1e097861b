"""What the mismatch correction keeps of simulated token noise, for docs/mismatch.md: `correction_bounds.py [--seed N]`.

Noise of three sizes, KL(rollout || trainer) per token of BF16 (6.4e-4), BF16 with experts (1.5e-3), FP8 weights and KV
cache (4.5e-3), and of four shapes, all of mean -KL and variance 2 KL: Gaussian; Student's t with 3 degrees of freedom;
a mixture in which 3 % of the tokens have eight times the sd of the others; one in which .1 % have thirty times it.
Prints a Markdown table. About ten seconds on one core.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

GAPS = {"BF16": 6.4e-4, "BF16, experts": 1.5e-3, "FP8 + KV": 4.5e-3}
SHAPES = ("Gaussian", "Student 3", "3 % x 8", ".1 % x 30")
LENGTHS = (16, 256, 16384)
BOUND = 0.5
FIXED_BAND = (-10 * 3e-4, 10 * 4e-4)
COUNTS = {16: 40_000, 32: 40_000, 256: 20_000, 512: 10_000, 4000: 2_000, 16384: 1_000}


def unit_noise(shape: str, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """`size` float32, mean 0 and sd 1."""
    noise = rng.standard_normal(size, dtype=np.float32)
    if shape == "Student 3":
        noise /= np.sqrt(rng.standard_gamma(1.5, size, dtype=np.float32) / 1.5) * math.sqrt(3)
    elif shape != "Gaussian":
        share, factor = (0.03, 8.0) if shape == "3 % x 8" else (0.001, 30.0)
        wide = rng.random(size, dtype=np.float32) < share
        noise *= np.where(wide, factor, 1.0) / math.sqrt(1 + share * (factor**2 - 1))
    return noise


def scaled_sums(shape: str, length: int, rng: np.random.Generator) -> np.ndarray:
    """Sums over a response of unit noise / sqrt(L), COUNTS[length] of them."""
    step = max(1, 1_000_000 // length)
    sizes = [min(step, COUNTS[length] - start) for start in range(0, COUNTS[length], step)]
    sums = [unit_noise(shape, (size, length), rng).sum(1, dtype=np.float64) for size in sizes]
    return np.concatenate(sums) / math.sqrt(length)


def _outside(means: np.ndarray) -> float:
    return float(((means < FIXED_BAND[0]) | (means > FIXED_BAND[1])).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    rng = np.random.default_rng(parser.parse_args().seed)
    print("| gap | noise | 99.9 % of abs z at L = 16 | 256 | 16384 | dropped at 16 | 256 | 16384 |", end="")
    print(" fixed band drops at 32 | 512 | 4000 |")
    print("|---" * 11 + "|")
    for shape in SHAPES:
        drawn = {length: scaled_sums(shape, length, rng) for length in COUNTS}
        for gap, kl in GAPS.items():
            z = {length: math.sqrt(2 * kl) * values for length, values in drawn.items()}
            cells = [f"{np.quantile(np.abs(z[length]), 0.999):.2f}" for length in LENGTHS]
            cells += [f"{(np.abs(z[length]) > BOUND).mean():.2%}" for length in LENGTHS]
            means = {length: z[length] / math.sqrt(length) - kl for length in (32, 512, 4000)}
            cells += [f"{_outside(values):.0%}" for values in means.values()]
            print(f"| {gap} | {shape} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

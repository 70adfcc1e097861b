"""The bins of response lengths by which metrics are split. Fixed, so that runs and models can be compared.

Owns the edges and their names; no torch.
"""

from __future__ import annotations

import numpy as np

# Fewest tokens of each bin, by the name that a metric has. Each is four times as wide as the one before.
LENGTH_BINS: dict[str, int] = {
    "1-63": 1,
    "64-255": 64,
    "256-1023": 256,
    "1024-4095": 1024,
    "4096-16383": 4096,
    "16384-up": 16384,
}


def rows_by_length(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """[N] bool by the name of each bin that holds any of `lengths` [N], numbers of tokens; 0 is in none."""
    place = np.searchsorted(np.array(list(LENGTH_BINS.values())), lengths, side="right") - 1
    return {name: place == index for index, name in enumerate(LENGTH_BINS) if (place == index).any()}

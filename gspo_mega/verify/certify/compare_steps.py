"""How far a case's optimizer steps are from the reference's, and from what they must be by themselves.

Owns what counts as a difference of norm, step or state; `compare_runs.py` has the tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gspo_mega.verify.certify.steps import Steps

Found = Iterator[tuple[float, str]]
# So many numbers of a tensor may be zero by chance, where their terms cancel to the last bit.
_ZEROS, _ZEROS_SHARE = 3, 1e-6
_CLIP_EPS = 1e-6  # which Megatron adds to the norm before it divides by it


def norm_differences(got: Steps, clip: float) -> Found:
    """(relative difference, place) of the norm from that of whole tensors, in all and by kind of parameter, and of the
    clipped gradient's from what clipping to `clip` leaves; 0 does not clip.
    """
    for step, (norm, counted, whole) in enumerate(zip(got.norms, got.counted, got.whole, strict=False), 1):
        total = sum(whole.values())
        for kind, squares in whole.items():
            # Half of the difference of squares is that of their root.
            yield _relative(abs(counted[kind] - squares) / 2, squares), f"step {step}: {kind}, counted in the norm"
        left = norm if clip <= 0 else norm * min(1.0, clip / (norm + _CLIP_EPS))
        yield _relative(abs(math.sqrt(total) - left), left), f"step {step}: the gradient after clipping"


def differences_of_norm(got: Steps, want: Steps) -> Found:
    """(relative difference, place) of the norm of each step from the reference's."""
    for step, (norm, wanted) in enumerate(zip(got.norms, want.norms, strict=False), 1):
        yield _relative(abs(norm - wanted), wanted), f"step {step}: the norm"


def differences_of_steps(got: Steps, want: Steps) -> Found:
    """(relative difference, place) of each step's clipped gradient, in the tensor where it is largest, and of what its
    routers counted and lost; of Adam's moments, if both went equally many steps.
    """
    if got.names != want.names:
        yield math.inf, "the names of the tensors"
        return
    sketches = [(f"step {n}: clipped gradient of", *pair) for n, pair in enumerate(zip(got.sketches, want.sketches), 1)]
    if len(got.norms) == len(want.norms):
        sketches += [
            (f"after the steps: {name} of", *pair)
            for name, *pair in zip(("first moments", "second moments"), got.moments, want.moments)
        ]
    for text, ours, theirs in sketches:
        error = np.sqrt(np.square(ours[:, 2:] - theirs[:, 2:]).mean(axis=1))
        size = np.sqrt(theirs[:, 0])
        relative = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.sqrt(ours[:, 0]))
        worst = int(np.argmax(np.where(np.isnan(relative), np.inf, relative)))
        yield float(relative[worst]), f"{text} {got.names[worst]}"
    for step, (ours, theirs) in enumerate(zip(got.routing, want.routing, strict=False), 1):
        for key in sorted(ours.keys() | theirs.keys()):
            value, wanted = ours.get(key, math.nan), theirs.get(key, math.nan)
            yield _relative(abs(value - wanted), abs(wanted)), f"step {step}: routing/{key}"


def differences_of_state(got: Steps, want: Steps, counts_zeros: bool) -> Iterator[str]:
    """What must be the same and is not: skipped steps, settings of parameters, buffers, copies on several ranks, and
    with `counts_zeros` the number of a gradient's zeros.
    """
    for step, (ours, theirs) in enumerate(zip(got.skipped, want.skipped, strict=False), 1):
        if ours != theirs:
            yield f"step {step} is {'skipped' if ours else 'not skipped'}"
    for step, (ours, theirs) in enumerate(zip(got.settings, want.settings, strict=False), 1):
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield f"step {step}: lr, weight decay, betas, eps of {name}: {ours.get(name)} for {theirs.get(name)}"
    if counts_zeros and got.names == want.names:
        for step, (ours, theirs) in enumerate(zip(got.sketches, want.sketches), 1):
            by_chance = _ZEROS + _ZEROS_SHARE * np.array(want.sizes)
            for place in np.flatnonzero(np.abs(ours[:, 1] - theirs[:, 1]) > by_chance):
                yield (
                    f"step {step}: {ours[place, 1]:.0f} zeros in the gradient of {got.names[place]}, for"
                    f" {theirs[place, 1]:.0f}"
                )
    for name in sorted(got.buffers.keys() | want.buffers.keys()):
        if got.buffers.get(name) != want.buffers.get(name):
            yield f"buffer {name}"
    for name in got.copies:
        yield f"{name} is not the same on all ranks that hold it"


def _relative(error: float, scale: float) -> float:
    return error / scale if scale > 0 else error

"""When do the server and the trainer agree on a rollout? The rule, on plain arrays.

A position of a sequence goes through every layer once, and depends on all earlier positions. So where the two engines
send a position to different experts in a layer, everything above and after it may differ as well: that is a
consequence. The cause is a difference that has no other below and before it, and only a tie excuses one: two experts
whose router logits are equal up to rounding. Wherever nothing differs up to a position, the log-probs made there must
be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LOG_PROB_TOLERANCE = 1e-4  # nats
TIE_MARGIN = 1e-5  # between router logits
TIES_PER_POSITION = 1e-4


@dataclass
class Sampled:
    """One trajectory as the server returned it: `log_probs` [R] nats; `experts` [P + R - 1, layers, k] ascending, or
    None; `kept` [R]: how many tokens each was sampled from, or None if from all.
    """

    group_id: int
    num_prompt_tokens: int
    log_probs: np.ndarray
    experts: np.ndarray | None
    kept: np.ndarray | None = None


@dataclass
class Scored:
    """The same trajectory in the trainer; `margins` [P + R - 1, layers]: k-th largest router logit minus the next."""

    log_probs: np.ndarray
    experts: np.ndarray | None
    margins: np.ndarray | None


@dataclass
class Agreement:
    """`largest_gap`: of the log-probs of the `num_compared` tokens that no difference of experts came before, nats.
    `causes`: margin of each difference that is no consequence, by (prompt or trajectory, position, layer). `kept`: the
    sizes of the sets of each trajectory that has them.
    """

    num_tokens: int = 0
    num_compared: int = 0
    num_positions: int = 0
    largest_gap: float = 0.0
    causes: dict[tuple[str, int, int], float] = field(default_factory=dict)
    kept: list[np.ndarray] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What keeps the two from agreeing; empty when they do."""
        found = []
        if not self.largest_gap <= LOG_PROB_TOLERANCE:
            found.append(f"log-probs differ by {self.largest_gap:.2e} nats at a token all of whose experts agree")
        wide = {place: margin for place, margin in self.causes.items() if not margin < TIE_MARGIN}
        if wide:
            place, margin = max(wide.items(), key=lambda item: item[1])
            found.append(f"{len(wide)} positions went to other experts without a tie; {place}: margin {margin:.2e}")
        if len(self.causes) > TIES_PER_POSITION * self.num_positions:
            found.append(f"{len(self.causes)} of {self.num_positions} positions went to other experts")
        if self.num_compared < 0.99 * self.num_tokens:
            found.append(f"only {self.num_compared} of {self.num_tokens} tokens could be compared")
        return found


def compare(sampled: list[Sampled], scored: dict[int, Scored]) -> Agreement:
    """Measure a rollout batch; `scored` has every row of `sampled`. A prompt's positions are counted once a group."""
    assert sorted(scored) == list(range(len(sampled)))
    result = Agreement()
    prompts: dict[int, int] = {}
    for row, ours in enumerate(sampled):
        theirs = scored[row]
        assert ours.log_probs.shape == theirs.log_probs.shape
        count, first = len(ours.log_probs), ours.num_prompt_tokens - 1
        agreed = np.ones(first + count, bool)
        if ours.experts is not None:
            assert ours.experts.shape == theirs.experts.shape
            differs = (ours.experts != theirs.experts).any(axis=2)
            agreed = ~np.logical_or.accumulate(differs.any(axis=1))
            for position, layer in zip(*np.nonzero(differs), strict=True):
                if not differs[: position + 1, :layer].any():
                    owner = f"trajectory {row}" if position > first else f"prompt {ours.group_id}"
                    result.causes[owner, int(position), int(layer)] = float(theirs.margins[position, layer])
        gaps = np.abs(ours.log_probs - theirs.log_probs)[agreed[first:]]
        result.num_tokens += count
        if ours.kept is not None:
            result.kept.append(ours.kept)
        result.num_compared += gaps.size
        result.num_positions += count - 1
        result.largest_gap = float(np.max(gaps, initial=result.largest_gap))
        prompts[ours.group_id] = ours.num_prompt_tokens
    result.num_positions += sum(prompts.values())
    return result

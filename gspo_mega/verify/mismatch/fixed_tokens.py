"""The tokens that every evaluation of a mismatch scores: sampled once by the servers, then kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import atomic_write_json
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.verify.mismatch.attribution import TokenPlaces


@dataclass(frozen=True)
class Sampled:
    """One prompt and one response to it. `log_probs`: as returned with the samples, nats, one per response token.
    `sign`: of its advantage, 0 where that is 0 or not known before the run.
    """

    group: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    log_probs: tuple[float, ...]
    sign: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.response)


@dataclass(frozen=True)
class FixedTokens:
    """`routes`: the experts that the server sent each sequence's tokens to as it sampled, int32 [tokens - 1, layers,
    experts per token], in the order of `sequences`; none where the model has no experts.
    """

    sequences: tuple[Sampled, ...]
    routes: tuple[np.ndarray, ...] = ()

    @classmethod
    def of(cls, groups: Sequence[Group]) -> FixedTokens:
        """Of sampled groups. A row's advantage counts where it has one and its tokens have none of their own."""
        trajectories = [t for group in groups for t in group.trajectories]
        routes = tuple(t.routed_experts for t in trajectories if t.routed_experts is not None)
        return cls(
            tuple(
                Sampled(
                    t.group_id,
                    t.prompt.token_ids,
                    tuple(t.response_token_ids),
                    tuple(t.rollout_log_probs),
                    0 if t.token_advantages is not None else int(np.sign(t.advantage or 0.0)),
                )
                for t in trajectories
            ),
            routes if len(routes) == len(trajectories) else (),
        )

    def save(self, folder: Path) -> None:
        """Write into `folder`, as `load` reads it."""
        np.savez(folder / "routes.npz", *self.routes)
        atomic_write_json(folder / "tokens.json", {"sequences": [vars(sequence) for sequence in self.sequences]})

    @classmethod
    def load(cls, folder: Path) -> FixedTokens:
        values: dict[str, Any] = read_json_file(folder / "tokens.json")
        with np.load(folder / "routes.npz") as routes:
            arrays = tuple(routes[name] for name in routes.files)
        sequences = (
            Sampled(s["group"], tuple(s["prompt"]), tuple(s["response"]), tuple(s["log_probs"]), s["sign"])
            for s in values["sequences"]
        )
        return cls(tuple(sequences), arrays)

    @property
    def sampled(self) -> np.ndarray:
        """The log-probs returned with the samples, [sum R] float64 nats."""
        return np.concatenate([np.asarray(s.log_probs, np.float64) for s in self.sequences])

    def tokens(self) -> TokenPlaces:
        """Whose the response tokens are."""
        lengths = [len(s.response) for s in self.sequences]
        groups, signs = (np.array([getattr(s, name) for s in self.sequences]) for name in ("group", "sign"))
        return TokenPlaces(np.repeat(np.arange(len(lengths)), lengths), groups, signs)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of all tokens but the first of each sequence, [sum (tokens - 1)], by sequence."""
        return np.split(values, np.cumsum([len(s.token_ids) - 1 for s in self.sequences])[:-1])

    def of_responses(self, values: np.ndarray) -> np.ndarray:
        """The part of such values that is the responses', [sum R]."""
        parts = zip(self.sequences, self.split(values), strict=True)
        return np.concatenate([part[len(s.prompt) - 1 :] for s, part in parts])

    def batch(self) -> RolloutBatch:
        """A batch whose prompts are each sequence's first token and whose responses are the rest, so that a trainer
        scores all of it. Advantages and rewards are 0.
        """
        groups: dict[int, Group] = {}
        for index, sequence in enumerate(self.sequences):
            first, rest = sequence.token_ids[:1], sequence.token_ids[1:]
            prompt = Prompt(f"budget:{sequence.group}", "budget", first, "")
            group = groups.setdefault(sequence.group, Group(sequence.group, prompt, []))
            row = one_turn_row(
                trajectory_id=f"budget:{index}",
                group_id=sequence.group,
                prompt=prompt,
                response_token_ids=list(rest),
                response_mask=[1] * len(rest),
                rollout_log_probs=[0.0] * len(rest),
                weight_versions=[0] * len(rest),
                finish_reason="length",
                routed_experts=self.routes[index] if self.routes else None,
                reward=0.0,
                advantage=0.0,
            )
            group.episodes.append(Episode.from_row(row))
        return RolloutBatch(0, list(groups.values()))

"""The tokens that every evaluation of a mismatch scores: the servers sample them once, then they are kept on disk."""

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
    `sign`: the sign of its advantage, 0 if that is 0 or not known before the run.
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
    """`routes`: the experts to which the server routed each sequence's tokens as it sampled, int32 [tokens - 1, layers,
    experts per token], in the order of `sequences`; empty if the model has no experts.
    """

    sequences: tuple[Sampled, ...]
    routes: tuple[np.ndarray, ...] = ()

    @classmethod
    def of(cls, groups: Sequence[Group]) -> FixedTokens:
        """Make the tokens from sampled groups. A row's sign is 0 if it has no advantage or its tokens have own ones."""
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
        """Write the tokens into `folder`, as `load` reads them."""
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
        """Return the sequence and prompt of each response token."""
        lengths = [len(s.response) for s in self.sequences]
        groups, signs = (np.array([getattr(s, name) for s in self.sequences]) for name in ("group", "sign"))
        return TokenPlaces(np.repeat(np.arange(len(lengths)), lengths), groups, signs)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split values of all tokens except each sequence's first, [sum (tokens - 1)], by sequence."""
        return np.split(values, np.cumsum([len(s.token_ids) - 1 for s in self.sequences])[:-1])

    def of_responses(self, values: np.ndarray) -> np.ndarray:
        """Return the response tokens' part of values as `split` takes them, [sum R]."""
        parts = zip(self.sequences, self.split(values), strict=True)
        return np.concatenate([part[len(s.prompt) - 1 :] for s, part in parts])

    def batch(self) -> RolloutBatch:
        """Return a batch in which each prompt is its sequence's first token and each response is the rest, so that a
        trainer scores every token. Advantages and rewards are 0.
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

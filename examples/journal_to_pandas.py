"""A run's journal as one row per episode: a pandas DataFrame where pandas is installed, else a list of dictionaries.

    python examples/journal_to_pandas.py runs/quickstart/train

Only steps whose batch is complete are read, so every episode is in one row, with the step that trained on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal


def rows(run: str | Path) -> Iterator[dict[str, Any]]:
    """One dictionary per episode, in the order of the steps. Raises JournalError for a file that is damaged."""
    journal = Journal(RunFolder(run).journal_dir)
    for number in journal.steps():
        record = journal.read(number)
        if record is None or record.batch is None:
            continue  # the step is still being sampled
        for group in record.batch.groups:
            for episode in group.episodes:
                turns = episode.turns
                yield {
                    "step": number + 1,  # files count from 0, metrics and `gspo-mega inspect` from 1
                    "prompt_id": group.prompt.prompt_id,
                    "episode_id": episode.episode_id,
                    "reward": episode.reward,  # None: it could not be scored, and is not trained on
                    "correct": episode.correct,
                    "failure": episode.failure or episode.reward_error,
                    "num_turns": len(turns),
                    "num_tokens": episode.num_sampled_tokens,
                    "is_truncated": episode.is_truncated,
                    "log_prob_mean": mean([value for turn in turns for value in turn.log_probs]),  # nats, by the server
                    "weight_version": min((value for turn in turns for value in turn.weight_versions), default=None),
                    "response": episode.response_text,
                }


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(run: str | Path) -> Any:
    """The rows as a DataFrame, or as a list without pandas."""
    found = list(rows(run))
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    return pandas.DataFrame(found)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/journal_to_pandas.py RUN")
    found = table(sys.argv[1])
    if isinstance(found, list):
        print("\n".join(f"step {row['step']}  reward {row['reward']}  {row['response'][:60]!r}" for row in found))
    else:
        print(found.groupby("step")[["reward", "num_tokens"]].mean())


if __name__ == "__main__":
    main()

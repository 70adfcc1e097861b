"""How long responses are: a constant, a log-normal, the lengths that a journal or a file holds.

Owns reading and drawing them. Lengths are drawn independently: that responses to one prompt resemble each other is left
out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from gspo_mega.base.errors import ConfigError, JournalError
from gspo_mega.base.guarded_files import MOST_BYTES, read_text
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.simulate.server_costs import Array

DEFAULT_SIGMA = 0.7
_FORMS = "constant:TOKENS, lognormal:MEAN, lognormal:MEAN:SIGMA, a run's folder, or a file with one length per line"
_MOST_STEPS_READ = 20


@dataclass(frozen=True)
class Lengths:
    """`drawn`: the lengths that may occur, equally likely; None for a log-normal of `mu`, `sigma`. No response is
    longer than `most` tokens: a longer one ends there.
    """

    described: str
    most: int
    mu: float = 0.0
    sigma: float = 0.0
    drawn: Array | None = None

    def sample(self, rng: np.random.Generator, number: int) -> Array:
        """Whole tokens, at least 1."""
        if self.drawn is not None:
            return rng.choice(self.drawn, number)
        return np.clip(np.rint(np.exp(rng.normal(self.mu, self.sigma, number))), 1, self.most)

    def moments(self) -> tuple[float, float]:
        """(mean, mean square)."""
        if self.drawn is not None:
            return float(self.drawn.mean()), float(np.square(self.drawn).mean())
        # The middle of each of many equally likely parts.
        normal = NormalDist(self.mu, self.sigma)
        values = np.clip([math.exp(normal.inv_cdf((i + 0.5) / 2000)) for i in range(2000)], 1, self.most)
        return float(values.mean()), float(np.square(values).mean())


def constant(tokens: int) -> Lengths:
    return Lengths(f"constant: {tokens} tokens", tokens, drawn=np.array([float(tokens)]))


def of_values(values: Array, described: str) -> Lengths:
    return Lengths(described, int(values.max()), drawn=np.asarray(values, float))


def log_normal(mean: float, sigma: float, most: int) -> Lengths:
    """A log-normal of which what is longer than `most` ends there, with this mean after that."""
    if not 1 <= mean < most:
        raise ConfigError(
            f"--length-distribution: a mean of {mean:g} tokens with at most {most}; valid: 1 to {most - 1}"
        )
    low, high = 0.0, math.log(most) + 10 * sigma + 1
    described = f"log-normal: mean {mean:g} tokens, sigma {sigma:g}, at most {most}"
    for _ in range(60):
        middle = (low + high) / 2
        reached = Lengths(described, most, middle, sigma).moments()[0]
        low, high = (middle, high) if reached < mean else (low, middle)
    return Lengths(described, most, (low + high) / 2, sigma)


def read_lengths(text: str, most: int) -> Lengths:
    """What `--length-distribution` names. Raises ConfigError."""
    place = f"--length-distribution {text}"
    kind, _, rest = text.partition(":")
    if kind in ("constant", "lognormal"):
        try:
            numbers = [float(part) for part in rest.split(":")]
        except ValueError:
            raise ConfigError(f"{place}: not numbers; valid: {_FORMS}") from None
        if kind == "constant" and len(numbers) == 1 and numbers[0].is_integer() and 1 <= numbers[0] <= most:
            return constant(int(numbers[0]))
        if kind == "lognormal" and len(numbers) in (1, 2) and all(number > 0 for number in numbers):
            return log_normal(numbers[0], numbers[1] if len(numbers) == 2 else DEFAULT_SIGMA, most)
        raise ConfigError(f"{place}: not a length from 1 to rollout.max_new_tokens ({most}); valid: {_FORMS}")
    path = Path(text)
    if path.is_dir():
        return _of_journal(path, place)
    if not path.is_file():
        raise ConfigError(f"{place}: no such file or folder; valid: {_FORMS}")
    return _of_file(path, place)


def _of_file(path: Path, place: str) -> Lengths:
    values = []
    try:
        lines = read_text(path, MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdigit() or int(line) < 1:
            raise ConfigError(
                f"{path}:{number}: {line.strip()[:40]!r} is not a length; one whole number from 1 per line"
            )
        values.append(float(line))
    if not values:
        raise ConfigError(f"{place}: the file is empty; one length per line")
    return of_values(np.array(values), f"{len(values)} lengths of {path}")


def _of_journal(folder: Path, place: str) -> Lengths:
    journal = Journal(folder / "journal" if (folder / "journal").is_dir() else folder)
    steps, values = journal.steps(), []
    if not steps:
        raise ConfigError(f"{place}: the folder holds no journal; a run's folder, or its journal, has step_* files")
    read = steps[-_MOST_STEPS_READ:]
    for step in read:
        try:
            record = journal.read_alone(step)
        except JournalError as error:
            raise ConfigError(f"{place}: {error}") from None
        for group in record.groups.values() if record is not None else ():
            values += [episode.num_sampled_tokens for episode in group.episodes]
    if not values:
        raise ConfigError(f"{place}: the journal has no complete episode")
    return of_values(np.array(values, float), f"{len(values)} responses of steps {read[0]} to {read[-1]} of {folder}")

"""Held-out prompts and the results on them: how many responses are correct, and whether the prompts are also trained
on.

`HeldOut` loads the sets of `eval`, and `summarize` turns sampled and scored groups into an `Evaluation`. The collector
samples and the scoring pool scores. Below are the statistics of several samples per prompt (avg@k, pass@k and the
majority's answer, each with the spread between prompts), the comparison of texts that finds held-out prompts in the
training data, and responses as rows of files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from gspo_mega.base.episodes import Episode, Group
from gspo_mega.base.errors import DataError, RewardError
from gspo_mega.base.records import Prompt, are_equal_rewards
from gspo_mega.config.prompt_sources import MOST_KEPT_CHARACTERS, HeldOutSet, names_prompts, reward_names
from gspo_mega.config.schema import Data, OwnReward, Reward, Source
from gspo_mega.data.held_out_responses import clipped, shown_places
from gspo_mega.data.prompts import PromptSource, answer_keys, answer_of, encoder_of
from gspo_mega.data.rows import Enough, Row
from gspo_mega.rewards.functions import problem_of_answer
from gspo_mega.rewards.mathematics import final_answer
from gspo_mega.rewards.weighted_sum import no_verdict

# The name of the training data among those whose texts a set is compared with. No set can have this name.
TRAINING = "training data"
# From GPT-3's contamination check: texts that share a run of 13 words rarely do so by chance.
NUM_WORDS = 13
# A text that has at least this share of a prompt's runs is close to the prompt.
CLOSE_SHARE = 0.5
# A run that occurs in more prompts of a set than this is an instruction that they share, and is not compared.
_MOST_SHARING = 2

_WORD = re.compile(r"\w+|[^\w\s]")
_MARKS = frozenset(".,;:!?\"'`*_$\u2018\u2019\u201c\u201d")


@dataclass(frozen=True)
class Evaluation:
    """The results on one held-out set. Each is a mean over prompts of the means over their scored samples.

    Attributes:
        accuracy: the fraction of correct responses (avg@k). A response is correct if the reward functions say so, or if
            its reward is at least `correct_threshold`. `standard_error`: of the accuracy, from the spread between
            prompts.
        num_samples: includes the `num_reward_failures` samples that could not be scored, which are in no mean.
        num_left_out: rows of the file that were too long.
        turns_mean: answers of the policy in an episode.
        pass_at: by k, [pass@k, its standard error] over the prompts with at least k scored samples.
        majority: [maj@k, its standard error]. It and `pass_at` exist only with several samples per prompt.
    """

    accuracy: float
    standard_error: float
    reward_mean: float
    num_prompts: int
    num_samples: int
    truncated_fraction: float
    response_tokens_mean: float
    num_reward_failures: int
    num_left_out: int = 0
    turns_mean: float = 1.0
    pass_at: dict[str, list[float]] = field(default_factory=dict)
    majority: list[float] | None = None


def summarize(
    groups: list[Group],
    correct_threshold: float | None = None,
    num_left_out: int = 0,
    votes: str = "none",
    place: str = "eval",
) -> Evaluation:
    """The results of sampled and scored groups.

    `votes`: which responses count as the same answer, as in `eval.votes`. `place`: the configuration key of the set,
    for messages. Raises RewardError if no sample could be scored, or if nothing says which responses are correct.
    """
    episodes = [episode for g in groups for episode in g.episodes]
    failed = [episode for episode in episodes if not episode.is_scored]
    scored = [group for g in groups if (group := g.scored)]
    if not scored:
        shown = "".join(
            f"\n  {one.episode_id} ({one.prompt.prompt_id}): {one.failure or one.reward_error}" for one in failed[:5]
        )
        raise RewardError(
            f"held-out evaluation: scoring failed for all {len(episodes)} samples, so there is no accuracy. The first"
            f" failures:{shown}"
        )
    marks = [[is_correct(one, correct_threshold, place) for one in group] for group in scored]
    accuracy = over_prompts(_mean(map(float, group)) for group in marks)
    most = max(len(group) for group in marks)
    return Evaluation(
        accuracy=accuracy.mean,
        standard_error=accuracy.standard_error,
        reward_mean=_mean(_mean(float(one.reward or 0.0) for one in group) for group in scored),
        num_prompts=len(groups),
        num_samples=len(episodes),
        truncated_fraction=_mean(float(one.is_truncated) for one in episodes),
        response_tokens_mean=_mean(float(one.num_sampled_tokens) for one in episodes),
        num_reward_failures=len(failed),
        num_left_out=num_left_out,
        turns_mean=_mean(float(one.num_turns) for one in episodes),
        pass_at={str(k): list(_pass_at(marks, k)) for k in ks_of(most)} if most > 1 else {},
        majority=list(_majority(scored, marks, votes)) if most > 1 and votes != "none" else None,
    )


def _pass_at(marks: list[list[bool]], k: int) -> HeldOutEstimate:
    return over_prompts(pass_at(len(group), sum(group), k) for group in marks if len(group) >= k)


def _majority(scored: list[list[Episode]], marks: list[list[bool]], votes: str) -> HeldOutEstimate:
    read = _final_answer if votes == "final_answer" else str.strip
    return over_prompts(
        majority_correct([(read(one.response_text) or None, mark) for one, mark in zip(group, right, strict=True)])
        for group, right in zip(scored, marks, strict=True)
    )


def _final_answer(text: str) -> str:
    found = final_answer(text)
    return "" if found is None else "".join(str(found).split()).strip("$.").casefold()


def _mean(values: Any) -> float:
    return over_prompts(values).mean


def is_correct(episode: Episode, threshold: float | None, place: str = "eval") -> bool:
    """Whether a scored episode is correct. Raises RewardError if there is no `threshold` and no reward function says
    it.
    """
    assert episode.reward is not None
    if threshold is not None:
        return episode.reward >= threshold or are_equal_rewards((episode.reward, threshold))
    if episode.correct is None:
        raise RewardError(no_verdict(episode.reward_parts, place))
    return episode.correct


class HeldOut:
    """The held-out `sets` of a run, and a check of the training data against them. Raises DataError as `LoadedSet`."""

    def __init__(self, sets: Sequence[HeldOutSet], reward: Reward, data: Data, tokenizer: Any) -> None:
        self.sets = [LoadedSet(one, reward, tokenizer) for one in sets]
        self._reward, self._data = reward, data
        for number, one in enumerate(self.sets):
            for other in self.sets[:number]:
                for words in other.words:
                    one.compare(words, other.settings.name)

    def check_of(self, source: Source, needs_answers: bool = True) -> Callable[[Row], str | None]:
        """The check of a training file's rows: it returns why the file's rewards cannot use the answer of a row, or
        None. `needs_answers`: false for demonstrations, which need no answer. The check also records rows whose prompt
        is a held-out one.
        """
        check_answer = row_check(self._reward, source.reward, self._data)
        key = self._data.prompt_key

        def check(row: Row) -> str | None:
            if self.sets:
                words = words_of(row[key])
                for one in self.sets:
                    one.compare(words, TRAINING)
            return check_answer(row) if needs_answers else None

        return check

    def report(self) -> list[str]:
        """Lines for the user about all sets. Call it after the training files were read."""
        lines = [line for one in self.sets for line in one.report()]
        if self.sets and not names_prompts(self._data):
            lines.append(
                "notice   no training data is named (data.path), so the held-out prompts are not compared with any"
            )
        return lines


class LoadedSet:
    """The prompts of one held-out set, and which of them the training data and other sets contain.

    Raises DataError if the file or a row is malformed, or if there are fewer prompts than `num_prompts`.
    """

    def __init__(
        self,
        settings: HeldOutSet,
        reward: Reward,
        tokenizer: Any,
        enough: Enough = lambda num_rows: False,
    ) -> None:
        """`enough(n)`: whether n rows of the file are enough, as for `open_rows`."""
        self.settings = settings
        data, place = settings.data, settings.place
        check_answer = row_check(reward, settings.reward, data)
        texts: list[list[str]] = []

        def check(row: Row) -> str | None:
            texts.append(words_of(row[data.prompt_key]))
            return check_answer(row)

        self.source = source = PromptSource(
            settings.source,
            settings.path,
            data,
            encoder_of(data, tokenizer),
            check,
            settings.template,
            settings.template_keys,
            enough,
        )
        self.prompts: list[Prompt] = list(source.items(settings.num_prompts))
        self.num_left_out = source.num_overlong
        if settings.num_prompts is not None and source.is_whole and len(self.prompts) < settings.num_prompts:
            raise DataError(
                f"{settings.path}: {place}.num_prompts asks for {settings.num_prompts} prompts, but there are"
                f" {len(self.prompts)} ({source.num_overlong} left out as longer than data.max_prompt_tokens,"
                f" {source.num_unreadable} left out because their answers cannot be read)"
            )
        self.rows = [int(prompt.prompt_id.rpartition(":")[2]) for prompt in self.prompts]
        self.words = [texts[row] for row in self.rows]
        self._texts = PromptTexts(self.words)
        self._same: dict[str, set[int]] = {}
        self._close: dict[str, set[int]] = {}

    def compare(self, words: list[str], whose: str) -> None:
        """Record which prompts the text `words` is the same as or close to. `whose`: the set it is from, or
        `TRAINING`.
        """
        if (same := self._texts.same_as(words)) is not None:
            self._same.setdefault(whose, set()).add(same)
        elif close := self._texts.close_to(words):
            self._close.setdefault(whose, set()).update(close)

    def report(self) -> list[str]:
        """Lines for the user about the set. Call it after the training files were read."""
        path = self.settings.path
        left_out = f"; {self.num_left_out} longer than data.max_prompt_tokens and left out" if self.num_left_out else ""
        lines = [f"held out {path}: {len(self.prompts)} prompts{left_out}"]
        if (unreadable := self.source.unreadable_line()) is not None:
            lines.append(f"notice   {unreadable}")
        if same := self._same.get(TRAINING):
            number, row = len(same), self.rows[min(same)] + 1
            if number == len(self.prompts):
                said = f"every held-out prompt ({number}) is also in the training data: the accuracy is not held-out"
            elif number == 1:
                said = f"1 of {len(self.prompts)} held-out prompts is also in the training data (row {row} of {path})"
            else:
                said = f"{number} of {len(self.prompts)} held-out prompts are also in the training data (the first is"
                said += f" row {row} of {path})"
            lines.append(f"notice   {said}")
        if close := self._close.get(TRAINING, set()) - self._same.get(TRAINING, set()):
            lines.append(
                f"notice   {len(close)} of {len(self.prompts)} held-out prompts share at least half of their runs of"
                f" {NUM_WORDS} words with a training prompt (the first is row {self.rows[min(close)] + 1} of {path}):"
                " check whether they are the same problems"
            )
        for other in sorted((self._same.keys() | self._close.keys()) - {TRAINING}):
            shared = self._same.get(other, set()) | self._close.get(other, set())
            lines.append(
                f"notice   {len(shared)} of {len(self.prompts)} held-out prompts of set {self.settings.name} are also"
                f" in set {other}, or close to one of its prompts (the first is row {self.rows[min(shared)] + 1} of"
                f" {path})"
            )
        return lines


def row_check(reward: Reward, own_reward: OwnReward | None, data: Data) -> Callable[[Row], str | None]:
    """A check of a row's answer against the rewards that will score it. It returns what is wrong, or None.

    `own_reward`: replaces the rewards of the section `reward` if it is not None. `data`: how the row is read.
    """
    names = reward_names(reward, own_reward)
    keys = " and ".join(repr(key) for _, key in answer_keys(data))

    def check(row: Row) -> str | None:
        problem = problem_of_answer(answer_of(row, data), names)
        return None if problem is None else f"{keys}: {problem}"

    return check


class HeldOutEstimate(NamedTuple):
    """A mean over prompts and its standard error, from the spread between prompts (0 for one prompt)."""

    mean: float
    standard_error: float


def over_prompts(values: Iterable[float]) -> HeldOutEstimate:
    """The mean of one value per prompt, with its standard error. Raises ValueError if there are no values."""
    kept = list(values)
    if not kept:
        raise ValueError("there is no prompt to take the mean over")
    mean = math.fsum(kept) / len(kept)
    spread = math.fsum((value - mean) ** 2 for value in kept) / max(len(kept) - 1, 1)
    return HeldOutEstimate(mean, math.sqrt(spread / len(kept)))


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is correct, from n samples of a prompt of
    which c are correct: 1 - C(n - c, k) / C(n, k). Raises ValueError if k is below 1 or above n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: k must be from 1 to {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """The values of k for which pass@k is computed: the powers of two below the number of samples, and that number."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return [*powers, num_samples]


def majority_correct(votes: Sequence[tuple[Hashable | None, bool]]) -> float:
    """Whether the answer that most samples of a prompt gave is correct: 1 or 0, or with a tie the correct share of the
    tied answers. 0 if no sample votes.

    `votes`: for each sample its answer, or None if it does not vote, and whether it is correct.
    """
    # All correct samples count as one answer, even if they wrote it in different ways.
    counts: dict[tuple[bool, Hashable], int] = {}
    for answer, is_correct in votes:
        if answer is not None:
            key = (True, None) if is_correct else (False, answer)
            counts[key] = counts.get(key, 0) + 1
    most = [key for key, count in counts.items() if count == max(counts.values())]
    return sum(is_correct for is_correct, _ in most) / len(most) if most else 0.0


def words_of(prompt: Any) -> list[str]:
    """The words and signs of a prompt (a text, or messages), without case, white space, quotes and punctuation. Signs
    such as + and = are kept: `1+1` and `1-1` are different prompts.
    """
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    found = _WORD.findall(unicodedata.normalize("NFKC", str(prompt)).casefold())
    return [word for word in found if word not in _MARKS]


class PromptTexts:
    """The prompts of one set, to find whether a text is the same as one of them or close to one. A prompt is identified
    by its number.
    """

    def __init__(self, prompts: Iterable[Sequence[str]]) -> None:
        """`prompts`: the words of each prompt, from `words_of`."""
        self._by_digest: dict[bytes, int] = {}
        having: defaultdict[int, list[int]] = defaultdict(list)
        for number, words in enumerate(prompts):
            self._by_digest.setdefault(_digest(words), number)
            for run in _runs(words):
                having[run].append(number)
        self._having = {run: numbers for run, numbers in having.items() if len(numbers) <= _MOST_SHARING}
        self._num_runs = Counter(number for numbers in self._having.values() for number in numbers)

    def same_as(self, words: Sequence[str]) -> int | None:
        """The number of the prompt with exactly these words, or None."""
        return self._by_digest.get(_digest(words))

    def close_to(self, words: Sequence[str]) -> list[int]:
        """The numbers of the prompts of which at least half of the runs of 13 words are in the text. Shorter prompts
        have no runs.
        """
        if not self._having or len(words) < NUM_WORDS:
            return []
        hits = Counter(number for run in _runs(words) for number in self._having.get(run, ()))
        return [number for number, count in hits.items() if count >= CLOSE_SHARE * self._num_runs[number]]


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _runs(words: Sequence[str]) -> set[int]:
    return {hash(tuple(words[start : start + NUM_WORDS])) for start in range(len(words) - NUM_WORDS + 1)}


def write_responses(file: TextIO, asked: HeldOutSet, groups: list[Group]) -> None:
    """Append every response of a set to `file` as one JSON object per line, whether it was scored or not. The response
    of an episode with several turns is the text of its last turn.
    """
    for group in groups:
        for sample, episode in enumerate(group.episodes):
            file.write(json.dumps(_response_row(asked, sample, episode), ensure_ascii=False) + "\n")
    file.flush()


def kept_responses(asked: HeldOutSet, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The first response to some prompts of a set, with long texts cut, for the run folder
    (`data/held_out_responses.py`). `num_correct` of the prompt's `num_scored` samples are correct.
    """
    rows = []
    for group in (groups[place] for place in shown_places(len(groups))):
        row = _response_row(asked, 0, group.episodes[0])
        marks = [is_correct(one, asked.correct_threshold, asked.place) for one in group.scored or ()]
        for key in ("prompt", "answer", "response", "failure"):
            value = row[key] if isinstance(row[key], str) else json.dumps(row[key], ensure_ascii=False)
            if len(value) > MOST_KEPT_CHARACTERS:
                row[key] = clipped(value)
        rows.append(row | {"num_scored": len(marks), "num_correct": sum(marks)})
    return rows


def _response_row(asked: HeldOutSet, sample: int, episode: Episode) -> dict[str, Any]:
    return {
        "set": asked.name,
        "row": int(episode.prompt.prompt_id.rpartition(":")[2]) + 1,
        "sample": sample,
        "episode_id": episode.episode_id,
        "prompt": episode.prompt.text,
        "answer": episode.prompt.answer,
        "response": episode.response_text,
        "reward": episode.reward,
        "correct": is_correct(episode, asked.correct_threshold, asked.place) if episode.is_scored else None,
        "reward_parts": episode.reward_parts,
        "failure": episode.failure or episode.reward_error,
        "num_tokens": episode.num_sampled_tokens,
        "num_turns": episode.num_turns,
        "is_truncated": episode.is_truncated,
    }

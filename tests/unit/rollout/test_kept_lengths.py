"""The length certificate through the correction: what its mask keeps of a whole run has the lengths that were sampled.

The responses are those of a run sampled ahead, of several weight versions and long-tailed lengths; a token's gap between
trainer and server is drawn here, independent of its response's length. The control is a bound on the summed log ratio
that is not scaled with the length: on the same gaps the same statistic sees that it is a length filter.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import zlib
from collections import Counter

import ahead_support
import chaos_server
import numpy as np
import pytest
import torch
from fake_answers import EOS, VOCAB
from waiting import until

from gspo_mega.algorithm.correction import CorrectionRule, correct_segments
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.config.schema import Mismatch

MOST_TOKENS, NUM_STEPS, STALENESS, PROMPTS, GROUP = 1200, 6, 2, 20, 4
DEFAULT = Mismatch()
RULE = CorrectionRule(
    DEFAULT.correction, DEFAULT.bound_nats, DEFAULT.token_veto_nats, DEFAULT.kept_weight, DEFAULT.segment_tokens
)
# Chi-squared of a share that is the same in four bins: above this in one of 1000 cases.
CHI_SQUARED_3 = 16.3
CHI_SQUARED_4 = 18.5  # as above, where the four shares are known beforehand
KL, MOVED = 4.5e-3, 2e-3  # nats per token: of the engines with an FP8 KV cache; of a version to the next one
BROKEN = 1 / 12  # share of the responses whose every token is 3 nats off
# The gaps of every batch are drawn this often: one run has too few responses for a share of some per cent.
NUM_DRAWS = 10


def long_tailed(name: str) -> tuple[list[int], list[float]]:
    """The response of the sample `name`, of lognormal length: one in eighty is longer than 1,100 tokens."""
    rng = random.Random(zlib.crc32(name.encode()))
    length = min(MOST_TOKENS, 1 + int(rng.lognormvariate(math.log(80), 1.2)))
    token_ids = [rng.randint(3, VOCAB - 1) for _ in range(length)]
    if length < MOST_TOKENS:
        token_ids[-1] = EOS
    return token_ids, [-rng.random() * 3 for _ in range(length)]


class Run(ahead_support.Ahead):
    """A run in which no clock, but the names of the samples say which weights sampled which token: a response of a group
    that is admitted after the first step waits in its middle for the next publish, and all publishes wait for those.
    """

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.num_held = Counter()
        for server in self.servers:
            server.holds = functools.partial(self._holds, server)

    def _holds(self, server, request_id: str, num_tokens: int) -> bool:
        name = request_id.rpartition(".")[0]
        version = int(re.findall(r"-g(\d+)-", name)[0]) // PROMPTS - STALENESS  # under which its group is admitted
        if version < 1 or num_tokens != max(1, len(long_tailed(name)[0]) // 2):
            return False
        self.num_held[name] += 1
        return server.version <= version

    def step(self, step, on_wait=lambda: None):
        taken = super().step(step, on_wait)
        num_admitted = min(step, NUM_STEPS - 1 - STALENESS) * PROMPTS * GROUP
        until(lambda: len(self.num_held) == num_admitted, 60)
        return taken


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Of every batch of a complete run: the responses' names, the weight versions that sampled them, and [N, V] float64,
    the tokens of each response by version.
    """
    attempt = RunFolder(tmp_path_factory.mktemp("kept_lengths") / "run").new_attempt()
    atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
    with pytest.MonkeyPatch.context() as patch:
        for module in (chaos_server, ahead_support):
            patch.setattr(module, "sample_of", long_tailed)
        run = Run(
            attempt,
            max_staleness=STALENESS,
            order="completion",
            num_steps=NUM_STEPS,
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            max_new_tokens=MOST_TOKENS,
            token_seconds=0.0,
            progress_deadline_seconds=20.0,
        )
        try:
            run.run()
            assert run.broken() == {}, "trained is not what was sampled"
            found = []
            for batch in run.batches:
                of_tokens = [np.array(episode.turns[0].weight_versions) for episode in batch.episodes]
                versions = np.unique(np.concatenate(of_tokens))
                names = [episode.episode_id for episode in batch.episodes]
                lengths = np.stack([(v[:, None] == versions).sum(axis=0) for v in of_tokens]).astype(np.float64)
                found.append((names, versions, lengths))
            return found
        finally:
            run.close()


def test_the_run_is_one_to_judge_by(batches):
    of_batches = [lengths for _, _, lengths in batches]
    lengths = np.concatenate([batch.sum(axis=1) for batch in of_batches])
    assert len(lengths) == NUM_STEPS * PROMPTS * GROUP and np.quantile(lengths, 0.95) > 4 * np.median(lengths)
    assert sum(((batch > 0).sum(axis=1) > 1).sum() for batch in of_batches) > 50, "responses of several versions"
    assert sum((batch >= RULE.segment_tokens).sum() for batch in of_batches) > 200, "segments that are judged"


def judge(batches, rule: CorrectionRule, kl: float, broken: float) -> dict[str, np.ndarray]:
    """Over all draws of the gaps: `length`, number of `parts` that are judged, `is_broken`, whether the rule keeps it, and
    whether the control does. A response's draws follow from its name.
    """
    found: dict[str, list[np.ndarray]] = {"length": [], "parts": [], "is_broken": [], "kept": [], "control": []}
    for draw, (names, versions, lengths) in itertools.product(range(NUM_DRAWS), batches):
        of_version = kl + MOVED * np.arange(lengths.shape[1])[::-1]
        rngs = [np.random.default_rng((17, draw, zlib.crc32(name.encode()))) for name in names]
        is_broken = np.array([rng.random() for rng in rngs]) < broken
        normal = np.stack([rng.standard_normal(NUM_STEPS)[versions] for rng in rngs])
        sums = np.sqrt(2 * of_version * lengths) * normal - of_version * lengths
        sums -= 3.0 * lengths * is_broken[:, None]
        result = correct_segments(rule, torch.from_numpy(sums), torch.from_numpy(lengths), torch.zeros(len(lengths)))
        found["length"].append(lengths.sum(axis=1))
        found["parts"].append(result.num_judged.numpy())
        found["is_broken"].append(is_broken)
        found["kept"].append(result.result.keep.numpy())
        found["control"].append(np.abs(sums.sum(axis=1)) <= rule.bound_nats)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def kept_by_quartile(lengths: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, float]:
    """Share kept of each quarter of the lengths sampled, and chi-squared of its being the same in all four."""
    quartile = np.searchsorted(np.quantile(lengths, [0.25, 0.5, 0.75]), lengths)
    shares, counts = np.array([kept[quartile == i].mean() for i in range(4)]), np.bincount(quartile, minlength=4)
    share = kept.mean()
    return shares, float((counts * (shares - share) ** 2).sum() / (share * (1 - share)))


def test_the_default_mask_drops_the_broken_at_every_length_and_keeps_the_lengths_sampled(batches):
    found = judge(batches, RULE, KL, BROKEN)
    shares, chi_squared = kept_by_quartile(found["length"], found["kept"])
    assert 0.9 < found["kept"].mean() < 0.93 and chi_squared < CHI_SQUARED_3, (shares, chi_squared)
    assert not found["kept"][found["is_broken"]].any() and found["kept"][~found["is_broken"]].mean() > 0.998


def chance_to_keep(batches, kl: float) -> np.ndarray:
    """Of each response, in the order of `judge`'s first draw: the probability that noise leaves it inside the band, whole
    and in every segment of at least `segment_tokens` tokens. Sampled from the definition, without the product's code.
    """
    chances, rng = [], np.random.default_rng(3)
    for _, _, lengths in batches:
        deviations = np.sqrt(2 * (kl + MOVED * np.arange(lengths.shape[1])[::-1]))
        noise = deviations * rng.standard_normal((40_000, lengths.shape[1]))
        for row in lengths:
            inside = np.abs(noise @ np.sqrt(row / row.sum())) <= RULE.bound_nats
            chances.append(
                (inside & (np.abs(noise[:, row >= RULE.segment_tokens]) <= RULE.bound_nats).all(axis=1)).mean()
            )
    return np.array(chances)


def test_where_noise_alone_leaves_the_default_band_it_does_so_at_every_length(batches):
    """The noise of one token is half the bound, so that responses are dropped by nothing but chance: one in twenty of
    those that are judged once, at every length. One that several versions sampled is judged as a whole and in its
    segments: at most one in twenty of them is dropped by each part. Longer responses have more parts; how many depends
    on when the run published.
    """
    kl = RULE.bound_nats**2 / 8
    found = judge(batches, RULE, kl, 0.0)
    chance = np.tile(chance_to_keep(batches, kl), NUM_DRAWS)
    once = np.tile(np.concatenate([(lengths > 0).sum(axis=1) == 1 for _, _, lengths in batches]), NUM_DRAWS)
    segments = np.concatenate([(lengths >= RULE.segment_tokens).sum(axis=1) for _, _, lengths in batches])
    assert np.ptp(chance[once]) < 0.02 and chance.min() < chance[once].min() - 0.03
    assert (chance >= 1 - 0.06 * np.tile(1 + segments, NUM_DRAWS)).all(), "more than its parts drop together"
    shares, chi_squared = kept_by_quartile(found["length"][once], found["kept"][once])
    assert 0.93 < found["kept"][once].mean() < 0.97 and chi_squared < CHI_SQUARED_3, (shares, chi_squared)
    quartile = np.searchsorted(np.quantile(found["length"], [0.25, 0.5, 0.75]), found["length"])
    sums = [np.bincount(quartile, of, minlength=4) for of in (found["kept"], chance, chance * (1 - chance))]
    chi_squared = float(((sums[0] - sums[1]) ** 2 / sums[2]).sum())
    assert chi_squared < CHI_SQUARED_4, (sums, chi_squared)


def test_a_bound_that_is_not_scaled_with_the_length_is_seen(batches):
    found = judge(batches, RULE, KL, BROKEN)
    shares, chi_squared = kept_by_quartile(found["length"], found["control"])
    assert chi_squared > 500 and shares[0] > 0.5 > 0.2 > shares[3], (shares, chi_squared)
    assert found["length"][found["control"]].mean() < 0.8 * found["length"].mean()

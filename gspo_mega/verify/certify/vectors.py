"""Replay reference vectors through this package's own functions and compare every number.

No formula is written here: each case runs the code that the trainer runs, in float64, with gradients from autograd. A
number agrees within a relative tolerance of 1e-12 (1e-10 for the cases that the file's header names); where 0 is
expected, within 1e-15 absolute. An objective is a sum whose terms nearly cancel, so a rounding error of its terms is
allowed as well: 1e-15 of their absolute sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_mega.algorithm.advantages import group_advantages
from gspo_mega.algorithm.correction import (
    MAXIMUM_NAMES,
    SUM_NAMES,
    CorrectionMode,
    CorrectionResult,
    CorrectionRule,
    correct_around,
    effective_sample_fraction,
    mismatch_metrics,
    mismatch_sums,
    sequence_mean_log_ratio,
)
from gspo_mega.algorithm.diagnostics import POLICY_SUMS, band_fractions, policy_metrics, policy_sums
from gspo_mega.algorithm.objective import (
    ObjectiveOutput,
    mini_batch_denominator,
    policy_objective,
    sequence_log_ratio_sums,
)
from gspo_mega.algorithm.terms import ObjectiveSettings
from gspo_mega.base.errors import DataError, GspoMegaError
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.verify.certify.vector_file import (
    Combination,
    clip_of,
    decode_array,
    parse_combination,
    ratio_of,
    read_vector_file,
)

ZERO_TOLERANCE = 1e-15
NOISE = 1e-40  # an expected 0 computed with 60 digits may read 4e-62
SHOWN_MISMATCHES = 4


def replay_file(path: Path) -> tuple[int, list[str]]:
    """Return (number of cases that agree, one line per case that does not). Raises DataError for a malformed file."""
    file = read_vector_file(path)
    passed, failures = 0, []
    runs = [(case, replay_case) for case in file.cases] + [(case, replay_mismatch_case) for case in file.mismatch_cases]
    for case, replay in runs:
        try:
            wrong = list(replay(case, file.tolerance(case["name"])))
        except DataError as error:
            raise DataError(f"{path}: case {case['name']}: {error}") from error
        except (GspoMegaError, ValueError) as error:
            wrong = [f"refused: {error}"]
        if wrong:
            more = f"; and {len(wrong) - SHOWN_MISMATCHES} more" if len(wrong) > SHOWN_MISMATCHES else ""
            failures.append(f"FAIL {case['name']}: {'; '.join(wrong[:SHOWN_MISMATCHES])}{more}")
        else:
            passed += 1
    return passed, failures


def agrees(got: float, expected: float, rtol: float, atol: float = 0.0) -> bool:
    """Return whether both are the same infinity, or differ by at most rtol * |expected| + atol (at least 1e-15 if 0 is
    expected).
    """
    if got == expected:
        return True
    if not (math.isfinite(got) and math.isfinite(expected)):
        return False
    return abs(got - expected) <= max(rtol * abs(expected) + atol, ZERO_TOLERANCE if abs(expected) < NOISE else 0.0)


def compare(name: str, got: Any, expected: Any, rtol: float, atol: float = 0.0) -> Iterator[str]:
    """Yield one line per number of `expected` (a number or a nested list) that `got` does not agree with."""
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            yield f"{name}: {len(got) if isinstance(got, list) else 'no'} entries, expected {len(expected)}"
            return
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from compare(f"{name}[{index}]", one, other, rtol, atol)
    elif isinstance(expected, bool) or not isinstance(expected, (int, float)) or math.isnan(expected):
        raise DataError(f"{name}: expected value {expected!r} is not a number")
    elif not agrees(float(got), float(expected), rtol, atol):
        yield f"{name} is {got!r}, expected {expected!r}"


class _Packed:
    """A case's rows laid out flat: token tensors [T] float64, and `segment_ids`."""

    def __init__(self, mask_rows: list[list[float]]) -> None:
        self.row_lengths = [len(row) for row in mask_rows]
        self.num_sequences = len(mask_rows)
        self.segment_ids = torch.repeat_interleave(
            torch.arange(self.num_sequences), torch.tensor(self.row_lengths, dtype=torch.int64)
        )
        self.mask = self.flat(mask_rows).bool()
        self.lengths = torch.tensor([sum(1 for m in row if m) for row in mask_rows], dtype=torch.int64)

    def flat(self, rows: list[list[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    def rows(self, values: Tensor) -> list[list[float]]:
        return [part.tolist() for part in values.split(self.row_lengths)] if self.row_lengths else []


def replay_case(case: dict[str, Any], rtol: float) -> Iterator[str]:
    """Yield what does not agree in one objective case: first every expected combination, then the diagnostics."""
    inputs = case["inputs"]
    packed = _Packed(inputs["mask"])
    advantages = _advantages(inputs, packed.num_sequences)
    for key, expected in case["expected"].items():
        combination = parse_combination(key)
        log_probs = packed.flat(inputs["logp"]).requires_grad_()
        keep = None if inputs.get("keep") is None else torch.tensor(inputs["keep"])
        output = _run(combination, inputs, packed, log_probs, advantages, keep)
        output.objective_sum.backward()
        rounding = 1e-15 * output.sequence_terms.abs().sum().item()
        yield from compare(f"{key} objective", output.value.item(), expected["objective"], rtol, rounding)
        yield from compare(
            f"{key} differentiated objective", output.objective_sum.item(), expected["objective"], rtol, rounding
        )
        yield from compare(f"{key} loss", output.loss.item(), expected["loss"], rtol, rounding)
        assert log_probs.grad is not None  # backward() has filled it
        yield from compare(f"{key} gradient", packed.rows(log_probs.grad), expected["grad_objective_wrt_logp"], rtol)
        wrong = list(_compare_flags(key, output, packed, advantages, expected, rtol))
        if wrong and keep is not None:
            # The schema leaves open whether a rejected row also counts as clipped; here it does not. Accept either.
            ignoring_keep = _run(combination, inputs, packed, log_probs, advantages, None)
            wrong = wrong if list(_compare_flags(key, ignoring_keep, packed, advantages, expected, rtol)) else []
        yield from wrong
    yield from _compare_diagnostics(case, packed, advantages, rtol)


def _advantages(inputs: dict[str, Any], num_sequences: int) -> Tensor:
    if inputs.get("advantages") is not None:
        return torch.tensor(inputs["advantages"], dtype=torch.float64)
    if inputs.get("rewards") is None:
        return torch.zeros(num_sequences, dtype=torch.float64)
    settings = inputs["adv_cfg"]
    rewards, group_ids = torch.tensor(inputs["rewards"], dtype=torch.float64), torch.tensor(inputs["group_ids"])
    return group_advantages(rewards, group_ids, settings["std_ddof"], settings["norm_std"], settings["std_eps"])


def _run(
    combination: Combination,
    inputs: dict[str, Any],
    packed: _Packed,
    log_probs: Tensor,
    advantages: Tensor,
    keep: Tensor | None,
) -> ObjectiveOutput:
    clip_low, clip_high = clip_of(combination.algorithm, inputs)
    recipe = RECIPES.get(combination.algorithm)
    settings = ObjectiveSettings(
        ratio=ratio_of(combination.algorithm),
        clip_low=clip_low,
        clip_high=clip_high,
        surrogate="clip" if recipe is None else recipe.surrogate,
        dual_clip=inputs["dual_clip_c"] if combination.dual else None,
        aggregation=combination.aggregation,
        norm_constant_tokens=inputs.get("norm_const"),
    )
    lengths, weights = packed.lengths, None
    group_ids = torch.tensor(inputs["group_ids"], dtype=torch.int64)
    episodes = _Episodes(packed, inputs)
    counted = episodes.lengths > 0 if not combination.denominator_all else torch.ones_like(episodes.lengths).bool()
    denominator = mini_batch_denominator(
        settings.aggregation, episodes.lengths[counted].tolist(), episodes.group_ids[counted].tolist()
    )
    old_log_probs, mask, segment_ids = packed.flat(inputs["old_logp"]), packed.mask, packed.segment_ids
    if combination.algorithm == "gspo_rawseq":
        # exp of the whole sum is GSPO's ratio for a response of one token whose log-ratio is that sum; if tokens are
        # summed, the term is then weighted by the true length.
        if combination.aggregation not in ("sequence_mean_token_mean", "group_mean_token_mean"):
            weights = lengths.double()
        log_probs = sequence_log_ratio_sums(log_probs, old_log_probs, mask, segment_ids, packed.num_sequences)
        old_log_probs, mask, segment_ids = torch.zeros_like(log_probs), lengths > 0, torch.arange(packed.num_sequences)
        lengths = mask.long()
    return policy_objective(
        settings,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        mask=mask,
        segment_ids=segment_ids,
        num_sequences=packed.num_sequences,
        advantages=advantages,
        lengths=lengths,
        denominator=denominator,
        keep=keep,
        token_advantages=None if inputs.get("token_advantages") is None else packed.flat(inputs["token_advantages"]),
        sequence_weights=weights,
        group_sizes=(group_ids[:, None] == episodes.group_ids[None, counted]).sum(dim=1),
        branch_weights=episodes.branch_weights,
        rollout_log_probs=packed.flat(inputs["rollout_logp"]) if inputs.get("rollout_logp") else None,
    )


class _Episodes:
    """A case's episodes, in ascending order of `episode_ids`; if the case has no such ids, each row is an episode.
    `lengths`, `group_ids`: per episode. `branch_weights` [rows]: each row's share of its episode's tokens.
    """

    def __init__(self, packed: _Packed, inputs: dict[str, Any]) -> None:
        group_ids = torch.tensor(inputs["group_ids"], dtype=torch.int64)
        self.lengths, self.group_ids, self.branch_weights = packed.lengths, group_ids, None
        if inputs.get("episode_ids") is not None:
            ids, rows = torch.unique(torch.tensor(inputs["episode_ids"]), return_inverse=True)
            self.lengths = torch.zeros(len(ids), dtype=torch.int64).index_add(0, rows, packed.lengths)
            self.group_ids = torch.zeros(len(ids), dtype=torch.int64).scatter(0, rows, group_ids)
            self.branch_weights = packed.lengths.double() / self.lengths.clamp(min=1)[rows]


def _sums(output: ObjectiveOutput, packed: _Packed, advantages: Tensor) -> Tensor:
    return policy_sums(
        output, mask=packed.mask, segment_ids=packed.segment_ids, lengths=packed.lengths, advantages=advantages
    )


def _compare_flags(
    key: str, output: ObjectiveOutput, packed: _Packed, advantages: Tensor, expected: dict[str, Any], rtol: float
) -> Iterator[str]:
    sums = _sums(output, packed, advantages)
    total: dict[str, float] = dict(zip(POLICY_SUMS, sums.tolist(), strict=True))
    for name, field in (
        ("clipped_high", "tokens_clipped_high"),
        ("clipped_low", "tokens_clipped_low"),
        ("dual_clipped", "tokens_dual_clipped"),
    ):
        yield from compare(f"{key} {field}", total[f"{name}_tokens"], expected[field], rtol)
    yield from compare(f"{key} tokens_total", total["num_tokens"], expected["tokens_total"], rtol)
    yield from compare(
        f"{key} clip_fraction_tokens",
        policy_metrics(sums)["token_clip_fraction"],
        expected["clip_fraction_tokens"],
        rtol,
    )
    got: dict[str, set[str]] = {}
    for kind, flags in (("high", output.clipped_high), ("low", output.clipped_low), ("dual", output.dual_clipped)):
        rows = packed.segment_ids[flags] if output.flags_are_per_token else flags.nonzero()[:, 0]
        for row in rows.tolist():
            got.setdefault(str(row), set()).add(kind)
    if got != {row: set(str(kinds).split("+")) for row, kinds in expected["seq_flags"].items()}:
        yield (
            f"{key} seq_flags is { {row: '+'.join(sorted(kinds)) for row, kinds in got.items()} }, expected"
            f" {expected['seq_flags']}"
        )


def _compare_diagnostics(case: dict[str, Any], packed: _Packed, advantages: Tensor, rtol: float) -> Iterator[str]:
    inputs = case["inputs"]
    paper = Combination("gspo", "sequence_mean_token_mean", denominator_all=False, dual=False)
    output = _run(paper, inputs, packed, packed.flat(inputs["logp"]), advantages, None)
    metrics = policy_metrics(_sums(output, packed, advantages))
    present = output.sequence_log_ratio[packed.lengths > 0]
    high, low = band_fractions(present, inputs["clip"]["gspo"]["eps_low"], inputs["clip"]["gspo"]["eps_high"])
    got = {
        "advantages": advantages.tolist(),
        "lengths": packed.lengths.tolist(),
        "log_s": output.sequence_log_ratio.tolist(),
        "s": output.importance_ratio.tolist(),
        "k1_old_vs_new": metrics["k1"],
        "k2": metrics["k2"],
        "k3": metrics["k3"],
        "chi2_token": metrics["chi2_token"],
        "out_of_band_high_seq_frac": high,
        "out_of_band_low_seq_frac": low,
        "ess_frac_s": effective_sample_fraction(present),
    }
    yield from _compare_all("diagnostics", got, case["diagnostics"], rtol)


def _compare_all(where: str, got: dict[str, Any], expected: dict[str, Any], rtol: float) -> Iterator[str]:
    for key, value in expected.items():
        if key not in got:
            raise DataError(f"{where}: unknown key {key!r}; valid: {', '.join(got)}")
        if value is not None:
            value = decode_array(value, f"{where}.{key}") if isinstance(value, (list, dict)) else value
            yield from compare(f"{where} {key}", got[key], value, rtol)


def replay_mismatch_case(case: dict[str, Any], rtol: float) -> Iterator[str]:
    """Yield what does not agree in one case of rollout against trainer."""
    inputs = case["inputs"]
    packed = _Packed(inputs["mask"])
    cap, (geo_low, geo_high) = inputs["tis_cap"], inputs["geo_band"]
    sums, maxima = mismatch_sums(
        packed.flat(inputs["train_logp"]),
        packed.flat(inputs["rollout_logp"]),
        packed.mask,
        packed.segment_ids,
        packed.num_sequences,
        cap,
    )
    metrics = mismatch_metrics(sums, maxima)
    mean_log_ratio = sequence_mean_log_ratio(sums)
    product_log_ratio = sums[:, SUM_NAMES.index("log_ratio")]

    def of_products(mode: CorrectionMode) -> CorrectionResult:
        """Correct whole products around 1, as the file does: as if each response were one token, centred on 0."""
        rule = CorrectionRule(mode, math.log(cap), token_veto_nats=None)
        ones = torch.ones_like(product_log_ratio)
        return correct_around(rule, product_log_ratio, ones, ones < 1, centre=0.0)

    lowest = -maxima[:, MAXIMUM_NAMES.index("negative_log_ratio")]
    got = {
        "k1": metrics["k1"],
        "k2": metrics["k2"],
        "k3": metrics["k3"],
        "abs_logp_diff_mean": metrics["abs_log_ratio_mean"],
        "abs_logp_diff_max": metrics["abs_log_ratio_max"],
        "abs_prob_diff_max": metrics["abs_prob_difference_max"],
        "log_s_per_seq": mean_log_ratio.tolist(),
        "seq_ppl_ratio": (-mean_log_ratio).exp().tolist(),
        "ppl_ratio_mean": metrics["ppl_ratio_mean"],
        "log_ppl_diff_mean": metrics["log_ppl_difference_mean"],
        "chi2_token": metrics["chi2_token"],
        "chi2_seq": metrics["chi2_sequence"],
        "chi2_seq_lengthnorm": metrics["chi2_sequence_length_normalised"],
        "tis_token_weights_mean": metrics["token_truncated_ratio_mean"],
        "tis_token_trunc_frac": metrics["token_truncated_fraction"],
        "tis_seq_weights": of_products("truncate").weights.tolist(),
        "ess_frac_token": metrics["ess_token"],
        "ess_frac_seq": metrics["ess_sequence"],
        "mis_seq_keep": of_products("mask").keep.long().tolist(),
        "geo_keep": ((mean_log_ratio >= math.log(geo_low)) & (mean_log_ratio <= math.log(geo_high))).long().tolist(),
        "veto_reject": (lowest < math.log(inputs["veto"])).long().tolist(),
        "icepop_keep_frac_0p5_5": metrics["icepop_kept_fraction"],
    }
    yield from _compare_all("mismatch", got, case["expected"], rtol)

"""Read a file of reference vectors: JSON, its array encodings, and the shape of every case.

A file that does not match the schema raises a DataError that says where, so nothing is skipped silently. `vectors.py`
computes and compares.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import DataError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.config.algorithms import RECIPES, Aggregation, Ratio

# The recipes with a ratio of their own, and GSPO with the product of the token ratios in place of their geometric mean.
RAW_SEQUENCE = "gspo_rawseq"
ALGORITHMS = (*(name for name, recipe in RECIPES.items() if recipe.ratio is not None), RAW_SEQUENCE)
AGGREGATIONS: dict[str, Aggregation] = {
    "seq_mean_token_mean": "sequence_mean_token_mean",
    "token_mean": "token_mean",
    "seq_mean_token_sum": "sequence_mean_token_sum",
    "seq_mean_token_sum_norm": "sequence_mean_token_sum_norm",
    "group_mean_token_mean": "group_mean_token_mean",
}
DENOMINATOR_ALL = "__denom_all"
EXPECTED_FIELDS = (
    "objective",
    "loss",
    "grad_objective_wrt_logp",
    "tokens_clipped_high",
    "tokens_clipped_low",
    "tokens_dual_clipped",
    "tokens_total",
    "clip_fraction_tokens",
    "seq_flags",
)


@dataclass(frozen=True)
class Combination:
    """One key of a case's `expected`: `<algorithm>/<aggregation>[__denom_all][/dual]`."""

    algorithm: str
    aggregation: Aggregation
    denominator_all: bool
    dual: bool


@dataclass(frozen=True)
class VectorFile:
    """`cases` and `mismatch_cases`: as in the file, with arrays decoded. `tolerances`: relative, by case-name prefix;
    "" stands for all other cases.
    """

    cases: list[dict[str, Any]]
    mismatch_cases: list[dict[str, Any]]
    tolerances: dict[str, float]

    def tolerance(self, case_name: str) -> float:
        matching = [prefix for prefix in self.tolerances if case_name.startswith(prefix)]
        return self.tolerances[max(matching, key=len)]


def read_vector_file(path: Path) -> VectorFile:
    """Read and check a file of vectors. Raises DataError, with file, case and key, for anything outside the schema."""
    try:
        content = read_json_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: is not JSON: {error.msg}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from error
    try:
        return _checked(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def ratio_of(algorithm: str) -> Ratio:
    """Return the importance ratio of one of `ALGORITHMS`."""
    ratio = RECIPES["gspo" if algorithm == RAW_SEQUENCE else algorithm].ratio
    assert ratio is not None  # ALGORITHMS names no other recipe
    return ratio


def clip_of(algorithm: str, inputs: dict[str, Any]) -> tuple[float, float]:
    """Return the clip range of one of `ALGORITHMS` in a case: (low, high). An algorithm without an entry of its own has
    gspo's if its surrogate is the clipped one, else its recipe's.
    """
    name = "gspo" if algorithm == RAW_SEQUENCE else algorithm
    recipe = RECIPES[name]
    if algorithm not in inputs["clip"] and recipe.surrogate != "clip":
        return recipe.clip_low, recipe.clip_high
    clip = inputs["clip"].get(algorithm, inputs["clip"]["gspo"])
    return clip["eps_low"], clip["eps_high"]


def parse_combination(key: str) -> Combination:
    """Parse a key of `expected`. Raises DataError for an unknown one."""
    parts = key.split("/")
    dual = len(parts) == 3 and parts[2] == "dual"
    if len(parts) != 2 and not dual:
        raise DataError(f"expected key {key!r}: must be <algorithm>/<aggregation>[/dual]")
    algorithm, aggregation = parts[0], parts[1].removesuffix(DENOMINATOR_ALL)
    if algorithm not in ALGORITHMS:
        raise DataError(f"expected key {key!r}: unknown algorithm {algorithm!r}; valid: {', '.join(ALGORITHMS)}")
    if aggregation not in AGGREGATIONS:
        raise DataError(f"expected key {key!r}: unknown aggregation {aggregation!r}; valid: {', '.join(AGGREGATIONS)}")
    return Combination(algorithm, AGGREGATIONS[aggregation], parts[1].endswith(DENOMINATOR_ALL), dual)


def _checked(content: Any) -> VectorFile:
    if not isinstance(content, dict) or not isinstance(content.get("header"), dict):
        raise DataError("no `header`: a vector file is an object with header, cases and mismatch_metrics")
    header = content["header"]
    if header.get("version") != 1:
        raise DataError(f"header.version is {header.get('version')!r}; this command reads version 1")
    lists = {}
    for key in ("cases", "mismatch_metrics"):
        lists[key] = content.get(key, [])
        if not isinstance(lists[key], list) or not all(isinstance(case, dict) for case in lists[key]):
            raise DataError(f"`{key}` must be a list of objects")
    if not lists["cases"] and not lists["mismatch_metrics"]:
        raise DataError("no case in `cases` or `mismatch_metrics`: nothing to check")
    names = [_name(case, key, index) for key in lists for index, case in enumerate(lists[key])]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"case {name!r} appears more than once")
    cases = [_located(_checked_case, case) for case in lists["cases"]]
    mismatch = [_located(_checked_mismatch, case) for case in lists["mismatch_metrics"]]
    return VectorFile(cases, mismatch, _tolerances(header))


def _tolerances(header: dict[str, Any]) -> dict[str, float]:
    # A file may ask for 1e-10 for named cases, but never for more: otherwise any file could make itself pass.
    tolerances = {"": 1e-12}
    text = str((header.get("suggested_tolerance") or {}).get("float64", ""))
    for group in re.findall(r"1e-10 for ((?:[A-Za-z]\w*(?:, | and )?)+)", text):
        tolerances |= dict.fromkeys(re.findall(r"\b[A-Z]\w*", group), 1e-10)
    return tolerances


def _name(case: dict[str, Any], key: str, index: int) -> str:
    if not isinstance(case.get("name"), str) or not case["name"]:
        raise DataError(f"{key}[{index}]: no `name`")
    return case["name"]


def _located(check: Any, case: dict[str, Any]) -> dict[str, Any]:
    try:
        return check(case)
    except DataError as error:
        raise DataError(f"case {case['name']}: {error}") from None


def _section(case: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(case.get(key), dict):
        raise DataError(f"no `{key}` object")
    return case[key]


def decode_array(value: Any, where: str) -> list[float]:
    """Return a plain list, {"rle": [[value, count], ...]} or {"tile": [...], "times": k} as a list of numbers. Raises
    DataError.
    """
    if isinstance(value, dict) and set(value) == {"rle"}:
        runs = value["rle"]
        if not isinstance(runs, list) or not all(isinstance(r, list) and len(r) == 2 and _is_count(r[1]) for r in runs):
            raise DataError(f"{where}: `rle` must be a list of [value, count]")
        value = [v for v, count in runs for _ in range(count)]
    elif isinstance(value, dict) and set(value) == {"tile", "times"}:
        if not isinstance(value["tile"], list) or not _is_count(value["times"]):
            raise DataError(f"{where}: `tile` must be a list and `times` a count")
        value = value["tile"] * value["times"]
    if not isinstance(value, list):
        raise DataError(f"{where}: must be a list, an rle or a tile")
    for index, number in enumerate(value):
        _number(number, f"{where}[{index}]")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{where}: {value!r} is not a number")
    return value


def _rows(section: dict[str, Any], key: str, lengths: list[int] | None) -> list[list[float]]:
    rows = section.get(key)
    if not isinstance(rows, list):
        raise DataError(f"`{key}` must be a list of rows")
    decoded = [decode_array(row, f"{key}[{i}]") for i, row in enumerate(rows)]
    if lengths is not None and [len(r) for r in decoded] != lengths:
        raise DataError(f"`{key}` has rows of {[len(r) for r in decoded]} tokens, `mask` of {lengths}")
    return decoded


def _checked_case(case: dict[str, Any]) -> dict[str, Any]:
    inputs, expected = dict(_section(case, "inputs")), _section(case, "expected")
    inputs["mask"] = _rows(inputs, "mask", None)
    lengths = [len(row) for row in inputs["mask"]]
    for key in ("logp", "old_logp"):
        inputs[key] = _rows(inputs, key, lengths)
    for key in ("token_advantages", "rollout_logp"):
        if inputs.get(key) is not None:
            inputs[key] = _rows(inputs, key, lengths)
    for key in ("group_ids", "episode_ids", "rewards", "advantages", "keep"):
        if inputs.get(key) is not None:
            inputs[key] = decode_array(inputs[key], key)
            if len(inputs[key]) != len(lengths):
                raise DataError(f"`{key}` has {len(inputs[key])} entries for {len(lengths)} rows")
    if inputs.get("group_ids") is None:
        raise DataError("no `group_ids`")
    if inputs.get("episode_ids") is not None:
        groups: dict[float, float] = {}
        for episode, group in zip(inputs["episode_ids"], inputs["group_ids"], strict=True):
            if groups.setdefault(episode, group) != group:
                raise DataError(f"`episode_ids`: episode {episode} has rows in groups {groups[episode]} and {group}")
    if all(inputs.get(key) is None for key in ("rewards", "advantages", "token_advantages")):
        raise DataError("needs one of `rewards`, `advantages`, `token_advantages`")
    given = inputs.get("clip")
    clips: dict[str, Any] = given if isinstance(given, dict) else {}
    for algorithm in {**dict.fromkeys(("gspo", "grpo")), **clips}:
        clip = clips.get(algorithm)
        if not isinstance(clip, dict):
            raise DataError(f"no `clip.{algorithm}`")
        for key in ("eps_low", "eps_high"):
            _number(clip.get(key), f"clip.{algorithm}.{key}")
    if not isinstance(inputs.get("adv_cfg"), dict) or set(inputs["adv_cfg"]) != {"std_ddof", "std_eps", "norm_std"}:
        raise DataError("`adv_cfg` must have std_ddof, std_eps and norm_std")
    decoded = {key: _checked_expected(key, entry, inputs, lengths) for key, entry in expected.items()}
    if not decoded:
        raise DataError("`expected` is empty: nothing to check")
    diagnostics = case.get("diagnostics", {})
    if not isinstance(diagnostics, dict):
        raise DataError("`diagnostics` must be an object")
    return {**case, "inputs": inputs, "expected": decoded, "diagnostics": diagnostics}


def _checked_expected(key: str, entry: Any, inputs: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    combination = parse_combination(key)
    if not isinstance(entry, dict) or set(entry) != set(EXPECTED_FIELDS):
        raise DataError(f"expected {key!r} must have exactly {', '.join(EXPECTED_FIELDS)}")
    if (
        combination.algorithm in ("gspo", "gspo_rawseq")
        and inputs.get("advantages") is None
        and inputs.get("rewards") is None
    ):
        raise DataError(f"expected {key!r} needs `rewards` or `advantages`")
    if combination.dual:
        _number(inputs.get("dual_clip_c"), "dual_clip_c")
    if combination.aggregation == "sequence_mean_token_sum_norm":
        _number(inputs.get("norm_const"), "norm_const")
    for field in EXPECTED_FIELDS:
        if field not in ("grad_objective_wrt_logp", "seq_flags") and math.isnan(
            _number(entry[field], f"expected {key!r}.{field}")
        ):
            raise DataError(f"expected {key!r}.{field} is NaN: nothing equals it")
    return {**entry, "grad_objective_wrt_logp": _rows(entry, "grad_objective_wrt_logp", lengths)}


def _checked_mismatch(case: dict[str, Any]) -> dict[str, Any]:
    inputs, expected = dict(_section(case, "inputs")), _section(case, "expected")
    inputs["mask"] = _rows(inputs, "mask", None)
    lengths = [len(row) for row in inputs["mask"]]
    for key in ("rollout_logp", "train_logp"):
        inputs[key] = _rows(inputs, key, lengths)
    for key in ("tis_cap", "veto"):
        _number(inputs.get(key), key)
    if len(decode_array(inputs.get("geo_band"), "geo_band")) != 2:
        raise DataError("`geo_band` must be [low, high]")
    if not expected:
        raise DataError("`expected` is empty: nothing to check")
    return {**case, "inputs": inputs, "expected": expected}

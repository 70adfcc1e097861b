"""The tables and verdicts of budgets in RESULTS.md are those of the files in docs/studies, as `--json` wrote them."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs/studies"
PAGE = (Path(__file__).parents[2] / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
NAMES = ["budget_moe_fp8_servers.json", "budget_dense_fp8.json"]
R3 = "the same with R3"


@pytest.fixture(scope="module", params=NAMES)
def found(request):
    return json.loads((DOCS / request.param).read_text()) | {"section": section_of(request.param)}


def section_of(link):
    (text,) = [section for section in re.split(r"\n##+ ", PAGE) if f"/{link})" in section]
    return text


def rows_of(section, heading):
    """First cell -> the other cells, of the section's table whose first heading that is."""
    lines = section.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading}"))
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cause, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[re.sub(r" \(.*\)$|, both in .*$", "", cause)] = cells
    return rows


def numbers(cell):
    """The numbers of a cell such as `9.5e-3 ± 2e-3`, `.74 ± .08`, `3.0 %`."""
    return [float(number) for number in re.findall(r"[-+]?[\d.]+(?:e-?\d+)?", cell.replace("\N{MINUS SIGN}", "-"))]


def rounded(value, digits):
    """A number as the page shows it: so many digits."""
    return float(f"{value:.{digits - 1}e}")


def test_a_table_shows_the_numbers_of_its_file(found):
    shown, orders = rows_of(found["section"], "cause"), list(found["parts"])
    parts = found["parts"]["forward"]
    # A cause that makes no difference at all may be left out of the table; the text names it.
    assert {c for c in parts if parts[c]["row"]["k3"]["value"] > 0} == shown.keys() - {"all together", R3}
    for cause in parts.keys() - shown.keys():
        assert cause in found["section"], cause
    rows = {cause: part["row"] for cause, part in parts.items()} | {"all together": found["total"]}
    if found["alternatives"]:
        rows[R3] = found["alternatives"]["other routing"]["row"]
    assert (R3 in shown) == bool(found["alternatives"])
    for cause, (k3, band, negative, positive, *shares) in shown.items():
        row = rows[cause]
        assert numbers(k3) == [rounded(row["k3"]["value"], 2), rounded(row["k3"]["error"], 1)], cause
        assert numbers(band)[0] == pytest.approx(row["band_share"]["value"], abs=0.005), cause
        cells = dict(clipped_negative=negative, clipped_positive=positive)
        for side, cell in cells.items():
            assert numbers(cell)[0] == pytest.approx(100 * row[side]["value"], abs=0.5), (cause, side)
        if cause in parts:
            values = [100 * found["parts"][order][cause]["share"]["value"] for order in orders]
            assert [numbers(cell)[0] for cell in shares] == pytest.approx(values, abs=0.05), cause
            errors = [100 * found["parts"][order][cause]["share"]["error"] for order in orders]
            assert [numbers(cell)[1] for cell in shares] == pytest.approx(errors, abs=0.5), cause


def test_log_s_of_all_together_is_shown_at_each_length_and_the_largest_difference_of_a_token(found):
    shown = rows_of(found["section"], "first tokens")
    assert list(shown) == [str(at["length"]) for at in found["total"]["at_length"]]
    for at, (count, mean, sd) in zip(found["total"]["at_length"], shown.values(), strict=True):
        assert int(count) == at["count"]
        assert numbers(mean) == [rounded(at["mean"]["value"], 2), rounded(at["mean"]["error"], 1)]
        assert numbers(sd) == [rounded(at["sd"], 2)]
    assert f"differ by up to {found['total']['maximum']:.2g} nats" in found["section"]


def test_the_verdict_stands_on_the_page_word_for_word(found):
    """Whatever a budget said, faults first: a page cannot leave out a verdict that does not suit it."""
    text = " ".join(found["section"].split())
    for sentence in found["sentences"]:
        assert sentence in text, sentence
    for fault in found["faults"]:
        assert f"NOT PRECISION ({fault['kind']}, found in `{fault['cause']}`): {fault['text']}" in text
    assert f"exit code {1 if found['faults'] else 0}" in text


def test_what_a_budget_left_out_is_said(found):
    """Both orders and every cause; what could not be changed is in the text, unless there was nothing to change."""
    assert list(found["parts"]) == ["forward", "backward"]
    for cause, why in found["nothing"].items():
        assert why["is_zero"] or cause in found["section"], cause
        assert "budget.causes" not in why["why"], cause
    assert f"{found['num_sequences']} responses to {found['num_prompts']}" in found["section"]
    assert f"{found['num_negative']} have A < 0, {found['num_positive']} A > 0" in found["section"]


def test_who_made_the_numbers_when_and_in_which_time(found):
    made, text = found["made"], " ".join(found["section"].split())
    assert made["date"][:10] in text and f"{made['seconds'] / 60:.0f} minutes" in text and made["commit"][:8] in text
    assert not made["commit"].endswith("-dirty")
    assert f"gspo-mega mismatch {made['config']} {' '.join(made['overrides'])}".strip() in text.replace(" \\ ", " ")
    for package, name in (("torch", "torch"), ("sglang", "SGLang"), ("megatron-core", "Megatron-Core")):
        assert f"{name} {made['versions'][package]}" in PAGE
    assert f"Transformer Engine {made['versions']['transformer-engine']}" in PAGE

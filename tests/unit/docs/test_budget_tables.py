"""The tables of docs/precision.md are the numbers of the budgets that stand beside it, as `--json` wrote them."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "precision.md").read_text(encoding="utf-8")


def rows_below(link):
    """First cell -> the other cells, of the first table below the link to that file."""
    lines = PAGE.partition(f"]({link})")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| cause"))
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


@pytest.mark.parametrize("name", ["budget_moe_fp8_servers.json", "budget_dense_fp8.json"])
def test_a_table_shows_the_numbers_of_its_file(name):
    found = json.loads((DOCS / name).read_text())
    shown = rows_below(name)
    causes = {cause: (part["row"], part["share"]) for cause, part in found["parts"]["forward"].items()}
    # A cause that makes no difference at all may be left out of the table; the text names it.
    assert {c for c in causes if causes[c][0]["k3"]["value"] > 0} == shown.keys() - {"all together", "the same with R3"}
    causes["all together"] = (found["total"], 1.0)
    if "the same with R3" in shown:
        causes["the same with R3"] = (found["alternatives"]["other routing"]["row"], None)
    for cause, (k3, band, below, above, share) in shown.items():
        row, its_share = causes[cause]
        value, error = row["k3"]["value"], row["k3"]["error"]
        assert numbers(k3) == [float(f"{value:.1e}"), float(f"{error:.0e}")], cause
        assert numbers(band)[0] == pytest.approx(row["band_share"]["value"], abs=0.005), cause
        for cell, side in ((below, "negative"), (above, "positive")):
            assert numbers(cell)[0] == pytest.approx(100 * row[side]["value"], abs=0.5), cause
        if its_share is not None:
            assert numbers(share)[0] == pytest.approx(100 * its_share, abs=0.05), cause


@pytest.mark.parametrize("name", ["budget_moe_fp8_servers.json", "budget_dense_fp8.json"])
def test_what_a_budget_left_out_is_said(name):
    """A cause that was not changed is in the text of its section, unless there was nothing to change."""
    found = json.loads((DOCS / name).read_text())
    (text,) = [section for section in PAGE.split("\n### ") if f"]({name})" in section]
    for cause, why in found["nothing"].items():
        assert why["is_zero"] or cause in text, cause
    assert f"{found['num_sequences']} responses to {found['num_prompts']}" in text

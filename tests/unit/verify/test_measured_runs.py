"""The simulation against runs that were measured; its tables are in tests/benchmarks/RESULTS.md."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs():
    sys.path.insert(0, str(ROOT / "tests/benchmarks"))
    try:
        import simulated_runs
    finally:
        sys.path.pop(0)
    return simulated_runs


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_quickstart_with_and_without_sampling_ahead(runs):
    """Two rates of each seed's run with K = 0; validated: its run with K = 1. K = 4 is in the table."""
    rows = [row for row in runs.shared() if row[1] != "k4"]
    assert len(rows) == 6
    for _, arm, measured, simulated in rows:
        assert simulated == pytest.approx(measured, rel=0.01 if arm == "k0" else 0.15)


def test_a_core_each(runs):
    """Pairs differ by what else the machine did: the mean of each mode. Reading again is not one of the two rates."""
    found = runs.pinned()
    for mode in ("wait", "continue_with_cache"):
        rows = [(measured, simulated) for name, measured, simulated in found if name == mode]
        assert sum(s for _, s in rows) == pytest.approx(sum(m for m, _ in rows), rel=0.15)


def test_published_rows_by_two_rates_of_other_rows(runs):
    """The factors of tests/benchmarks/RESULTS.md, which follow from the first two rows; the third is validated."""
    _, measured, of = runs.published_jobs()[2]
    assert runs.rate(of.scaled(1.44, 2.94)) == pytest.approx(measured, rel=0.15)
    assert runs.rate(replace(of, num_servers=2 * of.num_servers)) > runs.rate(of)

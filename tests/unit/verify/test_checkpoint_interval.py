"""The best interval between saves: Young's and Daly's where failures are exponential and lost work costs its price."""

import math

import numpy as np
import pytest

from gspo_mega.verify.simulate.outcome import Costs, best_interval, daly_seconds, effective_share, young_seconds


def exact(costs, every):
    """Daly's expected share: M exp(R/M) (exp((w + C)/M) - 1) seconds per w seconds of work."""
    work = every * costs.step
    return work / (costs.mtbf * math.exp(costs.restart / costs.mtbf) * (math.exp((work + costs.save) / costs.mtbf) - 1))


@pytest.mark.parametrize("every", [60, 200, 1000])
def test_the_share_is_the_known_one(every):
    costs = Costs(step=1.0, redo=1.0, save=20.0, restart=30.0, mtbf=5000.0)
    gaps = np.random.default_rng(1).exponential(costs.mtbf, 20_000).tolist()
    assert effective_share(costs, every, gaps) == pytest.approx(exact(costs, every), rel=0.01)


@pytest.mark.parametrize("save, mtbf", [(20.0, 5000.0), (60.0, 40_000.0)])
def test_young_and_daly_are_recovered(save, mtbf):
    costs = Costs(step=1.0, redo=1.0, save=save, restart=30.0, mtbf=mtbf)
    found = best_interval(costs)
    assert found is not None and found.young == young_seconds(save, mtbf) and found.daly == daly_seconds(save, mtbf)
    nearest = min(found.shares, key=lambda every: abs(every - found.daly))
    assert found.shares[nearest] == pytest.approx(found.shares[found.best], abs=0.002)
    assert found.daly / 1.6 < found.best < found.daly * 1.6
    assert exact(costs, found.best) == pytest.approx(max(exact(costs, every) for every in found.shares), abs=0.002)


def test_cheaper_repetition_allows_longer_intervals():
    dear = best_interval(Costs(10.0, 10.0, 60.0, 600.0, 40_000.0))
    cheap = best_interval(Costs(10.0, 2.0, 60.0, 600.0, 40_000.0))
    assert dear is not None and cheap is not None and cheap.best > dear.best


def test_nothing_to_choose():
    assert best_interval(Costs(1.0, 1.0, 10.0, 1.0, math.inf)) is None
    assert best_interval(Costs(1.0, 1.0, 0.0, 1.0, 100.0)) is None
    assert daly_seconds(300.0, 100.0) == 100.0

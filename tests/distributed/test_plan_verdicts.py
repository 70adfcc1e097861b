"""The plan refuses exactly what dies, or trains wrong: a fixed part of the soak `tests/soak/plan_verdicts.py`.

Each configuration is planned, without torch, and trained one step on real ranks with the plan's checks left out: old
pass, reference, every optimizer step; its gradient is compared tensor by tensor with one rank's. What is refused and
runs all the same is of the kinds in `verdicts.DELIBERATE`, and of no other.
"""

from __future__ import annotations

import pytest
from verdict_cases import generate
from verdict_changes import CHANGES
from verdicts import DELIBERATE, IS_019, Engine, figures, verdicts

SEED = 1
COUNT = -(-3 * len(CHANGES) // 2)  # two of three are changed, by each change once


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    engine = Engine()
    try:
        return list(verdicts(generate(COUNT, SEED), tmp_path_factory.mktemp("verdicts"), engine))
    finally:
        engine.close()


def test_plan_and_engine_agree_on_every_configuration(found):
    assert not [v for v in found if not v.agree], "\n" + "\n".join(v.described for v in found if not v.agree)
    print(figures(found))


def test_the_generator_reaches_what_it_should(found):
    assert {v.case.change for v in found} == {"", *CHANGES}
    refused = [v for v in found if v.plan is not None]
    assert 0.4 * COUNT < len(refused) < 0.6 * COUNT
    assert IS_019 or any(v.wrong is not None for v in refused), (
        "no layout trained wrong: the comparison of gradients was not tried"
    )
    assert sum(v.deliberate is not None for v in found) < 0.2 * COUNT
    assert {v.deliberate for v in found if v.deliberate} <= {why for _, why in DELIBERATE}
    ran = [v.case for v in found if v.plan is None]
    assert all(
        any(case.values["parallel"].get(key, 1) > 1 for case in ran)
        for key in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    )
    assert any(case.values["parallel"]["virtual_pipeline"] for case in ran) and any(
        "recompute" in case.values for case in ran
    )

"""A teacher in whole replayed runs: killed and continued they end as if they had not been."""

from __future__ import annotations

import json

import pytest
from recovery_support import KILLED, outcome

from gspo_mega.base.errors import ConfigError
from gspo_mega.verify.certify.program import make_random_folder


@pytest.mark.parametrize("compared", ["", ", divergence: top_k, top_k: 9"])
def test_a_run_with_a_teacher_that_is_killed_ends_as_if_it_had_not_been(ranks, tmp_path_factory, compared):
    """The advantages of sampled tokens under GSPO, and a loss of distributions. The teacher has other random weights."""
    shape = "configs/models/certify_dense.json"
    teacher = make_random_folder(shape, tmp_path_factory.mktemp("teacher") / "model", seed=8)
    keys, name = f"teacher={{path: {teacher}, reward_weight: 0.5{compared}}}", f"taught{len(compared)}"
    assert ranks.train(name, "", keys) == [0], ranks.log(name)
    want = outcome(ranks.folder(name))
    killed = f"{name}-killed"
    assert ranks.train(killed, "point=save.latest.rename.after,hit=1", keys) == [KILLED], ranks.log(killed)
    assert ranks.train(killed, "", keys) == [0], ranks.log(killed)
    assert "resumed from step_00000001" in ranks.console(killed) and "teacher: " in ranks.console(killed)
    got = outcome(ranks.folder(killed))
    assert want.keys() == got.keys()
    for part in want:
        assert want[part] == got[part], part
    lines = [json.loads(line) for line in ranks.folder(killed).metrics_file.read_text().splitlines()]
    acted = "teacher/divergence" if compared else "teacher/advantage_share"
    assert all(line[acted] > 0 and "teacher/reverse_kl" in line for line in lines)

    with pytest.raises(ConfigError, match="teacher.reward_weight: now 0.25, the run has 0.5"):
        ranks.train(killed, "", keys.replace("reward_weight: 0.5", "reward_weight: 0.25"))

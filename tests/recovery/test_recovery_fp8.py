"""kill -9 in a run in FP8: scales of the recipe `delayed` come from histories, which a continued run must have again."""

from __future__ import annotations

import pytest
import torch
from recovery_support import KILLED, NUM_STEPS, Ranks, leftovers, outcome
from safetensors.torch import load_file

from gspo_mega.config.precision import TRANSFORMER_ENGINE_VARIABLE

FP8 = ("precision=fp8", "fp8.recipe=delayed")


@pytest.fixture(scope="module")
def fp8_ranks(ranks):
    """Ranks of the same recording that load Transformer Engine, which the others' process must not."""
    made = Ranks(ranks.config_file, **{TRANSFORMER_ENGINE_VARIABLE: "1"})
    yield made
    made.close()


def test_killed_in_a_step_and_in_a_save_it_ends_where_an_uninterrupted_run_does(fp8_ranks):
    ranks = fp8_ranks
    assert ranks.train("fp8", "", *FP8) == [0], ranks.log("fp8")
    want = outcome(ranks.folder("fp8"))
    state = load_file(ranks.folder("fp8").checkpoint_dir(NUM_STEPS) / "fp8" / "rank_00000.safetensors")
    scales = torch.cat([value for key, value in state.items() if key.endswith("/scaling_fwd/scale")])
    assert (scales != 1).float().mean() > 0.4, "measured ones"

    # After an optimizer step of the second step, then with its checkpoint written and not yet in place.
    for fault in ("point=step.optimizer,hit=3", "point=save.rename.before"):
        assert ranks.train("fp8_killed", fault, *FP8) == [KILLED], ranks.log("fp8_killed")
        assert ranks.folder("fp8_killed").latest_checkpoint_file.read_text().strip() == "step_00000001"
    assert ranks.train("fp8_killed", "", *FP8) == [0], ranks.log("fp8_killed")
    found = outcome(ranks.folder("fp8_killed"))
    assert {key for key in want.keys() | found.keys() if found.get(key) != want.get(key)} == set()
    assert "checkpoint/fp8/rank_00000.safetensors" in want and leftovers(ranks.folder("fp8_killed")) == []

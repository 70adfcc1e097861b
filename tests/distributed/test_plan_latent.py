"""What the plan says a layer of DeepSeek-V3's kind saves for its backward pass is what it saves."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from family_models import make_family_folder
from layout_jobs import layout_config

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.activations import layer_activations

COUNTED = version("megatron-core").startswith("0.16.")

SAVED = [
    ("deepseek_v3", "fp32", {}, 1),
    ("deepseek_v3", "bf16", {}, 1),
    ("deepseek_v3-one-group", "bf16", {}, 1),
    ("deepseek_v3", "bf16", dict(tensor=2, expert=2), 2),
]


@pytest.mark.parametrize(("variant", "precision", "parallel", "ranks"), SAVED)
def test_what_a_layer_saves(rank_pools, tmp_path, variant, precision, parallel, ranks):
    """On one rank to the byte with the Megatron-Core whose layers were counted; on a newer one, whose router keeps a
    little more, and on several, the mean over whose unevenly loaded experts is compared, within 10 %.
    """
    folder, parallel = str(make_family_folder(tmp_path / "model", variant)), {"expert_tensor": 1, **parallel}
    found = rank_pools(ranks).run(
        "plan_jobs:saved_bytes", folder=folder, parallel=parallel, precision=precision, num_tokens=48, num_sequences=4
    )
    config = layout_config(folder, parallel, precision=precision)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ranks_per_node": ranks})})
    spec = read_model_spec(folder)
    terms = layer_activations(config, spec, resolve_layout(config, spec), "cpu")
    for half in ("attention", "mlp"):
        mean = sum(result[half] for result in found) / ranks
        want = getattr(terms, half)
        assert mean == (want if ranks == 1 and COUNTED else pytest.approx(want, rel=0.1)), half

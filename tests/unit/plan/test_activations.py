"""What a layer keeps for its backward pass against Megatron-LM's published formula; against measurements, on CPU:
`tests/distributed/test_plan_truth.py`."""

from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.activations import layer_activations
from gspo_mega.plan.memory import in_flight

SHAPES = Path(__file__).parents[3] / "configs" / "models"


def published(layers, hidden, intermediate, tensor, pipeline, virtual, num_micro_batches):
    """Bytes a token of all layers on the first stage: `compute_activation_memory` of Megatron-LM's
    training/theoretical_memory_usage.py (table 2 of arXiv:2205.05198, flash attention), embedding and head left out."""
    size = hidden * (18 + 4 * intermediate / hidden) * layers / tensor
    if virtual is not None:
        return size * (1 + (pipeline - 1) / (pipeline * virtual))
    return size * min(1, num_micro_batches / pipeline)


def layout_of_llama(load, *overrides):
    spec = read_model_spec(SHAPES / "llama3_70b.json")
    config = load(
        "precision=bf16", "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}", *overrides
    ).config
    return config, spec, resolve_layout(config, spec)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_a_layer_differs_from_megatrons_formula_by_what_can_be_named(load, tensor, fused):
    """Theirs is a GPT's with dropout: 18 h + 4 f bytes a token (h hidden, f intermediate size, bf16). Term by term,
    ours

    - keeps the projection's output, of which the values are a part, and turned copies of queries and keys: 2 (q + 2 k)
      +
      2 (q + k) bytes (q, k elements of queries, of keys) where theirs has queries, keys and values once, 6 h;
    - has the gate and the other half: 2 f more; and, where they are not fused, its SiLU and the other half plus
      Megatron's offset of zero: 4 f;
    - has no dropout, whose two masks are 2 h;
    - keeps the norms' scales, 4 bytes each, and attention's log-sum-exp, 4 bytes a head.
    """
    words = [f"cluster.ranks_per_node={tensor}", f"parallel.tensor={tensor}"]
    config, spec, layout = layout_of_llama(load, *words, *([] if fused else ["engine.fuse_activation=false"]))
    terms = layer_activations(config, spec, layout, "gpu")
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    theirs = published(1, hidden, intermediate, tensor, 1, None, 1)
    ours = (
        theirs
        + (
            2 * (query + 2 * key)
            + 2 * (query + key)
            - 6 * hidden
            + (2 if fused else 6) * intermediate
            - 2 * hidden
            + 2 * 4
            + 4 * spec.num_heads
        )
        / tensor
    )
    assert terms.attention + terms.mlp == pytest.approx(ours, rel=1e-12)
    assert 1.1 < ours / theirs < 2  # most of it the gated MLP, which theirs does not have


@pytest.mark.parametrize(
    ("pipeline", "virtual", "num_micro_batches"),
    [(1, None, 4), (4, None, 8), (4, None, 3), (8, None, 8), (4, 2, 8), (4, 5, 16), (2, 8, 4)],
)
def test_layers_held_at_once_are_megatrons(load, pipeline, virtual, num_micro_batches):
    """A 1F1B stage holds as many micro-batches as there are stages; interleaving adds (p - 1) / (p v) of them."""
    _, spec, layout = layout_of_llama(load, f"cluster.ranks_per_node={pipeline}", f"parallel.pipeline={pipeline}")
    layers = spec.num_layers // (pipeline * (virtual or 1))
    layout = replace(layout, virtual_pipeline=virtual)
    one = published(1, spec.hidden_size, spec.intermediate_size, 1, 1, None, 1)
    theirs = (
        published(spec.num_layers, spec.hidden_size, spec.intermediate_size, 1, pipeline, virtual, num_micro_batches)
        / one
    )
    assert in_flight(layout, 0, num_micro_batches) * layers == pytest.approx(theirs)

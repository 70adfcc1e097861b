"""Routes of the rollout engine as a pack is laid out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt, Trajectory
from gspo_mega.data.packing import ExpertRoutes, build_micro_batch, has_repeated
from gspo_mega.models.spec import ModelSpec, MoeSpec

LAYERS, TOP_K = 3, 2


def spec(num_experts: int = 64, num_dense_layers: int = 0) -> ModelSpec:
    return ModelSpec(
        family="qwen3_moe",
        num_layers=LAYERS,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=16,
        vocab_size=16,
        max_position_embeddings=64,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        torch_dtype="float32",
        eos_token_ids=(1,),
        moe=MoeSpec(num_experts, TOP_K, 8, num_dense_layers=num_dense_layers),
    )


def trajectory(index: int, prompt: int, response: int, routes: bool = True, dtype=np.uint8) -> Trajectory:
    count = prompt + response - 1
    # Recognisable numbers: 2 * (token + 10 * trajectory + layer), and one more.
    tokens, layers = np.arange(count)[:, None], np.arange(LAYERS)[None]
    first = 2 * (tokens + 10 * index + layers)
    return one_turn_row(
        trajectory_id=f"t{index}",
        group_id=0,
        prompt=Prompt(f"p:{index}", "p", tuple(range(prompt)), ""),
        response_token_ids=[1] * response,
        response_mask=[1] * response,
        rollout_log_probs=[-1.0] * response,
        weight_versions=[0] * response,
        finish_reason="stop",
        routed_experts=np.stack([first, first + 1], axis=-1).astype(dtype) if routes else None,
    )


def packed(trajectories, rows):
    records = [
        dict(
            prompt_token_ids=t.prompt.token_ids,
            response_token_ids=t.response_token_ids,
            response_mask=t.response_mask,
            rollout_log_probs=t.rollout_log_probs,
        )
        for t in trajectories
    ]
    return build_micro_batch(records, rows, 4)


def spread(start, end, num_experts=64):
    return [[[(2 * t + i) % num_experts for i in range(TOP_K)]] * LAYERS for t in range(start, end)]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32], ids=["bytes", "two bytes", "as earlier releases"])
@pytest.mark.parametrize(("num_experts", "kept"), [(256, np.uint8), (257, np.int16)])
def test_each_position_has_its_tokens_routes(dtype, num_experts, kept):
    trajectories = [trajectory(0, 2, 3, dtype=dtype), trajectory(1, 1, 2), trajectory(2, 3, 3, dtype=dtype)]
    pack = packed(trajectories, [2, 0])
    routes = ExpertRoutes.of(trajectories, spec(num_experts), True).packed(pack, range(LAYERS))
    assert routes.shape == (16, LAYERS, TOP_K) and routes.dtype == kept
    assert np.array_equal(routes[:5], trajectories[2].routed_experts)
    assert np.array_equal(routes[8:12], trajectories[0].routed_experts)
    # Last tokens and padding, by the place in their sequence, whatever the pack.
    assert routes[5:8].tolist() == spread(5, 8) and routes[12:].tolist() == spread(4, 8)


@pytest.mark.parametrize("layers", [[0], [1, 2], [0, 2], [2], []])
def test_a_stage_gets_its_own_layers_and_no_others(layers):
    trajectories = [trajectory(0, 2, 3), trajectory(1, 3, 4)]
    routes, pack = ExpertRoutes.of(trajectories, spec(), True), packed(trajectories, [1, 0])
    assert np.array_equal(routes.packed(pack, layers), routes.packed(pack, range(LAYERS))[:, layers])


def test_layers_without_experts_are_nobodys():
    routes = ExpertRoutes.of([trajectory(0, 2, 3)], spec(num_dense_layers=1), True)
    assert routes.layers([range(1), range(2, 3)]) == [2] and routes.layers([range(1)]) == []


def test_filler_is_spread_and_no_routes_at_all_are_none():
    trajectories = [trajectory(0, 2, 3)]
    routes = ExpertRoutes.of(trajectories, spec(num_experts=6), to_replay=True)
    filler = routes.packed(packed(trajectories, []), range(LAYERS))
    assert filler.tolist() == spread(0, 4, 6)
    without = [trajectory(0, 2, 3, routes=False)]
    assert ExpertRoutes.of(without, spec(), to_replay=False) is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda routes: None, "no routed experts"),
        (lambda routes: routes[:-1], r"shape \(3, 3, 2\); expected is \(4, 3, 2\)"),
        (lambda routes: routes[:, 1:], r"shape \(4, 2, 2\); expected is \(4, 3, 2\)"),
        (lambda routes: np.where(np.arange(4)[:, None, None] == 2, 7, routes), "same expert twice"),
    ],
)
def test_nonsense_is_named(spoil, said):
    trajectories = [trajectory(0, 2, 3), trajectory(1, 2, 3)]
    trajectories[1].routed_experts = spoil(trajectories[1].routed_experts)
    with pytest.raises(RolloutError, match=f"trajectory t1 has .*{said}"):
        ExpertRoutes.of(trajectories, spec(), to_replay=True)


def test_where_nothing_is_replayed_a_repeated_expert_is_only_a_difference():
    trajectories = [trajectory(0, 2, 3)]
    trajectories[0].routed_experts[2] = 7
    routes = ExpertRoutes.of(trajectories, spec(), to_replay=False)
    assert (routes.packed(packed(trajectories, [0]), range(LAYERS))[2] == 7).all()


@pytest.mark.parametrize("dense", [0, -1])
def test_layers_without_experts_have_no_routes_to_repeat(dense):
    trajectories = [trajectory(0, 2, 3, dtype=np.int32)]
    trajectories[0].routed_experts[:, 0] = dense
    routes = ExpertRoutes.of(trajectories, spec(num_dense_layers=1), to_replay=True)
    only = routes.packed(packed(trajectories, [0]), [1, 2])
    assert np.array_equal(only[:4], trajectories[0].routed_experts[:, 1:])


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_a_repeated_expert_is_found_wherever_it_is(seed, num_tokens, num_layers, k, repeated):
    rng = np.random.default_rng(seed)
    routes = rng.random((num_tokens, num_layers, 12)).argsort(axis=-1)[..., :k].astype(np.uint8)
    if repeated and k > 1:
        one, other = rng.choice(k, 2, replace=False)
        token, layer = rng.integers(num_tokens), rng.integers(num_layers)
        routes[token, layer, one] = routes[token, layer, other]
    assert has_repeated(routes) == (repeated and k > 1)


def test_blocks_are_all_searched():
    routes = np.tile(np.arange(8, dtype=np.uint8), (3 * 2**17 // 8 + 5, 1, 1))
    assert not has_repeated(routes)
    routes[-1, 0, 7] = 0
    assert has_repeated(routes)


def test_a_batch_forgets_its_routes_in_rows_and_in_nodes():
    batch = RolloutBatch(0, [Group.from_rows(0, Prompt("p:0", "p", (0, 1), ""), [trajectory(0, 2, 3)])])
    kept = [*batch.trajectories, *(node for one in batch.episodes for node in one.turns)]
    assert len(kept) == 2 and all(part.routed_experts is not None for part in kept)
    batch.drop_routes()
    assert all(part.routed_experts is None for part in kept)

import pytest

from gspo_mega.base.errors import ModelError, PlanError
from gspo_mega.plan import plan_run
from gspo_mega.plan.layout import divisors, nearest


def ranks(n):
    return f"cluster.ranks_per_node={n}"


# (shape, overrides, key, text, nearest valid)
IMPOSSIBLE = [
    (
        "dense",
        [ranks(3), "parallel.tensor=2"],
        "cluster.ranks_per_node",
        "= 3 ranks, which tensor 2",
        "2 ranks in all or 4 ranks in all",
    ),
    ("dense", ["parallel.pipeline=3"], "cluster.ranks_per_node", "pipeline 3", "3 ranks in all"),
    (
        "dense",
        [ranks(3), "parallel.tensor=3"],
        "parallel.tensor",
        "attention heads 4, key-value heads 2, intermediate size 128",
        "1",
    ),
    ("dense", [ranks(4), "parallel.tensor=3"], "parallel.tensor", "attention heads 4", "2 or 4"),
    ("dense", [ranks(7), "parallel={tensor: 3, pipeline: 2}"], "parallel.tensor", "attention heads 4", "2 or 4"),
    (
        "dense",
        [ranks(2), "parallel.pipeline=2"],
        "parallel.pipeline",
        "3 layers",
        "1 or `parallel: {last_stage_layers: 1}`",
    ),
    (
        "dense",
        [ranks(6), "parallel.pipeline=2"],
        "parallel.pipeline",
        "3 layers",
        "1 or 3 or `parallel: {last_stage_layers: 1}`",
    ),
    ("dense", ["parallel.virtual_pipeline=3"], "parallel.virtual_pipeline", "pipeline is 1", "leave it out (null)"),
    (
        "dense",
        [ranks(3), "parallel.pipeline=3", "parallel.virtual_pipeline=2"],
        "parallel.virtual_pipeline",
        "1 layers",
        "leave it out (null)",
    ),
    ("dense", ["recompute={granularity: full, num_layers: 4}"], "recompute.num_layers", "3 layers", "3"),
    ("dense", ["recompute={granularity: full, num_layers: 2}"], "recompute.num_layers", "3 layers", "1 or 3"),
    ("dense", [ranks(2), "parallel.expert=2"], "parallel.expert", "no experts", "1"),
    ("dense", [ranks(2), "parallel.expert_tensor=2"], "parallel.expert_tensor", "no experts", "1"),
    ("dense", ["rollout.return_routed_experts=true"], "rollout.return_routed_experts", "no experts", "false"),
    (
        "dense",
        ["moe={load_balancing: aux_loss, load_balancing_coefficient: 1e-3}"],
        "moe.load_balancing",
        "no experts",
        "none",
    ),
    ("dense", ["moe.z_loss_coefficient=1e-3"], "moe.z_loss_coefficient", "no experts", "0"),
    ("dense", ["moe.routing_replay=R2"], "moe.routing_replay", "no experts", "none"),
    ("dense", ["moe.expert_bias_update_rate=1e-3"], "moe.expert_bias_update_rate", "no experts", "0"),
    (
        "moe",
        ["moe.expert_bias_update_rate=1e-3"],
        "moe.expert_bias_update_rate",
        "qwen3_moe have no expert bias",
        "0, with moe.load_balancing or without",
    ),
    ("moe", [ranks(3), "parallel.expert=3"], "parallel.expert", "8 experts", "1"),
    ("moe", [ranks(8), "parallel.expert=3"], "parallel.expert", "8 experts", "2 or 4"),
    ("moe", [ranks(2), "parallel.expert=4"], "parallel.expert", "does not divide 2 ranks", "2"),
    (
        "moe",
        [ranks(2), "parallel={tensor: 2, expert: 2, sequence: false}"],
        "parallel.sequence",
        "sequence parallelism",
        "true",
    ),
    ("moe", [ranks(2), "parallel.tensor=2"], "parallel.expert", "trains wrong", "expert 2 or expert_tensor 2"),
    (
        "moe",
        [ranks(4), "parallel={context: 4, expert_tensor: 2}"],
        "parallel.expert",
        "tensor 1 with expert 1 and expert_tensor 2 trains wrong",
        "expert 2 or expert_tensor 1",
    ),
    (
        "moe",
        [ranks(3), "parallel={pipeline: 3, expert_dispatcher: allgather}"],
        "parallel.expert_dispatcher",
        "needs micro-batches of one length, and pipeline 3",
        "alltoall",
    ),
    (
        "moe",
        [ranks(2), "batch.num_mini_batches=17"],
        "batch.num_mini_batches",
        "fewer than the 2 data-parallel ranks",
        "16",
    ),
    (
        "dense",
        [ranks(64)],
        "batch.num_mini_batches",
        "8 per mini-batch, fewer than the 64",
        "1, with at least 16 prompts_per_step",
    ),
    (
        "dense",
        [
            ranks(8),
            (
                "sft={max_steps: 1, sequences_per_step: 6, eval_every_steps: 1, stop_accuracy_low: 0,"
                " stop_accuracy_high: 1}"
            ),
        ],
        "sft.sequences_per_step",
        "8 data-parallel ranks",
        "8",
    ),
    ("dense", ["batch.micro_batch_tokens=47"], "batch.micro_batch_tokens", "= 48", "48"),
    (
        "dense",
        [ranks(4), "parallel={tensor: 2, context: 2}", "rollout.max_new_tokens=33", "batch.micro_batch_tokens=49"],
        "batch.micro_batch_tokens",
        "56 when padded to a multiple of 8",
        "56",
    ),
    (
        "dense",
        ["rollout.max_new_tokens=1009", "batch.micro_batch_tokens=2000"],
        "rollout.max_new_tokens",
        "1024 positions",
        "1008",
    ),
    (
        "dense",
        ["episodes.max_tokens=1025", "batch.micro_batch_tokens=2000"],
        "episodes.max_tokens",
        "1024 positions",
        "1024",
    ),
    ("dense", ["server.tensor=3", "publish.verify=replicas"], "server.tensor", "4 heads, 2 key-value heads", "2 or 4"),
    (
        "dense",
        ["server.tensor=4", "cluster.gpus_per_node=2"],
        "server.tensor",
        "a server on 4 GPUs does not fit on a node of 2",
        "2, or `server.num_nodes: 2`",
    ),
    ("dense", ["server.context_tokens=47"], "server.context_tokens", "47 is not between", "48"),
    ("dense", ["server.context_tokens=1025"], "server.context_tokens", "1025 is not between", "1024"),
    ("dense", ["server.max_total_tokens=55"], "server.max_total_tokens", "one sequence of 48", "56"),
]


@pytest.mark.parametrize(("kind", "overrides", "key", "text", "valid"), IMPOSSIBLE)
def test_the_impossible_is_refused_with_the_nearest_valid(load, shape, kind, overrides, key, text, valid):
    with pytest.raises(PlanError) as caught:
        plan_run(load(*overrides), model=shape(kind))
    lines = [line for line in str(caught.value).splitlines() if f": {key}: " in line]
    assert len(lines) == 1
    assert text in lines[0]
    assert lines[0].endswith(f"; nearest valid: {valid}")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("dense", [ranks(2), "parallel.tensor=2", "parallel.sequence=false"]),
        ("dense", [ranks(4), "parallel.tensor=4"]),  # two ranks a key-value head
        ("dense", [ranks(3), "parallel.pipeline=3"]),
        ("dense", [ranks(2), "parallel.context=2"]),
        ("moe", [ranks(2), "parallel={tensor: 2, expert: 2}"]),
        ("moe", [ranks(2), "parallel={tensor: 2, expert_tensor: 2, expert_dispatcher: allgather}"]),
        ("moe", [ranks(2), "parallel={tensor: 2, expert_tensor: 2}"]),
        ("moe", [ranks(4), "parallel={expert: 4}"]),
        ("moe", [ranks(2), "parallel={context: 2, expert: 2}"]),
        ("moe", [ranks(2), "batch.num_mini_batches=16"]),
        ("dense", ["batch.micro_batch_tokens=48"]),
        ("dense", ["rollout.max_new_tokens=1008", "batch.micro_batch_tokens=1024"]),
        ("dense", ["server.tensor=4", "publish.verify=replicas"]),
        ("dense", ["server={context_tokens: 1024, max_total_tokens: 1032}"]),
        ("moe", ["rollout.return_routed_experts=true"]),
    ],
)
def test_what_stands_next_to_the_impossible_is_possible(load, shape, kind, overrides):
    plan_run(load(*overrides), "cpu", shape(kind))


def test_experts_that_do_not_divide_over_the_expert_tensor_ranks(load, shape):
    model = shape("moe", moe_intermediate_size=63)
    with pytest.raises(PlanError, match="parallel.expert_tensor: 2 does not divide the experts' intermediate size 63"):
        plan_run(load(ranks(2), "parallel={expert_tensor: 2}"), model=model)


@pytest.mark.parametrize(
    ("changes", "tensor", "said", "valid"),
    [
        (dict(num_attention_heads=12, num_key_value_heads=4, intermediate_size=96), 6, "key-value heads 4", "2"),
        # More ranks than key-value heads share a head's rows evenly, or not at all.
        (dict(num_attention_heads=4, num_key_value_heads=1, head_dim=2), 4, None, None),
        (dict(num_attention_heads=8, num_key_value_heads=1, head_dim=2), 8, "key-value heads 1", "4"),
    ],
)
def test_key_value_heads_over_tensor_ranks(load, shape, changes, tensor, said, valid):
    loaded, model = load(ranks(tensor), f"parallel.tensor={tensor}"), shape("dense", **changes)
    if said is None:
        plan_run(loaded, model=model)
        return
    with pytest.raises(
        PlanError, match=f"parallel.tensor: {tensor} does not divide the model's {said}; nearest valid: {valid}$"
    ):
        plan_run(loaded, model=model)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(
    "sizes",
    [dict(tensor=3), dict(tensor=3, expert=2), dict(pipeline=2), dict(tensor=3, pipeline=2), dict(tensor=5, context=2)],
)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12])
def test_nearest_values_do_not_contradict_each_other(load, shape, kind, sizes, world):
    """Following them all leads to a layout that can run, at once or after one more look."""
    if kind == "dense":
        sizes = {key: value for key, value in sizes.items() if key != "expert"}
    model, taken, count = (
        shape(kind),
        {f"parallel.{key}": str(value) for key, value in sizes.items()} | {"cluster.ranks_per_node": str(world)},
        0,
    )
    while True:
        try:
            plan_run(load(*(f"{key}={value}" for key, value in taken.items())), model=model)
            break
        except PlanError as error:
            count += 1
            assert count <= 3, f"{taken}: {error}"
            for line in str(error).splitlines():
                key, valid = (
                    line.split(": ")[1],
                    line.split("nearest valid: ")[1].split(" or ")[0].removesuffix(" ranks in all"),
                )
                name, _, value = valid.rpartition(" ")  # `expert 2`, where another key than the one refused may change
                taken[f"parallel.{name}" if name else key] = value
    assert count > 0


def test_one_expert_a_token_whose_weight_is_always_one(load, shape):
    with pytest.raises(
        PlanError, match="model.path: num_experts_per_tok 1 with norm_topk_prob: .* router cannot learn"
    ):
        plan_run(load(), model=shape("moe", num_experts_per_tok=1))
    plan_run(load(), model=shape("moe", num_experts_per_tok=1, norm_topk_prob=False))


def test_uneven_gathers_are_refused_on_cpu_and_mentioned_where_the_device_is_unknown(load, shape):
    loaded = load(ranks(4), "parallel={tensor: 2, expert: 2, expert_tensor: 2}")
    with pytest.raises(PlanError, match="expert_dispatcher: alltoall .* gloo.*; nearest valid: allgather"):
        plan_run(loaded, "cpu", shape("moe"))
    assert any("runs on GPUs only" in notice for notice in plan_run(loaded, None, shape("moe")).notices)
    assert plan_run(loaded, "gpu", shape("moe")).notices == ()
    plan_run(loaded, "cpu", shape("moe", num_experts_per_tok=8))  # every expert is chosen


def test_all_violations_are_reported_at_once_each_with_its_place(load, shape):
    loaded = load(ranks(6), "parallel={tensor: 3, pipeline: 2}", "server.max_total_tokens=1")
    with pytest.raises(PlanError) as caught:
        plan_run(loaded, model=shape("dense"))
    lines = str(caught.value).splitlines()
    origin = "override 'parallel={tensor: 3, pipeline: 2}': "
    assert [line.split(": nearest")[0].removeprefix(origin).split(":")[0] for line in lines[:2]] == [
        "parallel.tensor",
        "parallel.pipeline",
    ]
    assert lines[2].startswith("override 'server.max_total_tokens=1': server.max_total_tokens: ")
    assert len(lines) == 3


def test_nearest_and_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest(5, [1, 2, 4, 8]) == "4 or 8"
    assert nearest(9, [1, 2]) == "2"
    assert nearest(0, [3]) == "3"
    assert nearest(3, []) == ""


def test_the_reference_of_a_kl_term_has_the_policys_shape(load, shape, tmp_path):
    def plan(reference, **overrides):
        keys = {
            "model.path": policy,
            "kl.reference_path": reference,
            "kl.coefficient": 0.1,
            "algorithm": "grpo",
            **overrides,
        }
        return plan_run(load(*(f"{key}={value}" for key, value in keys.items())))

    policy = shape("moe").rename(tmp_path / "policy.json")
    same = shape("moe", eos_token_id=7, torch_dtype="bfloat16", max_position_embeddings=2048).rename(
        tmp_path / "same.json"
    )
    other = shape("moe", vocab_size=999).rename(tmp_path / "other.json")
    plan(same)
    with pytest.raises(
        ModelError,
        match=r"kl\.reference_path: .*other\.json has another shape than the policy: vocab_size 999 instead of",
    ):
        plan(other)
    with pytest.raises(ModelError, match=r"kl\.reference_path: .*nowhere"):
        plan(tmp_path / "nowhere")
    plan(other, **{"kl.coefficient": 0})

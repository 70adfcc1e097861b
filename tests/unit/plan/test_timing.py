import json
import math

import pytest

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import estimate, plan_run, render_report, timing
from gspo_mega.plan.gpus import (
    EXPERT_SHARE,
    GPUS,
    LINK_SHARE,
    MATRIX_SHARE,
    MEMORY_SHARE,
    SHA256_BYTES_PER_SECOND,
    STORAGE_BYTES_PER_SECOND,
    Gpu,
)
from gspo_mega.plan.report import plan_json
from gspo_mega.plan.state import ModelShares, checkpoint_bytes
from gspo_mega.plan.timing import (
    HashCost,
    _all_to_all,
    mean_tokens,
    rollout_seconds,
    save_seconds,
    step_time,
    train_time,
)

REAL = dict(
    hidden_size=4096,
    intermediate_size=16384,
    num_hidden_layers=8,
    vocab_size=32000,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=65536,
)
BATCH = [
    "precision=bf16",
    "cluster.gpu=H100",
    "data.max_prompt_tokens=1024",
    "rollout.max_new_tokens=3072",
    "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}",
]


def train(load, shape, *overrides, kind="dense"):
    plan = plan_run(load(*BATCH, *overrides), "gpu", shape(kind, **REAL))
    return train_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"])


def test_compute_is_flops_over_the_rate(load, shape):
    """Matrix products alone, to a few per cent: widths and attention are on top."""
    time = train(load, shape)
    tokens = 64 * 8 * (512 + 1536)
    weights = 8 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 16384)
    least = 6 * weights * tokens / (GPUS["H100"].bf16_flops * MATRIX_SHARE["bf16"])
    assert least < time.training["layers"] < 1.15 * least
    assert time.training["exchange"] == time.training["bubble"] == time.training["gradients"] == 0


def test_old_pass_is_a_forward_pass_where_there_is_one(load, shape):
    time = train(load, shape)
    assert time.old_pass == pytest.approx(time.training["layers"] / 3 + time.training["head"] / 4)
    assert train(load, shape, "batch.num_mini_batches=1", "mismatch.correction=none").old_pass == 0
    assert train(load, shape, "batch.num_mini_batches=1").old_pass > 0, "the correction needs the whole batch's gap"
    one_pack = ("batch.num_mini_batches=1", "batch.micro_batch_tokens=10000000")
    assert train(load, shape, *one_pack).old_pass == 0, "the training pass measures it"
    assert train(load, shape, *one_pack, "diagnostics.exact_staleness=true").old_pass > 0
    assert train(load, shape, "old_log_probs=rollout").old_pass == 0
    reference = train(load, shape, "algorithm=grpo", "kl={coefficient: 0.1}")
    assert reference.old_pass == pytest.approx(2 * time.old_pass)


def test_full_recomputation_is_one_more_forward_pass(load, shape):
    plain, again = train(load, shape).training, train(load, shape, "recompute.granularity=full").training
    assert again["layers"] == pytest.approx(plain["layers"] * 4 / 3) and again["head"] == plain["head"]


def test_the_bubble_is_what_pipelining_theory_says(load, shape):
    four = ["cluster.ranks_per_node=4", "parallel.pipeline=4"]
    time = train(load, shape, *four).training
    micro_batches = 64 * 8 * 2048 / 4 / 8192
    assert time["bubble"] == pytest.approx(3 / micro_batches * (time["layers"] + time["head"] + time["exchange"]))
    turns = train(load, shape, four[0], "parallel={pipeline: 4, virtual_pipeline: 2}").training
    assert turns["bubble"] == pytest.approx(
        3 / 2 / micro_batches * (turns["layers"] + turns["head"] + turns["exchange"])
    )
    assert turns["bubble"] < time["bubble"]


def test_groups_over_nodes_are_slower(load, shape):
    inside = train(load, shape, "cluster.ranks_per_node=4", "parallel.tensor=4").training
    across = train(load, shape, "cluster={num_nodes: 4}", "parallel.tensor=4").training
    assert across["exchange"] == pytest.approx(9 * inside["exchange"])  # 450 against 50 GB/s
    assert across["layers"] == inside["layers"]


def test_gradients_are_reduced_once_an_optimizer_step(load, shape):
    two = ["cluster.ranks_per_node=2"]
    plain = train(load, shape, *two).training["gradients"]
    elements = 8 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 16384) + 2 * 32000 * 4096
    assert plain == pytest.approx(4 * elements * 6 / 2 / (LINK_SHARE * 450e9), rel=0.01)
    assert train(load, shape, *two, "optimizer.overlap=true").training["gradients"] == pytest.approx(plain / 4)


def test_tokens_to_experts_take_the_slower_of_two_ways():
    gpu = Gpu(1, 1, 1, 1, 100.0, 10.0, (9, 0))
    assert _all_to_all(gpu, 80, 4, 8) == pytest.approx(80 * 3 / 4 / (LINK_SHARE * 100))
    assert _all_to_all(gpu, 80, 16, 8) == pytest.approx(80 * 8 / 16 / (LINK_SHARE * 10))


def test_experts_cost_their_own_rate(load, shape):
    moe = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8192)
    plan = plan_run(load(*BATCH), "gpu", shape("moe", **REAL, **moe))
    found = train_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"]).training["layers"]
    dense = train(load, shape).training["layers"]
    peak = 18 * 64 * 8 * 2048 * 8 * 4096 * 16384 / GPUS["H100"].bf16_flops
    # The experts' width, and the tokens that each of the 8 gets of a pack of 8192: two sides that make a product
    # narrow.
    experts = peak / EXPERT_SHARE["bf16"] / (8192 / (8192 + 128)) / (2048 / (2048 + 128))
    assert found - dense == pytest.approx(experts - peak / MATRIX_SHARE["bf16"] / (16384 / (16384 + 128)))


def test_phases_and_what_sampling_ahead_would_save(load, shape):
    plan = plan_run(load(*BATCH, "publish.method=distributed"), "gpu", shape("dense", **REAL))
    time = step_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"], 10**9)
    assert set(time.phases) == {"rollout", "old pass", "training", "publish"}
    assert time.total == pytest.approx(sum(time.phases.values())) and time.phases[time.bottleneck] == max(
        time.phases.values()
    )
    assert time.hidden_by_overlap == min(time.rollout, time.train.total)
    # Hashing 2 GB takes longer than sending them, which overlaps but for the first bucket; then the server hashes.
    hashed, read = 2e9 / SHA256_BYTES_PER_SECOND, 2e9 / (MEMORY_SHARE * 3.35e12)
    sent, first = 2e9 / (LINK_SHARE * 50e9), plan.config.publish.bucket_bytes / 2e9
    assert time.publish == pytest.approx(hashed + first * sent + read)
    disk = step_time(
        plan.config.model_copy(update={"publish": load().config.publish}),
        plan.layout,
        ModelShares(plan.spec),
        GPUS["H100"],
        10**9,
    )
    assert disk.publish == pytest.approx(hashed + 2 * 2e9 / STORAGE_BYTES_PER_SECOND + read)


def test_what_a_publish_hashes(load, shape):
    """By hand, 10^9 parameters in bf16 are 2 GB, those of one of two expert or pipeline ranks 1 GB."""

    def hashes(*overrides, device="gpu", total=10**9):
        plan = plan_run(load(*BATCH, *overrides), device, shape("dense", **REAL))
        on_gpu = device == "gpu"
        return timing.hash_cost(plan.config, plan.spec, plan.layout, total, on_gpu, GPUS["H100"] if on_gpu else None)

    read = MEMORY_SHARE * 3.35e12
    assert hashes() == HashCost(1, 2e9, 2e9 / SHA256_BYTES_PER_SECOND, 2e9, pytest.approx(2e9 / read))
    two = hashes("cluster.ranks_per_node=2", "parallel.pipeline=2", "server.tensor=2")
    assert two == HashCost(2, 1e9, 1e9 / SHA256_BYTES_PER_SECOND, 1e9, pytest.approx(1e9 / read))
    assert hashes("publish.verify_all_every=2") == hashes(), "replicas verify a tensor in two publishes in a row"
    spread = hashes("publish.verify_all_every=8")
    assert spread == HashCost(1, 5e8, 5e8 / SHA256_BYTES_PER_SECOND, 5e8, pytest.approx(5e8 / read))
    host = hashes("publish.verify_all_every=4", device="cpu")
    assert host.server_seconds == host.trainer_seconds == 5e8 / SHA256_BYTES_PER_SECOND
    # SGLang does not leave out what is in blocks, and hashes it in bf16.
    total = count_parameters(read_model_spec(shape("dense", **REAL))).total
    quantized = ("server.quantization=fp8_block", "publish.verify=replicas")
    blocks, spread = (hashes(*quantized, f"publish.verify_all_every={n}", total=total) for n in (1, 1000))
    assert spread.trainer_bytes == pytest.approx(blocks.trainer_bytes / 500)
    assert 0.8 * blocks.server_bytes < spread.server_bytes < blocks.server_bytes < 2.001 * total


def test_the_plan_shows_what_a_publish_hashes(load, shape):
    overrides = (*BATCH, "train.num_steps=3", "publish={method: distributed, verify_all_every: 4}")
    plan = plan_run(load(*overrides), "gpu", shape("dense", **REAL))
    figures = estimate(plan)
    text, values = render_report(plan, figures), json.loads(plan_json(plan, figures))["servers"]["hashes_per_publish"]
    assert "hashed per publish, the mean of 4 publishes (publish.verify_all_every: 4): " in text
    assert "ranks that own tensors (SHA-256, 1.1 GB/s on one core)" in text and "by SGLang's GPU kernel" in text
    assert values["trainer_bytes"] == pytest.approx(2 * figures.counts.total * 2 / 4)
    assert values["trainer_seconds"] == pytest.approx(values["trainer_bytes"] / 1.1e9)
    said = render_report(plan_run(load("train.num_steps=3"), "cpu", shape("dense")))
    assert "hashed per publish, all weights: " in said and "on each rank of a server, SHA-256" in said
    assert "hashed per publish" not in render_report(plan_run(load(), "cpu", shape("dense"))), "nothing is trained"


@pytest.mark.parametrize(("servers", "slower"), [(1, "rollout"), (16, "training")])
def test_with_sampling_ahead_a_step_takes_the_longer_of_rollout_and_training(load, shape, servers, slower):
    def report(staleness):
        overrides = (
            f"server.num_servers={servers}",
            f"rollout.max_staleness={staleness}",
            "publish.method=distributed",
        )
        plan = plan_run(load(*BATCH, *overrides), "gpu", shape("dense", **REAL))
        figures = estimate(plan)
        return figures.time, render_report(plan, figures)

    (waiting, before), (ahead, text) = report(0), report(1)
    assert (ahead.rollout, ahead.train, ahead.publish) == (waiting.rollout, waiting.train, waiting.publish)
    assert ahead.total == max(waiting.rollout, waiting.train.total) + waiting.publish
    assert ahead.total == pytest.approx(waiting.total - waiting.hidden_by_overlap)
    assert ahead.bottleneck == slower and f"about {ahead.total:.0f} s per step" in text
    assert f"sampling ahead (rollout.max_staleness: 1) would save about {waiting.hidden_by_overlap:.0f} s" in before
    assert f"sampling ahead saves about {waiting.hidden_by_overlap:.0f} s per step" in text and "would save" not in text
    waits = "the trainer waits for rollouts" if slower == "rollout" else "servers wait for the trainer"
    assert f"{waits} for about {abs(ahead.rollout - ahead.train.total):.0f} s of it" in text


@pytest.fixture
def without_hashes(monkeypatch):
    monkeypatch.setattr(timing, "hash_cost", lambda *_: HashCost(1, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.usefixtures("without_hashes")
def test_publishing_sends_a_copy_per_group_of_servers_out_of_one_gpu(load, shape):
    """Without what is hashed. By hand, 10^9 parameters in bf16: 2 GB a copy; .75 of 50 GB/s of network are 37.5, of 450 of NVLink 337.5."""

    def seconds(*overrides, kind="dense", total=10**9):
        plan = plan_run(load(*BATCH, "publish.method=distributed", *overrides), "gpu", shape(kind, **REAL))
        return step_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"], total).publish

    assert seconds("server.num_servers=16") == pytest.approx(2 / 37.5), "one group, however many are in it"
    assert seconds("server={num_servers: 16, tensor: 2}") == pytest.approx(2 / 37.5)
    assert seconds("server.num_servers=16", "precision=fp32") == pytest.approx(4 / 37.5)
    for per_group, groups in ((1, 16), (5, 4), (16, 1), (20, 1)):
        more = f"publish={{method: distributed, servers_per_group: {per_group}}}"
        assert seconds("server.num_servers=16", more) == pytest.approx(groups * 2 / 37.5)
    assert seconds("server.num_servers=3", "cluster={gpus_per_node: 4}") == pytest.approx(2 / 337.5), (
        "beside the ranks of one machine"
    )
    assert seconds("server.num_servers=4", "cluster={gpus_per_node: 4}") == pytest.approx(2 / 37.5), (
        "one more does not fit there"
    )
    # Pipeline stages and expert ranks send what they have.
    half = "publish={method: distributed, bucket_bytes: 500000000}"
    stages = seconds("server.num_servers=2", "cluster={num_nodes: 4}", "parallel.pipeline=4", half)
    experts = seconds("server.num_servers=2", "cluster={ranks_per_node: 4}", "parallel.expert=4", half, kind="moe")
    assert stages == experts == pytest.approx(2 / 37.5)
    # Tensor-parallel shares: three quarters come from other ranks of the node. They are sent meanwhile, but for the
    # first bucket of .5 GB. Two stages gather at once, each its half.
    tensor = seconds("server.num_servers=2", "cluster={ranks_per_node: 4}", "parallel.tensor=4", half)
    assert tensor == pytest.approx(2 / 37.5 + 0.25 * 0.75 * 2 / 337.5)
    both = ("cluster={num_nodes: 2, ranks_per_node: 4}", "parallel={tensor: 4, pipeline: 2}")
    assert seconds("server.num_servers=2", *both, half) == pytest.approx(2 / 37.5 + 0.5 * 0.75 * 1 / 337.5)


@pytest.mark.parametrize(
    "stages, tensor, servers, per_group",
    [(4, 2, 16, "null"), (4, 2, 16, "1"), (2, 4, 2, "null"), (1, 2, 5, "2"), (1, 4, 1, "null"), (4, 1, 2, "null")],
)
@pytest.mark.parametrize("hash_rate", [math.inf, 200e9, 1.1e9])
def test_a_publish_takes_what_its_buckets_take_by_a_clock(
    load, shape, monkeypatch, stages, tensor, servers, per_group, hash_rate
):
    """Every stage gathers and hashes its next bucket while it waits for its turn to send the one before. A node per
    rank. Servers' hashes come after it, and are left out.
    """
    hashed = 2e9 / stages / hash_rate
    monkeypatch.setattr(timing, "hash_cost", lambda *_: HashCost(stages, 0.0, hashed, 0.0, 0.0))
    num_buckets, rate = 16, 37.5e9
    plan = plan_run(
        load(
            *BATCH,
            f"publish={{method: distributed, bucket_bytes: {2 * 10**9 // num_buckets}, servers_per_group: {per_group}}}",
            f"server.num_servers={servers}",
            f"cluster.num_nodes={stages * tensor}",
            f"parallel={{pipeline: {stages}, tensor: {tensor}}}",
        ),
        "gpu",
        shape("dense", **REAL),
    )
    groups = 1 if per_group == "null" else math.ceil(servers / int(per_group))
    gather = (1 - 1 / tensor) * 2e9 / rate / num_buckets + 2e9 / hash_rate / num_buckets
    send = groups * 2e9 / rate / num_buckets
    handed, sent, end = [0.0] * stages, [0.0] * stages, 0.0
    for _ in range(num_buckets // stages):
        for stage in range(stages):
            handed[stage] = max(handed[stage] + gather, sent[stage])
            sent[stage] = end = max(handed[stage], end) + send
    found = step_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"], 10**9).publish
    assert found == pytest.approx(end)


def test_rollout_is_bound_by_memory_and_by_the_longest_response(load, shape):
    spec = read_model_spec(shape("dense", **REAL))

    def seconds(*overrides, total=2 * 10**9):
        return rollout_seconds(load(*BATCH, *overrides).config, spec, GPUS["H100"], total)

    assert seconds("server.num_servers=4") < seconds("server.num_servers=2") < seconds()
    assert seconds("rollout.max_concurrent_requests=8") > 5 * seconds()
    # With a server a sequence, what is left is a response of the longest length: reading all weights for each token.
    alone = seconds("server.num_servers=512")
    assert 3072 * 4e9 / (0.6 * 3.35e12) < alone < 1.3 * 3072 * 4e9 / (0.6 * 3.35e12)


def test_lengths_and_checkpoint(load):
    config = load(*BATCH).config
    assert mean_tokens(config) == (512, 1536)
    plain, small = load("precision=fp32").config, load("precision=bf16", "optimizer.moments_dtype=bf16").config
    for one, size in ((config, 140), (plain, 120), (small, 100)):
        assert checkpoint_bytes(one.precision, one.optimizer, 10) == size
    assert save_seconds(10 * 10**9) == 1.0


def test_several_turns_sample_more_and_read_what_is_between_them(load, shape):
    """Up to 4 turns of 3,072 tokens in an episode of 16,384: half of 12,288 sampled, the rest of 8,192 read."""
    agent = ["rollout.episode=my.agents:play", "episodes={max_tokens: 16384, max_turns: 4}"]
    config = load(*BATCH, "batch.micro_batch_tokens=16384", *agent).config
    assert mean_tokens(config) == (2048, 6144)
    spec = read_model_spec(shape("dense", **REAL))
    alone = rollout_seconds(
        load(*BATCH, "batch.micro_batch_tokens=16384", *agent, "server.num_servers=512").config,
        spec,
        GPUS["H100"],
        2 * 10**9,
    )
    assert alone > 12288 * 4e9 / (0.6 * 3.35e12), "the longest episode samples four whole turns"


def test_an_average_episode_has_a_prompt_however_tight_its_limit_is(load):
    """8 turns of 3,072 tokens would be more than 4,608: half an episode is half a prompt and what is left of 2,304."""
    agent = ["rollout.episode=my.agents:play", "episodes={max_tokens: 4608, max_turns: 8}"]
    assert mean_tokens(load(*BATCH, *agent).config) == (512, 1792)
    assert mean_tokens(load(*BATCH, agent[0], "episodes={max_tokens: 4096, max_turns: 1}").config) == (512, 1536)


def test_a_server_over_several_nodes_pays_for_the_network(load, shape):
    """Two sums per layer: a latency each, and the share of each GPU of what the nodes exchange. By hand."""
    from gspo_mega.plan.timing import between_nodes

    spec = read_model_spec(shape("dense", **REAL))
    over = load("server={tensor: 8, num_nodes: 2}", "cluster.num_nodes=2", "precision=bf16").config
    fixed, by_sequence = between_nodes(over.server, over.precision, spec, GPUS["H100"])
    assert fixed == pytest.approx(2 * spec.num_layers * 40e-6)
    # 4096 values of 2 bytes, half of them sent in both halves of the sum, by 4 GPUs at 0.75 of 50 GB/s.
    assert by_sequence == pytest.approx(2 * spec.num_layers * 2 * 0.5 * 4096 * 2 / 4 / (LINK_SHARE * 50e9))
    inside = load("server.tensor=8").config
    assert between_nodes(inside.server, inside.precision, spec, GPUS["H100"]) == (0.0, 0.0)
    batch = [*BATCH, "precision=bf16", "cluster.num_nodes=2"]
    one, two = (
        rollout_seconds(load(*batch, f"server={{tensor: 2, num_nodes: {n}}}").config, spec, GPUS["H100"], 10**9)
        for n in (1, 2)
    )
    assert two > one
    plan = plan_run(load("server={tensor: 2, num_nodes: 2}", "cluster.num_nodes=2"), model=shape("dense", **REAL))
    figures = estimate(plan)
    assert any("servers of 2 ranks span 2 nodes: two sums over all their ranks" in notice for notice in figures.notices)
    assert "1 x tensor 2 over 2 nodes on 127.0.0.1" in render_report(plan, figures)
    assert (figures.servers.num_gpus, figures.servers.nodes) == (2, 2)

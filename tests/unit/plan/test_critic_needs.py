"""A critic in a plan: counts by hand, where its bytes and seconds stand, and a critic that does not fit."""

import json

import pytest

from gspo_mega.base.errors import ModelError, PlanError
from gspo_mega.config.derived import critic_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import estimate, plan_run, render_report, resolve_layout
from gspo_mega.plan.memory import critic_parameters, critic_state, saved_bytes
from gspo_mega.plan.report import plan_json
from gspo_mega.plan.state import ModelShares, has_reference, state_bytes
from gspo_mega.plan.timing import MORE_POSITION_BYTES, hand_out
from gspo_mega.plan.watchdog_bounds import patience
from gspo_mega.verify.simulate.job import job_of

PPO = ("algorithm=ppo", "objective={}")
GPU = ("precision=bf16", "cluster.gpu=H100", "cluster.gpus_per_node=8", "optimizer.distributed=false")
LARGE = dict(hidden_size=4096, intermediate_size=16384, num_hidden_layers=8, vocab_size=32000, head_dim=128)
LARGE |= dict(num_attention_heads=32, num_key_value_heads=8)


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_a_row_in_place_of_the_head(load, shape, tied):
    spec = read_model_spec(shape("dense", tie_word_embeddings=tied))
    config, shares = load(*PPO, "optimizer.distributed=false").config, ModelShares(spec)
    layout = resolve_layout(config, spec)
    policy = shares.state(config, layout, 0).of_rank(0)
    found = critic_state(config, layout, shares, 0)
    assert found is not None
    critic = found[0].of_rank(0)
    # The head of a policy is a second matrix unless it is tied; vocabulary 512 by hidden 64.
    assert critic.parameters == policy.parameters - (0 if tied else 512 * 64) + 64 == critic_parameters(spec)
    assert critic.optimized == critic.parameters and critic.padding == 0
    assert critic_state(load("algorithm=grpo").config, layout, shares, 0) is None


def test_stages_of_a_critic_and_its_own_precision_and_moments(load, shape):
    spec = read_model_spec(shape("dense", tie_word_embeddings=True, num_hidden_layers=4))
    sizes = ("cluster.ranks_per_node=2", "parallel.pipeline=2", "optimizer.distributed=false", "precision=fp32")
    own = "critic={precision: bf16, optimizer: {lr: 1e-5, distributed: false}}"
    config, shares = load(*PPO, *sizes, own).config, ModelShares(spec)
    layout = resolve_layout(config, spec)
    stages = [critic_state(config, layout, shares, stage) for stage in range(2)]
    parts = [found[0].of_rank(stage).parameters for stage, found in enumerate(stages) if found is not None]
    assert sum(parts) == critic_parameters(spec), "tied embeddings of a policy are on both stages, a critic's are not"
    assert stages[0] is not None and stages[1] is not None
    last = stages[1][1]
    assert (last.weights, last.main, last.moments) == (2 * parts[1], 4 * parts[1], 8 * parts[1])
    assert critic_config(config).precision == "bf16" and config.precision == "fp32"
    assert stages[0][1].main == 4 * parts[0] and state_bytes(config, stages[0][0].largest, is_critic=True).main == 0


def test_memory_time_checkpoint_and_hand_out_of_a_run_with_a_critic(load, shape):
    model = shape("dense", **LARGE)

    def planned(*overrides):
        plan = plan_run(load(*GPU, *overrides), "gpu", model)
        figures = estimate(plan)
        assert figures.memory is not None and figures.time is not None
        return plan, figures, figures.memory, figures.time

    plan, with_critic, memory, seconds = planned(*PPO)
    alone_plan, alone, before, seconds_before = planned("algorithm=grpo", "objective={}")
    spec, counts = plan.spec, count_parameters(plan.spec)
    own = critic_parameters(spec)
    assert memory.parts["critic"] == own * (2 + 4 + 4 + 8) and before.parts["critic"] == 0
    assert memory.exact - before.exact == memory.parts["critic"]
    assert 0 < memory.phases["critic"] < memory.phases["training"], "its head needs less than logits"
    saved = counts.total * (2 + 4 + 8) + own * (2 + 4 + 8)
    assert with_critic.checkpoint_bytes == saved_bytes(plan.config, spec, counts.total) == saved
    assert with_critic.node_save_bytes > alone.node_save_bytes
    time = seconds.train
    # A forward pass for the values and three for its training, beside the policy's whose numbers stay; it has no head.
    share = own / counts.total
    assert time.critic == pytest.approx(time.training["layers"] * 4 / 3 + time.training["optimizer"] * share)
    assert seconds_before.train.critic == 0
    assert time.training == seconds_before.train.training
    assert seconds.phases["critic"] == time.critic and "critic" not in seconds_before.phases
    assert seconds.total - seconds_before.total == pytest.approx(time.critic)
    more = hand_out(plan.config, spec, plan.layout).shards - hand_out(alone_plan.config, spec, plan.layout).shards
    assert more % MORE_POSITION_BYTES == 0 and more >= 0
    report = render_report(plan, with_critic)
    assert "per rank, the critic in addition: " in report and "critic " in report
    assert "critic" not in render_report(alone_plan, alone)
    assert json.loads(plan_json(plan, with_critic))["critic_state"][0]["elements"]["parameters"] == own
    assert json.loads(plan_json(alone_plan, alone))["critic_state"] == []
    jobs = [job_of(p.config, ModelShares(p.spec), p.layout, counts) for p in (plan, alone_plan)]
    assert jobs[0].train_token > jobs[1].train_token and jobs[0].restart > jobs[1].restart


def test_the_reference_of_a_penalty_is_held_once(load, shape):
    spec = read_model_spec(shape("dense"))
    config = load(*PPO, "critic={kl_coefficient: 0.05}").config
    assert has_reference(config) and not has_reference(load(*PPO).config)
    shares, layout = ModelShares(spec), resolve_layout(config, spec)
    policy = state_bytes(config, shares.state(config, layout, 0).largest)
    critic = critic_state(config, layout, shares, 0)
    assert critic is not None and policy.reference == policy.weights and critic[1].reference == 0


def test_moments_of_both_models_on_the_host(load, shape):
    offload = "optimizer={lr: 1e-6, cpu_offload_fraction: 1.0}"
    config = ("precision=bf16", "cluster.gpu=H100", "cluster.gpus_per_node=8", offload)
    plan = plan_run(load(*config, *PPO), "gpu", shape("dense", **LARGE))
    figures = estimate(plan)
    offloaded = figures.states[0][1].offloaded + figures.critic_states[0][1].offloaded
    assert figures.memory is not None and figures.node_host_bytes == figures.memory.offloaded == offloaded
    with pytest.raises(PlanError, match=r"cluster.host_memory_gib: the 1 ranks of a node keep .* GiB"):
        estimate(plan_run(load(*config, *PPO, "cluster.host_memory_gib=40"), "gpu", shape("dense", **LARGE)))


def test_a_critic_that_does_not_fit_is_named(load, shape):
    model = shape("dense", **LARGE)
    limit = "cluster.gpu_memory_gib=50"
    assert estimate(plan_run(load(*GPU, limit), "gpu", model)).memory is not None
    with pytest.raises(PlanError, match=r"take 7\d\.\d GiB, 3\d\.\d GiB of it the critic's, of a GPU with 50\.0 GiB"):
        estimate(plan_run(load(*GPU, *PPO, limit), "gpu", model))


def test_the_backbone_of_a_critic_has_the_policys_shape(load, shape, tmp_path):
    other = json.loads(shape("dense").read_text()) | {"num_hidden_layers": 5}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    path = f"critic.path={tmp_path / 'other'}"
    loaded = load(*PPO, path, f"model.path={shape('dense')}")
    with pytest.raises(ModelError, match=r"critic.path: .*other has another shape than the policy: .*layers"):
        plan_run(loaded, "cpu")


def test_a_critics_phase_has_the_bound_of_training(load):
    bounds = patience(load(*PPO).config)
    assert bounds is not None and bounds.key("critic") == "watchdog.train_seconds"

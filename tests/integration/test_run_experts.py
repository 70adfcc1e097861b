"""Whole runs of a model with experts, each with real servers: what is measured of its routes, what replay does to that,
and a KL term to the model that the run starts from."""

import pytest
from converted_models import make_converted_model
from router_ties import differ_by_rounding
from run_support import REPOSITORY, Command, small_overrides
from safetensors.torch import load_file

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.writer import read_metrics

CONFIG = REPOSITORY / "configs/quickstart.yaml"
NUM_STEPS = 2


def run(folder, quickstart_files, name, *overrides):
    """(console, metrics by step) of a run that ended well. Its learning rate moves routes in two steps."""
    command = Command(
        folder,
        "train",
        str(CONFIG),
        *small_overrides(quickstart_files, folder / "runs", name),
        "eval=null",
        f"train.num_steps={NUM_STEPS}",
        "optimizer.lr=3e-4",
        f"reward.functions=[{{function: 'run_support:score', options: {{log: {folder / 'scores'}}}}}]",
        "rollout.return_routed_experts=true",
        *overrides,
        forked=True,
    )
    try:
        assert command.finish() == 0, command.out + command.err
    finally:
        command.end()
    lines = read_metrics(RunFolder(folder / "runs" / name).metrics_file)
    for line in lines:
        for metric in line.keys() - {"step", "time"}:
            find_metric(metric)
    return command.out, lines


@pytest.fixture(scope="module")
def free(tmp_path_factory, quickstart_files):
    return run(
        tmp_path_factory.mktemp("free"),
        quickstart_files,
        "free",
        "algorithm=custom",
        "objective={ratio: sequence, entropy_coefficient: 0.01}",
        "kl.coefficient=0.01",
        "moe={load_balancing: aux_loss, load_balancing_coefficient: 0.01, z_loss_coefficient: 0.001}",
    )


def test_the_engines_agree_on_routes_and_learning_changes_them(free):
    for line in free[1]:
        assert line["routing/changed_since_rollout"] < 0.005, "fp32: only what rounding can tip"
        assert 0 < line["routing/changed_since_old"] < 0.5
        by_layer = [value for name, value in line.items() if name.startswith("routing/layer/")]
        assert len(by_layer) == 3 and 0 < sum(by_layer) / 3 <= line["routing/changed_since_old"]


def test_the_router_losses_are_reported(free):
    for line in free[1]:
        assert 1 - 1e-3 < line["routing/load_balancing_loss"] < 8, "even is 1, and all on one of 8 experts is 8"
        assert line["routing/z_loss"] > 0


def test_the_entropy_bonus_is_that_share_of_the_entropy(free):
    for line in free[1]:
        # The mean over the mini-batches' own responses, of which the old pass reports the mean over all tokens.
        assert line["policy/entropy_bonus"] == pytest.approx(0.01 * line["policy/entropy"], rel=0.2)


def test_the_kl_term_starts_at_zero_and_is_measured(free):
    console, lines = free
    assert "reference policy of the KL term: " in console and " GiB of parameters" in console
    assert all(line["time/reference_log_probs_seconds"] > 0 for line in lines)
    # Of two mini-batches in the first step, the first is the reference itself.
    assert 0 < lines[0]["policy/kl_reference"] < lines[1]["policy/kl_reference"] < 1


def test_the_servers_routes_are_replayed(tmp_path, quickstart_files):
    by_token = ("algorithm=gspo_token", "mismatch.correction=token_tis")
    console, lines = run(tmp_path, quickstart_files, "replayed", "moe.routing_replay=R3", *by_token)
    assert "routing replay R3" in console and "mismatch.correction token_tis" in console
    for line in lines:
        # In fp32 the engines agree: no weight is cut or 0, and all are 1 to rounding.
        assert line["mismatch/token_cut_fraction"] == line["mismatch/token_dropped_fraction"] == 0
        assert 0 < abs(line["mismatch/token_weight_mean"] - 1) < 1e-4
        # The trainer goes through the very experts that the server chose: the engines still agree to rounding.
        assert 0 < line["mismatch/abs_log_ratio_max"] < 1e-3
        assert line["policy/mini_batch/0/k3"] == 0 < line["policy/mini_batch/1/k3"]
        # Nothing can differ, and no router loss is on: only the loads of the two expert ranks are there.
        loads = {name: value for name, value in line.items() if name.startswith("routing/")}
        assert loads.keys() == {"routing/rank_load_max_over_mean", "routing/rank_load_max"}
        assert 1 < loads["routing/rank_load_max_over_mean"] < loads["routing/rank_load_max"] <= 2
    recorded = RunFolder(tmp_path / "runs" / "replayed").path
    replayed = ("moe.routing_replay=R3", *by_token, f"train.from_rollouts={recorded}")
    again = run(tmp_path, quickstart_files, "again", *replayed)[1]
    computed = ("policy/", "mismatch/", "optimizer/", "advantage/", "reward/")
    for live, replay in zip(lines, again, strict=True):
        names = [name for name in live if name.startswith(computed)]
        assert len(names) > 30 and {n: replay.get(n) for n in names} == {n: live[n] for n in names}, "to the bit"


def test_a_cold_start_balances_experts_too(tmp_path, quickstart_files):
    """Two supervised steps with the router losses on; they end at the first measurement, whatever it is."""
    command = Command(
        tmp_path,
        "sft",
        str(REPOSITORY / "configs/quickstart_sft.yaml"),
        *small_overrides(quickstart_files, tmp_path / "runs", "cold"),
        "rollout.max_new_tokens=48",
        "sft={max_steps: 2, sequences_per_step: 16, eval_every_steps: 2, stop_accuracy_low: 0, stop_accuracy_high: 1}",
        "moe={load_balancing: aux_loss, load_balancing_coefficient: 0.01}",
        forked=True,
    )
    try:
        assert command.finish() == 0, command.out + command.err
    finally:
        command.end()
    lines = read_metrics(RunFolder(tmp_path / "runs" / "cold").metrics_file)
    assert len(lines) == 2
    assert all(1 - 1e-3 < line["routing/load_balancing_loss"] < 8 and "routing/z_loss" not in line for line in lines)


def test_a_model_of_deepseeks_kind_trains_with_its_expert_bias(tmp_path, quickstart_files):
    """Latent attention, a shared expert, a dense first layer; the bias moves in the trainer, on the server and in what
    is exported.
    """
    model = make_converted_model(tmp_path, "deepseek_v3")
    rate = 0.01
    _, lines = run(tmp_path, quickstart_files, "deepseek", f"model.path={model}", f"moe.expert_bias_update_rate={rate}")
    deepseek = RunFolder(tmp_path / "runs" / "deepseek")
    for line in lines:
        assert line["routing/load_max_over_mean"] > 1
        assert differ_by_rounding(deepseek, line), "the server samples with another bias than the trainer has"
    num_optimizer_steps = lines[-1]["optimizer/num_optimizer_steps"]
    before, after = (biases(folder) for folder in (model, deepseek.huggingface_dir))
    assert before.keys() == after.keys() and before
    for name in before:
        moved = (after[name] - before[name]).abs().max().item()
        assert 0 < moved <= num_optimizer_steps * rate * (1 + 1e-4), name


def biases(folder):
    found = (load_file(file) for file in sorted(folder.glob("*.safetensors")))
    return {
        name: tensor
        for tensors in found
        for name, tensor in tensors.items()
        if name.endswith("e_score_correction_bias")
    }

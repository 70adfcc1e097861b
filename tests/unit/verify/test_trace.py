"""The trace on cases known by hand and against PyTorch's own allocator, and through the command on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError, ModelError
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import plan_run
from gspo_mega.plan.memory import EXCHANGED_ELEMENTS
from gspo_mega.verify.trace.compare import Difference, kept_between_steps, kinds_of_rank, num_packs
from gspo_mega.verify.trace.report import NOT_MEASURED, draw, render_differences
from gspo_mega.verify.trace.request import with_layers

ROOT = Path(__file__).parents[3]
MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def found() -> dict:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("trace_cases.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_bytes_and_flops_are_those_counted_by_hand(found):
    """Two matrices of 2 MiB and an input of 0.5 MiB; at the end their gradients and a gather of 8 MiB."""
    one = found["plain"]
    assert (one["before"], one["peak"], one["after"]) == (4.5 * MIB, 16.5 * MIB, 4.5 * MIB)
    # Two products forward; backward both weights' gradients and that of the hidden layer.
    assert one["flops"] == {"products, float32": 5 * 2 * 256 * 512 * 1024}
    assert one["waits"] == {} and one["collectives"] == [["_allgather_base", "other", 4, 1, 8 * MIB]]
    assert one["moved"] == 0.5 * MIB, "storages that are emptied in place"
    assert one["recorded"] == one["after"], "what happens later does not change a phase's record"
    assert any("trace_cases.py" in frame for stack in one["stacks"] for frame in stack)


def test_the_peak_is_what_pytorch_allocates_on_a_cpu(found):
    """The same passes with real tensors; small tensors differ by the block they are rounded up to."""
    traced = found["plain"]["passes"] - found["plain"]["before"]
    assert found["profiled"] > 4 * MIB and abs(traced - found["profiled"]) <= 2048


def test_what_is_kept_gathered_twice_or_waited_for_is_found_with_its_line(found):
    plain = found["plain"]
    kept = found["retention"]
    assert kept["after"] - plain["after"] == MIB
    (more,) = [one for one in kept["left"] if one not in plain["left"]]
    assert more[:2] == ["model", MIB] and "trace_cases.py" in more[2]
    assert found["gathered twice"]["collectives"] == [["_allgather_base", "other", 4, 2, 16 * MIB]]
    (what,) = found["waits"]["waits"]
    assert what.startswith("_local_scalar_dense") and "trace_cases.py" in what


def test_of_a_compiled_function_only_the_result_takes_memory(found):
    assert found["compiled"] == {"before": MIB, "peak": 2 * MIB, "after": 2 * MIB}


def test_what_is_freed_while_it_is_counted_is_no_error(found):
    assert found["collected"] == ""


def test_numbers_of_the_host_are_known_and_others_are_answered(found):
    assert found["reads"] == {"lengths": [3, 4], "unknown": [0.0] * 3, "chosen": [2, 2], "waits": 2}


def test_copies_on_the_host_are_counted_and_page_locked_ones_rounded(found):
    """3 MiB twice, once in page-locked memory; a view keeps all of its storage."""
    one = found["copied"]
    assert (one["peak"], one["after"], one["end"]) == (7 * MIB, 7 * MIB, 0)
    assert [held[:2] for held in one["held"]] == [["host", 3 * MIB], ["page-locked", 4 * MIB]]
    assert all("trace_cases.py" in held[2] for held in one["held"]) and one["waits"] == 1


def test_what_cannot_be_traced_is_named_with_its_line(found):
    operation, kernel = found["untraceable"]
    assert "rank 3 cannot be traced" in operation and "_unique2" in operation
    assert "rank 3 cannot be traced" in kernel and "made_up_kernel" in kernel
    assert all("trace_cases.py:" in said for said in found["untraceable"])


def test_one_rank_of_each_kind():
    def layout(*overrides):
        return plan_run(load_config(str(ROOT / "configs/llama3_70b_8nodes.yaml"), overrides, "train"), "gpu").layout

    staged = layout()
    assert kinds_of_rank(staged) == [0, 8, 24] and num_packs(staged) == 8
    assert [staged.coordinates(rank).pipeline for rank in (0, 8, 24)] == [0, 1, 3]
    plain = layout("parallel.pipeline=1", "parallel.virtual_pipeline=null", "parallel.tensor=8")
    assert kinds_of_rank(plain) == [0] and num_packs(plain) == 2
    assert num_packs(layout("parallel.virtual_pipeline=null")) == 4


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/models").glob("*.json")))
def test_a_shape_with_fewer_layers_is_one_of_its_family(tmp_path, name):
    spec = read_model_spec(with_layers(ROOT / f"configs/models/{name}.json", 4, tmp_path))
    whole = read_model_spec(ROOT / f"configs/models/{name}.json")
    assert spec.num_layers == 4 and spec.hidden_size == whole.hidden_size and spec.family == whole.family
    assert (spec.moe is None) == (whole.moe is None)


def test_a_shape_that_is_none_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="config.json: not a model's shape: KeyError"):
        with_layers(tmp_path, 2, tmp_path / "out")


def test_a_difference_names_the_formula():
    formula = "plan/activations.py: layer_activations"

    def difference(planned, traced, what="rank 8: memory, training", tolerance=0.05):
        return Difference(what, planned * GIB, traced * GIB, "bytes", tolerance, formula)

    near, far = difference(100, 104), difference(100, 94)
    assert near.agrees and not far.agrees and far.share == pytest.approx(-0.06)
    assert difference(0, 0.2, "rollout, x").agrees and not difference(0, 0.3, "rollout, x").agrees
    assert difference(1, 1.2).agrees and not difference(1, 1.2, "state", 0.01).agrees, "a workspace is no state"
    lines = render_differences([near, far])
    assert formula not in lines[1] and lines[2].endswith("-6.0%   more than 5%: " + formula)


def test_what_is_kept_besides_the_state_is_named():
    left = [
        {"holder": "state: parameters", "bytes": 10},
        {"holder": "decoder.layers.*.mlp", "bytes": 3},
    ]
    assert kept_between_steps({"phases": [{"name": "second optimizer", "left": left}]}) == (3, [left[1]])


def test_a_picture_has_every_phase():
    phase = {
        "name": "training",
        "peak": 3 * 2**30,
        "at_peak": [{"holder": "a<b", "where": "", "bytes": 2**30, "tensors": 2}],
    }
    svg = draw([{"rank": 0, "phases": [phase]}], "title")
    assert "rank 0: training" in svg and "a&lt;b" in svg and "3.0 GiB" in svg and NOT_MEASURED.split(":")[0] in svg


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "99"], "--rank 99: the configuration has ranks 0 to 1"),
        (["--layers", "0"], "--layers 0: give a whole number from 1 on"),
        (["--imbalance", "0"], "--imbalance 0: give a number above 0"),
        (["--imbalance", "nan"], "--imbalance nan: give a number above 0"),
        (["--imbalance", "runs/nothing"], "--imbalance runs/nothing: give a number above 0, 1 for even experts, or"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(arguments, said, capsys):
    assert main(["trace", str(ROOT / "configs/qwen3_4b_1node.yaml"), *arguments]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_the_imbalance_of_a_run_is_the_largest_that_it_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def stop(*_: object, imbalance: float, **__: object) -> None:
        asked.append(imbalance)
        raise ConfigError("stopped")

    monkeypatch.setattr("gspo_mega.cli.trace.trace_run", stop)
    words = ["trace", str(ROOT / "configs/qwen3_30b_a3b_4nodes.yaml"), "--imbalance"]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    main([*words, str(tmp_path)])
    assert f"--imbalance {tmp_path}: that run has not measured routing/rank_load_max" in capsys.readouterr().err
    loads = "".join(f'{{"step": {s}, "routing/rank_load_max": {x}}}\n' for s, x in ((2, 1.4), (3, 2.6), (4, 1.9)))
    metrics.write_text('{"step": 1}\n' + loads)
    main([*words, str(tmp_path)])
    main([*words, "1.5"])
    assert asked == [2.6, 1.5]


def test_without_the_wheel_the_command_says_what_installs_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("gspo_mega.verify.trace.job.megatron_folder", lambda: tmp_path)
    assert main(["trace", str(ROOT / "configs/qwen3_4b_1node.yaml")]) == ModelError.exit_code
    assert (
        f"the GPU's Megatron-Core is not in {tmp_path}; launch/setup.sh --trace installs it" in capsys.readouterr().err
    )


# Configuration, further arguments, and the groups that must have been used.
SAMPLES = {
    "experts": (
        "qwen3_30b_a3b_4nodes",
        ["--layers", "2", "moe.routing_replay=R3", "rollout.return_routed_experts=true"],
        {"expert", "expert_data"},
    ),
    "adapters": (
        "qwen3_30b_a3b_4nodes",
        ["--layers", "2", "--rank", "0", "lora={rank: 16, alpha: 32}"],
        {"expert", "expert_data"},
    ),
    "stages": (
        "llama3_70b_8nodes",
        ["--layers", "8", "--rank", "0", "parallel.virtual_pipeline=null"],
        {"pipeline", "tensor"},
    ),
    "delta nets": (
        "qwen3_30b_a3b_4nodes",
        ["--model", str(ROOT / "configs/models/qwen3_next_80b.json"), "--layers", "2", "--rank", "0"],
        {"expert", "expert_data"},
    ),
}


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_a_shipped_configuration_agrees_with_its_plan(kind, capsys):
    """Two layers, in seconds: the state to 1 %, and nothing of a pass kept between steps."""
    name, arguments, groups = SAMPLES[kind]
    assert main(["trace", str(ROOT / f"configs/{name}.yaml"), *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["note"] == NOT_MEASURED
    compared = {one["what"]: one for one in result["plan"]}
    exact = ("state", "expert exchange", "memory, save", "host, ")
    assert [one for what, one in compared.items() if what.startswith(exact) and not one["agrees"]] == []
    assert abs(compared["memory, training"]["share"]) < 0.10, compared["memory, training"]
    for one in result["ranks"]:
        used = {sent["group"] for phase in one["phases"] for sent in phase["collectives"]}
        assert groups <= used
        waits = [where for phase in one["phases"] for where in phase["waits"]]
        assert not any("rope_utils" in where for where in waits), "rotary positions are not fused"
        assert one["versions"]["megatron-core"] == "0.19.2"
        _, holders = kept_between_steps(one)
        layers = [
            held for held in holders if "experts" in held["holder"] or held["holder"].endswith((".mlp", ".router"))
        ]
        assert sum(held["bytes"] for held in layers if "transformer_engine/pytorch/cpp" not in held["where"]) < 2**20, (
            layers
        )


def small(capsys, *overrides: str) -> tuple[dict, dict]:
    """What is compared, and the phases, of one layer and one pack on one GPU, whose head takes few chunks."""
    arguments = ["--layers", "1", "--packs", "1", "--json", "batch.log_prob_chunk_tokens=2048", *overrides]
    assert main(["trace", str(ROOT / "configs/qwen3_06b_1gpu.yaml"), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    phases = {phase["name"]: phase for phase in result["ranks"][0]["phases"]}
    return {one["what"]: one for one in result["plan"]}, phases


def test_a_critic_and_a_reference_are_traced_with_their_state_passes_and_saves(capsys):
    """PPO with a penalty for leaving the reference, and the critic's optimizer on the host."""
    critic = "critic={kl_coefficient: 0.1, optimizer: {lr: 1e-6, cpu_offload_fraction: 1.0}}"
    compared, phases = small(capsys, "algorithm=ppo", "cluster.colocated=false", critic)
    step = ["old pass", "reference pass", "values", "critic training", "critic optimizer", "training", "optimizer"]
    steps = [f"{nth} {name}" for nth in ("first", "second") for name in step]
    assert list(phases) == ["build", *steps, "publish", "save"]
    assert [what for what, one in compared.items() if not one["agrees"]] == []
    assert compared["state, critic"]["traced"] > compared["state, reference"]["traced"] > 0
    assert compared["host, offloaded optimizer"]["traced"] > 0
    flops = {name: sum(phase["flops"].values()) for name, phase in phases.items()}
    assert flops["second reference pass"] == flops["second old pass"] > flops["second values"] > 0
    assert phases["second critic training"]["flops"] != {} == phases["second critic optimizer"]["flops"]


def test_a_reference_makes_room_for_servers(capsys):
    compared, phases = small(capsys, "algorithm=grpo", "kl={coefficient: 0.1}")
    assert [what for what, one in compared.items() if not one["agrees"]] == []
    assert "state, critic" not in compared and compared["state, reference"]["traced"] > 0
    left = {one["holder"]: one["bytes"] for one in phases["rollout"]["left"]}
    assert left["state: reference"] == left["state: parameters"] == 0


def test_a_teacher_is_traced_with_its_pass_and_chunks_of_its_logits(capsys):
    compared, phases = small(capsys, "teacher={path: there, divergence: full}", "cluster.colocated=false")
    assert [what for what, one in compared.items() if not one["agrees"]] == []
    assert compared["state, reference"]["traced"] > 0, "a frozen model is marked as a reference is"
    plain = small(capsys, "cluster.colocated=false")[1]
    flops = {name: sum(phase["flops"].values()) for name, phase in phases.items()}
    assert flops["second teacher pass"] == flops["second old pass"]
    assert flops["second training"] > sum(plain["second training"]["flops"].values()), "both heads once more"


def test_flex_attention_is_traced_with_the_blocks_that_it_computes(capsys):
    """Of 8192 positions: a prompt of 512 and three responses of 2048, and a row of 1536 for the rest. In blocks of 128 these are
    10 + 3 (16 x 4 + 136) + 78 = 688; two products forward and seven backward, of 16 heads of 128.
    """
    compared, phases = small(capsys, "batch.share_prefixes=prompts", "recompute.granularity=none")
    flops = {name: phase["flops"].get("FlexAttention") for name, phase in phases.items()}
    forward = 2 * 688 * 128**2 * 16 * 2 * 128
    assert flops["second old pass"] == forward and flops["second training"] == forward * 4.5
    assert any("core_attention" in name for name in phases["second old pass"]["flops_by_module"])
    assert "attention" not in phases["second training"]["flops"], "Transformer Engine's is left out"
    assert [what for what, one in compared.items() if not one["agrees"]] == []
    waits = [where for phase in phases.values() for where in phase["waits"]]
    assert not any("flex_attention" in where for where in waits)


def test_a_save_makes_no_fp32_copies_of_all_small_moments(capsys):
    """They would be 2 GiB here. It holds what ranks exchange at a time, twice."""
    arguments = ["--layers", "9", "--packs", "1", "--rank", "0", "--json"]
    assert main(["trace", str(ROOT / "configs/deepseek_v3_64nodes.yaml"), *arguments]) == 0
    phases = {one["name"]: one for one in json.loads(capsys.readouterr().out)["ranks"][0]["phases"]}
    assert phases["save"]["peak"] - phases["save"]["before"] < 2 * 4 * EXCHANGED_ELEMENTS + 64 * MIB

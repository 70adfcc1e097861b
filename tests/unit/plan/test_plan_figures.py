"""`gspo-mega plan` for programs, and the configurations of real models that are shipped."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from published_qwen3_5 import qwen3_5

from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import estimate, plan_run, render_report

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
REAL = [path for path in sorted(CONFIGS.glob("*.yaml")) if "  gpu: " in path.read_text()]
NAMES = {
    "qwen3_06b_1gpu",
    "qwen3_17b_1gpu",
    "qwen3_4b_lora_1gpu",
    "qwen3_4b_1node",
    "qwen3_8b_2nodes",
    "qwen3_5_4b_1node",
    "qwen3_5_35b_a3b_4nodes",
    "llama3_70b_8nodes",
    "deepseek_v3_64nodes",
} | {
    *(f"qwen3_235b_a22b_{nodes}nodes" for nodes in (8, 32, 128)),
    *(f"qwen3_30b_a3b_{nodes}nodes{precision}" for nodes in (4, 8) for precision in ("", "_fp8")),
}


def test_the_shipped_configurations_of_real_models():
    assert {path.stem for path in REAL} == NAMES


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_real_configuration_fits_its_gpus(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_config(path, (), "train")
    plan = plan_run(loaded, "gpu")
    figures = estimate(plan, loaded.where)
    report = render_report(plan, figures)
    assert figures.fits and "to spare" in report
    cluster = loaded.config.cluster
    machines = cluster.num_nodes + (figures.servers.nodes or 0)
    assert machines == int(re.search(r"_(\d+)(?:node|gpu)", path.stem)[1])
    # The paper's, where it states them.
    objective = loaded.config.objective
    assert (objective.clip_low, objective.clip_high, loaded.config.batch.num_mini_batches) == (3e-4, 4e-4, 4)
    assert loaded.config.kl.coefficient == 0 and loaded.config.algorithm == "gspo"
    assert loaded.config.precision == ("fp8" if path.stem.endswith("fp8") else "bf16")


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_real_configuration_is_commented_line_by_line(path):
    """Every value says what it is, but for those a name says it all of."""
    plain = ("  seed:", "run:", "  name:", "  weight_decay", "  keep_last", "  deadline_seconds")
    for line in path.read_text().splitlines():
        if line and not line.startswith("#") and not line.endswith(":"):
            assert "# " in line or line.startswith(plain), line
    text = path.read_text()
    assert text.count("not in the paper") >= 6 and "the paper's" in text


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        ("qwen3_4b", 4.02, 4.02),
        ("qwen3_30b_a3b", 30.5, 3.35),
        ("qwen3_235b_a22b", 235.1, 22.2),
        ("llama3_70b", 70.55, 70.55),
    ],
)
def test_a_published_shape_has_its_published_size(shape, total, active):
    counts = count_parameters(read_model_spec(CONFIGS / "models" / f"{shape}.json"))
    assert counts.total / 1e9 == pytest.approx(total, rel=0.002) and counts.active / 1e9 == pytest.approx(
        active, rel=0.005
    )


@pytest.fixture
def real(monkeypatch):
    monkeypatch.chdir(ROOT)
    return "configs/qwen3_30b_a3b_4nodes.yaml"


def test_json(real, capsys):
    assert main(["plan", real, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["layout"]["world_size"] == 16 and value["servers"]["nodes"] == 2 and value["fits"] is True
    memory = value["memory"]
    assert memory["peak_bytes"] == sum(memory["parts_bytes"].values()) == memory["phases_bytes"][memory["peak_phase"]]
    assert memory["verified_on_gpu"] is False
    assert value["time"]["total_seconds"] == pytest.approx(sum(value["time"]["phases_seconds"].values()))
    assert len(value["time"]["assumptions"]) == 4
    assert value["checkpoint"]["bytes"] == value["model"]["parameters"] * 14
    elements = value["state"][0]["elements"]
    assert elements["parameters"] > value["model"]["parameters"] / 8  # an eighth of the experts, all of the rest


def test_shell(real, capsys):
    assert main(["plan", real, "--shell", "run.dir=a folder"]) == 0
    lines = capsys.readouterr().out.splitlines()
    values = dict(shlex.split(line)[0].split("=", 1) for line in lines)
    assert values["GSPO_RUN_DIR"] == "a folder/qwen3-30b-a3b-4nodes"
    wanted = {
        "TRAINER_NODES": "2",
        "RANKS_PER_NODE": "8",
        "WORLD_SIZE": "16",
        "NUM_SERVERS": "8",
        "SERVER_GPUS": "16",
        "ROLLOUT_NODES": "2",
        "FITS": "yes",
    }
    assert {name: values[f"GSPO_{name}"] for name in wanted} == wanted


def test_search_and_refusals_of_the_command(real, capsys):
    assert main(["plan", real, "--search", "1x8"]) == 0
    out = capsys.readouterr().out
    assert "layouts fit 79 GiB (H100)" in out and "\nparallel:\n" in out
    assert main(["plan", real, "--command", "train", "--search", "1x8"]) != 0, "its data is nowhere"
    assert "data.path" in capsys.readouterr().err
    assert main(["plan", real, "--search", "8"]) == 2
    assert "for example 4x8" in capsys.readouterr().err
    assert main(["plan", real, "cluster.gpu_memory_gib=20"]) == 10
    assert (
        "override 'cluster.gpu_memory_gib=20': cluster.gpu_memory_gib: weights, gradients and optimizer state take"
        in capsys.readouterr().err
    )
    assert main(["plan", real, "cluster.gpus_per_node=4"]) == 2
    assert "8 ranks, one GPU each, on nodes of 4 GPUs; nearest valid: 4" in capsys.readouterr().err
    assert main(["plan", real, "cluster.ranks_per_node=1", "cluster.gpus_per_node=1", "parallel.expert=2"]) == 2
    assert "a server on 2 GPUs does not fit on a node of 1" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "size"), [("qwen3_5_4b", "4B"), ("qwen3_5_35b_a3b", "35B-A3B")])
def test_the_shapes_of_qwen3_5_are_those_of_its_published_folders(shape, size, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen3_5(size)))
    published, shipped = (read_model_spec(path) for path in (tmp_path, CONFIGS / "models" / f"{shape}.json"))
    assert replace(published, raw={}) == replace(shipped, raw={}) and published.raw != {}

"""What `gspo-mega mismatch` refuses before it starts anything, and which evaluations share a start."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config import load_config, render_config
from gspo_mega.launcher.prepare import commit
from gspo_mega.models.block_fp8 import is_quantizable
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.plan import plan_run
from gspo_mega.verify.certify.program import make_random_folder
from gspo_mega.verify.mismatch.causes import ONE_RANK, Nothing, formats
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens, Sampled
from gspo_mega.verify.mismatch.run import Conduct
from gspo_mega.verify.mismatch.served_folders import ServedFolders
from gspo_mega.verify.mismatch.walks import Point, make_plan

CONFIG = "configs/quickstart.yaml"
MODEL = "model.path=configs/models/quickstart_moe.json"


def conduct(*overrides):
    given = [MODEL, *overrides]
    return Conduct(load_config(CONFIG, given, "budget"), given, lambda line: None, ())


def test_several_nodes_are_refused_with_what_to_override():
    with pytest.raises(PlanError, match=r"cluster.num_nodes: 2: `gspo-mega mismatch` runs on one machine. Override"):
        conduct("cluster.num_nodes=2")


def test_an_unknown_cause_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"budget.causes: 'server cache' is no cause; valid: .*server KV cache"):
        conduct("budget.causes=[server cache]")


def test_a_run_s_resolved_file_is_taken_as_it_is(tmp_path):
    loaded = load_config(CONFIG, [MODEL, "server.num_servers=2", "train.num_steps=3"], "train")
    file = tmp_path / "config.resolved.yaml"
    file.write_text(render_config(loaded.config))
    made = Conduct(load_config(file, (), "budget"), (), lambda line: None, ())
    config = made.load({}).config
    assert config.server.num_servers == 1 and config.eval is None
    assert config.run.name == f"{loaded.config.run.name}-budget"


def test_what_the_plan_refuses_is_named_as_unchangeable(monkeypatch):
    """A plain attention backend is refused here; the walks go on without it, and say why."""

    def refusing(loaded, device):
        if loaded.config.server.attention_backend == "torch_native":
            raise PlanError("no such backend\nand more about it")
        return plan_run(loaded, device)

    monkeypatch.setattr("gspo_mega.verify.mismatch.run.plan_run", refusing)
    made = conduct()
    assert "server attention" in {link.cause for link in make_plan(made.facts).walks["forward"]}
    made.refuse_impossible()
    assert made.refused == {"server attention": "no such backend"}
    plan = make_plan(made.facts, True, made.refused)
    for name, why in made.refused.items():
        assert plan.nothing[name] == Nothing(why, False)
    assert not any(link.cause in made.refused for links in plan.walks.values() for link in links)


def test_nothing_of_the_quickstart_is_refused():
    made = conduct()
    assert made.check({"parallel.tensor": 3}, "trainer") is not None
    made.refuse_impossible()
    assert made.refused == {}


def test_the_steps_from_fp8_to_fp32_are_allowed_one_after_the_other():
    given = ["model.path=configs/models/quickstart_wide.json", "server.quantization=none"]
    made = Conduct(load_config("configs/quickstart_fp8.yaml", given, "budget"), given, lambda line: None, ())
    made.refuse_impossible()
    assert made.refused == {}


@pytest.mark.parametrize("file", ["configs/quickstart_fp8.yaml", CONFIG])
def test_every_row_is_judged_in_fp32_with_the_overrides_that_the_documentation_gives(file):
    page = (Path(__file__).parents[3] / "docs/budget.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("    gspo-mega mismatch CONFIG precision=fp32"))
    model = {CONFIG: MODEL}.get(file, "model.path=configs/models/quickstart_wide.json")
    given = [model, *line.split()[3:]]
    made = Conduct(load_config(file, given, "budget"), given, lambda line: None, ())
    made.refuse_impossible()
    assert made.refused == {}
    assert formats(made.facts) == {"server": ["fp32"], "trainer": ["fp32"]}


def test_r2_is_measured_as_the_old_pass_which_chooses_its_own_experts():
    made = conduct("moe.routing_replay=R2", "model.weights=null")
    assert made.load({}).config.moe.routing_replay == "none"


def test_evaluations_share_a_start_by_what_a_process_cannot_change():
    made = conduct("precision=bf16")
    starts = {point: made.start_of(point) for point in make_plan(made.facts).points}
    kinds = {start[0] for start in starts.values()}
    assert kinds == {"server", "trainer"}
    assert {start[1:] for start in starts.values() if start[0] == "trainer"} == {(1, False), (2, False)}
    with_library = Point.of("trainer", {**ONE_RANK, "engine.transformer_engine": True})
    assert made.start_of(with_library) == ("trainer", 1, True)


def test_the_tokens_come_back_from_their_file(tmp_path):
    sequences = (Sampled(0, (1, 2, 3), (4, 5), (-0.5, -1.0), -1), Sampled(1, (6,), (7,), (-2.0,), 1))
    fixed = FixedTokens(sequences, (np.zeros((4, 1, 2), np.int32), np.ones((1, 1, 2), np.int32)))
    fixed.save(tmp_path)
    again = FixedTokens.load(tmp_path)
    assert again.sequences == fixed.sequences
    assert [r.tolist() for r in again.routes] == [r.tolist() for r in fixed.routes]
    assert fixed.sampled.tolist() == [-0.5, -1.0, -2.0]
    # All tokens but the first of each sequence: 2, 3, 4, 5 and 7, of which 4, 5 and 7 are responses.
    assert fixed.of_responses(np.array([2.0, 3, 4, 5, 7])).tolist() == [4, 5, 7]
    batch = fixed.batch()
    assert [t.response_token_ids for t in batch.trajectories] == [[2, 3, 4, 5], [7]]
    assert json.loads((tmp_path / "tokens.json").read_text())["sequences"][1]["prompt"] == [6]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_random_folder("configs/models/certify_moe.json", tmp_path_factory.mktemp("model") / "hf", seed=1)


def as_served(weight, beside, is_expert, quantization):
    """The values [n, m] float32 that SGLang's kernels make of a weight, with casts of numpy and torch alone.

    `int8`: round(w / s) with s = amax / 127 of each row. `fp8`: w / s in e4m3 with s = amax / 448 of each row; an
    expert has one scale, gate and up (`beside`) together. `fp8_block`, which is published: w (448 / amax) of each
    128 x 128 block, as Transformer Engine rounds the trainer's, with 1 / (448 / amax) beside it.
    """
    if quantization == "int8":
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
        return np.rint(weight / scale) * scale
    if quantization == "fp8" and is_expert:
        scale = np.full((1, 1), max(np.abs(weight).max(), np.abs(beside).max()))
    elif quantization == "fp8":
        scale = np.abs(weight).max(axis=1, keepdims=True)
    else:
        scale = np.zeros_like(weight)
        for row in range(0, weight.shape[0], 128):
            for column in range(0, weight.shape[1], 128):
                block = np.s_[row : row + 128, column : column + 128]
                scale[block] = np.abs(weight[block]).max()
    if quantization == "fp8_block":
        inverse = np.float32(448) / scale
        return torch.from_numpy(weight * inverse).to(torch.float8_e4m3fn).float().numpy() * (np.float32(1) / inverse)
    scale = scale / np.float32(448)
    return torch.from_numpy(weight / scale).to(torch.float8_e4m3fn).float().numpy() * scale


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int8"])
def test_rounded_weights_are_the_servers_values(model, tmp_path, quantization):
    given = [f"model.path={model}", f"run.dir={tmp_path}", f"server.quantization={quantization}"]
    config = load_config(CONFIG, given, "budget").config
    folders = ServedFolders(config)
    folder = folders.path("rounded")
    folders.make(folder)
    before, after = (
        {k: v for f in path.glob("*.safetensors") for k, v in load_file(f).items()} for path in (model, folder)
    )
    assert before.keys() == after.keys()
    spec = read_model_spec(model)
    assert any(".experts." in entry.name for entry in hf_tensors(spec))
    for entry in hf_tensors(spec):
        want = before[entry.name]
        if is_quantizable(entry):
            beside = entry.name.replace("gate_proj", "up_proj") if "gate_proj" in entry.name else entry.name
            beside = entry.name.replace("up_proj", "gate_proj") if "up_proj" in entry.name else beside
            want = as_served(want, before[beside], ".experts." in entry.name, quantization)
            assert not np.array_equal(before[entry.name], want), entry.name
        assert np.array_equal(after[entry.name], want), entry.name
    folders.remove()
    assert not folder.exists()
    assert folders.start() == (folders.path("quantized") if quantization == "fp8_block" else None)


def test_other_weights_get_another_folder(model, tmp_path):
    given = [f"model.path={model}", f"run.dir={tmp_path}", "server.quantization=fp8"]
    config = load_config(CONFIG, given, "budget").config
    before = ServedFolders(config).path("rounded")
    file = next(model.glob("*.safetensors"))
    save_file(load_file(file), file, metadata={"format": "pt"})
    assert ServedFolders(config).path("rounded") != before


def test_numbers_say_what_they_were_made_of_and_by_what(monkeypatch):
    made = conduct("precision=bf16")
    origin = made.origin()
    assert datetime.datetime.fromisoformat(origin["date"]).utcoffset() == datetime.timedelta(0)
    assert (origin["config"], origin["overrides"], origin["device"]) == (CONFIG, [MODEL, "precision=bf16"], "cpu")
    assert {"torch", "sglang", "megatron-core", "transformer-engine"} < origin["versions"].keys()
    assert origin["versions"]["torch"] == torch.__version__ and origin["commit"] == commit()
    monkeypatch.setattr("gspo_mega.verify.mismatch.run.commit", lambda: None)
    assert made.origin()["commit"] == "not known: these sources are in no git repository"

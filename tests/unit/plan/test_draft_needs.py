"""What speculative decoding takes of a server's GPU, and where it is refused."""

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.servers import DraftMemory, draft_memory
from gspo_mega.plan.validate_servers import validate_speculative

SHAPES = Path(__file__).parents[3] / "configs/models"
WORDS = ["publish.method=distributed", "publish.verify=replicas", "precision=bf16"]


@pytest.fixture
def draft(tmp_path):
    """A draft of one layer: 2 key-value heads of 32, and 1000 bytes of weights."""
    folder = tmp_path / "draft"
    folder.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def test_a_draft_takes_its_weights_and_its_own_cache(load, shape, draft):
    spec = read_model_spec(shape("dense"))
    words = [*WORDS, "server.tensor=2"]
    plain = load(*words).config
    assert draft_memory(plain, spec) == draft_memory(load(*words, "server.speculative.algorithm=ngram").config, spec)
    drafting = load(*words, f"server.speculative={{algorithm: standalone, draft_path: {draft}}}").config
    # A key and a value of the one head that each of two ranks has, in two bytes.
    assert draft_memory(drafting, spec) == DraftMemory(500, 2 * 1 * 32 * 2)
    before, after = (server_memory(config, spec, 10_000, 10**6) for config in (plain, drafting))
    assert (after.weights - before.weights, after.draft, before.draft) == (500, 500, 0)
    token = 2 * spec.num_layers * spec.head_dim * 2
    assert before.cache_tokens == (850_000 - 10_000) // token
    assert after.cache_tokens == (850_000 - 10_500) // (token + 128)


def test_layers_for_multi_token_prediction_count_as_one_more_layer(load):
    spec = read_model_spec(SHAPES / "deepseek_v3.json")
    config = load(*WORDS, "server.tensor=16", "server.num_nodes=2", "cluster.num_nodes=2", NEXTN).config
    layer = sum(entry.num_elements for entry in hf_tensors(spec) if entry.layer == 60)
    needs = draft_memory(config, spec)
    assert needs.weights == (layer + 2 * 7168**2) * 2 // 16
    assert needs.cached_token == (512 + 64) * 2


NEXTN = "server.speculative={algorithm: nextn}"


@pytest.mark.parametrize(
    ("speculative", "device", "text"),
    [
        (
            "{algorithm: ngram}",
            "cpu",
            "server.speculative: ngram without GPUs: SGLang accepts drafts there by the most probable token, no"
            " matter what the temperature is",
        ),
        ("{algorithm: nextn}", "gpu", "nextn, and models of qwen3 have no layers for multi-token prediction"),
        (
            "{algorithm: eagle, draft_path: nowhere}",
            "gpu",
            "server.speculative.draft_path: nowhere is no Hugging Face folder with config.json and safetensors",
        ),
    ],
)
def test_where_it_cannot_run(load, shape, speculative, device, text):
    with pytest.raises(PlanError) as error:
        plan_run(load(*WORDS, f"server.speculative={speculative}"), device, shape("dense"))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("model", "changes", "text"),
    [
        ("certify_mla", {"num_nextn_predict_layers": 1}, None),
        ("certify_mla", {"num_nextn_predict_layers": 0}, "nextn, and config.json names no layers for multi-token"),
        ("certify_glm4_moe", {"num_nextn_predict_layers": 1}, None),
        (
            "certify_qwen3_next",
            {},
            "nextn, which was not tried with the layers for multi-token prediction of qwen3_next",
        ),
    ],
)
def test_a_model_drafts_by_layers_that_it_has(load, tmp_path, model, changes, text):
    config = load(*WORDS, NEXTN).config
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(json.loads((SHAPES / f"{model}.json").read_text()) | changes))
    found = validate_speculative(config.server, config.cluster, read_model_spec(file), "gpu")
    said = [str(violation) for violation in found]
    assert (said == []) if text is None else (len(said) == 1 and text in said[0]), said


def test_the_report_names_the_draft(load, shape, draft):
    words = [*WORDS, "cluster.gpu_memory_gib=8", f"server.speculative={{algorithm: eagle, draft_path: {draft}}}"]
    plan = plan_run(load(*words), "gpu", shape("dense"))
    figures = estimate(plan)
    report = render_report(plan, figures)
    assert ", drafts by eagle on 127.0.0.1" in report and " of the draft), " in report
    assert any(notice.startswith("server.speculative: the time of a rollout") for notice in figures.notices)

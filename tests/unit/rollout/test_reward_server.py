"""The servers of a reward model: their configuration, and where they are found."""

import json
import time
from dataclasses import replace

import pytest
from run_configs import make_config

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.rollout.registration import Registration, ensure_secret
from gspo_mega.rollout.server.reward_server import RewardServers, own_model, reward_config, reward_folder
from gspo_mega.rollout.server.spec import sglang_arguments, spec_from_config

OWN = dict(name="sums", path="/models/sums", num_servers=2, tensor=2, dtype="bf16", context_tokens=300, batch_size=4)


def config_with(*models):
    functions = tuple(dict(function=model["name"]) for model in models)
    server = dict(quantization="fp8", expert=1, options={"chunked_prefill_size": 64})
    return make_config(reward=dict(functions=functions, model=models), server=server)


def test_a_server_of_it_is_one_of_the_policys_but_for_what_its_entry_says(tmp_path):
    config = config_with(OWN)
    derived = reward_config(config, own_model(config.reward, "sums"))
    spec = spec_from_config(
        derived,
        model_path=derived.model.path,
        weight_version=None,
        port=1,
        api_key_file=tmp_path / "key",
        attempt="sums",
        index=0,
        generation=1,
        store=tmp_path / "store",
    )
    assert (spec.model_path, spec.tensor, spec.dtype, spec.context_tokens) == ("/models/sums", 2, "bfloat16", 300)
    assert (spec.quantization, spec.options, spec.max_concurrent_requests) == ("none", {}, 16 * 4 // 2)
    assert config.server.quantization == "fp8" and config.model.path == "unused"


@pytest.mark.parametrize(("positions", "tokens"), [(10_000, 4 * (64 + 64)), (300, 300), (None, 4 * (64 + 64))])
def test_a_text_may_be_longer_in_its_tokens_than_in_the_policys(tmp_path, positions, tokens):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions} if positions else {}))
    config = config_with(dict(name="sums", path=str(tmp_path)))
    assert reward_config(config, own_model(config.reward, "sums")).server.context_tokens == tokens


def test_sglang_is_told_that_the_model_scores(tmp_path):
    spec = spec_from_config(
        make_config(),
        model_path="m",
        weight_version=None,
        port=1,
        api_key_file=tmp_path,
        attempt="a",
        index=0,
        generation=1,
        store=tmp_path,
    )
    plain = sglang_arguments(spec, on_cpu=False, cpu_attention_backend="x")
    assert "is_embedding" not in plain and plain["skip_tokenizer_init"] is True
    scores = sglang_arguments(replace(spec, classifies=True), on_cpu=False, cpu_attention_backend="x")
    assert scores["is_embedding"] is True and scores["skip_tokenizer_init"] is False


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--reward-model: other: valid: sums"):
        own_model(config_with(OWN).reward, "other")
    foreign = dict(name="sums", url="http://127.0.0.1:9/")
    with pytest.raises(ConfigError, match=r"no entry of reward.model has a `path`"):
        own_model(config_with(foreign).reward, "sums")


def test_those_that_are_ready_are_found_apart_from_the_policys(tmp_path):
    attempt = Attempt(tmp_path / "attempts" / "0001")
    servers = RewardServers(attempt, "sums", 60.0)
    assert servers.ready() == ([], "")
    mine = reward_folder(attempt, "sums")
    attempt.servers_dir.mkdir(parents=True)
    key = ensure_secret_in(mine)
    for index, state in enumerate(("ready", "starting", "ready", "failed")):
        one = Registration(f"server-{index}", f"http://h:{index}", 1, state, 1, None, time.time())
        one.write(mine.servers_dir)
    Registration("server-9", "http://policy", 1, "ready", 1, None, time.time()).write(attempt.servers_dir)
    assert servers.ready() == (["http://h:0", "http://h:2"], key)


def ensure_secret_in(attempt):
    attempt.servers_dir.mkdir(parents=True)
    return str(ensure_secret(attempt.api_key_file))

"""From configuration to SGLang's arguments, and the API key's file."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from collector_support import collector_config

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.config.validate_servers import CHOOSES_UNSEEN, OWN_ARGUMENTS, REFUSED_ARGUMENTS
from gspo_mega.rollout.registration import Registration, Secret, ensure_secret, read_registrations, read_secret
from gspo_mega.rollout.server.spec import (
    ServerSpec,
    argument_names,
    check_batch_invariant,
    check_checkpoint,
    check_gpu,
    check_memory_saver,
    check_options_sglang,
    experts_arguments,
    missing_values,
    sglang_arguments,
    spec_from_config,
)


def spec_of(tmp_path, generation=1, index=0, attempt="0001", seed=1, rollout=None, **server):
    config = collector_config(**(rollout or {}))
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    config = config.model_copy(update={"server": config.server.model_copy(update=server)})
    return spec_from_config(
        config,
        model_path=str(tmp_path / "m"),
        weight_version=5,
        port=1234,
        api_key_file=tmp_path / "key",
        attempt=attempt,
        index=index,
        generation=generation,
        store=tmp_path / "store",
    )


def arguments(spec, on_cpu=True):
    return sglang_arguments(spec, on_cpu=on_cpu, cpu_attention_backend="batched")


def test_a_spec_survives_its_file(tmp_path):
    spec = spec_of(tmp_path, options={"chunked_prefill_size": 512})
    spec.write(tmp_path / "spec.json")
    assert ServerSpec.read(tmp_path / "spec.json") == spec


def test_adapters_are_asked_for_with_their_rank_and_layers(tmp_path):
    spec = replace(spec_of(tmp_path), adapter_rank=8, adapter_targets=["q_proj", "o_proj"])
    here, elsewhere = arguments(spec), arguments(spec, on_cpu=False)
    wanted = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "o_proj"]}
    assert wanted.items() <= here.items() and wanted.items() <= elsewhere.items()
    assert here["lora_backend"] == "torch_native" and "lora_backend" not in elsewhere
    assert "enable_lora" not in arguments(spec_of(tmp_path))


def test_on_cpu(tmp_path):
    a = arguments(spec_of(tmp_path))
    assert a["disable_overlap_schedule"] is True
    assert (a["device"], a["attention_backend"], a["sampling_backend"], a["sleep_on_idle"]) == (
        "cpu",
        "batched",
        "pytorch",
        True,
    )
    assert (
        a["incremental_streaming_output"],
        a["dtype"],
        a["weight_version"],
        a["skip_tokenizer_init"],
        a["trust_remote_code"],
    ) == (True, "float32", "5", True, False)
    assert a["context_length"] > 8 + 6 and a["max_total_tokens"] >= a["max_running_requests"] * (8 + 6)
    assert "api_key" not in a
    assert arguments(spec_of(tmp_path, attention_backend="torch_native"))["attention_backend"] == "torch_native"
    assert arguments(spec_of(tmp_path, max_total_tokens=99))["max_total_tokens"] == 99


@pytest.mark.parametrize(
    ("quantization", "method"), [("none", None), ("fp8", "fp8"), ("fp8_block", "fp8"), ("int8", "w8a8_int8")]
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_precisions_have_sglangs_names(tmp_path, quantization, method, on_cpu):
    assert arguments(spec_of(tmp_path, quantization=quantization), on_cpu)["quantization"] == method
    assert arguments(spec_of(tmp_path, kv_cache="fp8"), on_cpu)["kv_cache_dtype"] == "fp8_e4m3"
    assert arguments(spec_of(tmp_path), on_cpu)["kv_cache_dtype"] == "auto"


@pytest.mark.parametrize(
    ("dtype", "precision", "served"),
    [
        ("auto", "fp32", "float32"),
        ("auto", "bf16", "bfloat16"),
        ("auto", "fp8", "bfloat16"),
        ("bf16", "fp32", "bfloat16"),
        ("fp32", "bf16", "float32"),
    ],
)
def test_a_server_may_compute_in_another_precision_than_the_trainer(tmp_path, dtype, precision, served):
    config = collector_config()
    config = config.model_copy(
        update={"precision": precision, "server": config.server.model_copy(update={"dtype": dtype})}
    )
    spec = spec_from_config(
        config,
        model_path=str(tmp_path),
        weight_version=None,
        port=1,
        api_key_file=tmp_path / "key",
        attempt="0001",
        index=0,
        generation=1,
        store=tmp_path / "store",
    )
    assert arguments(spec)["dtype"] == served


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "found", "said"),
    [
        ("fp8_block", None, "has no `quantization_config` with quant_method fp8 and weight_block_size"),
        ("fp8_block", {"quant_method": "fp8"}, "has no `quantization_config`"),
        ("fp8_block", BLOCKS | {"quant_method": "mxfp8"}, "servers begin with weights that are quantized already"),
        (
            "none",
            BLOCKS,
            r"none, and the weights in .* are quantized already \(quantization_config: fp8\); valid: fp8_bl",
        ),
        ("fp8", BLOCKS, "fp8, and the weights in"),
        ("int8", BLOCKS, "int8, and the weights in"),
    ],
)
def test_a_folder_in_another_form_is_refused(tmp_path, quantization, found, said):
    spec = spec_of(tmp_path, quantization=quantization)
    with pytest.raises(ConfigError, match=f"server.quantization: .*{said}"):
        check_checkpoint(spec, {} if found is None else {"quantization_config": found})


@pytest.mark.parametrize(("quantization", "found"), [("fp8_block", BLOCKS), ("none", None), ("fp8", None)])
def test_a_folder_in_the_right_form_is_taken(tmp_path, quantization, found):
    check_checkpoint(spec_of(tmp_path, quantization=quantization), {"quantization_config": found})


def test_on_gpu_sglang_chooses(tmp_path):
    a = arguments(spec_of(tmp_path), on_cpu=False)
    assert not {"device", "attention_backend", "sleep_on_idle", "disable_overlap_schedule"} & a.keys()
    assert a["max_total_tokens"] is None and a["mem_fraction_static"] == 0.85


def test_options_win_but_not_over_keys_of_ours(tmp_path):
    assert arguments(spec_of(tmp_path, options={"sleep_on_idle": False}))["sleep_on_idle"] is False
    with pytest.raises(ConfigError, match=r"server.options.tp_size: set by this package from server.tensor"):
        spec_of(tmp_path, options={"tp_size": 2, "api_key": "x"})
    with pytest.raises(ConfigError, match=r"server.options.trust_remote_code: runs code that"):
        spec_of(tmp_path, options={"trust_remote_code": True})


def test_every_refused_option_is_one_that_sglang_has():
    """The names are compared with SGLang's source: ServerArgs consists of mixins with annotated fields."""
    import importlib.util

    package = importlib.util.find_spec("sglang")
    if package is None:
        pytest.skip("sglang is not installed")
    names = argument_names(Path(package.origin).parent)
    assert {*OWN_ARGUMENTS, *REFUSED_ARGUMENTS} <= names and len(names) < 1000


def test_unknown_options_are_named_with_their_neighbour():
    check_options_sglang({"mem_fraction": 1} | {}, ["mem_fraction", "_hidden"])
    with pytest.raises(ConfigError) as error:
        check_options_sglang({"chunked_prefil_size": 1, "zzzzzz": 2, "_hidden": 3}, ["chunked_prefill_size", "_hidden"])
    lines = str(error.value).splitlines()
    assert "did you mean 'chunked_prefill_size'?" in lines[0] and "server.options.zzzzzz" in lines[1]
    assert "server.options._hidden" in lines[2]


def test_a_cache_too_small_for_one_request_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="server.max_total_tokens: 10 cannot hold one request of 14 tokens"):
        spec_of(tmp_path, max_total_tokens=10)


def test_no_two_starts_sample_alike(tmp_path):
    """Also across the attempts of a resumed run, in which each server's generation begins at 1 again."""
    starts = [(g, i, a, s) for g in (1, 2, 3) for i in range(5) for a in ("0001", "0002", "0013") for s in (1, 2, 3)]
    seeds = [spec_of(tmp_path, generation=g, index=i, attempt=a, seed=s).seed for g, i, a, s in starts]
    assert len(set(seeds)) == len(starts) and all(0 <= seed < 2**31 for seed in seeds)
    assert [spec_of(tmp_path, generation=g, index=i, attempt=a, seed=s).seed for g, i, a, s in starts] == seeds, (
        "by what they are, not by chance"
    )


def test_a_server_without_a_version_says_so(tmp_path):
    from dataclasses import replace

    assert arguments(replace(spec_of(tmp_path), weight_version=None))["weight_version"] == "unpublished"
    assert arguments(spec_of(tmp_path))["weight_version"] == "5"


def test_a_secret_never_shows_itself():
    secret = Secret("hunter2")
    for same in (secret, copy.deepcopy(secret), pickle.loads(pickle.dumps(secret))):
        assert same == "hunter2" and f"Bearer {same}" == "Bearer hunter2"
        for shown in (repr(same), str({"api_key": same}), f"{same!r}", str([same]), "%r" % (same,)):
            assert "hunter2" not in shown


def test_the_key_file(tmp_path):
    path = tmp_path / "api_key"
    with pytest.raises(ConfigError, match="cannot read the API key"):
        read_secret(path)
    key = ensure_secret(path)
    assert len(key) >= 32 and path.stat().st_mode & 0o777 == 0o600
    assert ensure_secret(path) == read_secret(path) == key
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640 lets others read"):
        read_secret(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(path)


def test_servers_that_start_together_agree_on_the_key(tmp_path):
    path = tmp_path / "api_key"
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            (tmp_path / f"seen_{os.getpid()}").write_text(ensure_secret(path))
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
    assert {p.read_text() for p in tmp_path.glob("seen_*")} == {path.read_text().strip()}
    assert list(tmp_path.glob(".api_key*")) == []


def test_registrations_are_read_whole_while_they_are_rewritten(tmp_path):
    stop = threading.Event()

    def write():
        generation = 0
        while not stop.is_set():
            generation += 1
            Registration(
                "server-0", "http://h:1", 1, "ready", generation, 0, float(generation), error="x" * 5000
            ).write(tmp_path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            for found in read_registrations(tmp_path):
                assert found.heartbeat == float(found.generation) and len(found.error) == 5000
    finally:
        stop.set()
        writer.join()
    (tmp_path / "server-1.json").write_text("[1]")
    with pytest.raises(RolloutError, match="server-1.json"):
        read_registrations(tmp_path)


def test_what_sglang_looks_for_and_transformers_does_not_write_is_given_to_it():
    config = {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    assert json.loads(missing_values(config)["json_model_override_args"]) == {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
    }
    assert missing_values(config | {"moe_layer_freq": 1, "scoring_func": "sigmoid"}) == {}
    assert missing_values({"architectures": ["Qwen3ForCausalLM"]}) == missing_values({}) == {}


def test_sglang_is_told_which_layers_have_attention_and_the_rotary_base():
    """A folder that transformers 5 wrote has both only in its own form."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        "partial_rotary_factor": 0.25,  # written as a default; what is inside counts
    }
    found = {"full_attention_interval": 3, "rope_theta": 2e4, "partial_rotary_factor": 0.5}
    assert json.loads(missing_values(config)["json_model_override_args"]) == found
    assert missing_values(config | found) == {}


def test_servers_of_a_vision_language_class_hold_its_text_part_and_plain_positions():
    """transformers 4 wrote `rope_theta` next to the sections, 5 writes both into one object; SGLang may read either level."""
    sections = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    for text in (
        {"rope_theta": 5e6, "rope_scaling": sections},
        {"rope_parameters": sections | {"rope_theta": 5e6}},
    ):
        config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
        plain = {"rope_parameters": None, "rope_theta": 5e6}
        told = json.loads(missing_values(config)["json_model_override_args"])
        assert told == plain | {"language_model_only": True, "text_config": plain}
    text |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    text["rope_parameters"]["partial_rotary_factor"] = 0.25
    plain |= {"partial_rotary_factor": 0.25}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    told = json.loads(missing_values(config)["json_model_override_args"])
    assert told == plain | {"language_model_only": True, "text_config": plain | {"full_attention_interval": 4}}
    # A text model that kept the sections of the class that it comes from.
    told = json.loads(missing_values(text | {"architectures": ["Qwen3_5MoeForCausalLM"]})["json_model_override_args"])
    assert told == plain | {"full_attention_interval": 4, "language_model_only": True}


def test_the_gpu_of_a_server_is_asked_whether_it_keeps_what_is_published(tmp_path):
    """`cluster.gpu` may be absent, or another; what counts is the GPU that is there."""
    blocks = spec_of(tmp_path, quantization="fp8_block")
    assert not blocks.is_published_to, "neither trains"
    published = replace(blocks, is_published_to=True)
    for capability in ((8, 9), (9, 0)):
        check_gpu(published, capability)
    for spec, capability in ((published, (8, 0)), (blocks, (8, 0)), (published, (10, 0)), (published, (12, 0))):
        with pytest.raises(ConfigError, match=rf"server.quantization: fp8_block on .* {capability[0]}.0: SGLang re"):
            check_gpu(spec, capability)
    check_gpu(blocks, (10, 0))
    check_gpu(replace(published, quantization="none"), (8, 0))


def test_kernels_that_choose_experts_unseen_are_not_left_to_sglang(tmp_path):
    """SGLang's own choice for gpt-oss in bf16, and on sm100 for Qwen3, GLM and DeepSeek, would return no route."""
    plain, asked = spec_of(tmp_path), replace(spec_of(tmp_path), return_routed_experts=True)
    eight = replace(asked, quantization="fp8_block")
    triton = {"moe_runner_backend": "triton"}
    assert experts_arguments(asked, (9, 0)) == experts_arguments(asked, (10, 0)) == triton
    assert experts_arguments(eight, (9, 0)) == experts_arguments(plain, (10, 0)) == {}
    assert experts_arguments(eight, (10, 0)) == experts_arguments(eight, (12, 0)) == triton
    assert experts_arguments(replace(asked, options={"moe_runner_backend": "cutlass"}), (10, 0)) == {}
    assert experts_arguments(replace(asked, expert_dispatcher="deepep"), (9, 0)) == {}


def test_the_kernels_that_choose_unseen_are_those_of_this_sglang():
    """What it compares with, in the text: importing the file takes SGLang's kernels."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed")
    package = Path(found.origin).parent / "srt"
    names = re.findall(r'^    \w+ = "(\w+)"$', (package / "layers/moe/utils.py").read_text(), re.MULTILINE)
    assert set(CHOOSES_UNSEEN) <= set(names)
    binding = (package / "layers/moe/topk.py").read_text().split("def bind_runner_backend")[1].split("def ")[0]
    asked = set(re.findall(r"runner_backend\.is_(\w+)\(", binding))
    assert asked == {"flashinfer_mxfp4", "triton_kernels", "flashinfer_trtllm", "experimental_sgl_trtllm"}


def test_a_server_that_shares_its_gpu_frees_it_and_keeps_its_weights_on_the_host(tmp_path):
    spec = replace(spec_of(tmp_path), releases_memory=True)
    plain, sharing = arguments(spec_of(tmp_path), on_cpu=False), arguments(spec, on_cpu=False)
    assert sharing == {**plain, "enable_memory_saver": True, "enable_weights_cpu_backup": True}


GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"


def test_a_server_that_shares_its_gpu_keeps_its_graphs_whatever_the_environment_says(tmp_path):
    """SGLang's default graphs of prefills end the start with the variable (the next test)."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from gspo_mega.base.errors import ConfigError\n"
        "from gspo_mega.rollout.server import entry\n"
        "try:\n    entry.server_arguments(entry.ServerSpec.read(Path(sys.argv[1])))\n"
        "except ConfigError as error:\n    print(str(error)[:40])\n"
        f"print(os.environ.get('{GRAPHS}'))\n"
    )
    said = []
    for sharing in (True, False):
        replace(spec_of(tmp_path), releases_memory=sharing, model_path=str(tmp_path)).write(tmp_path / "spec.json")
        command = [sys.executable, "-c", code, str(tmp_path / "spec.json")]
        environment = {**os.environ, GRAPHS: "1"}
        said.append(subprocess.run(command, capture_output=True, text=True, env=environment).stdout.splitlines())
    assert [lines[-1] for lines in said] == ["false", "1"], said


def test_this_sglang_cannot_free_the_graphs_that_it_captures_by_default():
    """If this fails, SGLang may be able to free them: see `SERVER_PARTS` and docs/colocated.md."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed")
    package = Path(found.origin).parent / "srt"
    assert f"{GRAPHS} = EnvBool(False)" in (package / "environ.py").read_text()
    backends = package / "model_executor/runner_backend"
    for name in ("full", "breakable"):
        text = (backends / f"{name}_cuda_graph_backend.py").read_text()
        assert f'enable=enable_memory_saver\n            and get_bool_env_var("{GRAPHS}")' in text
    assert 'raise NotImplementedError(\n                "Breakable CUDA graph is not compatible with' in text
    config = (package / "model_executor/cuda_graph_config.py").read_text()
    assert "return Backend.BREAKABLE if is_cuda() else Backend.DISABLED" in config


def test_a_server_that_cannot_free_its_gpu_is_refused_before_it_starts(tmp_path):
    spec = replace(spec_of(tmp_path), releases_memory=True)
    check_memory_saver(spec, on_cpu=False, is_installed=True)
    check_memory_saver(spec_of(tmp_path), on_cpu=True, is_installed=False)
    with pytest.raises(ConfigError, match="sees no GPU that it could share; valid: false"):
        check_memory_saver(spec, on_cpu=True, is_installed=False)
    with pytest.raises(ConfigError, match="torch_memory_saver is not installed in the servers' Python"):
        check_memory_saver(spec, on_cpu=False, is_installed=False)


def test_a_server_forgets_answers_of_one_turn_only(tmp_path):
    assert spec_of(tmp_path).forgets_answers
    several_turns = {"episode": {"function": "my_package.episodes:play"}}
    assert not spec_of(tmp_path, rollout=several_turns, context_tokens=40).forgets_answers


def test_batch_invariant_operations_are_a_cpus(tmp_path):
    asked = replace(spec_of(tmp_path), batch_invariant=True)
    check_batch_invariant(asked, on_cpu=True)
    check_batch_invariant(spec_of(tmp_path), on_cpu=False)
    with pytest.raises(ConfigError, match="engine.batch_invariant: true, and this server sees a GPU"):
        check_batch_invariant(asked, on_cpu=False)

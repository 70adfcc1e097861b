"""What contradicts itself in servers over several nodes, and what `server.options` may not say of them."""

from pathlib import Path

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.validate_servers import speculative_arguments
from gspo_mega.rollout.server.spec import draft_architectures, sglang_arguments, spec_from_config

SENT = ("publish.method=distributed",)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["server={tensor: 4, num_nodes: 2}", "cluster={num_nodes: 2, num_rollout_nodes: 4}"],
            "cluster.num_rollout_nodes",
            "4 nodes for server.num_servers 1 over 2 nodes each: some would have nothing to do; at most 2",
        ),
        (
            ["server={tensor: 4, num_nodes: 3}", "cluster.num_nodes=3"],
            "server.num_nodes",
            "3 does not divide server.tensor 4: SGLang places equally many ranks on each node; valid: 1, 2, 4",
        ),
        (
            ["server={tensor: 4, num_nodes: 2}", "cluster={num_nodes: 2, num_rollout_nodes: 1}"],
            "server.num_nodes",
            "2, and the servers have 1 nodes (cluster.num_rollout_nodes): a server takes 2 whole neighbouring"
            " nodes; valid:"
            " a multiple of 2 as cluster.num_rollout_nodes, for example 2, or another size here",
        ),
        (["server.options.nnodes=2"], "server.options.nnodes", "set by this package from server.num_nodes"),
        (["server.options.ep_size=2"], "server.options.ep_size", "set by this package from server.expert;"),
        (["server.options.moe_a2a_backend=x"], "server.options.moe_a2a_backend", "from server.expert_dispatcher;"),
        (["server.options.attn_dp_size=2"], "server.options.attn_dp_size", "from server.attention_data;"),
        (
            ["server.options.enable_dp_attention=true"],
            "server.options.enable_dp_attention",
            "from server.attention_data;",
        ),
        (
            ["server.speculative={algorithm: eagle3}", *SENT],
            "server.speculative.draft_path",
            "missing; eagle3 needs the folder of a draft model",
        ),
        (
            ["server.speculative={algorithm: ngram, num_steps: 2}"],
            "server.speculative.num_steps",
            "ngram drafts from the tokens of earlier responses and has no such size; leave it out",
        ),
        (
            ["server.speculative={algorithm: nextn, num_steps: 2}", *SENT],
            "server.speculative.num_steps",
            "num_steps, eagle_topk and num_draft_tokens belong together; give all three, or none for SGLang's choice",
        ),
        (
            ["server.speculative={algorithm: nextn, num_steps: 2, eagle_topk: 1, num_draft_tokens: 4}", *SENT],
            "server.speculative.num_draft_tokens",
            "4 with `eagle_topk: 1` and `num_steps: 2`, where SGLang takes num_steps + 1; valid: 3",
        ),
        (
            ["server={speculative: {algorithm: standalone, draft_path: d}, tensor: 2, attention_data: 2}", *SENT],
            "server.speculative.algorithm",
            "standalone with `server.attention_data: 2`, which SGLang refuses; valid: `attention_data: 1`, or another",
        ),
        (
            ["server.options={moe_runner_backend: flashinfer_trtllm}", "rollout.return_routed_experts=true"],
            "server.options.moe_runner_backend",
            "flashinfer_trtllm chooses experts where SGLang does not see it, and `rollout.return_routed_experts` is true;"
            " valid: triton, or false there",
        ),
        (
            ["server.speculative={algorithm: ngram}", "rollout.return_routed_experts=true"],
            "server.speculative",
            "nobody has shown that the returned experts are those of the accepted tokens; valid: null, or false there",
        ),
        (
            ["server.speculative={algorithm: nextn}", "train.num_steps=1"],
            "server.speculative.algorithm",
            "nextn with `publish.method: disk`: SGLang loads what is published into the draft as well; valid:"
            " `publish.method: distributed`, or ngram",
        ),
        (
            ["server.options.speculative_algorithm=x"],
            "server.options.speculative_algorithm",
            "from server.speculative;",
        ),
        (
            ["server.options.speculative_draft_load_format=pt"],
            "server.options.speculative_draft_load_format",
            "servers load safetensors from the folder",
        ),
    ],
)
def test_contradictions_of_large_servers_are_refused_by_key(write, overrides, key, said):
    text = refused(write(), *overrides)
    assert f": {key}: " in text and said in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("speculative", "arguments"),
    [
        ("null", {}),
        ("{algorithm: ngram, num_draft_tokens: 8}", {"algorithm": "NGRAM", "num_draft_tokens": 8}),
        ("{algorithm: nextn}", {"algorithm": "NEXTN", "draft_model_path": str(Path("m").absolute())}),
        (
            "{algorithm: eagle3, draft_path: d, num_steps: 2, eagle_topk: 1, num_draft_tokens: 3}",
            {
                "algorithm": "EAGLE3",
                "draft_model_path": str(Path("d").absolute()),
                "num_steps": 2,
                "eagle_topk": 1,
                "num_draft_tokens": 3,
            },
        ),
    ],
)
def test_speculative_decoding_by_sglangs_names(write, speculative, arguments):
    config = load_config(write(), [f"server.speculative={speculative}", *SENT, "model.path=m"]).config
    expected = {f"speculative_{name}": value for name, value in arguments.items()}
    assert speculative_arguments(config.server, config.model) == expected
    spec = spec_from_config(
        config,
        model_path="published",
        weight_version=1,
        port=21_000,
        api_key_file=Path("key"),
        attempt="0001",
        index=0,
        generation=1,
        store=Path("store"),
    )
    found = sglang_arguments(spec, on_cpu=False, cpu_attention_backend="")
    assert {name: value for name, value in found.items() if name.startswith("speculative_")} == expected
    # The draft is not what the run published: its layers are in the folder that the run began with.
    assert found["model_path"].endswith("/published")
    names = draft_architectures(spec, {"architectures": ["DeepseekV3ForCausalLM"]})
    assert names == ["DeepseekV3ForCausalLMNextN" if "nextn" in speculative else "DeepseekV3ForCausalLM"]

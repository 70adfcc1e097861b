"""`engine.batch_invariant`: what would make trainer and servers add or round differently is refused."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config

ON = "engine.batch_invariant=true"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "precision=fp8",
            "precision: fp8 with `engine.batch_invariant: true`: only plain layers have these operations",
        ),
        ("engine.transformer_engine=true", "engine.transformer_engine: true with `engine.batch_invariant: true`"),
        ("engine.fuse_activation=true", "engine.fuse_activation: true with `engine.batch_invariant: true`"),
        ("parallel.tensor=2", "parallel.tensor: 2 with `engine.batch_invariant: true`: it divides sums over ranks"),
        ("parallel.context=2", "parallel.context: 2 with `engine.batch_invariant: true`: it divides sums over ranks"),
        ("parallel.pipeline=2", "parallel.pipeline: 2 with `engine.batch_invariant: true`: it was not compared"),
        ("server.tensor=2", "server.tensor: 2 with `engine.batch_invariant: true`: it divides sums over ranks"),
        ("lora={rank: 4, alpha: 8}", "lora: set with `engine.batch_invariant: true`: adapters were not compared"),
        ("server.quantization=fp8", "server.quantization: fp8 with `engine.batch_invariant: true`: it rounds"),
        (
            "server.kv_cache=fp8",
            "server.kv_cache: fp8 with `engine.batch_invariant: true`: it rounds; valid then: auto",
        ),
        ("server.dtype=fp32", "server.dtype: fp32 with `engine.batch_invariant: true` and `precision: bf16`"),
        (
            "server.attention_backend=torch_native",
            "torch_native with `engine.batch_invariant: true`, which uses its own",
        ),
        ("server.speculative={algorithm: ngram}", "server.speculative: set with `engine.batch_invariant: true`"),
    ],
)
def test_what_contradicts_it_is_refused(write, override, said):
    assert said in refused(write(), "precision=bf16", ON, override)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_data_parallel_ranks_are_allowed(write, precision):
    config = load_config(write(), [ON, f"precision={precision}", "cluster.ranks_per_node=2"]).config
    assert config.engine.batch_invariant

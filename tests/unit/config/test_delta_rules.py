"""Publishes that send only what changed (`publish.full_every`): what contradicts is refused."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config

DELTA = ("publish.full_every=10", "train.num_steps=1")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("lora={rank: 8, alpha: 8}", "publish.lora=adapter"),
            "`publish.lora: adapter`: adapters are sent whole, and are small; valid: 1, or `publish.lora: merged`",
        ),
        (("cluster.colocated=true",), "second copy of the weights in the memory of the same nodes"),
        (("server={tensor: 2, num_nodes: 2}",), "a copy of the weights on each of a server's nodes was not tested"),
        (("server.speculative={algorithm: ngram}",), "a draft that shares SGLang's weight updates was not tested"),
        (
            ("eval={every_steps: 1, path: a.jsonl, blocking: false}", "server.num_servers=2"),
            "an evaluation that a restart interrupted loads its version's folder, which has only changes",
        ),
    ],
)
def test_where_changes_cannot_be_sent(write, overrides, said):
    words = refused(write(), *DELTA, *overrides)
    assert "publish.full_every: 10 with " in words and said in words


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_with_either_method_it_is_taken(write, method):
    config = load_config(write(), [*DELTA, f"publish.method={method}", "server.quantization=fp8_block"]).config
    assert config.publish.full_every == 10

"""Speculative decoding in the servers: what the algorithms need, what contradicts them, and SGLang's names for it.

Owns the rules between keys. What a draft takes of a GPU's memory is `plan/draft_needs.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import publishes

_KEY = "server.speculative"
# With a model of their own in `draft_path`. `nextn` takes the layers that the policy's own checkpoint brings.
_WITH_DRAFT = ("eagle", "eagle3", "standalone")


def draft_folder(config: Config) -> str | None:
    """Where the draft's weights are; None where nothing is drafted by a model."""
    speculative = config.server.speculative
    if speculative is None or speculative.algorithm == "ngram":
        return None
    return speculative.draft_path or config.model.path


def speculative_arguments(config: Config) -> dict[str, Any]:
    """SGLang's arguments; empty without speculative decoding."""
    speculative, folder = config.server.speculative, draft_folder(config)
    if speculative is None:
        return {}
    found = {
        "speculative_algorithm": speculative.algorithm.upper(),
        "speculative_draft_model_path": None if folder is None else str(Path(folder).absolute()),
        "speculative_num_steps": speculative.num_steps,
        "speculative_eagle_topk": speculative.eagle_topk,
        "speculative_num_draft_tokens": speculative.num_draft_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def speculative_violations(config: Config) -> Iterator[Violation]:
    """What SGLang would refuse, change without a word, or do to the draft that nobody asked for."""
    speculative = config.server.speculative
    if speculative is None:
        return
    algorithm = speculative.algorithm
    sizes = {"num_steps": speculative.num_steps, "eagle_topk": speculative.eagle_topk}
    if algorithm in _WITH_DRAFT and speculative.draft_path is None:
        yield Violation(f"{_KEY}.draft_path", f"missing; {algorithm} needs the folder of a draft model")
    if algorithm == "ngram":
        given = [name for name, value in {**sizes, "draft_path": speculative.draft_path}.items() if value is not None]
        for name in given:
            yield Violation(
                f"{_KEY}.{name}", "ngram drafts from the tokens of earlier responses and has no such size; leave it out"
            )
    else:
        yield from _sizes(config)
    if algorithm == "standalone" and config.server.attention_data > 1:
        yield Violation(
            f"{_KEY}.algorithm",
            f"standalone with `server.attention_data: {config.server.attention_data}`, which SGLang refuses; valid:"
            " `attention_data: 1`, or another algorithm",
        )
    if config.rollout.return_routed_experts:
        yield Violation(
            _KEY,
            "with `rollout.return_routed_experts: true`: nobody has shown that the experts returned are those of the"
            " accepted tokens; valid: null, or false there",
        )
    if algorithm != "ngram" and publishes(config) and config.publish.method == "disk":
        yield Violation(
            f"{_KEY}.algorithm",
            f"{algorithm} with `publish.method: disk`: SGLang loads what is published into the draft, too; valid:"
            " `publish.method: distributed`, or ngram",
        )


def _sizes(config: Config) -> Iterator[Violation]:
    speculative = config.server.speculative
    assert speculative is not None
    steps, topk, drafted = speculative.num_steps, speculative.eagle_topk, speculative.num_draft_tokens
    given = [value is not None for value in (steps, topk, drafted)]
    if any(given) and not all(given):
        yield Violation(
            f"{_KEY}.num_steps",
            "num_steps, eagle_topk and num_draft_tokens belong together; give all three, or none for SGLang's choice",
        )
    elif steps is not None and topk == 1 and drafted != steps + 1:
        yield Violation(
            f"{_KEY}.num_draft_tokens",
            f"{drafted} with `eagle_topk: 1` and `num_steps: {steps}`, where SGLang takes num_steps + 1; valid:"
            f" {steps + 1}",
        )

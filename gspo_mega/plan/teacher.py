"""Whether teachers (`teacher`) can score what the policy samples, in the policy's layout; known before a start.

A teacher that the ranks load is a frozen model of any supported family and size. It must have the policy's tokenizer,
because token ids that were sampled are scored as they are, and it must divide over the policy's ranks. What it holds is
in `state.py` (`with_teacher`). Of a teacher's server only what its answers take is known here. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import GspoMegaError, ModelError, PlanError, Violation
from gspo_mega.config.derived import episode_lengths, has_served_teacher, num_served_top, teacher_config, teachers
from gspo_mega.config.schema import Config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import Device
from gspo_mega.plan.layout import Sizes, undivided_sizes
from gspo_mega.plan.validate import validate_biased_layers, validate_experts, validate_sharing, validate_stages
from gspo_mega.plan.validate_delta import validate_delta_nets
from gspo_mega.plan.validate_precision import validate_batch_invariance, validate_fusions, validate_precision

# Files that say which token an id stands for, in the order in which they are looked for.
_TOKENIZER, _PIECES = "tokenizer.json", ("tokenizer.model", "vocab.json", "merges.txt")


def check_teacher(
    config: Config,
    spec: ModelSpec,
    policy: Path,
    where: Callable[[str], str] = lambda key: "configuration",
    device: Device | None = None,
) -> None:
    """Check that each teacher with a `path` can score what the policy samples. `spec`, `policy`: the policy's shape and
    folder.

    Raises ModelError if a teacher's folder cannot be read or has another tokenizer or a smaller vocabulary, and
    PlanError if the teacher does not fit the layout; both with the key's place.
    """
    for one in teachers(config.teacher):
        if one.settings.path is not None:
            key = f"{one.key}.path"
            _check_model(config, spec, policy, one.settings.path, f"{where(key)}: {key}: ", device)


def _check_model(config: Config, spec: ModelSpec, policy: Path, path: str, place: str, device: Device | None) -> None:
    assert config.teacher is not None
    try:
        theirs = read_model_spec(path)
        if policy.is_dir() and (text := tokenizer_difference(Path(path), policy)):
            raise ModelError(f"{path} has another tokenizer than the policy: {text}; valid: a model of its family")
    except GspoMegaError as error:
        raise ModelError("\n".join(place + line for line in str(error).splitlines())) from None
    if theirs.vocab_size < spec.vocab_size:
        raise ModelError(
            f"{place}{path} has a vocabulary of {theirs.vocab_size}, and the policy may sample any of {spec.vocab_size}"
            " ids; valid: a teacher whose vocabulary is not smaller"
        )
    if config.teacher.divergence != "sampled_token" and theirs.vocab_size != spec.vocab_size:
        raise ModelError(
            f"{place}{path} has a vocabulary of {theirs.vocab_size}, the policy one of {spec.vocab_size}: with"
            f" `divergence: {config.teacher.divergence}` they must be equal; valid: sampled_token, or another teacher"
        )
    found = list(validate_teacher_layout(config, theirs, device))
    if found:
        raise PlanError("\n".join(f"{place}{path}, in the policy's layout: {one.key}: {one.text}" for one in found))


def validate_teacher_layout(config: Config, spec: ModelSpec, device: Device | None = None) -> Iterator[Violation]:
    """Yield what keeps a teacher of this shape from running in the policy's layout and precision."""
    own = teacher_config(config, spec.moe is not None)
    sizes = Sizes.of(own)
    if bad := undivided_sizes(spec, own.parallel.tensor):
        yield Violation("parallel.tensor", f"{own.parallel.tensor} does not divide its {', '.join(bad)}")
    yield from validate_stages(own.parallel, own.recompute, spec, sizes)
    yield from validate_experts(own, spec, sizes, device)
    yield from validate_biased_layers(own, spec, device)
    yield from validate_delta_nets(own, spec)
    yield from validate_sharing(own, spec, device)
    yield from validate_precision(own, spec, device)
    yield from validate_fusions(own, spec, device)
    yield from validate_batch_invariance(own.engine, own.cluster, spec, device)
    if sizes.longest_sequence > spec.max_position_embeddings:
        yield Violation(
            "rollout.max_new_tokens",
            f"prompt and response may have {sizes.longest_sequence} tokens, and it has {spec.max_position_embeddings}"
            " positions",
        )


def served_bytes(config: Config) -> tuple[int, int]:
    """Return the most bytes that the answers of teachers' servers take in a step's journal, and on their way to the
    ranks: (log-probs of sampled tokens, most likely tokens). Every response has its longest length.
    """
    if not has_served_teacher(config.teacher):
        return 0, 0
    tokens = config.batch.prompts_per_step * config.batch.group_size * episode_lengths(config).sampled
    return 4 * tokens, 8 * num_served_top(config.teacher) * tokens


def served_lines(config: Config) -> list[str]:
    """Return the report's line about teachers' servers."""
    own, top = served_bytes(config)
    if not own:
        return []
    responses = config.batch.prompts_per_step * config.batch.group_size
    return [
        f"teachers' servers per step: {responses} requests at least, at most {(own + top) / 2**20:.1f} MiB of answers"
        " in the journal and handed out; their time is not in the plan"
    ]


def tokenizer_difference(theirs: Path, ours: Path) -> str | None:
    """What differs between the tokenizers of two Hugging Face folders, in words; None if each id of ours stands for the
    same token there and text is split alike. Ids that only theirs has do not matter.
    """
    if not (ours / _TOKENIZER).is_file() or not (theirs / _TOKENIZER).is_file():
        return _differing_files(theirs, ours)
    there, here = _tokens(theirs / _TOKENIZER), _tokens(ours / _TOKENIZER)
    for number, token in sorted(here[0].items()):
        other = there[0].get(number)
        if other != token:
            return f"id {number} is {token!r} here and {'missing' if other is None else repr(other)} there"
    return "its merges differ" if there[1] != here[1] else None


def _differing_files(theirs: Path, ours: Path) -> str | None:
    # A policy's folder without any of these, as certify's random models, has no tokenizer that samples could come from.
    names = [name for name in (_TOKENIZER, *_PIECES) if (ours / name).is_file()]
    for name in names:
        if not (theirs / name).is_file():
            return f"it has no {name}, which the policy has; copy the tokenizer's files there if they are the same"
        if (theirs / name).read_bytes() != (ours / name).read_bytes():
            return f"its {name} differs"
    return None


def _tokens(file: Path) -> tuple[dict[int, str], list[str]]:
    """(token by id, merges) of a tokenizer.json. Raises ModelError for a file that holds no tokenizer."""
    try:
        tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
        )
        tokens = {int(number): str(token) for token, number in pairs}
        tokens |= {int(one["id"]): str(one["content"]) for one in tree.get("added_tokens") or ()}
        merges = [one if isinstance(one, str) else " ".join(one) for one in tree["model"].get("merges") or ()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} holds no tokenizer that can be compared: {error}") from None
    return tokens, merges

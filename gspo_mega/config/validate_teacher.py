"""The rules of a teacher (`teacher`): what contradicts it for every model. Those that need the two models are in
`plan/teacher.py`; what a server answers is checked when it is asked first (`rollout/teacher_server.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.derived import (
    OneTeacher,
    has_sampling_masks,
    has_served_teacher,
    is_one_turn,
    leaves_out_by_covariance,
    teachers,
)
from gspo_mega.config.prompt_sources import names_prompts, sources_of
from gspo_mega.config.schema import Config, Data, Rollout, Teacher
from gspo_mega.config.validate_rewards import is_variable_name, url_problem


def validate_teacher(config: Config, command: str | None = None) -> Iterator[Violation]:
    """Yield what contradicts a teacher (`teacher`). `certify` records old log-probs of its own."""
    teacher, recipe = config.teacher, RECIPES[config.algorithm]
    if teacher is None:
        return
    yield from _validate_places(config, teacher, command)
    if has_served_teacher(config.teacher):
        yield from _validate_served(config.rollout, teacher)
    if recipe.has_critic:
        yield Violation(
            "teacher",
            f"with `algorithm: {recipe.name}`: advantages from a critic's values and from a teacher together are not"
            " implemented; valid: an algorithm without a critic",
        )
    by_token = teacher.divergence == "sampled_token"
    if by_token and leaves_out_by_covariance(config.algorithm):
        yield Violation(
            "teacher",
            f"with `algorithm: {recipe.name}`, which chooses tokens by the advantages of rewards, before a teacher"
            " scores them; valid: another algorithm, or another teacher.divergence",
        )
    if by_token and recipe.facts.has_one_advantage:
        yield Violation(
            "teacher",
            f"with `algorithm: {recipe.name}`, whose term of a whole sequence takes no advantage of a token; valid:"
            " gspo and luspo, which get a second term, an algorithm with a term per token (gspo_token, grpo, ...), or"
            " another teacher.divergence",
        )
    if by_token and config.objective.function is not None and config.objective.ratio == "sequence":
        yield Violation(
            "teacher",
            "with `objective.function` of whole sequences, which takes no advantage of a token; valid: `ratio: token`,"
            " or another teacher.divergence",
        )
    if (teacher.divergence == "top_k") != (teacher.top_k is not None):
        missing = teacher.top_k is None
        yield Violation(
            "teacher.top_k",
            "missing; `divergence: top_k` needs it"
            if missing
            else f"has no effect with `divergence: {teacher.divergence}`; leave it out, or use `divergence: top_k`",
        )
    for key in ("top_k_of", "top_k_rest"):
        if teacher.divergence != "top_k" and getattr(teacher, key) != type(teacher).model_fields[key].default:
            yield Violation(
                f"teacher.{key}",
                f"has no effect with `divergence: {teacher.divergence}`; leave it out, or use `divergence: top_k`",
            )
    cut = config.rollout.top_p < 1 or config.rollout.top_k > 0
    if not by_token and cut:
        yield Violation(
            "teacher.divergence",
            f"{teacher.divergence} with rollout.top_p {config.rollout.top_p:g} and rollout.top_k"
            f" {config.rollout.top_k}: distributions are compared over tokens that sampling leaves out; valid:"
            " sampled_token, or sampling from the whole vocabulary",
        )
    if config.old_log_probs == "rollout" and command != "certify":
        yield Violation(
            "old_log_probs",
            "rollout with `teacher`: the servers' log-probs differ from the teacher's by the gap between the engines,"
            " too; valid: trainer",
        )
    if config.rollout.filter_constant_groups:
        yield Violation(
            "rollout.filter_constant_groups",
            "true with `teacher`, which teaches on groups whose rewards are all equal too; valid: false",
        )


def _validate_places(config: Config, teacher: Teacher, command: str | None) -> Iterator[Violation]:
    """Yield what is wrong with where the teachers are, and with the sources that they are for."""
    given = [key for key in ("path", "url", "policy", "by_source") if getattr(teacher, key)]
    if len(given) != 1:
        has = f"has {' and '.join(given)}" if given else "has none of them"
        yield Violation(
            "teacher", f"needs one of `path`, `url`, `policy` and `by_source`, and {has}; valid: exactly one"
        )
    for one in teachers(config.teacher):
        where = one.settings
        if one.source is not None and sum(map(bool, (where.path, where.url, where.policy))) != 1:
            yield Violation(one.key, "needs one of `path`, `url` and `policy`; valid: exactly one")
        yield from _validate_context(config.rollout, one)
        if where.url is not None and (problem := url_problem(where.url)) is not None:
            yield Violation(f"{one.key}.url", problem)
        if where.api_key_variable is None:
            continue
        if where.url is None:
            yield Violation(f"{one.key}.api_key_variable", "has no effect without `url`; leave it out")
        elif not is_variable_name(where.api_key_variable):
            yield Violation(  # without its value, which may be the key
                f"{one.key}.api_key_variable",
                "is no name of an environment variable; valid: letters, digits and `_`. The file names the variable and"
                " never holds the key",
            )
    if teacher.by_source:
        yield from _validate_sources(config.data, teacher, command)


def _validate_context(rollout: Rollout, one: OneTeacher) -> Iterator[Violation]:
    """Yield what is wrong with the other prompt that a teacher reads."""
    where, key = one.settings, f"{one.key}.context"
    if where.context is None:
        if where.policy:
            yield Violation(key, "missing; with `policy` the teacher would be the policy itself, and teach nothing")
        if where.max_prompt_tokens is not None:
            yield Violation(f"{one.key}.max_prompt_tokens", "has no effect without `context`; leave it out")
        return
    if where.path is not None:
        yield Violation(
            key,
            "with `path`: the ranks' packs have the policy's prompts; valid: `url` or `policy`, whose servers read"
            " another prompt",
        )
    if "{prompt}" not in where.context:
        yield Violation(key, "has no {prompt}, so the teacher would not see the task")
    if where.max_prompt_tokens is None:
        yield Violation(f"{one.key}.max_prompt_tokens", "missing; `context` needs it, as servers need room for it")
    if not is_one_turn(rollout):
        yield Violation(
            key,
            f"with `rollout.episode: {rollout.episode.function}`: only an episode of one turn has one prompt"
            " that can be replaced; valid: one_turn",
        )
    if where.policy and rollout.on_publish == "continue_with_cache":
        yield Violation(
            "rollout.on_publish",
            f"continue_with_cache with `{one.key}.policy`: the cache of earlier weights would score; valid: wait or"
            " continue",
        )


def _validate_sources(data: Data, teacher: Teacher, command: str | None) -> Iterator[Violation]:
    known = [source.name for source in sources_of(data)] if names_prompts(data) else []
    seen: set[str] = set()
    for place, one in enumerate(teacher.by_source):
        key = f"teacher.by_source.{place}.source"
        if one.source in seen:
            yield Violation(key, f"{one.source!r} is listed twice; a row has one teacher: list it once")
        elif command != "certify" and known and one.source not in known:
            text = f"no source of the data is named {one.source!r}, so nothing would ask it"
            yield Violation(key, f"{text}; valid: {', '.join(known)}")
        seen.add(one.source)


def _validate_served(rollout: Rollout, teacher: Teacher) -> Iterator[Violation]:
    """Yield what a server cannot tell."""
    if teacher.divergence == "full":
        yield Violation(
            "teacher.divergence",
            "full with `url` or `policy`: a server returns its most likely tokens, not the whole vocabulary; valid:"
            " sampled_token, top_k, or a teacher with `path`",
        )
    if teacher.divergence == "top_k" and teacher.top_k_of == "policy":
        yield Violation(
            "teacher.top_k_of",
            "policy with `url` or `policy`: a server returns its own most likely tokens, before the policy's are known;"
            " valid: teacher, or a teacher with `path`",
        )
    if rollout.temperature != 1:
        yield Violation(
            "rollout.temperature",
            f"{rollout.temperature:g} with `teacher.url`: SGLang's log-probs of given tokens are at temperature"
            " 1; valid: 1, or a teacher with `path`",
        )
    if has_sampling_masks(rollout):
        yield Violation(
            "rollout.top_k",
            f"{rollout.top_k} with `teacher.url`: a server's log-probs of given tokens are over the whole"
            " vocabulary, not over the tokens that sampling keeps; valid: -1, or a teacher with `path`",
        )

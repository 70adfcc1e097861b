"""Rules of the held-out sets of `eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.prompt_sources import eval_sets, own_rewards
from gspo_mega.config.schema import Config

_MARK = "{prompt}"


def held_out_rules(config: Config) -> Iterator[Violation]:
    """What is wrong with `eval`."""
    evaluation = config.eval
    if evaluation is None:
        return
    sets = eval_sets(config)
    if not sets:
        yield Violation("eval.path", "missing; the JSONL file of held-out prompts")
    if evaluation.path is not None and evaluation.sets:
        yield Violation(
            "eval.path",
            "both `path` and `sets` are given; make the file an entry of `sets`, or leave those out (eval.sets=[])",
        )
    yield from _beside_training(config)
    for name, count in Counter(entry.name for entry in evaluation.sets).items():
        if count > 1:
            yield Violation("eval.sets", f"{count} sets are named {name!r}; names must differ")
    own = own_rewards(config)
    is_unclear = None not in own and len(own) > 1 and evaluation.reward is None
    if is_unclear and not all(entry.reward for entry in evaluation.sets or [evaluation]):
        yield Violation(
            "eval.reward",
            "missing; the sources have different rewards of their own, and none has `reward`; valid:"
            f" {', '.join(sorted(' + '.join(one.function for one in reward or ()) for reward in own))}, or another",
        )
    most = config.rollout.max_new_tokens
    for one in sets:
        if one.max_new_tokens is not None and one.max_new_tokens > most:
            yield Violation(
                f"{one.place}.max_new_tokens",
                f"{one.max_new_tokens} is above rollout.max_new_tokens ({most}), from which the servers' context and"
                " deadlines follow; at most that",
            )
        if one.template is not None and _MARK not in one.template:
            yield Violation(
                f"{one.place}.template", f"lacks {_MARK}, which stands for the row's prompt; put it where that belongs"
            )
        for key in one.template_keys:
            if f"{{{key}}}" not in (one.template or ""):
                yield Violation(
                    f"{one.place}.template_keys", f"{key!r} is not in `template`; put {{{key}}} where it belongs"
                )
        if one.data.system_prompt is not None and not one.data.chat_template and config.data.chat_template:
            yield Violation(
                f"{one.place}.chat_template",
                "false with a system prompt (of the set, or data.system_prompt); without a template there is no system"
                " message",
            )


def _beside_training(config: Config) -> Iterator[Violation]:
    """What contradicts an evaluation beside training."""
    evaluation, num = config.eval, config.server.num_servers
    if evaluation is None or evaluation.blocking:
        return
    if config.cluster.colocated:
        yield Violation(
            "eval.blocking",
            "false with `cluster.colocated`: servers and ranks take turns on the same GPUs, so nothing can be measured"
            " while ranks train; valid: true, or servers with GPUs of their own",
        )
    elif num < 2:
        yield Violation(
            "eval.blocking",
            f"false with `server.num_servers: {num}`: the only server samples for training; valid: true, or 2 servers"
            " or more",
        )
    elif evaluation.servers >= num:
        yield Violation(
            "eval.servers",
            f"{evaluation.servers} of server.num_servers {num} would leave none for training; valid: 1 to {num - 1}",
        )

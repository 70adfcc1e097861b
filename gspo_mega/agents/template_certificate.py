"""The certificate of a chat template: do the turns of an episode, put together, hold what the template would write?

Generated dialogues (`template_dialogues.py`) are led as an episode leads them: the suffix rule gives each context, an
answer is "sampled" as the template itself would write it, read as a message, and recorded. Before every turn the
tokens so far are compared with the template's own rendering of the whole conversation.

What stands between the turns must be the same text and the same tokens: anything else is a drift, and wrong. A turn
may be written in another way than it was sampled, or encoded in other tokens; what was sampled counts, and that is a
note. A template that rewrites what came before makes a branch, which is a note with its reason.

Owns the comparison. Raises nothing on what a template does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_mega.agents.message_parts import ToolFormat, format_of, parts_of
from gspo_mega.agents.recorder import Recorder
from gspo_mega.agents.template_comparison import Comparison, Observation, Part
from gspo_mega.agents.template_dialogues import WORD, Dialogue, Message, Step, dialogues
from gspo_mega.agents.turn import Turn
from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.template_suffix import Rendered, Rewritten, SuffixRule

_MOST_SHOWN = 12  # added tokens
RuleOf = Callable[[Sequence[dict[str, Any]]], SuffixRule]


class _Sampled(NamedTuple):
    text: str
    token_ids: list[int]
    end: str  # text of its end token, empty where it has none
    is_as_written: bool  # as the template would write it


@dataclass
class Certificate:
    """`num_turns`: contexts that were compared with the template's whole rendering."""

    observations: list[Observation]
    num_dialogues: int = 0
    num_turns: int = 0
    num_context_tokens: int = 0

    @property
    def is_exact(self) -> bool:
        return self.num_turns > 0 and not any(one.level == "wrong" for one in self.observations)


def certify_template(
    tokenizer: Any, encoder: PromptEncoder, rule_of: RuleOf, tool_format: str = "auto", *, number_of_each: int = 3
) -> Certificate:
    """Lead all kinds of dialogues. `rule_of`: the suffix rule for a list of tools. `tokenizer`: the Hugging Face one,
    whose own rendering is compared with the encoder's. `tool_format`: as `episodes.tool_format`.
    """
    certificate = Certificate([])
    for dialogue in dialogues(encoder.special_tokens, number_of_each=number_of_each):
        comparison = Comparison(tokenizer, encoder, dialogue.kind, dialogue.tools)
        try:
            rule = rule_of(dialogue.tools)
            tool_calls = _format_of(tool_format, tokenizer, dialogue.tools)
            _Led(tokenizer, encoder, rule, tool_calls, dialogue, comparison).lead()
        except DataError as error:
            comparison.observe("note", "refusal", str(error))
        certificate.observations += comparison.observations
        certificate.num_dialogues += 1
        certificate.num_turns += comparison.num_turns
        certificate.num_context_tokens += comparison.num_context_tokens
    if added := encoder.added_tokens:
        shown = ", ".join(map(repr, added[:_MOST_SHOWN])) + (", ..." if len(added) > _MOST_SHOWN else "")
        text = f"written out in a message, each of these is its one token, as with transformers and servers: {shown}"
        certificate.observations.append(Observation("note", "added", "all", text))
    if not certificate.num_turns:
        none = Observation("wrong", "template", "all", "not one dialogue could be led; see the refusals")
        certificate.observations.append(none)
    return certificate


class _Led:
    """One dialogue while it is led."""

    def __init__(
        self,
        tokenizer: Any,
        encoder: PromptEncoder,
        rule: SuffixRule,
        tool_format: ToolFormat | None,
        dialogue: Dialogue,
        comparison: Comparison,
    ) -> None:
        """`tool_format`: None for one that isn't known here; answers are then read as a parser of it would."""
        self._tokenizer, self._encoder, self._dialogue, self._comparison = tokenizer, encoder, dialogue, comparison
        self._rule, self._format = rule, tool_format
        self._recorder = Recorder()
        self._parts: dict[int, Part] = {}
        self._as_text: set[int] = set()  # messages that are all content
        self._is_as_written = True

    def lead(self) -> None:
        """Raises DataError: the template refuses the dialogue, or has no place for a message."""
        history: list[Message] = []
        tools = self._dialogue.tools
        for turn, step in enumerate(self._dialogue.steps):
            history += _answering(step.new, history)
            place = self._recorder.locate(history, tools)
            rendered: Rendered | Rewritten = Rewritten(0, "")
            if place.node >= 0:
                rendered = self._rule.after(self._recorder.history(place.node), place.new)
                if isinstance(rendered, Rewritten):
                    self._check_rewriting(place.node, history, rendered)
                    place = place.rewritten()
            if isinstance(rendered, Rewritten):
                rendered = self._rule.first(place.messages)
            node = self._recorder.add_context(place, rendered, tools)
            self._parts[node] = Part(len(history) - len(place.new), rendered.text, rendered.token_ids)
            self._comparison.check(self._path(node), self._as_rendered(history, node))
            sampled = self._sample(history, step, rendered.text)
            self._is_as_written &= sampled.is_as_written
            said = step.answer
            if self._format is not None:
                said = parts_of(sampled.text, self._format, turn=turn, tools=tools, gap=rendered.text).message
            message = self._rule.given(history, said, sampled.text)
            reason = "stop" if sampled.end else "length"
            num = len(sampled.token_ids)
            record = Turn(sampled.token_ids, [0.0] * num, [0] * num, reason)
            node = self._recorder.add_sampled(node, message, record, sampled.text)
            self._parts[node] = Part(len(history), sampled.text + sampled.end, sampled.token_ids, True, sampled.end)
            if message.get("content") == sampled.text and said.get("content") != sampled.text:
                self._as_text.add(len(history))
            history.append(message)

    def _as_rendered(self, history: Sequence[Message], node: int) -> list[Message]:
        """`history` as the rule has it at `node`: calls of this path's turns for which the template has no place are in
        the content only.
        """
        turns = {part.message for part in self._path(node) if part.is_sampled} & self._as_text
        return [
            {key: value for key, value in message.items() if key != "tool_calls" or place not in turns}
            for place, message in enumerate(history)
        ]

    def _sample(self, history: Sequence[Message], step: Step, gap: str) -> _Sampled:
        """What a policy would sample to say the step's answer: as the template writes it, or else as models do."""
        try:
            found = self._rule.sampled_text(history, step.answer)
            text, ids, is_as_written = found.text, found.token_ids[:-1], True
            end = found.token_ids[-1]
        except DataError:
            text, is_as_written = _as_models_write(step.answer, gap), False
            ids = self._encoder.encode_response(text)[:-1]
            end = self._encoder.end_token_id
        if step.in_odd_tokens:
            odd = [token for letter in text for token in self._encoder.encode_response(letter)[:-1]]
            ids = odd if self._tokenizer.decode(odd) == text else ids
        if step.is_cut and ids:
            return _Sampled(text, ids, "", is_as_written)
        return _Sampled(text, [*ids, end], self._encoder.token_text(end) or "", is_as_written)

    def _check_rewriting(self, node: int, history: Sequence[Message], found: Rewritten) -> None:
        """A branch has a reason: what was sampled, with all around it, does not begin the whole rendering."""
        whole = self._encoder.render(self._as_rendered(history, node), self._dialogue.tools).unmasked
        if self._is_as_written and whole.startswith("".join(part.text for part in self._path(node))):
            self._comparison.observe(
                "wrong",
                "drift",
                f"message {found.message}: a branch begins ({found.why}), and the template goes on from what was"
                " sampled",
            )
        else:
            self._comparison.observe("note", "branch", f"cause template: {found.why}")

    def _path(self, node: int) -> list[Part]:
        path = []
        while node >= 0:
            path.append(self._parts[node])
            node = self._recorder.nodes[node].parent
        return path[::-1]


def _format_of(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> ToolFormat | None:
    try:
        return format_of(name, str(tokenizer.chat_template), tools)
    except DataError:
        return None


def _answering(new: Sequence[Message], history: Sequence[Message]) -> list[Message]:
    """`new` with the ids of the calls that they answer, which were given anew."""
    calls = (history[-1].get("tool_calls") if history else None) or []
    answers = iter(calls)
    out = []
    for message in new:
        call = next(answers, None) if message["role"] == "tool" else None
        out.append(message if call is None else {**message, "tool_call_id": call["id"]})
    return out


def _as_models_write(answer: Message, gap: str) -> str:
    """An answer for which the template has no place, as one text."""
    thinking, text = answer.get("reasoning_content") or "", answer.get("content") or ""
    is_opened = gap.rstrip().endswith("<think>")
    if thinking or is_opened:
        text = f"{'' if is_opened else '<think>' + chr(10)}{thinking}\n</think>\n\n{text}"
    for call in answer.get("tool_calls") or []:
        text += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return text


def summary(certificate: Certificate, most: int = 3) -> list[Observation]:
    """The observations, each once for all dialogues in which it was made, and at most so many notes of a sort."""
    kinds: dict[tuple[Any, Any, str], dict[str, None]] = {}
    for one in certificate.observations:
        kinds.setdefault((one.level, one.what, WORD.sub("...", one.text)), {})[one.kind] = None
    merged = [Observation(level, what, ", ".join(names), text) for (level, what, text), names in kinds.items()]
    shown: list[Observation] = []
    for sort, alike in itertools.groupby(sorted(merged, key=_sort_of), key=_sort_of):
        observations = list(alike)
        kept = 10 if sort[0] == "wrong" else most
        shown += observations[:kept]
        if left := observations[kept:]:
            shown.append(dataclasses.replace(left[0], kind="...", text=f"{len(left)} more of this sort"))
    if certificate.is_exact:
        proved = (
            f"{certificate.num_turns} turns of {certificate.num_dialogues} dialogues: every token between turns is the"
            f" template's own ({certificate.num_context_tokens} tokens compared)"
        )
        shown.append(Observation("ok", "template", "all", proved))
    return shown


def _sort_of(one: Observation) -> tuple[str, str]:
    return one.level, one.what

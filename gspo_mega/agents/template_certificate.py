"""The certificate of a chat template: do the turns of an episode, put together, hold what the template would write?

`certify_template` takes generated dialogues (`template_dialogues.py`) through the steps of an episode: the suffix rule
gives each context, an answer is "sampled" as the template itself would write it, read as a message, and recorded.
Before every turn, `DialogueComparison` compares the tokens so far with the template's own rendering of the whole
conversation. Nothing that a template does raises an error.

The text and the tokens between the turns must be the same: anything else is a drift, which is wrong. A turn may be
written in another way than it was sampled, or encoded in other tokens. What was sampled counts, and that is a note. A
template that rewrites what came before makes a branch, which is a note with its reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gspo_mega.agents.messages import ToolFormat, format_of, parts_of
from gspo_mega.agents.recorder import Recorder
from gspo_mega.agents.template_dialogues import WORD, Dialogue, DialogueStep, Message, dialogues
from gspo_mega.agents.turn import Turn
from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import MaskedText, PromptEncoder, for_template
from gspo_mega.data.templates import Rendered, Rewritten, SuffixRule, difference

_MOST_SHOWN = 12  # added tokens

RuleOf = Callable[[Sequence[dict[str, Any]]], SuffixRule]


@dataclass(frozen=True)
class Observation:
    """One finding about a template. `kind` is the kind of dialogue; `level` and `what` are as in the doctor's
    findings.
    """

    level: Literal["ok", "note", "wrong"]
    what: Literal["drift", "branch", "spelling", "tokens", "refusal", "template", "added"]
    kind: str
    text: str


@dataclass
class Certificate:
    """What was found about a template. `num_turns` counts the contexts that were compared with a whole rendering."""

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
    """Play all kinds of dialogues, and return the certificate. `rule_of` gives the suffix rule for a list of tools.
    `tokenizer` is the Hugging Face tokenizer, whose own rendering is compared with the encoder's. `tool_format` is
    `episodes.tool_format`.
    """
    certificate = Certificate([])
    for dialogue in dialogues(encoder.special_tokens, number_of_each=number_of_each):
        comparison = DialogueComparison(tokenizer, encoder, dialogue.kind, dialogue.tools)
        try:
            rule = rule_of(dialogue.tools)
            tool_calls = _format_of(tool_format, tokenizer, dialogue.tools)
            _DialogueRun(tokenizer, encoder, rule, tool_calls, dialogue, comparison).play()
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


def summary(certificate: Certificate, most: int = 3) -> list[Observation]:
    """Return the observations, each once for all dialogues in which it was made, and at most `most` notes of a sort."""
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


class _Sampled(NamedTuple):
    text: str
    token_ids: list[int]
    end: str  # the text of its end token, empty if it has none
    is_as_written: bool  # as the template would write it


class _DialogueRun:
    """One dialogue while it is played as an episode."""

    def __init__(
        self,
        tokenizer: Any,
        encoder: PromptEncoder,
        rule: SuffixRule,
        tool_format: ToolFormat | None,
        dialogue: Dialogue,
        comparison: DialogueComparison,
    ) -> None:
        """`tool_format` is None for a format that is not known here; answers are then read as its parser would."""
        self._tokenizer, self._encoder, self._dialogue, self._comparison = tokenizer, encoder, dialogue, comparison
        self._rule, self._format = rule, tool_format
        self._recorder = Recorder()
        self._parts: dict[int, NodePart] = {}
        self._as_text: set[int] = set()  # messages that are all content
        self._is_as_written = True

    def play(self) -> None:
        """Play the dialogue. Raises DataError if the template refuses it, or has no place for a message."""
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
            self._parts[node] = NodePart(len(history) - len(place.new), rendered.text, rendered.token_ids)
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
            self._parts[node] = NodePart(len(history), sampled.text + sampled.end, sampled.token_ids, True, sampled.end)
            if message.get("content") == sampled.text and said.get("content") != sampled.text:
                self._as_text.add(len(history))
            history.append(message)

    def _as_rendered(self, history: Sequence[Message], node: int) -> list[Message]:
        """Return `history` as the rule has it at `node`: if the template has no place for the calls of a turn on this
        path, they are only in the content.
        """
        turns = {part.message for part in self._path(node) if part.is_sampled} & self._as_text
        return [
            {key: value for key, value in message.items() if key != "tool_calls" or place not in turns}
            for place, message in enumerate(history)
        ]

    def _sample(self, history: Sequence[Message], step: DialogueStep, gap: str) -> _Sampled:
        """Return what a policy would sample to say the step's answer, as the template writes it, or else as models
        do.
        """
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
        """Check that a branch has a reason: what was sampled, with all around it, is not how the whole rendering
        begins.
        """
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

    def _path(self, node: int) -> list[NodePart]:
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
    """Return `new` with the ids of the calls that they answer, because these calls got new ids."""
    calls = (history[-1].get("tool_calls") if history else None) or []
    answers = iter(calls)
    out = []
    for message in new:
        call = next(answers, None) if message["role"] == "tool" else None
        out.append(message if call is None else {**message, "tool_call_id": call["id"]})
    return out


def _as_models_write(answer: Message, gap: str) -> str:
    """Return an answer for which the template has no place as one text."""
    thinking, text = answer.get("reasoning_content") or "", answer.get("content") or ""
    is_opened = gap.rstrip().endswith("<think>")
    if thinking or is_opened:
        text = f"{'' if is_opened else '<think>' + chr(10)}{thinking}\n</think>\n\n{text}"
    for call in answer.get("tool_calls") or []:
        text += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return text


@dataclass
class NodePart:
    """A node's text and tokens. `message` is the index of its first message in the history. `end` is the text of a
    sampled node's end token, with which its text ends; empty if it has none.
    """

    message: int
    text: str
    token_ids: list[int]
    is_sampled: bool = False
    end: str = ""


class DialogueComparison:
    """Compares the paths of one dialogue with the template's renderings.

    Attributes:
        observations: what was found.
        num_turns, num_context_tokens: how many turns and tokens of contexts were compared.
    """

    def __init__(self, tokenizer: Any, encoder: PromptEncoder, kind: str, tools: list[dict[str, Any]]) -> None:
        """`tokenizer` is the Hugging Face tokenizer, whose own rendering is compared with the encoder's."""
        self.observations: list[Observation] = []
        self.num_turns = self.num_context_tokens = 0
        self._tokenizer, self._encoder, self._kind, self._tools = tokenizer, encoder, kind, tools

    def check(self, path: Sequence[NodePart], history: Sequence[Message]) -> None:
        """Compare a path that ends with a context with the rendering of the whole `history`. They should be equal."""
        whole = self._encoder.render(history, self._tools)
        self._check_against_transformers(whole, history)
        self._check_control_tokens(whole, history)
        self.num_turns += 1
        self.num_context_tokens += sum(len(part.token_ids) for part in path if not part.is_sampled)
        written = self._align(path, whole.unmasked)
        if written is None:
            return
        pieces = _cut(whole, written)
        for place, (part, piece) in enumerate(zip(path, pieces, strict=True)):
            if not part.is_sampled or piece.unmasked == part.text:
                continue
            is_closed = self._is_closed_once(part, piece, path[place + 1].text)
            if not is_closed or WORD.findall(part.text) != WORD.findall(piece.unmasked):
                self._drift(part if is_closed else path[place + 1], piece.unmasked, part.text)
                return
            self.observe(
                "note",
                "spelling",
                f"sampled {short(part.text)}, in the history {short(piece.unmasked)}; what was sampled stays",
            )
        self._check_tokens(path, pieces, whole)

    def _is_closed_once(self, part: NodePart, piece: MaskedText, context: str) -> bool:
        """Whether nothing lies between the end of a turn and the context after it. A turn is closed by its end token,
        or by the control token with which the context begins.
        """
        if part.end and piece.text.endswith(part.end):
            return True
        closing = next((token for token in self._encoder.special_tokens if context.startswith(token)), None)
        return closing is not None and not any(token in piece.text for token in (closing, part.end) if token)

    def _align(self, path: Sequence[NodePart], whole: str) -> list[str] | None:
        """Return what `whole` has for each part: exactly the text of contexts, and any text between them. None after a
        drift.
        """
        written: list[str] = []
        at = 0
        for place, part in enumerate(path):
            if part.is_sampled:
                continue
            found = whole.find(part.text, at) if place else (0 if whole.startswith(part.text) else -1)
            is_last = place == len(path) - 1
            if is_last and found >= 0:
                found = len(whole) - len(part.text) if whole.endswith(part.text) else -1
            if found < at:
                shown = whole[at:] if not place else whole[at + _num_same(whole[at:], path[place - 1].text) :]
                self._drift(part, shown, part.text)
                return None
            if place:
                written.append(whole[at:found])
            written.append(part.text)
            at = found + len(part.text)
        return written

    def _check_tokens(self, path: Sequence[NodePart], pieces: Sequence[MaskedText], whole: MaskedText) -> None:
        """Check that the tokens of the contexts are those of the whole rendering, encoded at once."""
        ours: list[int] = []
        owners: list[tuple[NodePart, bool]] = []  # of each token, and whether it touches what was sampled
        for place, (part, piece) in enumerate(zip(path, pieces, strict=True)):
            ids = part.token_ids
            if part.is_sampled:
                ids = self._encoder.encode(piece)
                if ids != part.token_ids and piece.unmasked == part.text:
                    self.observe(
                        "note",
                        "tokens",
                        f"{short(part.text)}: {len(part.token_ids)} tokens were sampled and stay; encoded again it is"
                        f" {len(ids)} others",
                    )
            ours += ids
            touches = [part.is_sampled or (n == len(ids) - 1 and place + 1 < len(path)) for n in range(len(ids))]
            owners += [(part, one) for one in touches]
        theirs = self._encoder.encode(whole)
        if ours == theirs:
            return
        at = _num_same(ours, theirs)
        part, touches_sampled = owners[min(at, len(owners) - 1)]
        shown = [repr(self._tokenizer.decode(ids[at : at + 3])) for ids in (theirs, ours)]
        if touches_sampled:
            self.observe(
                "note", "tokens", f"encoded as a whole, a token {shown[0]} would cross the beginning of a turn"
            )
        else:
            text = f"encoded as a whole the tokens are {shown[0]}, and here {shown[1]}"
            self.observe("wrong", "drift", f"message {part.message}: {text}")

    def _check_against_transformers(self, whole: MaskedText, history: Sequence[Message]) -> None:
        """Check that transformers renders the same text."""
        texts: list[str] = []
        for arguments_are_text in (False, True):
            messages = [for_template(message, arguments_are_text) for message in history]
            try:
                texts.append(
                    self._tokenizer.apply_chat_template(
                        messages, tools=self._tools or None, tokenize=False, add_generation_prompt=True
                    )
                )
            except Exception as error:  # a template may raise anything
                texts.append(f"an error: {error}"[:200])
        if whole.unmasked not in texts:
            self.observe(
                "wrong", "template", f"transformers renders another text: {difference(whole.unmasked, texts[0])}"
            )

    def _check_control_tokens(self, whole: MaskedText, history: Sequence[Message]) -> None:
        """Check that no text of a message becomes a control token: a harmless text in its place must give as many
        of them.
        """
        control = self._encoder.special_tokens
        if not any(token in str(message.get("content")) for token in control for message in history):
            return
        expected = self._num_control(self._harmless(history, range(len(history))))
        if self._count(self._encoder.encode(whole)) == expected:
            return
        for place, message in enumerate(history):
            if self._num_control(self._harmless(history, [n for n in range(len(history)) if n != place])) != expected:
                self.observe(
                    "wrong",
                    "drift",
                    f"message {place}: a text of the {message['role']}'s becomes a control"
                    f" token: {short(str(message.get('content')))}",
                )
                return

    def _harmless(self, history: Sequence[Message], places: Iterable[int]) -> list[Message]:
        changed = [dict(message) for message in history]
        for place in places:
            content = str(changed[place].get("content") or "")
            for token in self._encoder.special_tokens:
                content = content.replace(token, "x")
            changed[place]["content"] = content
        return changed

    def _num_control(self, history: Sequence[Message]) -> Counter[int]:
        return self._count(self._encoder.encode(self._encoder.render(history, self._tools)))

    def _count(self, ids: Sequence[int]) -> Counter[int]:
        control = set(self._tokenizer.convert_tokens_to_ids(list(self._encoder.special_tokens)))
        return Counter(token for token in ids if token in control)

    def _drift(self, part: NodePart, theirs: str, ours: str) -> None:
        text = f"message {part.message}: the template writes {difference(ours, theirs)}"
        self.observe("wrong", "drift", text)

    def observe(self, level: Any, what: Any, text: str) -> None:
        self.observations.append(Observation(level, what, self._kind, text))


def _cut(whole: MaskedText, texts: Sequence[str]) -> list[MaskedText]:
    """Cut `whole` into pieces with these texts."""
    pieces = []
    for text in texts:
        end = _end_of(whole, len(text))
        pieces.append(whole[:end])
        whole = whole[end:]
    return pieces


def _end_of(text: MaskedText, length: int) -> int:
    """Return the place in `text` up to which it stands for `length` characters."""
    at = said = 0
    while said < length:
        word = next((word for word in text.originals if text.text.startswith(word, at)), None)
        at += 1 if word is None else len(word)
        said += 1 if word is None else len(text.originals[word])
    return at


def _num_same(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-16:]}")

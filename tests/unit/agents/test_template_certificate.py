"""The certificate of a chat template: exact for templates that do what published ones do, with each branch and its
reason; and every injected drift is found, with the message that it is in.
"""

from __future__ import annotations

import json

import chat_templates as families
import pytest
from chat_templates import tokenizer_with

from gspo_mega.agents.template_certificate import certify_template, summary
from gspo_mega.agents.template_dialogues import KINDS, dialogues
from gspo_mega.cli.main import main
from gspo_mega.data.chat import MaskedText, PromptEncoder
from gspo_mega.data.templates import Rendered, Rewritten, SuffixRule

STOPS = {"TOOLS_LAST": ["</s>"], "SHARED_END": ["<|user|>", "<|observation|>"]}


def certified(folder, name="QUICKSTART", rule_class=SuffixRule, encoder_class=PromptEncoder, template=None):
    tokenizer = tokenizer_with(folder, template or getattr(families, name))
    encoder = encoder_class(tokenizer, chat_template=True)
    stops = tokenizer.convert_tokens_to_ids(STOPS.get(name, ["<|im_end|>", "<|endoftext|>"]))
    return certify_template(tokenizer, encoder, lambda tools: rule_class(encoder, stops, tools), number_of_each=1)


def found(certificate, level, what=None):
    return [one for one in certificate.observations if one.level == level and what in (None, one.what)]


@pytest.mark.parametrize(
    ("name", "branching", "refused"),
    [
        ("QUICKSTART", set(), set()),
        ("SHARED_END", set(), set()),
        ("CALL_OR_CONTENT", set(), set()),
        ("THINKING", {"thinking", "thinking and tools"}, set()),
        ("OPENED_THINKING", set(KINDS), set()),
        ("DROPS_TAGS", set(KINDS), set()),
        ("TOOLS_LAST", {"tools", "content beside calls", "thinking and tools", "control tokens of tools"}, set()),
        ("NO_TOOLS", set(), {"tools", "content beside calls", "thinking and tools", "control tokens of tools"}),
        ("ONE_LONG_TURN", set(), {"tools", "content beside calls", "thinking and tools", "control tokens of tools"}),
    ],
)
def test_templates_of_published_families_are_exact(tmp_path, name, branching, refused):
    certificate = certified(tmp_path, name)
    assert certificate.is_exact and not found(certificate, "wrong")
    assert {one.kind for one in found(certificate, "note", "branch")} == branching
    assert {one.kind for one in found(certificate, "note", "refusal")} >= refused
    assert certificate.num_dialogues == len(KINDS) and certificate.num_context_tokens > 100


def test_where_encoding_again_would_differ_is_said(tmp_path):
    notes = found(certified(tmp_path), "note", "tokens")
    assert {one.kind for one in notes} == {"odd tokens"}
    assert "tokens were sampled and stay; encoded again it is" in notes[0].text


def test_added_tokens_that_no_text_is_kept_from_are_named(tmp_path):
    (note,) = found(certified(tmp_path, "THINKING"), "note", "added")
    assert "'</think>', '</tool_call>', '<think>', '<tool_call>'" in note.text and "<|im_end|>" not in note.text


class DropsALetter(SuffixRule):
    def after(self, history, new):
        found = super().after(history, new)
        return found if isinstance(found, Rewritten) else Rendered(found.token_ids[1:], found.text[1:])


class EncodesByLetters(SuffixRule):
    """The right text in other tokens than the whole has."""

    def after(self, history, new):
        found = super().after(history, new)
        if isinstance(found, Rewritten):
            return found
        pieces = [found.text[:11], *found.text[11:]]  # behind the first control token
        ids = [token for piece in pieces for token in self._encoder.encode(MaskedText(piece, {}))]
        return Rendered(ids, found.text)


class NoticesNothing(SuffixRule):
    """The suffix is what the whole rendering has behind the last turn's words."""

    def after(self, history, new):
        found = super().after(history, new)
        if not isinstance(found, Rewritten):
            return found
        whole = self.first([*(one.message for one in history), *new])
        text = whole.text[whole.text.rindex("<|im_end|>", 0, whole.text.rindex("<|im_start|>user")) + 10 :]
        return Rendered(self._encoder.encode(MaskedText(text, {})), text)


class ClaimsTooMuch(SuffixRule):
    def after(self, history, new):
        return Rewritten(1, "the template drops the thinking of message 1")


class OpensAnotherRole(SuffixRule):
    def after(self, history, new):
        found = super().after(history, new)
        if isinstance(found, Rewritten):
            return found
        text = found.text.replace("<|im_start|>tool", "<|im_start|>user")
        return Rendered(self._encoder.encode(MaskedText(text, {})), text)


class LetsControlTokensIn(PromptEncoder):
    def encode(self, rendered):
        return self._encode(rendered.unmasked)


class RendersOtherText(PromptEncoder):
    def _render(self, messages, tools, opened):
        return super()._render(messages, tools, opened).replace("user\n", "user\n\n")


@pytest.mark.parametrize(
    ("name", "broken", "kinds", "says"),
    [
        ("QUICKSTART", {"rule_class": DropsALetter}, set(KINDS), "message 2: the template writes"),
        ("QUICKSTART", {"rule_class": EncodesByLetters}, {"plain", "unicode"}, "encoded as a whole the tokens are"),
        (
            "THINKING",
            {"rule_class": NoticesNothing},
            {"thinking", "thinking and tools"},
            "message 1: the template writes",
        ),
        ("QUICKSTART", {"rule_class": ClaimsTooMuch}, {"plain", "system", "unicode"}, "message 1: a branch begins"),
        (
            "QUICKSTART",
            {"rule_class": OpensAnotherRole},
            {"tools"},
            r"message 2: the template writes '\n<|im_start|>tool",
        ),
        ("QUICKSTART", {"encoder_class": LetsControlTokensIn}, {"control tokens"}, "message 0: a text of the user's"),
        ("QUICKSTART", {"encoder_class": RendersOtherText}, set(KINDS), "transformers renders another text"),
    ],
)
def test_an_injected_drift_is_found_and_its_message_named(tmp_path, name, broken, kinds, says):
    certificate = certified(tmp_path, name, **broken)
    wrong = found(certificate, "wrong")
    assert not certificate.is_exact and {one.kind for one in wrong} >= kinds
    assert any(says in one.text for one in wrong), [one.text for one in wrong]


def test_a_template_that_no_turn_can_follow_is_not_certified(tmp_path):
    certificate = certified(tmp_path, "TEXT_END")
    assert not certificate.is_exact and certificate.num_turns == 0
    assert "not one dialogue could be led" in found(certificate, "wrong")[0].text


def test_dialogues_are_of_all_kinds_and_no_two_messages_say_the_same():
    made = list(dialogues(["<|im_end|>"], number_of_each=2))
    assert [one.kind for one in made] == [*KINDS, *KINDS]
    assert [repr(one) for one in made] == [repr(one) for one in dialogues(["<|im_end|>"], number_of_each=2)]
    said = {kind: "".join(str(step) for one in made if one.kind == kind for step in one.steps) for kind in KINDS}
    assert "<|im_end|>" in said["control tokens"] and "<|im_end|>" in said["control tokens of tools"]
    assert "reasoning_content" in said["thinking and tools"] and "tool_calls" in said["thinking and tools"]


def test_the_summary_says_a_thing_once_and_bounds_the_notes(tmp_path):
    certificate = certified(tmp_path, "THINKING")
    lines = summary(certificate)
    assert len(lines) < 12 < len(certificate.observations)
    assert any("more of this sort" in one.text for one in lines) and lines[-1].level == "ok"


def saved(folder, template):
    """A folder as `--tokenizer` reads it."""
    tokenizer = tokenizer_with(folder, template)
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(("template", "code"), [(families.THINKING, 0), (families.TEXT_END, 2)])
def test_the_command(tmp_path, capsys, template, code):
    assert main(["doctor", "--tokenizer", saved(tmp_path, template)]) == code
    said = capsys.readouterr()
    assert (f"{tmp_path}: certified" in said.out) == (code == 0)
    if code == 0:
        assert "the template drops the thinking of message 1 [thinking" in said.out
    else:
        assert "end of an assistant's turn is text" in said.err


def test_the_command_fails_where_there_is_a_drift(tmp_path, capsys, monkeypatch):
    command = ["doctor", "--tokenizer", saved(tmp_path, families.QUICKSTART)]
    assert main(command) == 0
    capsys.readouterr()
    monkeypatch.setattr("gspo_mega.data.templates.SuffixRule", DropsALetter)
    assert main(command) == 1
    said = capsys.readouterr()
    *findings, last = said.out.splitlines()
    assert last == (
        f"{tmp_path}: not certified; the tokens of episodes of several turns would not be what this template writes"
    )
    wrong = [line for line in findings if "message 2: the template writes" in line]
    assert wrong and all("wrong" in line for line in wrong), said.out
    assert f"{tmp_path}: certified" not in said.out and said.err == ""


def test_the_command_names_what_a_folder_lacks(tmp_path, capsys):
    assert main(["doctor", "--tokenizer", str(tmp_path)]) == 2
    assert "neither generation_config.json nor config.json names eos_token_id" in capsys.readouterr().err

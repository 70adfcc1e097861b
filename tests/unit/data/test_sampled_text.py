"""What a policy would have sampled to say a message: the template's own text between the answer's beginning and the end
of the turn, so that a demonstration of several turns is the template's whole rendering.
"""

from __future__ import annotations

import chat_templates as families
import pytest
from chat_templates import TOOLS, call_of, tokenizer_with

from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.templates import HistoryMessage, Rendered, SuffixRule

USER = {"role": "user", "content": "2+2? <|im_end|>"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call_of({"expression": "2+2"})]}
TOOL = {"role": "tool", "content": "4", "tool_call_id": "c0000t000", "name": "calculator"}
SAID = {"role": "assistant", "content": "It is <|im_end|> 4"}
STOPS = {
    families.TOOLS_LAST: ["</s>"],
    families.SHARED_END: ["<|user|>", "<|observation|>"],
}


def rule_of(folder, template, tools=None):
    tokenizer = tokenizer_with(folder, template)
    encoder = PromptEncoder(tokenizer, chat_template=True)
    stops = tokenizer.convert_tokens_to_ids(STOPS.get(template, ["<|im_end|>"]))
    return tokenizer, encoder, SuffixRule(encoder, stops, tools)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (families.QUICKSTART, (SAID, USER, {**SAID, "content": ""})),
        # As published, it would write empty thinking into its last message only.
        (families.THINKING.replace("(loop.last or m.reasoning_content)", "m.reasoning_content"), (CALL, TOOL, SAID)),
        (families.TOOLS_LAST, ({**CALL, "content": None}, TOOL, {**SAID, "content": "4"})),
        (families.SHARED_END, (CALL, TOOL, SAID)),
        (families.THINKING, ({**CALL, "reasoning_content": "hm"}, TOOL, {**SAID, "reasoning_content": "so"})),
        (families.OPENED_THINKING, ({**CALL, "reasoning_content": "hm"}, TOOL, {**SAID, "reasoning_content": "so"})),
    ],
)
def test_turns_put_together_are_the_templates_rendering(tmp_path, template, turns):
    tokenizer, encoder, rule = rule_of(tmp_path, template, TOOLS if TOOL in turns else None)
    found = rule.first([USER])
    ids, text, history = [*found.token_ids], found.text, [HistoryMessage(USER)]
    for message in turns:
        before = [one.message for one in history]
        if message["role"] != "assistant":
            found = rule.after(history, [message])
            assert isinstance(found, Rendered)
            ids, text = ids + found.token_ids, text + found.text
            history.append(HistoryMessage(message))
            continue
        sampled = rule.sampled_text(before, message)
        end = tokenizer.decode(sampled.token_ids[-1:])
        assert sampled.token_ids[-1] in tokenizer.convert_tokens_to_ids(STOPS.get(template, ["<|im_end|>"]))
        assert tokenizer.decode(sampled.token_ids) == sampled.text + end
        ids, text = ids + sampled.token_ids, text + sampled.text + end
        history.append(HistoryMessage(message, True, found.text, sampled.token_ids[-1]))
    whole = encoder.render([one.message for one in history], rule.tools, opened=False)
    if template == families.SHARED_END:  # the last end is the next message's
        ids, text = ids[:-1], text.removesuffix("<|user|>")
    assert whole.unmasked.removesuffix("\n") == text
    assert encoder.encode(whole)[: len(ids)] == ids and len(encoder.encode(whole)) <= len(ids) + 1


def test_control_tokens_in_a_demonstration_are_characters(tmp_path):
    tokenizer, _, rule = rule_of(tmp_path, families.QUICKSTART)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampled = rule.sampled_text([USER], SAID)
    assert sampled.text == SAID["content"]
    assert sampled.token_ids.count(end) == 1 and sampled.token_ids[-1] == end


@pytest.mark.parametrize(
    ("template", "message", "error"),
    [
        (families.QUICKSTART, CALL, "no place for the calls of"),
        (
            families.OPENED_THINKING.replace("(loop.last or m.reasoning_content)", "m.reasoning_content"),
            SAID,
            "begins the assistant's answer with text .*<think",
        ),
        (families.DROPS_TAGS, {**SAID, "content": "hm</think>4"}, "begins the assistant's answer|leaves out a part"),
    ],
)
def test_what_a_policy_could_not_have_sampled_is_refused(tmp_path, template, message, error):
    _, _, rule = rule_of(tmp_path, template)
    with pytest.raises(DataError, match=error):
        rule.sampled_text([USER], message)

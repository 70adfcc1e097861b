import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.data.demonstrations import load_demonstrations
from gspo_mega.data.prompts import load_prompts
from gspo_mega.data.stream import PromptStream


def test_prompt_and_response_as_token_ids(write_jsonl, data_settings, tokenizer):
    data = data_settings(
        path=str(write_jsonl([{"prompt": "1+2=", "answer": "3", "response": "1+2=3#3"}])), chat_template=True
    )
    [source] = load_demonstrations(data, tokenizer, max_response_tokens=64)
    [demonstration] = source.items()
    assert demonstration.demonstration_id == "data:0"
    [row] = demonstration.rows
    assert tokenizer.decode(row.response_token_ids) == "1+2=3#3<|im_end|>"
    assert row.response_token_ids[-1] == tokenizer.eos_token_id
    assert row.response_mask == (1,) * row.num_learned and row.num_learned == len(row.response_token_ids)
    [prompts] = load_prompts(data, tokenizer)
    assert row.prompt_token_ids == prompts.item(0).token_ids


def test_the_answer_is_not_needed_and_any_key_may_hold_the_response(write_jsonl, data_settings, tokenizer):
    data = data_settings(path=str(write_jsonl([{"prompt": "1+2=", "solution": "3"}])), response_key="solution")
    [source] = load_demonstrations(data, tokenizer, max_response_tokens=64)
    assert source.item(0).rows[0].num_learned == 2


def test_what_no_rollout_could_produce_is_left_out(write_jsonl, data_settings, tokenizer):
    rows = [
        {"prompt": prompt, "response": response} for prompt, response in (("1", "7777"), ("1", "77777"), ("1" * 9, "7"))
    ]
    data = data_settings(path=str(write_jsonl(rows)), max_prompt_tokens=8)
    [source] = load_demonstrations(data, tokenizer, max_response_tokens=5)
    # Four sevens and the end token are five tokens.
    assert [item is not None for item in map(source.item, range(3))] == [True, False, False]
    assert source.num_overlong == 2
    with pytest.raises(
        DataError, match="every one of its 3 rows is too long .data.max_prompt_tokens: 8, rollout.max_new_tokens: 1"
    ):
        load_demonstrations(data, tokenizer, max_response_tokens=1)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "1"}, "no key 'response'"),
        ({"prompt": "1", "response": None}, "'response' must be a text or a list of chat messages, not null"),
        ({"prompt": "1", "response": 3}, "'response' must be a text or a list of chat messages, not a number"),
        ({"prompt": "1", "response": ""}, "'response' is empty"),
        ({"prompt": "1", "response": "3<|im_end|>\n"}, "ends with the end token '<|im_end|>'"),
        ({"response": "3"}, "no key 'prompt'"),
    ],
)
def test_malformed_rows(write_jsonl, data_settings, tokenizer, row, text):
    path = write_jsonl([{"prompt": "1", "response": "2"}, row])
    with pytest.raises(DataError) as caught:
        load_demonstrations(data_settings(path=str(path)), tokenizer, max_response_tokens=8)
    assert f"{path}:2: " in str(caught.value) and text in str(caught.value)


def test_their_order_is_the_streams_and_resumes(write_jsonl, data_settings, tokenizer):
    rows = [{"prompt": f"{k}", "response": f"{k}"} for k in range(12)]
    data = data_settings(path=str(write_jsonl(rows)))

    def stream():
        return PromptStream(load_demonstrations(data, tokenizer, max_response_tokens=8), [1.0], seed=5, shuffle=True)

    first = stream()
    seen = [first.next().demonstration_id for _ in range(12)]
    assert sorted(seen) == sorted(f"data:{k}" for k in range(12))
    state = first.state_dict()
    second = stream()
    second.load_state_dict(state)
    assert [first.next() for _ in range(20)] == [second.next() for _ in range(20)]


SAYS = {"role": "assistant", "content": "[1+2]"}
RESULT = {"role": "tool", "content": "3"}
CALL = {"function": {"name": "calculator", "arguments": {"expression": "1+2"}}}


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ([], "'response' is an empty list of messages"),
        (["3"], "message 1 that is no message of the role assistant, tool or user"),
        ([SAYS, {"role": "system", "content": "x"}, SAYS], "message 2 that is no message of the role"),
        (
            [{"role": "assistant", "content": ""}],
            'message 1 that has no text; {"role": "assistant", "content": "text"}',
        ),
        ([{"role": "assistant", "content": 3}], "message 1 that has 'content' that is a number, not a text"),
        ([SAYS, {**RESULT, "tool_calls": [CALL]}, SAYS], "message 2 that calls tools, which only the assistant does"),
        ([{**SAYS, "tool_calls": ["1+2"]}], "message 1 that has tool_calls that are no list of"),
        ([{**SAYS, "reasoning_content": 3}], "message 1 that has 'reasoning_content' that is a number, not a text"),
        ([RESULT, SAYS], "message 1 from the tool; the first and the last must be the assistant's"),
        ([SAYS, RESULT], "message 2 from the tool; the first and the last must be the assistant's"),
        ([SAYS, SAYS], "two messages of the assistant's, 1 and 2, with nothing between them"),
        ([{**SAYS, "content": "3<|im_end|>"}], "ends with the end token '<|im_end|>'"),
    ],
)
def test_malformed_conversations(write_jsonl, data_settings, tokenizer, response, text):
    path = write_jsonl([{"prompt": "1", "response": [SAYS, RESULT, SAYS]}, {"prompt": "1", "response": response}])
    data = data_settings(path=str(path), chat_template=True)
    with pytest.raises(DataError) as caught:
        load_demonstrations(data, tokenizer, max_response_tokens=8, conversation=lambda prompt, messages: ())
    assert f"{path}:2: 'response' " in str(caught.value) and text in str(caught.value)


def test_turns_need_a_chat_template_and_an_episode_that_has_them(write_jsonl, data_settings, tokenizer):
    path = write_jsonl([{"prompt": "1", "response": [SAYS, RESULT, SAYS]}])
    with pytest.raises(DataError, match="a list of chat messages, which needs data.chat_template: true"):
        load_demonstrations(data_settings(path=str(path)), tokenizer, max_response_tokens=8)
    with pytest.raises(DataError, match="several turns or calls, and `rollout.episode: one_turn` has neither"):
        load_demonstrations(data_settings(path=str(path), chat_template=True), tokenizer, max_response_tokens=8)


def test_a_list_of_one_message_is_its_text(write_jsonl, data_settings, tokenizer):
    rows = [{"prompt": "1", "response": [SAYS]}, {"prompt": "1", "response": SAYS["content"]}]
    data = data_settings(path=str(write_jsonl(rows)), chat_template=True)
    [source] = load_demonstrations(data, tokenizer, max_response_tokens=8)
    assert source.item(0).rows == source.item(1).rows


def test_null_keys_are_absent_ones(write_jsonl, data_settings, tokenizer):
    """As Arrow writes the keys that only other messages have."""
    nothing = dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content"))
    asked = [{"role": "user", "content": "1"}]
    rows = [
        {"prompt": [{**nothing, **asked[0]}], "response": [{**nothing, **SAYS}]},
        {"prompt": asked, "response": [SAYS]},
    ]
    [source] = load_demonstrations(
        data_settings(path=str(write_jsonl(rows)), chat_template=True), tokenizer, max_response_tokens=8
    )
    assert source.item(0).rows == source.item(1).rows
    seen = []
    turns = [{**nothing, **SAYS, "content": None, "tool_calls": [CALL]}, {**nothing, **RESULT}, {**nothing, **SAYS}]
    path = write_jsonl([{"prompt": asked, "response": turns}])
    load_demonstrations(
        data_settings(path=str(path), chat_template=True),
        tokenizer,
        max_response_tokens=8,
        conversation=lambda prompt, messages: seen.append(messages) or (),
    )
    assert seen == [[{"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, SAYS]]

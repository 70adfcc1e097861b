"""The end tokens of a run from a loaded tokenizer and its chat template, and what demonstrations end with."""

import chat_templates as families
import pytest
from chat_templates import tokenizer_with
from transformers import AutoTokenizer

from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.data.templates import run_end_tokens
from gspo_mega.models.end_tokens import EndTokens

# In the manner of Llama 3, gpt-oss, Phi-3, and one that refuses all but users.
HEADERS = "{% for m in messages %}<|system|>{{ m.role }}\n\n{{ m.content | trim }}</s>{% endfor %}"
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|system|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|observation|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
CLOSED_TWICE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}<|endoftext|>"
USERS_ONLY = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}x{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (families.QUICKSTART, "<|im_end|>"),
        (families.THINKING, "<|im_end|>"),
        (families.TOOLS_LAST, "</s>"),
        (families.CALL_OR_CONTENT, "<|endoftext|>"),  # its own end of a last message
        (HEADERS, "</s>"),
        (CHANNELS, "<|observation|>"),  # and not <|im_end|>, which stands inside the assistant's turn there
        (CLOSED_TWICE, "</s>"),
        (families.SHARED_END, None),  # the next message's opening token is no end that it writes
        (families.TEXT_END, None),
        (USERS_ONLY, None),
    ],
)
def test_the_token_with_which_a_template_ends_the_assistants_turn(tmp_path, template, end):
    tokenizer = tokenizer_with(tmp_path, template)
    encoder = PromptEncoder(tokenizer, chat_template=True)
    found = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert encoder.turn_end_token_id == found
    taught = tokenizer.eos_token if end is None else end
    assert encoder.end_token == taught and encoder.encode_response("7")[-1] == encoder.end_token_id
    assert encoder.end_token_id == tokenizer.convert_tokens_to_ids(taught)
    ends = run_end_tokens(encoder, tokenizer, (5,), None)
    assert encoder.end_token_id in ends.ids and tokenizer.eos_token_id in ends.ids and ends.ids[0] == 5
    assert PromptEncoder(tokenizer, chat_template=False).turn_end_token_id is None, "no template, no end of its"


def test_every_source_is_named_by_its_text(tmp_path):
    tokenizer = tokenizer_with(tmp_path, families.TOOLS_LAST)
    encoder = PromptEncoder(tokenizer, chat_template=True)
    found = run_end_tokens(encoder, tokenizer, (0,), len(tokenizer))
    end = tokenizer.convert_tokens_to_ids("</s>")
    assert found.ids == (0, tokenizer.eos_token_id, end)
    assert found.notices == (
        "the sources of the end token differ: config.json and generation_config.json name '<|endoftext|>' (0), the"
        f" tokenizer '<|im_end|>' (2), the chat template '</s>' ({end}); a response ends at any of these tokens",
    )
    agreeing = run_end_tokens(encoder, tokenizer, (end, tokenizer.eos_token_id), len(tokenizer))
    assert agreeing.notices == () and agreeing.ids == (end, tokenizer.eos_token_id)


def test_a_tokenizer_without_an_end_token(tmp_path):
    """Then the configuration's end alone counts, and the template's; only where nobody names one is it an error."""
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|im_end|>",', ""))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain = PromptEncoder(tokenizer, chat_template=False)
    assert run_end_tokens(plain, tokenizer, (7,), 512) == EndTokens((7,))
    with pytest.raises(DataError, match="No end token is named: give eos_token_id in generation_config.json"):
        run_end_tokens(plain, tokenizer, (), 512)
    assert run_end_tokens(PromptEncoder(tokenizer, chat_template=True), tokenizer, (), 512).ids == (2,)
    with pytest.raises(
        DataError, match=r"'<\|im_end\|>' \(2\), is outside the model's vocabulary of 2: .* No end token"
    ):
        run_end_tokens(PromptEncoder(tokenizer, chat_template=True), tokenizer, (), 2)


# In the manner of gpt-oss, whose call has an end of its own, and of a template whose special tokens enclose each call.
CALLS_OWN_END = CHANNELS.replace(
    "<|system|>{{ m.content }}",
    "<|system|>{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}</s>{% else %}{{ m.content }}",
).replace("{% endfor %}", "{% endif %}{% endfor %}")
ENCLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]"
    "{{ call.function.arguments | tojson }}[/INST]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CALLS_OWN_END, "</s>"),
        (families.THINKING, "<|im_end|>"),
        (families.TOOLS_LAST, "</s>"),  # several calls in one message, one end
        (families.CALL_OR_CONTENT, "<|endoftext|>"),
        (ENCLOSED, None),
        (families.SHARED_END, None),
        (families.NO_TOOLS, None),
        (USERS_ONLY, None),
    ],
)
def test_the_token_with_which_a_template_ends_a_call(tmp_path, template, end):
    tokenizer = tokenizer_with(tmp_path, template)
    encoder = PromptEncoder(tokenizer, chat_template=True)
    assert encoder.call_end_token_id == (None if end is None else tokenizer.convert_tokens_to_ids(end))
    without = run_end_tokens(encoder, tokenizer, (5,), None).ids
    ids = run_end_tokens(encoder, tokenizer, (5,), None, calls=True).ids
    assert ids[: len(without)] == without and set(ids[len(without) :]) <= {encoder.call_end_token_id}
    assert end is None or encoder.call_end_token_id in ids

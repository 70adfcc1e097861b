"""Chat templates that do what those of published families do, in few words; a tokenizer that has all their tokens."""

from __future__ import annotations

from transformers import AutoTokenizer

from gspo_mega.data.quickstart import CHAT_TEMPLATE, write_tokenizer

QUICKSTART = CHAT_TEMPLATE

_HERMES_CALLS = (
    '{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ "\\n" }}{% endif %}<tool_call>\n'
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
# Thinking stays in a cycle of tool calls and is dropped at the next user message; tool answers share a user's turn.
THINKING = (
    '{% if tools %}<|im_start|>system\n# Tools: {% for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}'
    '<|im_end|>{{ "\\n" }}{% endif %}'
    "{% set ns = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.query and (loop.last or m.reasoning_content) %}<think>\n"
    '{{ (m.reasoning_content or "").strip("\\n") }}\n</think>{{ "\\n\\n" }}{% endif %}'
    "{{ m.content }}" + _HERMES_CALLS + '<|im_end|>{{ "\\n" }}'
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ \"\\n\" }}{% endif %}"
    '{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ "\\n" }}{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant{{ "\\n" }}{% endif %}'
)
# The same, and the answer is begun with the opening tag.
OPENED_THINKING = THINKING.replace(
    '<|im_start|>assistant{{ "\\n" }}{% endif %}', '<|im_start|>assistant\n<think>{{ "\\n" }}{% endif %}'
)
# Tools come before the last user message, calls and their ids as JSON, and only ids of nine letters.
TOOLS_LAST = (
    "{{ bos_token }}{% set ns = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.query %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have nine letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}{% if m.content %}{{ raise_exception('content or calls') }}{% endif %}[TOOL_CALLS] ["
    '{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# No end of a turn: the next message's opening token is what the policy ends its turn with.
SHARED_END = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n{% for k, v in"
    " call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# A call in place of content, and a last message that is closed in another way.
CALL_OR_CONTENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}"
    "{% if loop.last and m.role == 'assistant' %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Content is all it knows; thinking is found in it, and dropped.
DROPS_TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TEXT_END = (
    "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_CHAT = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NO_TOOLS = "{% for m in messages %}{% if m.role != 'tool' %}" + _CHAT + "{% endif %}{% endfor %}" + _BEGUN
# A tool's answer is written inside the assistant's turn.
TOOLS_INSIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}({{ messages[loop.index0 + 1].content }})"
    "{% endif %}<|im_end|>\n{% elif m.role != 'tool' %}" + _CHAT + "{% endif %}{% endfor %}" + _BEGUN
)
# A tool's answer, and the assistant goes on in the same turn.
ONE_LONG_TURN = (
    "{% for m in messages %}{% if m.role == 'tool' %}({{ m.content }}){% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n"
    "{% endif %}{% else %}" + _CHAT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)

TOKENS = ["</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
TOKENS += ["[/TOOL_RESULTS]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def tokenizer_with(folder, template):
    """The quickstart's tokenizer with the control tokens of several families besides, and `template`."""
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *TOKENS]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


def call_of(arguments, turn=0, number=0, name="calculator"):
    function = {"name": name, "arguments": arguments}
    return {"id": f"c{turn:04d}t{number:03d}", "type": "function", "function": function}

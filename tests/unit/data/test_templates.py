"""A chat template in its own process: the text that Hugging Face renders, and an error in place of all memory or
time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.quickstart import CHAT_TEMPLATE
from gspo_mega.data.template_process import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": 'é\U0001f600 <b> & "q" {{ x }}'},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
]
# What templates of published models do: namespaces, macros, slices, loop controls, JSON, dates, the generation tag,
# special tokens.
TEMPLATES = [
    CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}\n{% endfor %}",
    (
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + m.content | length %}{% endfor"
        " %}{{ ns.n }}{{ eos_token }}"
    ),
    (
        "{% macro turn(m) -%}\n  <{{ m['role'] | upper }}> {{ m.content.strip() }}\n{%- endmacro %}{% for m in messages"
        " %}{{ turn(m) }}{% endfor %}"
    ),
    (
        "{%- for m in messages %}\n    {%- if m.role == 'assistant' %}\n    {% generation %}{{ m.content }}{%"
        " endgeneration %}\n    {%- endif %}\n{%- endfor %}\n"
    ),
    (
        "{{ messages | tojson(indent=2) }}{{ tools }}{{ documents }}{{ not_there }}{% if add_generation_prompt %}go{%"
        " endif %}"
    ),
    "{{ strftime_now('%Y') }}{% if tools is not none %}tools{% endif %}{{ additional_special_tokens }}",
]


@pytest.fixture
def with_template(tokenizer):
    before = tokenizer.chat_template

    def make(template):
        tokenizer.chat_template = template
        return tokenizer

    yield make
    tokenizer.chat_template = before


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_what_hugging_face_renders(with_template, template):
    tokenizer = with_template(template)
    text, _ = PromptEncoder(tokenizer, chat_template=True).encode_prompt(MESSAGES)
    assert text == tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


TIME = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = (
    "{% set ns = namespace(s='x' * 1000000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s |"
    " length }}"
)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (TIME, "takes more than 0.3 s for these messages"),
        (MEMORY, "takes more than 64 MiB of memory for these messages"),
    ],
    ids=["time", "memory"],
)
def test_all_time_or_all_memory_is_an_error_that_names_the_row_and_the_next_row_goes_on(template, error):
    bounded = ChatTemplate(
        "{% if messages[0].content == 'bad' %}" + template + "{% endif %}{{ messages[0].content }}",
        {},
        cpu_seconds=0.3,
        memory_bytes=64 * 2**20,
    )
    for _ in range(2):
        assert bounded.render([{"role": "user", "content": "good"}]) == "good"
        with pytest.raises(DataError, match=error):
            bounded.render([{"role": "user", "content": "bad"}])
    assert bounded.render([{"role": "user", "content": "good"}]) == "good"
    bounded.close()


def test_a_refusal_and_a_mistake_in_the_template_are_said(with_template):
    for template, error in (
        ("{{ raise_exception('no such role') }}", "refuses these messages: no such role"),
        ("{% if %}", "refuses these messages: Expected an expression"),
    ):
        with pytest.raises(DataError, match=error):
            PromptEncoder(with_template(template), chat_template=True).encode_prompt("x")


def test_the_sandbox_is_there():
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ messages.append(1) }}",
        "{{ range(999999) | list | length }}",
    ):
        with pytest.raises(DataError, match="refuses these messages"):
            ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])


def test_one_process_serves_all_prompts_and_ends_with_its_owner(tokenizer):
    encoder = PromptEncoder(tokenizer, chat_template=True)
    encoder.encode_prompt("a")
    process = encoder._template._process
    for number in range(100):
        encoder.encode_prompt(str(number))
    assert encoder._template._process is process and process.poll() is None
    del encoder
    assert process.poll() is not None


def test_it_ends_with_a_process_that_is_killed():
    code = """
import os
from gspo_mega.data.template_process import ChatTemplate
one = ChatTemplate("x", {})
one.render([])
print(one._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z":
        assert time.monotonic() < deadline, "the process outlives the one that started it"
        time.sleep(0.02)


def test_a_process_that_was_ended_from_outside_is_replaced():
    """Its end has nothing to do with the messages that come next, so they are rendered all the same."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    for _ in range(3):
        assert template.render([{"role": "user", "content": "a" * 200_000}]) == "a" * 200_000
        process = template._process
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert template.render([{"role": "user", "content": "b"}]) == "b"
    template.close()

"""Turn a prompt's text or messages into token ids: chat template, special tokens, plain text.

Owns the rule that no text of a row can act as a control token of the chat. A literal `<|im_end|>` in a user's
text, encoded naively after the template was applied, becomes the token that ends the turn (and often the response).
Here it is encoded as the characters it is made of, while the template's own control tokens stay what they are.
"""

from __future__ import annotations

import secrets
from typing import Any, TypeAlias

from gspo_mega.data.templates import ChatTemplate
from gspo_mega.errors import DataError

Messages: TypeAlias = list[dict[str, str]]


class PromptEncoder:
    """Encodes the prompts and the demonstrated responses of one run, with one tokenizer.

    With `chat_template`, a prompt is a list of messages (a text is one user message), rendered up to where the
    assistant's answer begins. Without, a text is taken as it is: no token is added, and a special token written
    out in it counts, because a text that was rendered beforehand has to come through unchanged.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool, system_prompt: str | None = None) -> None:
        """`tokenizer`: a Hugging Face tokenizer.

        Raises DataError: there is no chat template to apply, a system prompt without one, or no end token.
        """
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer names no end token (eos_token in tokenizer_config.json); a response could never end"
            )
        if chat_template and not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; add one (chat_template.jinja beside it) or set data.chat_template:"
                " false"
            )
        if system_prompt is not None and not chat_template:
            raise DataError("data.system_prompt needs data.chat_template: true")
        self.chat_template = chat_template
        self.eos_token: str = tokenizer.eos_token
        self.eos_token_id: int = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._template = _template_of(tokenizer) if chat_template else None
        self._system_prompt = system_prompt
        special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        # Longest first, so that a token that is part of another one does not hide it.
        self._special = sorted(special, key=len, reverse=True)
        self._special_ids = frozenset(special.values())

    def problem_of(self, prompt: Any) -> str | None:
        """What is wrong with a row's prompt, in words, or None: its type, its messages' shape, emptiness."""
        if isinstance(prompt, str):
            return None if prompt.strip() else "is empty"
        if not isinstance(prompt, list):
            return "must be a text or a list of chat messages"
        if not self.chat_template:
            return "is a list of chat messages, which needs data.chat_template: true"
        if not prompt:
            return "is an empty list of messages"
        for number, message in enumerate(prompt, start=1):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys() or not _all_texts(message):
                return f'has message {number} that is not of the form {{"role": "user", "content": "text"}}'
        if self._system_prompt is not None and prompt[0]["role"] == "system":
            return "brings a system message of its own, and data.system_prompt is set too; keep one of them"
        if prompt[-1]["role"] == "assistant":
            return "ends with the assistant's message; the last one must ask for an answer"
        return None if prompt[-1]["content"].strip() else "ends with an empty message"

    def encode_prompt(self, prompt: str | Messages) -> tuple[str, list[int]]:
        """The rendered text of a prompt that has no problem, and its token ids.

        Raises DataError if the chat template refuses the messages, or the tokenizer cannot encode a special
        token's characters as plain text.
        """
        if not self.chat_template:
            assert isinstance(prompt, str)
            return prompt, self._encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system_prompt is not None:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        placeholders = self._placeholders(messages)
        if not placeholders:
            text = self._render(messages)
            return text, self._encode(text)
        masked = self._render(
            [{key: _replace(value, placeholders) for key, value in message.items()} for message in messages]
        )
        originals = {placeholder: special for special, placeholder in placeholders.items()}
        return _replace(masked, originals), self._encode_masked(masked, originals)

    def encode_response(self, response: str) -> list[int]:
        """Token ids of a demonstrated response, all of it plain text, and the end token."""
        return [*self._encode_plain(response), self.eos_token_id]

    def _render(self, messages: Messages) -> str:
        if self._template is not None:
            return self._template.render(messages)
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a tokenizer's own chat code may raise anything
            raise DataError(f"the tokenizer's chat template refuses these messages: {error}") from error

    def _placeholders(self, messages: Messages) -> dict[str, str]:
        """For each special token that is written out in the messages, a unique word to stand for it in the template."""
        present = [
            special for special in self._special if any(special in text for m in messages for text in m.values())
        ]
        # A word that no template treats in a special way and no text contains.
        return {special: f"placeholder{secrets.token_hex(16)}" for special in present}

    def _encode_masked(self, masked: str, originals: dict[str, str]) -> list[int]:
        """Encode a rendered text in which placeholders stand for written-out special tokens.

        The special tokens left in it are the template's. They cut the text into segments; a segment with a
        placeholder gets its text back and is encoded as plain text, everything else as usual. Tokenizers
        never merge across a special token, so the cuts change nothing.
        """
        ids: list[int] = []
        usual: list[str] = []
        for segment in self._segments(masked):
            plain = _replace(segment, originals)
            if plain == segment:
                usual.append(segment)
                continue
            ids += self._encode("".join(usual)) + self._encode_plain(plain)
            usual.clear()
        return ids + self._encode("".join(usual))

    def _segments(self, text: str) -> list[str]:
        """`text` cut before and after every special token; joined, they are the text again."""
        segments = [text]
        for special in self._special:
            cut: list[str] = []
            for segment in segments:
                if segment in self._special:
                    cut.append(segment)
                    continue
                pieces = segment.split(special)
                for number, piece in enumerate(pieces):
                    cut += ([special] if number else []) + ([piece] if piece else [])
            segments = cut
        return segments

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []
        if not self._special_ids.isdisjoint(ids):
            tokens = ", ".join(repr(s) for s in self._special if s in text)
            raise DataError(
                f"{tokens} is written out in the text, and this tokenizer cannot encode it as plain text; take it out"
            )
        return ids


def load_tokenizer(folder: str) -> Any:
    """The Hugging Face tokenizer of a model's folder. Raises DataError where it cannot be read, or where it needs code
    from the folder.
    """
    from transformers import AutoTokenizer

    try:
        # Without this argument, transformers would ask at the terminal whether the code may run.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{folder}: its tokenizer cannot be loaded: {reason[:500]}") from error


def _template_of(tokenizer: Any) -> ChatTemplate | None:
    """The tokenizer's template, to be rendered in a process of its own; None for a tokenizer that renders chats with
    its own code.
    """
    if type(tokenizer).apply_chat_template.__module__ != "transformers.tokenization_utils_base":
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates and no default
        raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from error
    return ChatTemplate(
        template,
        {
            name: str(value) if not isinstance(value, list) else [str(v) for v in value]
            for name, value in tokenizer.special_tokens_map.items()
        },
    )


def _all_texts(message: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in message.values())


def _replace(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text

"""Anthropic's Messages on the wire: a request as chat completions have it, and the turn as a message or its events.

The fields are those of Anthropic's API reference, "Create a Message", "Count Message tokens" and "Streaming Messages".

    system                                   a message of role system
    user: tool_result blocks, then text      a message of role tool for each result, then one of role user
    assistant: thinking, text, tool_use      one message: reasoning_content, content, tool_calls
    tools: name, description, input_schema   functions with parameters

Text blocks are joined as they are. A message whose blocks are in another order, or are no text (images, documents), has
no such form and is refused. `cache_control`, a thinking's `signature` and `is_error` of a tool's result have no effect:
the policy reads the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gspo_mega.agents.wire import (
    ApiError,
    Fields,
    Head,
    Message,
    Reply,
    Request,
    Sampling,
    call_of,
    integer_of,
    list_of,
    named_event,
    object_of,
    read_json,
    refuse,
    refuse_choice,
    refuse_format,
    shown,
    stops_of,
    string_of,
    text_of,
    tool_of,
    truth_of,
    with_inner,
)

_FIELDS = Fields(
    used=frozenset(
        {
            *("context_management", "max_tokens", "messages", "output_config", "stop_sequences", "stream", "system"),
            *("tool_choice", "tools"),
        }
    ),
    without_effect=frozenset(
        {"cache_control", "inference_geo", "metadata", "model", "service_tier", "speed", "user_profile_id"}
    ),
    sampling={
        "temperature": (),
        "top_p": (),
        "top_k": (),
        "thinking": ({"type": "adaptive"},),
        "output_config.effort": (),
        "tool_choice.disable_parallel_tool_use": (False,),
    },
    instead={"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
)

# An answer must say who signed its thinking, and some clients drop thinking without a signature.
_SIGNATURE = "unsigned"

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    # Clients that shorten a history that is too long look for these words.
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{too_long}{error}"}, "request_id": None}


def model_body(head: Head) -> dict[str, Any]:
    """Return the served model as Anthropic's list of models has it."""
    created = datetime.fromtimestamp(head.created, UTC).isoformat()
    return {"type": "model", "id": head.model, "display_name": head.model, "created_at": created}


def read_request(body: bytes, sampling: Sampling, ignore_sampling: bool) -> Request:
    """Read and check a request's body. Raises ApiError, which names the field and what would be valid."""
    asked = _FIELDS.checked(read_json(body), sampling, "ANTHROPIC_MODEL")
    ignored = _FIELDS.ignored(_flat(asked), sampling, ignore_sampling)
    form = object_of(asked, "output_config").get("format")
    if form is not None:
        refuse_format("output_config.format", form)
    _check_kept(object_of(asked, "context_management"))
    return Request(
        _messages(asked),
        _tools(asked),
        integer_of(asked, "max_tokens"),
        truth_of(asked, "stream"),
        ignored=ignored,
        stop=stops_of(asked, "stop_sequences"),
    )


def read_count(body: bytes, sampling: Sampling) -> Request:
    """Read and check the body of a request to count a context's tokens. Raises ApiError."""
    asked = _FIELDS.checked(read_json(body), sampling, "ANTHROPIC_MODEL")
    return Request(_messages(asked), _tools(asked), None, False)


def _flat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those inside of others that are about sampling."""
    flat = with_inner(asked, "output_config.effort", "tool_choice.disable_parallel_tool_use")
    thinking = object_of(asked, "thinking")
    if thinking.get("type") == "adaptive":  # the policy thinks as it does
        del flat["thinking"]
    return flat


def _check_kept(management: Mapping[str, Any]) -> None:
    """Refuse edits of the history at the server. The one that keeps everything is none."""
    for place, edit in enumerate(list_of(management, "edits")):
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            refuse(
                f"context_management.edits[{place}]",
                f'{shown(edit)}: the endpoint edits no history; valid: leave it out, or "keep": "all"',
            )


def _messages(asked: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if "system" in asked:
        messages.append({"role": "system", "content": text_of(asked["system"], "system", ("text",))})
    given = list_of(asked, "messages")
    if not given:
        refuse("messages", "missing or empty; valid: a list of at least one message")
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            refuse(where, f"is {shown(message)}; an object with role and content was expected")
        for name in message.keys() - {"role", "content"}:
            refuse(f"{where}.{name}", "not a field of a message; valid: role, content")
        role, content = message.get("role"), message.get("content")
        if role == "user":
            messages += _of_user(content, f"{where}.content")
        elif role == "assistant":
            messages.append(_of_assistant(content, f"{where}.content"))
        elif role == "system":
            messages.append({"role": "system", "content": text_of(content, f"{where}.content", ("text",))})
        else:
            refuse(f"{where}.role", f"{shown(role)}; valid: user, assistant, system")
    if given[-1]["role"] == "assistant":
        refuse(
            f"messages[{len(given) - 1}]",
            "the last message is the assistant's: a turn is sampled from its beginning; valid: end with the user's",
        )
    return messages


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(where, f"is {shown(content)}; a text or a list of blocks was expected")
    return content


def _of_user(content: Any, where: str) -> list[Message]:
    """Return a user's message as messages: one for each result of a tool, then one for the text."""
    made: list[Message] = []
    texts: list[str] = []
    for place, block in enumerate(_blocks(content, where)):
        at, kind = f"{where}[{place}]", block.get("type")
        if kind == "text":
            texts.append(string_of(block, "text", at))
        elif kind != "tool_result":
            refuse(at, f"{shown(block)}; valid: text, tool_result, because the policy reads text")
        elif texts:
            refuse(at, "a tool_result after text; valid: the results first")
        else:
            result = text_of(block.get("content") or "", f"{at}.content", ("text",))
            made.append({"role": "tool", "tool_call_id": string_of(block, "tool_use_id", at), "content": result})
    if texts or not made:
        made.append({"role": "user", "content": "".join(texts)})
    return made


def _of_assistant(content: Any, where: str) -> Message:
    """Return an assistant's message: thinking, then text, then calls."""
    parts: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    order = list(parts)
    last = 0
    for place, block in enumerate(_blocks(content, where)):
        at, kind = f"{where}[{place}]", str(block.get("type"))
        if kind not in parts:
            refuse(at, f"{shown(block)}; valid: {', '.join(order)}")
        if order.index(kind) < last:
            refuse(at, f"{kind} after {order[last]}; valid: in the order {', '.join(order)}, as a turn is answered")
        last = order.index(kind)
        if kind != "tool_use":
            parts[kind].append(string_of(block, kind, at))
            continue
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            refuse(f"{at}.input", f"is {shown(arguments)}; an object was expected")
        written = json.dumps(arguments, ensure_ascii=False)
        parts[kind].append(call_of(string_of(block, "id", at), string_of(block, "name", at), written))
    made: Message = {"role": "assistant", "content": "".join(parts["text"])}
    if parts["tool_use"]:
        made["tool_calls"] = parts["tool_use"]
    if parts["thinking"]:
        made["reasoning_content"] = "".join(parts["thinking"])
    return made


def _tools(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for place, tool in enumerate(list_of(asked, "tools")):
        where = f"tools[{place}]"
        if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
            refuse(where, f'{shown(tool)}: only tools with a schema of their own; valid: {{"name": ..., "input_schema":'
                   " ...}")  # fmt: skip
        tools.append(
            tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"), where, "input_schema")
        )
    choice = object_of(asked, "tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        refuse_choice("tool_choice", asked["tool_choice"], ('{"type": "auto"}', '{"type": "none"}'))
    return [] if choice == "none" else tools


class MessagesWriter:
    """Writes the answer to one request: `whole`, or as events `begin`, any number of `text`, one `end`, `close`."""

    def __init__(self, request: Request, head: Head) -> None:
        self.id = f"msg_{head.name}"
        self._model = head.model
        self._num_blocks = 0
        self._in_text = False

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        (reply,) = replies
        usage = _usage(reply.num_context_tokens, reply.num_tokens)
        return self._message(_blocks_of(reply), usage) | _end_of(reply)

    def begin(self, num_context_tokens: int) -> bytes:
        message = self._message([], _usage(num_context_tokens, 0))
        return named_event("message_start", {"type": "message_start", "message": message})

    def text(self, text: str, place: int = 0) -> bytes:
        start = b"" if self._in_text else self._start({"type": "text", "text": ""})
        self._in_text = True
        return start + self._delta({"type": "text_delta", "text": text})

    def end(self, reply: Reply, place: int = 0) -> bytes:
        """Return the rest of the turn: thinking, text and calls."""
        events = []
        if reply.thinking:
            events += [
                self._stop_text(),
                self._start({"type": "thinking", "thinking": "", "signature": ""}),
                self._delta({"type": "thinking_delta", "thinking": reply.thinking}),
                self._delta({"type": "signature_delta", "signature": _SIGNATURE}),
                self._stop(),
            ]
        if reply.rest:
            events.append(self.text(reply.rest))
        events.append(self._stop_text())
        for call in reply.calls:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            written = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events += [self._start(block), self._delta(written), self._stop()]
        return b"".join(events)

    def close(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        usage = _usage(reply.num_context_tokens, reply.num_tokens)
        delta = {"type": "message_delta", "delta": _end_of(reply), "usage": usage}
        return named_event("message_delta", delta) + named_event("message_stop", {"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error_body(error))

    def _message(self, blocks: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _start(self, block: dict[str, Any]) -> bytes:
        event = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return named_event("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return named_event("content_block_delta", event)

    def _stop(self) -> bytes:
        self._num_blocks += 1
        event = {"type": "content_block_stop", "index": self._num_blocks - 1}
        return named_event("content_block_stop", event)

    def _stop_text(self) -> bytes:
        if not self._in_text:
            return b""
        self._in_text = False
        return self._stop()


def _blocks_of(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": _SIGNATURE})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _end_of(reply: Reply) -> dict[str, Any]:
    """Return why the turn ended: `tool_use` if it is whole and has calls."""
    if reply.finish_reason == "length":
        reason = "max_tokens"
    elif reply.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if reply.finish_reason == "stop_string" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string or None}


def _usage(num_context_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": num_context_tokens,
        "output_tokens": num_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }

"""OpenAI's chat completions on the wire: reading and checking a request's body, and writing an answer or its stream.

The fields are those of OpenAI's API reference, "Create chat completion" and "Chat completion chunk". `read_request`
says which fields a request may have and what becomes of each; `error_body` is the form of errors, which OpenAI's other
protocol shares.

`message_of` brings a message into the one form that records have. Clients add null and empty fields to an answer when
they hand it back, write text in parts, or use the role `developer`. Each change is made in the same way in every
request, so that a history that comes back unedited is found in the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from gspo_mega.agents.wire import (
    ApiError,
    Fields,
    Head,
    Message,
    Reply,
    Request,
    Sampling,
    call_of,
    check_tool_name,
    choice_of,
    integer_of,
    list_of,
    object_of,
    read_json,
    refuse,
    refuse_format,
    shown,
    stops_of,
    text_of,
    truth_of,
)

Refuse = Callable[[str, str], NoReturn]

WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
    }
)
"""These name, store or bill a request of OpenAI's protocols, and do not change its answer."""

_FIELDS = Fields(
    used=frozenset(
        {
            *("logprobs", "max_completion_tokens", "max_tokens", "messages", "modalities", "n", "response_format"),
            *("stop", "stream", "stream_options", "tool_choice", "tools", "top_logprobs"),
        }
    ),
    without_effect=WITHOUT_EFFECT,
    sampling={
        "temperature": (),
        "top_p": (),
        "top_k": (),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "min_p": (),
        "parallel_tool_calls": (True,),
        "presence_penalty": (0,),
        "reasoning_effort": (),
        "repetition_penalty": (1,),
        "seed": (),
        "verbosity": (),
    },
    instead={"functions": "tools", "function_call": "tool_choice"},
)

_ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields that a client may add to a message that it hands back. They are dropped if they are empty.
_EMPTY = ("annotations", "audio", "function_call", "refusal", "tool_calls")

_MESSAGE_FIELDS = {
    "system": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "tool_calls"),
    "tool": ("content", "name", "tool_call_id"),
}

_END_OF_STREAM = b"data: [DONE]\n\n"


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def read_request(body: bytes, sampling: Sampling, ignore_sampling: bool) -> Request:
    """Read and check a request's body. Raises ApiError, which names the field and what would be valid."""
    asked = _FIELDS.checked(read_json(body), sampling, "OPENAI_MODEL")
    ignored = _FIELDS.ignored(asked, sampling, ignore_sampling)
    _check_rest(asked)
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(list_of(asked, "tools"))]
    if choice_of(asked) == "none":
        tools = []
    messages = [message_of(message, f"messages[{place}]", refuse) for place, message in enumerate(_messages(asked))]
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := integer_of(asked, name))]
    options = object_of(asked, "stream_options")
    return Request(
        messages,
        tools,
        min(limits, default=None),
        truth_of(asked, "stream"),
        bool(options.get("include_usage")),
        truth_of(asked, "logprobs"),
        ignored,
        stops_of(asked, "stop"),
        integer_of(asked, "n") or 1,
    )


def _check_rest(asked: Mapping[str, Any]) -> None:
    if asked.get("top_logprobs", 0) != 0:
        refuse("top_logprobs", f"{shown(asked['top_logprobs'])}: only sampled tokens have a log-prob here; valid: 0")
    form = asked.get("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") != "text":
        refuse_format("response_format", form)
    if asked.get("modalities", ["text"]) != ["text"]:
        refuse("modalities", f'{shown(asked["modalities"])}; valid: ["text"]')


def _messages(asked: Mapping[str, Any]) -> list[Any]:
    messages = list_of(asked, "messages")
    if not messages:
        refuse("messages", "missing or empty; valid: a list of at least one message")
    return messages


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a tool's schema as the chat template gets it, without `strict`, which is about constrained sampling."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        refuse(where, f'{shown(tool)} is not a tool; valid: {{"type": "function", "function": {{"name": ...}}}}')
    function = {key: value for key, value in tool["function"].items() if key != "strict" and value is not None}
    check_tool_name(function.get("name"), f"{where}.function")
    if not isinstance(function.get("parameters", {}), dict):
        refuse(f"{where}.function.parameters", f"{shown(function['parameters'])}; a JSON schema was expected")
    return {"type": "function", "function": function}


def message_of(message: Any, where: str, refuse: Refuse) -> Message:
    """Return the message in the form that records have. `refuse` is called with the place and the text of a problem."""
    if not isinstance(message, dict):
        refuse(where, f"is {shown(message)}; an object with role and content was expected")
    role = message.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{shown(role)}; valid: {', '.join(_ROLES)}")
    role = "system" if role == "developer" else role
    made: Message = {"role": role}
    for key, value in message.items():
        if key == "role" or value is None or (key in _EMPTY and not value):
            continue
        if key not in _MESSAGE_FIELDS[role]:
            refuse(
                f"{where}.{key}", f"not a field of a message of role {role}; valid: {', '.join(_MESSAGE_FIELDS[role])}"
            )
        if key == "content":
            made[key] = text_of(value, f"{where}.content", ("text",), refuse)
        elif key == "tool_calls":
            made[key] = _calls(value, f"{where}.tool_calls", refuse)
        elif isinstance(value, str):
            made[key] = value
        else:
            refuse(f"{where}.{key}", f"is {shown(value)}; a text was expected")
    if "content" not in made:
        if role != "assistant":
            refuse(f"{where}.content", "missing; a text was expected")
        made["content"] = ""
    if role == "tool" and "tool_call_id" not in made:
        refuse(f"{where}.tool_call_id", "missing; the id of the call that this answers was expected")
    return made


def _calls(calls: Any, where: str, refuse: Refuse) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(where, f"is {shown(calls)}; a list was expected")
    made = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or call.get("type", "function") != "function"
            or not all(
                isinstance(one, str) for one in (call.get("id"), function.get("name"), function.get("arguments"))
            )
        ):
            refuse(
                f"{where}[{place}]",
                f'{shown(call)}; valid: {{"id": text, "type": "function", "function": {{"name": text, "arguments":'
                " JSON text}}",
            )
        made.append(call_of(call["id"], function["name"], function["arguments"]))
    return made


class ChatWriter:
    """Writes the answer to one request: `whole`, or as events `begin`, then for each turn any number of `text` and one
    `end`, and `close`.
    """

    def __init__(self, request: Request, head: Head) -> None:
        self._request = request
        self.id = f"chatcmpl-{head.name}"
        self._head = {"id": self.id, "created": head.created, "model": head.model}

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        choices = [
            {
                "index": place,
                "message": sent_message(reply.message),
                "logprobs": self._log_probs(reply),
                "finish_reason": finish_of(reply),
            }
            for place, reply in enumerate(replies)
        ]
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": usage_of(replies)}

    def begin(self, num_context_tokens: int) -> bytes:
        return b"".join(self._chunk(place, {"role": "assistant", "content": ""}) for place in range(self._request.n))

    def text(self, text: str, place: int = 0) -> bytes:
        return self._chunk(place, {"content": text})

    def end(self, reply: Reply, place: int = 0) -> bytes:
        """Return the rest of one turn: thinking, content, calls, then the reason of its end."""
        chunks = []
        if reply.thinking:
            chunks.append(self._chunk(place, {"reasoning_content": reply.thinking}))
        if reply.rest:
            chunks.append(self.text(reply.rest, place))
        if reply.calls:
            calls = [{"index": number, **call} for number, call in enumerate(reply.calls)]
            chunks.append(self._chunk(place, {"tool_calls": calls}))
        chunks.append(self._chunk(place, {}, finish_of(reply), self._log_probs(reply)))
        return b"".join(chunks)

    def close(self, replies: Sequence[Reply]) -> bytes:
        chunk = {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage_of(replies)}
        return (_event(chunk) if self._request.include_usage else b"") + _END_OF_STREAM

    def failure(self, error: ApiError) -> bytes:
        return _event(error_body(error))

    def _chunk(self, place: int, delta: dict[str, Any], finish: str | None = None, log_probs: Any = None) -> bytes:
        choice = {"index": place, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        return _event({"object": "chat.completion.chunk", **self._head, "choices": [choice]})

    def _log_probs(self, reply: Reply) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return log_probs_of(reply.token_ids, reply.log_probs, reply.texts)


def sent_message(message: Message) -> Message:
    """Return a recorded message in the form of OpenAI's answers: empty content next to calls is null."""
    sent = {"role": "assistant", "content": message.get("content") or ""} | message
    if message.get("tool_calls") and not message.get("content"):
        sent["content"] = None
    return sent


def finish_of(reply: Reply) -> str:
    """Return OpenAI's finish reason: `tool_calls` if the turn is whole and has calls, else `stop` or `length`."""
    finish = "stop" if reply.finish_reason == "stop_string" else reply.finish_reason
    return "tool_calls" if finish == "stop" and reply.calls else finish


def log_probs_of(token_ids: Sequence[int], log_probs: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of a choice, in nats, with a further field `token_id`. A token that is only a part of
    a character has no `bytes`.
    """
    return {
        "content": [
            {
                "token": text,
                "token_id": token_id,
                "logprob": log_prob,
                "bytes": None if "�" in text else list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for token_id, log_prob, text in zip(token_ids, log_probs, texts, strict=True)
        ],
        "refusal": None,
    }


def usage_of(replies: Sequence[Reply]) -> dict[str, int]:
    context, sampled = replies[0].num_context_tokens, sum(reply.num_tokens for reply in replies)
    return {"prompt_tokens": context, "completion_tokens": sampled, "total_tokens": context + sampled}


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"

"""OpenAI's Responses on the wire: a request as chat completions have it, and the turn as a response or its events.

The fields are those of OpenAI's API reference, "Create a model response" and "Streaming events".

    instructions                              a message of role system
    message items                             a message of role system, user or assistant
    reasoning, message, function_call items   one assistant's message: reasoning_content, content, tool_calls
    function_call_output                      a message of role tool
    previous_response_id                      the session's messages up to that response, without its instructions

A turn is answered as up to one reasoning item, one message and its calls, in this order, with ids that name the
response. Items that follow each other in this order are one turn again, unless their ids name two responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo_mega.agents.openai_wire import WITHOUT_EFFECT
from gspo_mega.agents.wire import (
    ApiError,
    Fields,
    Head,
    Message,
    Reply,
    Request,
    Sampling,
    call_of,
    choice_of,
    integer_of,
    list_of,
    named_event,
    object_of,
    read_json,
    refuse,
    refuse_format,
    shown,
    string_of,
    text_of,
    tool_of,
    truth_of,
    with_inner,
)

HistoryOf = Callable[[str], list[Message] | None]
"""Returns the messages up to the response with this id, without its instructions; None if there was none."""

_FIELDS = Fields(
    used=frozenset(
        {
            *("background", "include", "input", "instructions", "max_output_tokens", "previous_response_id"),
            *("reasoning", "stream", "stream_options", "text", "tool_choice", "tools", "top_logprobs", "truncation"),
        }
    ),
    without_effect=WITHOUT_EFFECT,
    sampling={
        "temperature": (),
        "top_p": (),
        "top_k": (),
        "parallel_tool_calls": (True,),
        "reasoning.effort": (),
        "text.verbosity": (),
    },
    instead={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "conversation": "previous_response_id",
    },
)

_ROLES = ("system", "developer", "user", "assistant")

_TEXT_KINDS = ("input_text", "output_text", "text")

_ITEMS = "message, reasoning, function_call, function_call_output"

# The place of an item of the assistant in its turn.
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}

_OWN_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24}|.*-t[0-9]+)(?:_[0-9]+)?")

# What else a client may ask to see is not there.
_INCLUDED = ("reasoning.encrypted_content",)

_TOLD = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "tools", "user")


def read_request(body: bytes, sampling: Sampling, ignore_sampling: bool, history_of: HistoryOf) -> Request:
    """Read and check a request's body. Raises ApiError, which names the field and what would be valid."""
    asked = _FIELDS.checked(read_json(body), sampling, "OPENAI_MODEL")
    flat = with_inner(asked, "reasoning.effort", "text.verbosity")
    ignored = _FIELDS.ignored(flat, sampling, ignore_sampling)
    _check_rest(asked)
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(list_of(asked, "tools"))]
    choice = choice_of(asked)
    return Request(
        _messages(asked, history_of),
        [] if choice == "none" else tools,
        integer_of(asked, "max_output_tokens"),
        truth_of(asked, "stream"),
        ignored=ignored,
        told={name: asked.get(name) for name in _TOLD} | {"tool_choice": choice},
    )


def _check_rest(asked: Mapping[str, Any]) -> None:
    form = object_of(asked, "text").get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        refuse_format("text.format", form)
    if asked.get("top_logprobs", 0) != 0:
        refuse("top_logprobs", f"{shown(asked['top_logprobs'])}; valid: 0 (chat completions have log-probs)")
    if truth_of(asked, "background"):
        refuse("background", "a response is answered to the request that asks for it; valid: false")
    if asked.get("truncation", "disabled") != "disabled":
        refuse("truncation", f"{shown(asked['truncation'])}: the endpoint edits no history; valid: disabled")
    for place, what in enumerate(list_of(asked, "include")):
        if what not in _INCLUDED:
            refuse(f"include[{place}]", f"{shown(what)} is not there; valid: {', '.join(_INCLUDED)}, which is null")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        refuse(where, f'{shown(tool)}: only functions; valid: {{"type": "function", "name": ..., "parameters": ...}}')
    return tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"), where, "parameters")


def _messages(asked: Mapping[str, Any], history_of: HistoryOf) -> list[Message]:
    messages: list[Message] = []
    if "instructions" in asked:
        messages.append({"role": "system", "content": text_of(asked["instructions"], "instructions", _TEXT_KINDS)})
    if (previous := asked.get("previous_response_id")) is not None:
        history = history_of(previous) if isinstance(previous, str) else None
        if history is None:
            refuse(
                "previous_response_id",
                f"{shown(previous)}: the session has no such response; valid: the id of one that it answered, with"
                ' "store" not false',
                code="previous_response_not_found",
            )
        messages += history
    given = asked.get("input", [])
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    items = list_of(asked, "input")
    if not items and previous is None:
        refuse("input", "missing or empty; valid: a text, or a list of at least one item")
    turn: _Turn | None = None
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            refuse(where, f"is {shown(item)}; an object was expected")
        kind = str(item.get("type") or ("message" if "role" in item else None))
        is_ours = kind in _ORDER and (kind != "message" or item.get("role") == "assistant")
        if is_ours:
            if turn is None or not turn.admits(kind, item):
                turn = _Turn()
                messages.append(turn.message)
            turn.add(kind, item, where)
            continue
        turn = None
        if kind == "message":
            messages.append(_of_message(item, where))
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{where}.output", _TEXT_KINDS)
            messages.append({"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": output})
        else:
            refuse(where, f"{shown(item)}; valid: {_ITEMS}")
    return messages


def _of_message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{shown(role)}; valid: {', '.join(_ROLES)}")
    content = text_of(item.get("content"), f"{where}.content", _TEXT_KINDS)
    return {"role": "system" if role == "developer" else role, "content": content}


class _Turn:
    """One message of the assistant, put together from items."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": ""}
        self._last = -1
        self._response: str | None = None

    def admits(self, kind: str, item: Mapping[str, Any]) -> bool:
        """Whether this item may be of the same turn as those before it."""
        response = _response_of(item)
        if None not in (response, self._response) and response != self._response:
            return False
        return _ORDER[kind] > self._last or kind == "function_call"

    def add(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        self._last, self._response = _ORDER[kind], _response_of(item) or self._response
        if kind == "message":
            self.message["content"] = text_of(item.get("content"), f"{where}.content", _TEXT_KINDS)
        elif kind == "function_call":
            fields = (string_of(item, name, where) for name in ("call_id", "name", "arguments"))
            self.message.setdefault("tool_calls", []).append(call_of(*fields))
        else:
            content = item.get("content") or item.get("summary") or []
            kinds = ("reasoning_text", "summary_text", "text")
            if thinking := text_of(content, f"{where}.content", kinds):
                self.message["reasoning_content"] = thinking


def _response_of(item: Mapping[str, Any]) -> str | None:
    """Return the response that an item's id names; None if the id is not one of ours."""
    found = _OWN_ID.fullmatch(str(item.get("id")))
    return None if found is None else found[1]


class ResponsesWriter:
    """Writes the answer to one request: `whole`, or as events `begin`, any number of `text`, one `end`, `close`."""

    def __init__(self, request: Request, head: Head) -> None:
        self.id = f"resp_{head.name}"
        self._request, self._head = request, head
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # the items that are whole
        self._text = ""  # of the message that is being streamed
        self._in_message = False

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        (reply,) = replies
        self._output = [] if not reply.thinking else [self._reasoning(reply.thinking)]
        if reply.content or not reply.calls:
            self._output.append(self._message(reply.content))
        self._output += [self._call(number, call) for number, call in enumerate(reply.calls)]
        return self._response(_status_of(reply)) | _end_of(reply)

    def begin(self, num_context_tokens: int) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, text: str, place: int = 0) -> bytes:
        opening = b"" if self._in_message else self._open_message()
        self._text += text
        return opening + self._in_part("response.output_text.delta", f"msg_{self._head.name}", delta=text, logprobs=[])

    def end(self, reply: Reply, place: int = 0) -> bytes:
        """Return the rest of the turn: reasoning, the message and calls."""
        events = []
        if reply.thinking:
            events += [self._close_message(), self._whole_reasoning(reply.thinking)]
        if reply.rest:
            events.append(self.text(reply.rest))
        if not reply.content and not reply.calls:
            events.append(self._open_message())
        events.append(self._close_message())
        for number, call in enumerate(reply.calls):
            item = self._call(number, call)
            written = {"item_id": item["id"], "output_index": len(self._output)}
            arguments = item["arguments"]
            events += [
                self._added(item | {"arguments": "", "status": "in_progress"}),
                self._event("response.function_call_arguments.delta", **written, delta=arguments),
                self._event("response.function_call_arguments.done", **written, name=item["name"], arguments=arguments),
                self._done(item),
            ]
        return b"".join(events)

    def close(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        status = _status_of(reply)
        return self._event(f"response.{status}", response=self._response(status) | _end_of(reply))

    def failure(self, error: ApiError) -> bytes:
        told = {"code": error.code or "server_error", "message": str(error)}
        failed = self._response("failed") | {"error": told | {"code": "server_error"}}  # the client knows few codes
        return self._event("error", **told, param=error.param) + self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _in_part(self, kind: str, item_id: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=item_id, output_index=len(self._output), content_index=0, **fields)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _open_message(self) -> bytes:
        self._in_message = True
        item = self._message("") | {"content": [], "status": "in_progress"}
        return self._added(item) + self._in_part("response.content_part.added", item["id"], part=_output_text(""))

    def _close_message(self) -> bytes:
        if not self._in_message:
            return b""
        self._in_message = False
        item = self._message(self._text)
        return (
            self._in_part("response.output_text.done", item["id"], text=self._text, logprobs=[])
            + self._in_part("response.content_part.done", item["id"], part=_output_text(self._text))
            + self._done(item)
        )

    def _whole_reasoning(self, thinking: str) -> bytes:
        item = self._reasoning(thinking)
        part, name = {"type": "reasoning_text", "text": ""}, item["id"]
        return (
            self._added(item | {"content": [], "status": "in_progress"})
            + self._in_part("response.content_part.added", name, part=part)
            + self._in_part("response.reasoning_text.delta", name, delta=thinking)
            + self._in_part("response.reasoning_text.done", name, text=thinking)
            + self._in_part("response.content_part.done", name, part=part | {"text": thinking})
            + self._done(item)
        )

    def _message(self, text: str) -> dict[str, Any]:
        name, content = f"msg_{self._head.name}", [_output_text(text)]
        return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}

    def _reasoning(self, thinking: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": thinking}]
        name = f"rs_{self._head.name}"
        return {"type": "reasoning", "id": name, "summary": [], "content": content, "status": "completed"}

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{self._head.name}_{number}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
            **self._request.told,
            "metadata": self._request.told.get("metadata") or {},
            "tools": self._request.told.get("tools") or [],
            "store": self._request.told.get("store") is not False,
            "status": status,
            "output": list(self._output),
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status_of(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _end_of(reply: Reply) -> dict[str, Any]:
    """Return the fields of a response that are known at its end. Tokens of reasoning are not counted apart."""
    usage = {
        "input_tokens": reply.num_context_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_context_tokens + reply.num_tokens,
    }
    cut = {"reason": "max_output_tokens"} if reply.finish_reason == "length" else None
    return {"usage": usage, "incomplete_details": cut}

"""OpenAI's chat completions on the wire: reading and checking a request's body, and writing an answer or its stream.

The fields are those of OpenAI's API reference, "Create chat completion" and "Chat completion chunk". `read_request`
says which fields a request may have and what becomes of each; `ApiError` is the form of errors. Nothing here does HTTP
or knows a session.

Training needs one distribution. What a request says about sampling must therefore be what its session is sampled with;
otherwise the request is refused by name (or counted, with `episodes.endpoint.ignore_sampling`).

`message_of` brings a message into the one form that records have. Clients add null and empty fields to an answer when
they hand it back, write text in parts, or use the role `developer`. Each change is made in the same way in every
request, so that a history that comes back unedited is found in the record.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gspo_mega.base.errors import EpisodeError

Refuse = Callable[[str, str], NoReturn]


_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# These name, store or bill a request, and do not change its answer.
_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
    }
)

_USED = frozenset(
    {
        *("logprobs", "max_completion_tokens", "max_tokens", "messages", "modalities", "n", "response_format", "stop"),
        *("stream", "stream_options", "tool_choice", "tools", "top_logprobs"),
    }
)

# Fields that could change the distribution, with the values that do not. For fields of `Sampling`, the session's own
# value is valid, too.
_SAMPLING: dict[str, tuple[Any, ...]] = {
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
}

_FIELDS = _WITHOUT_EFFECT | _USED | _SAMPLING.keys()

_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}

_ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields that a client may add to a message that it hands back. They are dropped if they are empty.
_EMPTY = ("annotations", "audio", "function_call", "refusal", "tool_calls")

_MESSAGE_FIELDS = {
    "system": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "tool_calls"),
    "tool": ("content", "name", "tool_call_id"),
}


END_OF_STREAM = b"data: [DONE]\n\n"


class ApiError(EpisodeError):
    """A request is answered with an error in OpenAI's form. `status` is HTTP's, `param` the field at fault, and `code`
    is for programs. `retry` says whether the same request may succeed later; clients heed it.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Sampling:
    """What a session is sampled with, which a request may repeat. `model` is the name that is served."""

    temperature: float
    top_p: float
    top_k: int
    model: str = "policy"
    min_p: float = 0.0


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `tools` is empty if the request names none, or forbids calls. `ignored` are fields about
    sampling that differ from the run's. `fingerprint` is equal for requests that ask for the same.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: tuple[str, ...] = ()
    fingerprint: str = field(default="", compare=False)


def read_request(body: bytes, sampling: Sampling, ignore_sampling: bool) -> ChatRequest:
    """Read and check a request's body. Raises ApiError, which names the field and what would be valid."""
    asked = _read_json(body)
    _check_names(asked)
    asked = {key: value for key, value in asked.items() if value is not None}
    ignored = _check_sampling(asked, sampling, ignore_sampling)
    _check_rest(asked, sampling)
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(_list(asked, "tools"))]
    choice = asked.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        _refuse("tool_choice", f"{_shown(choice)}: the policy cannot be made to call a tool; valid: auto, none")
    if choice == "none":
        tools = []
    messages = [message_of(message, f"messages[{place}]", _refuse) for place, message in enumerate(_messages(asked))]
    limits = [_integer(asked, name) for name in ("max_tokens", "max_completion_tokens") if name in asked]
    options = asked.get("stream_options", {})
    if not isinstance(options, dict):
        _refuse("stream_options", f"is {_shown(options)}; an object was expected")
    identity = json.dumps([messages, tools, min(limits, default=None)], sort_keys=True)
    return ChatRequest(
        messages,
        tools,
        min(limits, default=None),
        _truth(asked, "stream"),
        bool(options.get("include_usage")),
        _truth(asked, "logprobs"),
        ignored,
        hashlib.sha256(identity.encode()).hexdigest(),
    )


def _read_json(body: bytes) -> dict[str, Any]:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        asked = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise ApiError(f"the body is {_shown(asked)}; an object was expected", code="invalid_json")
    return asked


def _check_names(asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        if name in _FIELDS or value is None:
            continue
        near = _INSTEAD.get(name) or next(iter(difflib.get_close_matches(name, sorted(_FIELDS), n=1)), None)
        guess = f"did you mean {near!r}? " if near else ""
        _refuse(name, f"not a field of this endpoint; {guess}valid: {', '.join(sorted(_FIELDS))}")


def _check_sampling(asked: dict[str, Any], sampling: Sampling, ignore_sampling: bool) -> tuple[str, ...]:
    """Return the names of fields that differ from what the run samples with. Raises ApiError unless they are
    ignored.
    """
    differing = []
    for name, neutral in _SAMPLING.items():
        valid = [*neutral, *([getattr(sampling, name)] if hasattr(sampling, name) else [])]
        if name not in asked or any(asked[name] == one and type(asked[name]) is not bool for one in valid):
            continue
        if asked[name] is True and True in neutral:
            continue
        if not ignore_sampling:
            allowed = ", ".join(map(_shown, dict.fromkeys(valid))) if name != "logit_bias" else "{}"
            _refuse(
                name,
                f"{_shown(asked[name])} is not what the run samples the session with, and training needs one"
                f" distribution; valid: leave it out{f', or {allowed}' if allowed else ''}."
                " (episodes.endpoint.ignore_sampling: true samples as the run does, no matter what a request says.)",
                code="sampling_differs",
            )
        differing.append(name)
    return tuple(differing)


def _check_rest(asked: dict[str, Any], sampling: Sampling) -> None:
    if asked.get("model", sampling.model) != sampling.model:
        raise ApiError(
            f"the model {_shown(asked['model'])} does not exist here; valid: {sampling.model} (OPENAI_MODEL)",
            status=404,
            param="model",
            code="model_not_found",
        )
    if asked.get("n", 1) != 1 or isinstance(asked.get("n"), bool):
        _refuse("n", f"{_shown(asked['n'])} answers were asked for; valid: 1 (ask again for another one)")
    if asked.get("top_logprobs", 0) != 0:
        _refuse("top_logprobs", f"{_shown(asked['top_logprobs'])}: only sampled tokens have a log-prob here; valid: 0")
    if asked.get("stop", []) != []:
        _refuse("stop", "a turn ends with the model's own end token; valid: leave it out")
    form = asked.get("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") != "text":
        _refuse(
            "response_format",
            f'{_shown(form)}: sampling is not constrained, since training needs one distribution; valid: {{"type":'
            ' "text"}',
        )
    if asked.get("modalities", ["text"]) != ["text"]:
        _refuse("modalities", f'{_shown(asked["modalities"])}; valid: ["text"]')


def _messages(asked: dict[str, Any]) -> list[Any]:
    messages = _list(asked, "messages")
    if not messages:
        _refuse("messages", "missing or empty; valid: a list of at least one message")
    return messages


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a tool's schema as the chat template gets it, without `strict`, which is about constrained sampling."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        _refuse(where, f'{_shown(tool)} is not a tool; valid: {{"type": "function", "function": {{"name": ...}}}}')
    function = {key: value for key, value in tool["function"].items() if key != "strict" and value is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        _refuse(f"{where}.function.name", f"{_shown(name)}; valid: 1 to 64 letters, digits, underscores and hyphens")
    if not isinstance(function.get("parameters", {}), dict):
        _refuse(f"{where}.function.parameters", f"{_shown(function['parameters'])}; a JSON schema was expected")
    return {"type": "function", "function": function}


def _list(asked: dict[str, Any], name: str) -> list[Any]:
    value = asked.get(name, [])
    if not isinstance(value, list):
        _refuse(name, f"is {_shown(value)}; a list was expected")
    return value


def _integer(asked: dict[str, Any], name: str) -> int:
    value = asked[name]
    if type(value) is not int or value < 1:
        _refuse(name, f"is {_shown(value)}; an integer >= 1 was expected")
    return value


def _truth(asked: dict[str, Any], name: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        _refuse(name, f"is {_shown(value)}; true or false was expected")
    return value


def _refuse(param: str, text: str, code: str | None = None) -> NoReturn:
    raise ApiError(f"{param}: {text}", param=param, code=code)


def message_of(message: Any, where: str, refuse: Refuse) -> dict[str, Any]:
    """Return the message in the form that records have. `refuse` is called with the place and the text of a problem."""
    if not isinstance(message, dict):
        refuse(where, f"is {_shown(message)}; an object with role and content was expected")
    role = message.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{_shown(role)}; valid: {', '.join(_ROLES)}")
    role = "system" if role == "developer" else role
    made: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "role" or value is None or (key in _EMPTY and not value):
            continue
        if key not in _MESSAGE_FIELDS[role]:
            refuse(
                f"{where}.{key}", f"not a field of a message of role {role}; valid: {', '.join(_MESSAGE_FIELDS[role])}"
            )
        if key == "content":
            made[key] = _content(value, f"{where}.content", refuse)
        elif key == "tool_calls":
            made[key] = _calls(value, f"{where}.tool_calls", refuse)
        elif isinstance(value, str):
            made[key] = value
        else:
            refuse(f"{where}.{key}", f"is {_shown(value)}; a text was expected")
    if "content" not in made:
        if role != "assistant":
            refuse(f"{where}.content", "missing; a text was expected")
        made["content"] = ""
    if role == "tool" and "tool_call_id" not in made:
        refuse(f"{where}.tool_call_id", "missing; the id of the call that this answers was expected")
    return made


def _content(content: Any, where: str, refuse: Refuse) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, f"is {_shown(content)}; a text or a list of text parts was expected")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            refuse(
                f"{where}[{place}]",
                f'{_shown(part)}; valid: {{"type": "text", "text": ...}}, because the policy reads text',
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any, where: str, refuse: Refuse) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(where, f"is {_shown(calls)}; a list was expected")
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
                f'{_shown(call)}; valid: {{"id": text, "type": "function", "function": {{"name": text, "arguments":'
                " JSON text}}",
            )
        named = {"name": function["name"], "arguments": function["arguments"]}
        made.append({"id": call["id"], "type": "function", "function": named})
    return made


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def completion(
    head: dict[str, Any], message: dict[str, Any], finish: str, log_probs: Any, usage: dict[str, int]
) -> dict[str, Any]:
    """Return the body of a whole answer. `head` has its id, created and model."""
    choice = {"index": 0, "message": sent_message(message), "logprobs": log_probs, "finish_reason": finish}
    return {"object": "chat.completion", **head, "choices": [choice], "usage": usage}


def sent_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded message in the form of OpenAI's answers: empty content next to calls is null."""
    sent = {"role": "assistant", "content": message.get("content") or ""} | message
    if message.get("tool_calls") and not message.get("content"):
        sent["content"] = None
    return sent


def finish_of(message: dict[str, Any], finish_reason: str) -> str:
    """Return OpenAI's finish reason: `tool_calls` if the turn is whole and has calls, else `stop` or `length`."""
    return "tool_calls" if finish_reason == "stop" and message.get("tool_calls") else finish_reason


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


def usage_of(num_context_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_context_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_context_tokens + num_tokens,
    }


def chunk(head: dict[str, Any], delta: dict[str, Any], finish: str | None = None, log_probs: Any = None) -> bytes:
    """Return one event of a streamed answer."""
    choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
    return event({"object": "chat.completion.chunk", **head, "choices": [choice]})


def usage_chunk(head: dict[str, Any], usage: dict[str, int]) -> bytes:
    return event({"object": "chat.completion.chunk", **head, "choices": [], "usage": usage})


def call_deltas(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form of a delta."""
    return [{"index": place, **call} for place, call in enumerate(calls)]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"

"""What the endpoint's protocols share: the request as a session gets it, the checks of a body's fields, the errors.

An agent may speak OpenAI's chat completions (`openai_wire.py`), Anthropic's Messages (`anthropic_wire.py`) or OpenAI's
Responses (`responses_wire.py`). Each module reads a body into the same `Request`, whose messages and tools have the
form of chat completions, which is that of records; and writes the turn that a session answers as a body or as events.
So tokens, the tree, masks and the journal do not know which protocol was spoken. What a protocol can say and this form
cannot is refused by name.

Training needs one distribution. What a request says about sampling must therefore be what its session is sampled with;
otherwise the request is refused by name (or counted, with `episodes.endpoint.ignore_sampling`).

Nothing here does HTTP or knows a session.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from gspo_mega.base.errors import EpisodeError

Message = dict[str, Any]

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# More stop strings, or longer ones, are no agent's; each is looked for after every token.
_MOST_STOPS, _MOST_STOP_CHARACTERS = 32, 1024


class ApiError(EpisodeError):
    """A request is answered with an error. `status` is HTTP's, `param` the field at fault, and `code` is for programs.
    `retry` says whether the same request may succeed later; clients heed it. The protocol writes it in its own form.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry


@dataclass(frozen=True)
class Sampling:
    """What a session is sampled with, which a request may repeat. `model` is the name that is served."""

    temperature: float
    top_p: float
    top_k: int
    model: str = "policy"
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """A checked request. `tools` is empty if the request names none, or forbids calls. `stop` are texts that end a
    turn, `n` is how many turns are asked for. `ignored` are fields about sampling that differ from the run's.
    `fingerprint` is equal for requests that ask for the same. `told` are fields that an answer repeats.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_new_tokens: int | None
    stream: bool
    include_usage: bool = False
    logprobs: bool = False
    ignored: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        identity = json.dumps([self.messages, self.tools, self.max_new_tokens, self.stop, self.n], sort_keys=True)
        object.__setattr__(self, "fingerprint", hashlib.sha256(identity.encode()).hexdigest())


@dataclass(frozen=True)
class Fields:
    """The fields of a protocol's request: those that are `used`, those `without_effect`, and those about `sampling`
    with the values that change nothing. For a field of `Sampling` the session's own value is valid, too. `instead`
    names the right field for a wrong one.
    """

    used: frozenset[str]
    without_effect: frozenset[str]
    sampling: Mapping[str, tuple[Any, ...]]
    instead: Mapping[str, str] = field(default_factory=dict)

    def checked(self, asked: dict[str, Any], sampling: Sampling, variable: str) -> dict[str, Any]:
        """Return the fields that are not null. Raises ApiError for one that is unknown, and for another model than the
        one that is served, whose name the agent has in `variable`.
        """
        valid = self.used | self.without_effect | self.sampling.keys()
        for name, value in asked.items():
            if name in valid or value is None:
                continue
            near = self.instead.get(name) or next(iter(difflib.get_close_matches(name, sorted(valid), n=1)), None)
            guess = f"did you mean {near!r}? " if near else ""
            refuse(name, f"not a field of this endpoint; {guess}valid: {', '.join(sorted(valid))}")
        asked = {key: value for key, value in asked.items() if value is not None}
        if asked.get("model", sampling.model) != sampling.model:
            raise ApiError(
                f"the model {shown(asked['model'])} does not exist here; valid: {sampling.model} ({variable})",
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked

    def ignored(self, asked: Mapping[str, Any], sampling: Sampling, ignore_sampling: bool) -> tuple[str, ...]:
        """Return the names of fields that differ from what the run samples with. Raises ApiError unless they are
        ignored.
        """
        differing = []
        for name, neutral in self.sampling.items():
            valid = [*neutral, *([getattr(sampling, name)] if hasattr(sampling, name) else [])]
            if name not in asked or any(asked[name] == one and type(asked[name]) is not bool for one in valid):
                continue
            if asked[name] is True and True in neutral:
                continue
            if not ignore_sampling:
                allowed = ", ".join(dict.fromkeys(shown(one) for one in valid))
                refuse(
                    name,
                    f"{shown(asked[name])} is not what the run samples the session with, and training needs one"
                    f" distribution; valid: leave it out{f', or {allowed}' if allowed else ''}."
                    " (episodes.endpoint.ignore_sampling: true samples as the run does, no matter what a request"
                    " says.)",
                    code="sampling_differs",
                )
            differing.append(name)
        return tuple(differing)


def read_json(body: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object. Raises ApiError."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        asked = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise ApiError(f"the body is {shown(asked)}; an object was expected", code="invalid_json")
    return asked


def refuse(param: str, text: str, code: str | None = None) -> NoReturn:
    raise ApiError(f"{param}: {text}", param=param, code=code)


def shown(value: Any) -> str:
    """Return a value of a request as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def list_of(asked: Mapping[str, Any], name: str) -> list[Any]:
    value = asked.get(name, [])
    if not isinstance(value, list):
        refuse(name, f"is {shown(value)}; a list was expected")
    return value


def object_of(asked: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = asked.get(name, {})
    if not isinstance(value, dict):
        refuse(name, f"is {shown(value)}; an object was expected")
    return value


def with_inner(asked: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields, and those inside of others that `names` says as `outer.inner`, under that name."""
    flat = dict(asked)
    for name in names:
        outer, inner = name.split(".")
        value = object_of(asked, outer).get(inner)
        if value is not None:
            flat[name] = value
    return flat


def string_of(part: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text inside of the part of a request that is at `where`."""
    value = part.get(name)
    if not isinstance(value, str):
        refuse(f"{where}.{name}", f"is {shown(value)}; a text was expected")
    return value


def integer_of(asked: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is an integer of at least 1; None if there is none."""
    value = asked.get(name)
    if value is not None and (type(value) is not int or value < 1):
        refuse(name, f"is {shown(value)}; an integer >= 1 was expected")
    return value


def truth_of(asked: Mapping[str, Any], name: str, otherwise: bool = False) -> bool:
    value = asked.get(name, otherwise)
    if not isinstance(value, bool):
        refuse(name, f"is {shown(value)}; true or false was expected")
    return value


def stops_of(asked: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the texts that end a turn, from a text or a list of texts."""
    value = asked.get(name, [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        refuse(name, f"is {shown(value)}; a text or a list of texts was expected")
    if len(stops) > _MOST_STOPS or not all(0 < len(one) <= _MOST_STOP_CHARACTERS for one in stops):
        refuse(name, f"valid: at most {_MOST_STOPS} texts of 1 to {_MOST_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stops))


def check_tool_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        refuse(f"{where}.name", f"{shown(name)}; valid: 1 to 64 letters, digits, underscores and hyphens")


def tool_of(name: Any, description: Any, parameters: Any, where: str, schema: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions, with its fields always in the same order, because a template may
    write them as they come. `schema` is the protocol's name of the parameters.
    """
    check_tool_name(name, where)
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{where}.{schema}", f"{shown(parameters)}; a JSON schema was expected")
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def refuse_format(param: str, form: Any) -> NoReturn:
    """Refuse an answer in a form that only a grammar could ensure."""
    refuse(
        param,
        f'{shown(form)}: sampling is not constrained, since training needs one distribution; valid: {{"type": "text"}}',
    )


def choice_of(asked: Mapping[str, Any]) -> Literal["auto", "none"]:
    """Return the choice of tools of OpenAI's protocols."""
    choice = asked.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        refuse_choice("tool_choice", choice, ("auto", "none"))
    return choice


def refuse_choice(param: str, choice: Any, valid: Collection[str]) -> NoReturn:
    """Refuse a choice of tools that only a grammar could ensure."""
    refuse(param, f"{shown(choice)}: the policy cannot be made to call a tool; valid: {', '.join(valid)}")


def text_of(content: Any, where: str, kinds: Sequence[str], refuse: Callable[[str, str], NoReturn] = refuse) -> str:
    """Return the text of a content: a text, or a list of parts of the `kinds` that have a text, which are joined as
    they are. `refuse` is called with the place and the text of a problem.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, f"is {shown(content)}; a text or a list of text parts was expected")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            refuse(
                f"{where}[{place}]",
                f'{shown(part)}; valid: {{"type": "{kinds[0]}", "text": ...}}, because the policy reads text',
            )
        texts.append(part["text"])
    return "".join(texts)


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool in the form that records have. `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Head:
    """What every answer to one request has. `name` is of the answer alone, `created` in Unix seconds."""

    name: str
    created: int
    model: str


@dataclass(frozen=True)
class Reply:
    """A finished turn as a protocol writes it.

    `message` is the assistant's in the form of chat completions, `rest` the content of it that was not streamed before.
    `finish_reason` is `stop`, `length` or `stop_string`, which is then the text `stop_string`. `log_probs` [tokens] are
    in nats, `texts` [tokens] are the texts of single tokens; both are empty unless they were asked for.
    """

    message: Message
    finish_reason: str
    stop_string: str
    num_context_tokens: int
    num_tokens: int
    rest: str
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    texts: Sequence[str] = ()

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def thinking(self) -> str:
        return self.message.get("reasoning_content") or ""

    @property
    def content(self) -> str:
        return self.message.get("content") or ""


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """Return one server-sent event with a name."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()

"""Messages, read once from a client's JSON, and written as a chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slime_openai.errors import (
    InvalidRequest,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
    wrong,
)
from slime_openai.requests.call_arguments import as_object, read_exactly, write
from slime_openai.requests.content import has_media, read_content
from slime_openai.requests.fields import one_of, string, text

__all__ = [
    "Message",
    "PartlyRead",
    "ToolCall",
    "exact_messages",
    "for_template",
    "has_media",
    "has_objects",
    "read_messages",
    "template_role",
]

#: Members of an answer that clients send back (openai's ``.parse()``, litellm), but that no template reads.
_WITHOUT_EFFECT = frozenset(("annotations", "parsed", "provider_specific_fields"))
_ANY = frozenset(("content", "name", "role")) | _WITHOUT_EFFECT
_KEYS = {
    "assistant": _ANY | {"reasoning", "reasoning_content", "refusal", "tool_calls"},
    "developer": _ANY,
    "function": _ANY,
    "system": _ANY,
    "tool": _ANY | {"tool_call_id"},
    "user": _ANY,
}
_role = one_of(*_KEYS)
#: The two names of an assistant's thoughts.
_THOUGHTS = ("reasoning_content", "reasoning")
#: Roles whose content may be missing: an assistant that calls tools or was cut within thoughts, a tool without result.
_MAY_BE_SILENT = frozenset(("assistant", "function", "tool"))
#: Roles of OpenAI's API that chat templates silently ignore, and the roles that replace them.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


class ToolCall(NamedTuple):
    """A call that an assistant made. ``arguments``: the text that the model wrote, valid JSON or not."""

    name: str
    arguments: str
    id: str | None = None


class Message(NamedTuple):
    """One message. ``content``: the text of all its parts; ``reasoning``: the thoughts before the content."""

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


class PartlyRead(NamedTuple):
    """A client's messages: those ``read`` before, and the JSON of the ``others`` behind them."""

    read: tuple[Message, ...]
    others: Sequence[Any]


def read_messages(value: Any, param: str = "messages") -> tuple[Message, ...]:
    """Return the conversation in ``value``, any JSON or a PartlyRead.

    Raises InvalidRequest, whose ``param`` is the path of the value at fault.
    """
    messages: list[Message] = []
    if isinstance(value, PartlyRead):
        messages += value.read
        value = value.others
    elif not isinstance(value, list) or not value:
        raise wrong(param, "a list of messages that is not empty", value)
    for index, item in enumerate(value, len(messages)):
        if (
            type(item) is dict
            and len(item) == 2
            and type(role := item.get("role")) is type(content := item.get("content")) is str
            and role in _KEYS
        ):
            messages.append(Message(role, content))  # most messages have only a role and a text
        else:
            messages.append(_message(f"{param}.[{index}]", item))
    return tuple(messages)


def exact_messages(raw: bytes) -> Any:
    """Return the messages of the body ``raw``, with all digits and repeated keys. Raises InvalidRequest."""
    try:
        return read_exactly(raw)["messages"]
    except RecursionError:
        raise InvalidRequest("messages", "Invalid value for 'messages': it is nested too deep.") from None


def has_objects(messages: Any) -> bool:
    """Return True if arguments of a call in ``messages``, which may be any JSON, are an object."""
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(call, dict)
        and isinstance(function := call.get("function"), dict)
        and isinstance(function.get("arguments"), dict)
        for message in messages
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list)
        for call in calls
    )


def _message(param: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise wrong(param, "a message, which is an object", value)
    # The path of a member is made only if the member is passed to a reader. Most messages have no such member.
    role = value.get("role")
    if type(role) is not str or role not in _KEYS:
        role = _role(f"{param}.role", role)
    if not value.keys() <= _KEYS[role]:
        _refuse_unknown(param, value, role)
    content = value.get("content")
    if type(content) is not str and (content is not None or role not in _MAY_BE_SILENT):
        content = read_content(f"{param}.content", content)
    name = value.get("name")
    if name is not None:
        string(f"{param}.name", name)
    if role == "assistant":
        return Message(
            role,
            _with_refusal(param, content, value.get("refusal")),
            _tool_calls(param, value.get("tool_calls")),
            None,
            name,
            _reasoning(param, value),
        )
    tool_call_id = value.get("tool_call_id")
    if tool_call_id is not None:
        text(f"{param}.tool_call_id", tool_call_id)
    return Message(role, content, (), tool_call_id, name)


def _refuse_unknown(param: str, value: dict[str, Any], role: str) -> None:
    """Refuse unknown members, unless they are null: SDKs send back messages with nulls for absent members."""
    for key in sorted(value.keys() - _KEYS[role]):
        if value[key] is None:
            continue
        if key == "function_call":
            raise UnsupportedParameter(f"{param}.{key}", "send 'tool_calls' instead")
        if key == "audio":
            raise UnsupportedParameter(f"{param}.{key}", "the router keeps no earlier audio")
        raise UnknownParameter(f"{param}.{key}")


def _with_refusal(param: str, content: str | None, refusal: Any) -> str | None:
    if refusal is None:
        return content
    if content:
        raise InvalidRequest(
            f"{param}.refusal", f"Wanted either content or a refusal in '{param}', got both."
        )
    return text(f"{param}.refusal", refusal)


def _reasoning(param: str, value: dict[str, Any]) -> str | None:
    """Return the thoughts of an assistant, under either of their two names."""
    names = [key for key in _THOUGHTS if value.get(key) is not None]
    if not names:
        return None
    thoughts = [text(f"{param}.{key}", value[key]) for key in names]
    if len(set(thoughts)) > 1:
        raise InvalidRequest(
            f"{param}.reasoning",
            f"'reasoning' and 'reasoning_content' are two names of one parameter; in '{param}' they differ.",
        )
    return thoughts[0]


def _tool_calls(param: str, value: Any) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(f"{param}.tool_calls", "a list of tool calls", value)
    return tuple([_tool_call(f"{param}.tool_calls.[{index}]", item) for index, item in enumerate(value)])


def _tool_call(param: str, value: Any) -> ToolCall:
    """Read one call. Other keys are ignored: ``index`` (from streams) and ``parsed_arguments`` add nothing."""
    if not isinstance(value, dict):
        raise wrong(param, "a tool call, which is an object", value)
    kind = value.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(f"{param}.type", "only calls of type 'function' can be rendered")
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{param}.function", "an object", function)
    id = value.get("id")
    if id is not None:
        text(f"{param}.id", id)
    name = string(f"{param}.function.name", function.get("name"))
    return ToolCall(name, _arguments(f"{param}.function.arguments", function.get("arguments")), id)


def _arguments(param: str, value: Any) -> str:
    """Return arguments as JSON text. Some agents send an object instead of text."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return write(value)
        except ValueError as error:
            raise InvalidRequest(
                param, f"Invalid value for '{param}': it cannot be written as JSON: {error}."
            ) from None
    if value is None:
        raise MissingParameter(param, "a string of JSON")
    raise wrong(param, "a string of JSON", value)


def template_role(role: str) -> str:
    """Return ``role`` as chat templates know it."""
    return _TEMPLATE_ROLES.get(role, role)


def for_template(message: Message | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``message`` as chat templates read it. A mapping is in this form already.

    The content is always a string, since templates write None as ``None``. Arguments are an object if
    :func:`as_object` can read one, since templates write ``arguments | tojson``.
    """
    if not isinstance(message, Message):
        return message
    rendered: dict[str, Any] = {
        "role": template_role(message.role),
        "content": message.content or "",
    }
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments = as_object(call.arguments)
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    rendered: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered

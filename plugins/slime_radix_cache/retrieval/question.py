"""Requests to the retrieval routes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router_core.errors import BadRequest
from router_core.request import Request
from router_core.routes import shown
from slime_radix_cache.retrieval.token_rows import INT32, NPY, ROWS, WantedRows

__all__ = ["Conversation", "Question", "read_object", "rows_asked", "rows_form"]


@dataclass(frozen=True, slots=True)
class Question:
    """A request for the tokens of ``text`` and for their ``rows``. ``logprobs``: True if it asks for logprobs, too."""

    text: str
    session: str | None = None
    logprobs: bool = True
    rows: WantedRows = field(default_factory=WantedRows)

    @classmethod
    def from_json(cls, request: Request, session: str | None) -> Question:
        """Read the body of a ``/retrieve_from_text`` request. ``session``: the request's session. Raises BadRequest."""
        document = read_object(request, "text")
        text = document.get("text")
        if not isinstance(text, str):
            raise BadRequest(f'"text" must be a string, got {_kind(text)}')
        return cls.about(text, document, session)

    @classmethod
    def about(cls, text: str, document: Mapping[str, Any], session: str | None) -> Question:
        """Return a question about ``text`` with the options in ``document``. Raises BadRequest."""
        named = document.get("session_id")
        if named is not None and not isinstance(named, str):
            raise BadRequest(f'"session_id" must be a string, got {_kind(named)}')
        return cls(
            text,
            session or named or None,
            logprobs=_flag(document, "return_logp", default=True),
            rows=WantedRows(
                [name for name, names in ROWS.items() if _flag(document, names.asked, default=False)],
                rows_form(document.get("routed_experts_format")),
            ),
        )


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Conversation:
        """Read the body of ``/retrieve_from_messages_template``. Raises BadRequest."""
        messages = document.get("messages")
        if not isinstance(messages, list) or not messages:
            wanted = "a list of at least one message"
            raise BadRequest(f'"messages" must be {wanted}, got {_kind(messages)}')
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(f'"messages"[{number}] must be an object with a string "role"')
        tools = document.get("tools")
        odd = [tool for tool in tools if not isinstance(tool, dict)] if isinstance(tools, list) else [tools]
        if tools is not None and odd:
            raise BadRequest(f'"tools" must be a list of objects, got {_kind(odd[0])}')
        variables = document.get("chat_template_kwargs")
        if variables is not None and not isinstance(variables, dict):
            raise BadRequest(f'"chat_template_kwargs" must be an object, got {_kind(variables)}')
        return cls(
            messages, tools or None, _flag(document, "add_generation_prompt", default=False), variables or {}
        )


def read_object(request: Request, key: str) -> dict[str, Any]:
    """Return the body as a JSON object. ``key``: the required key that an error names. Raises BadRequest."""
    document = request.json()
    if not isinstance(document, dict):
        raise BadRequest(f'wanted a JSON object with "{key}", got {_kind(document)}')
    return document


def rows_form(value: Any) -> str:
    """Return the encoding of rows in JSON that ``value`` names; INT32 if it is None. Raises BadRequest."""
    if value in (None, INT32):
        return INT32
    if value != NPY:
        raise BadRequest(f'"routed_experts_format" must be "{INT32}" or "{NPY}", got {shown(value)}')
    return NPY


def rows_asked(query: Mapping[str, str]) -> WantedRows:
    """Return the rows that a URL's ``query`` asks for. Raises BadRequest."""
    wanted = []
    for name, names in ROWS.items():
        value = query.get(names.asked, "false")
        if value not in ("true", "false"):
            raise BadRequest(f'"{names.asked}" must be true or false, got {value!r:.80}')
        if value == "true":
            wanted.append(name)
    return WantedRows(wanted, rows_form(query.get("routed_experts_format")))


def _flag(document: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f'"{name}" must be true or false, got {_kind(value)}')
    return value


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, array):
        return "list"
    return "an empty list" if value == [] else type(value).__name__

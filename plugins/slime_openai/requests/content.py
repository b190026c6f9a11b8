"""The ``content`` of a message: a string, or a list of parts."""

from __future__ import annotations

from typing import Any

from slime_openai.errors import UnsupportedParameter, wrong
from slime_openai.requests.fields import text

__all__ = ["has_media", "read_content"]

#: Types of parts that are no text. Requests with such a part go to a worker unchanged.
_MEDIA = frozenset(("audio_url", "file", "image", "image_url", "input_audio", "input_image", "video_url"))
#: The key of the text in a part of each type. A refusal is text of the model, too.
_TEXTS = {"text": "text", "refusal": "refusal"}


def read_content(param: str, value: Any) -> str:
    """Return the text of ``value``. Its parts are joined without a separator.

    Other keys of a part, such as ``cache_control``, have no effect.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join([_part(f"{param}.[{index}]", part) for index, part in enumerate(value)])
    raise wrong(param, "a string or a list of content parts", value)


def _part(param: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise wrong(param, "a content part, an object with a type", value)
    if kind in _MEDIA:
        raise UnsupportedParameter(param, f"parts of type {kind!r} are no text")
    key = _TEXTS.get(kind)
    if key is None:
        raise wrong(f"{param}.type", f"one of {', '.join(_TEXTS)}", kind)
    return text(f"{param}.{key}", value.get(key))


def has_media(messages: Any) -> bool:
    """Return True when a part of ``messages``, which may be any JSON, is an image, audio, a video or a file."""
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _MEDIA
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )

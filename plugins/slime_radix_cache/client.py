"""Client for rollout code: retrieves exact tokens and fills them into a sample.

A custom rollout function for slime takes a few lines::

    router = AsyncClient("http://127.0.0.1:30000")

    async def generate(args, sample, sampling_params):
        turn = await router.generate(sample.prompt, sampling_params, session=sample.session_id)
        sample.response = turn["text"]
        return await router.fill(sample, session=sample.session_id)

The router sends retrieved tokens as msgpack, so that the client need not parse each token. The client returns the
documented JSON object with two differences: tokens, masks and logprobs are arrays instead of lists, and routed experts
are an array instead of base64. The client never retries: each failure raises an exception.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import orjson

from slime_radix_cache.samples import NotExact, fill_sample

__all__ = ["AsyncClient", "Client", "NotExact", "RequestFailed", "fill_sample"]

_ACCEPT = {"accept": "application/x-msgpack"}
_SampleT = TypeVar("_SampleT")


class RequestFailed(Exception):
    """An error answer of the router or of an engine, or an answer that cannot be parsed.

    ``status``: the HTTP status of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Client:
    """Synchronous client of a router. Raises RequestFailed, NotExact, and httpx.TransportError.

    ``timeout_s``: longest wait for a connection, and for the next bytes of an answer. Proxy settings of the environment
    are ignored.
    """

    def __init__(self, url: str, *, timeout_s: float = 3600.0) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=timeout_s, limits=_UNLIMITED)

    def generate(
        self, text: str, sampling_params: dict[str, Any], *, session: str | None = None, **fields: Any
    ) -> Any:
        """Return the engine's answer to ``text``. ``fields``: more fields of SGLang's ``/generate``."""
        return _answer(self._http.post("/generate", json=_ask(text, sampling_params, session, fields)))

    def retrieve(
        self, text: str, *, session: str | None = None, routed_experts: bool = False
    ) -> dict[str, Any]:
        """Return a dict with the tokens of ``text``, and with ``inexact_reason``, which is None if they are exact.

        ``routed_experts``: add the routed experts of all tokens but the last, and ``routed_experts_reason``, which is
        None if the experts are exact.
        """
        return _record(
            _answer(
                self._http.post(
                    "/retrieve_from_text", json=_question(text, session, routed_experts), headers=_ACCEPT
                )
            )
        )

    def session(self, session: str) -> dict[str, Any]:
        """Return a dict whose ``trajectories`` are the records of ``session``, one for each leaf.

        A leaf is a response that the session has not continued. ``complete`` is False if a response was lost, or could
        not be recorded as exact.
        """
        return _session(_answer(self._http.get(_path(session), headers=_ACCEPT)))

    def trajectories(self, session: str) -> list[dict[str, Any]]:
        """Return a record for each kept leaf of ``session``. :meth:`session` also says whether responses are lost."""
        return list(self.session(session)["trajectories"])

    def fill(
        self,
        sample: _SampleT,
        *,
        session: str | None = None,
        allow_inexact: bool = False,
        routed_experts: bool = False,
    ) -> _SampleT:
        """Retrieve ``sample.prompt + sample.response``, and fill in the tokens: see :func:`fill_sample`."""
        answer = self.retrieve(_text_of(sample), session=session, routed_experts=routed_experts)
        return fill_sample(sample, answer, allow_inexact=allow_inexact)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Asynchronous client of a router, with the methods of Client, but ``aclose`` instead of ``close``.

    Use it within one event loop.
    """

    def __init__(self, url: str, *, timeout_s: float = 3600.0) -> None:
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout_s, limits=_UNLIMITED)

    async def generate(
        self, text: str, sampling_params: dict[str, Any], *, session: str | None = None, **fields: Any
    ) -> Any:
        """See :meth:`Client.generate`."""
        return _answer(await self._http.post("/generate", json=_ask(text, sampling_params, session, fields)))

    async def retrieve(
        self, text: str, *, session: str | None = None, routed_experts: bool = False
    ) -> dict[str, Any]:
        """See :meth:`Client.retrieve`."""
        return _record(
            _answer(
                await self._http.post(
                    "/retrieve_from_text", json=_question(text, session, routed_experts), headers=_ACCEPT
                )
            )
        )

    async def session(self, session: str) -> dict[str, Any]:
        """See :meth:`Client.session`."""
        return _session(_answer(await self._http.get(_path(session), headers=_ACCEPT)))

    async def trajectories(self, session: str) -> list[dict[str, Any]]:
        """See :meth:`Client.trajectories`."""
        return list((await self.session(session))["trajectories"])

    async def fill(
        self,
        sample: _SampleT,
        *,
        session: str | None = None,
        allow_inexact: bool = False,
        routed_experts: bool = False,
    ) -> _SampleT:
        """See :meth:`Client.fill`."""
        answer = await self.retrieve(_text_of(sample), session=session, routed_experts=routed_experts)
        return fill_sample(sample, answer, allow_inexact=allow_inexact)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


#: Rollout code limits its requests itself. A server may close idle connections after 5 s, so this client closes them
#: after 4 s.
_UNLIMITED = httpx.Limits(max_connections=None, keepalive_expiry=4.0)


def _ask(text: str, sampling_params: dict[str, Any], session: str | None, fields: dict[str, Any]) -> Any:
    return {**fields, **_text(text, session), "sampling_params": sampling_params}


def _text(text: str, session: str | None) -> dict[str, Any]:
    return {"text": text} if session is None else {"text": text, "session_id": session}


def _question(text: str, session: str | None, routed_experts: bool) -> dict[str, Any]:
    return {**_text(text, session), **({"return_routed_experts": True} if routed_experts else {})}


def _path(session: str) -> str:
    return f"/trajectories/{quote(session, safe='')}"


def _text_of(sample: Any) -> str:
    if not isinstance(sample.prompt, str):
        raise TypeError(
            f"sample.prompt is a {type(sample.prompt).__name__}, not the text that was sent; "
            "call retrieve() with that text, then fill_sample()"
        )
    return sample.prompt + str(sample.response)


def _answer(reply: httpx.Response) -> Any:
    packed = reply.headers.get("content-type") == _ACCEPT["accept"]
    try:
        document = msgpack.unpackb(reply.content) if packed else orjson.loads(reply.content)
    except ValueError:
        raise RequestFailed(reply.status_code, f"wanted JSON or msgpack, got {reply.text[:200]}") from None
    if reply.is_success:
        return document
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message", error) if isinstance(error, dict) else error
    raise RequestFailed(reply.status_code, str(message))


def _session(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "trajectories": [_record(record) for record in answer["trajectories"]]}


def _record(packed: dict[str, Any]) -> dict[str, Any]:
    """Return ``packed`` with arrays, and with a weight version for each token."""
    record = {
        key: np.frombuffer(value["data"], value["dtype"])
        if isinstance(value, dict) and "dtype" in value
        else value
        for key, value in packed.items()
    }
    if record.get("routed_experts") is not None:
        record["routed_experts"] = record["routed_experts"].reshape(record["routed_experts_shape"])
    names = [*record.pop("version_names"), -1]
    record["generation_versions"] = [names[index] for index in record.pop("version_index")]
    return record

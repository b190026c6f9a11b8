"""The answers to control calls, those of the router itself among them, are what the description says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from control.steered import Steered, steering
from surface.description import documents, key_of, operations

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.anyio

OPERATIONS = [(method, path) for method, path, one in operations() if one["tags"] == ["control"]]
#: Values that any of the calls may want.
BODY = {"rank_offset": 0, "rid": "a", "weight_version": "7", "new_version": "7"}
REFUSAL = (409, b'{"success": false, "message": "busy", "error": {"message": "busy"}}')
NONSENSE = (200, b'{"success": false, "status": "down"}')


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
async def test_each_status_of_a_control_call_comes_as_described(method: str, path: str) -> None:
    seen: set[str] = set()
    good, bad = Steered(), Steered()
    async with steering(good, bad) as running:

        async def ask(status: int, body: dict[str, Any]) -> None:
            answer: httpx.Response = await running.client.request(method, path, json=body)
            assert answer.status_code == status, answer.text
            documents(method, path, status, answer.headers["content-type"], answer.content)
            seen.add(key_of(method, path, status))

        await ask(200, BODY)
        await ask(200, {"workers": {good.url: BODY}})
        bad.answers[path] = (200, b"[" * 2000) if path.startswith("/update") else REFUSAL
        await ask(207, BODY)
        good.answers[path] = bad.answers[path] = REFUSAL
        await ask(409, BODY)
        good.answers[path] = NONSENSE
        await ask(502, BODY)
        await ask(400, {"workers": {good.url: BODY}, "more": 1})
        await ask(404, {"workers": {"http://127.0.0.1:1": BODY}})
        for worker in running.router.pool:
            running.router.pool.remove(worker)
        await ask(503, BODY)
    described = {
        key
        for each, where, one in operations()
        if (each, where) == (method, path)
        for key in one["responses"]
    }
    assert seen == described

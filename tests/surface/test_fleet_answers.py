"""The answers to questions that all engines are asked are what the description says."""

from __future__ import annotations

import pytest

from control.steered import Steered, steering
from surface.description import content_of, documents, key_of, operations

pytestmark = pytest.mark.anyio

PATHS = [path for _, path, one in operations() if one["tags"] == ["fleet"]]
#: Of keys, which have a test of their own.
KEYS = {"401", "403"}


@pytest.mark.parametrize("path", PATHS)
async def test_each_status_of_a_question_comes_as_described(path: str) -> None:
    seen: set[str] = set()
    good, bad = Steered("7"), Steered()
    good.answers["/v1/loads"] = 200, b'{"loads": [{"dp_rank": 0, "num_used_tokens": 3}]}'
    good.answers["/metrics"] = 200, b"# TYPE sglang:x gauge\nsglang:x 1\n"
    async with steering(good, bad) as running:

        async def ask() -> int:
            answer = await running.client.get(path)
            media = answer.headers["content-type"]
            if media.startswith("text/plain"):
                assert "text/plain" in content_of("GET", path, answer.status_code)
            else:
                documents("GET", path, answer.status_code, media, answer.content)
            seen.add(key_of("GET", path, answer.status_code))
            return answer.status_code

        for worker in (bad, good):
            assert await ask() == 200
            for asked in ("/v1/loads", "/metrics", "/server_info", "/model_info", "/health_generate"):
                worker.answers[asked] = 500, b""
        await ask()
        for registered in running.router.pool:
            running.router.pool.remove(registered)
        await ask()
    assert seen == {key for _, where, one in operations() if where == path for key in one["responses"]} - KEYS

"""The plugin in a real router with a real worker, in one process and on free ports."""

from __future__ import annotations

import pytest

from slime_testing import FakeEngine, serving, started


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_session_ends_after_its_turns() -> None:
    engine = FakeEngine()
    engine.script += [{"text": "Hello", "meta_info": {}}, {"text": "Hello again", "meta_info": {}}]
    async with (
        serving(engine.app) as worker,
        started("--plugin", "turns", "--max-turns", "2", "--worker-urls", worker) as router,
    ):
        ada = {"x-session-id": "ada"}
        for turn in ("1", "2"):
            answer = await router.client.post("/generate", json={"text": "Hi"}, headers=ada)
            assert answer.json()["text"].startswith("Hello")
            assert engine.headers[-1]["x-turn"] == answer.headers["x-turn"] == turn

        refused = await router.client.post("/generate", json={"text": "Hi"}, headers=ada)
        assert refused.status_code == 400
        assert "2 turns" in refused.json()["error"]["message"]
        assert (await router.client.get("/turns")).json() == {"turns": {"ada": 2}, "max_turns": 2}

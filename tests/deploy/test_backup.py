"""A copy of the state and of the trajectory log, made while the router runs, is restored elsewhere."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S, until
from ports import free_port
from routers import Start
from slime_engine.app import make_backend_app
from slime_engine.backends import load_backend
from slime_engine.settings import Settings
from slime_http.serving import serving
from state.killed import listening, started


def generation(session: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return {"text": f"Tell {session}", "session_id": session, "stream": stream, "sampling_params": sampling}


@pytest.mark.anyio
async def test_copy_of_a_stopped_process_is_restored(start: Start, tmp_path: Path) -> None:
    """As docs/deploy/backups.md says. The session with a running stream is not complete in the copy."""
    settings = Settings(tokens_per_second=100.0)
    backend = load_backend(settings)
    backend.tokenizer.save(tmp_path / "tokenizer")
    port, folder, copy = free_port(), tmp_path / "state", tmp_path / "copy"

    def flags(directory: Path) -> list[str]:
        return [
            *("--plugin", "state", "--state-dir", str(directory)),
            *("--plugin", "radix_cache", "--trajectory-log", str(directory / "trajectories")),
            *("--hf-checkpoint", str(tmp_path / "tokenizer"), "--plugin", "sessions"),
        ]

    router = Program(["--port", str(port), *flags(folder)], tmp_path / "log")
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False)
    async with serving(make_backend_app(settings, lambda: backend), grace_s=1) as engine, client:
        with started(router):
            await listening(client, router)
            worker = (await client.post("/workers", json={"url": engine})).json()["worker_id"]
            told = (await client.post("/generate", json=generation("done", 8))).json()
            await client.post("/generate", json=generation("running", 1))
            body = generation("running", 40, stream=True)
            async with client.stream("POST", "/generate", json=body) as answer:
                pieces = answer.aiter_bytes()
                await anext(pieces)
                router.send(signal.SIGSTOP)
                await anyio.to_thread.run_sync(shutil.copytree, folder, copy)
                router.send(signal.SIGCONT)
                assert b"[DONE]" in b"".join([piece async for piece in pieces])
            # The copy had no effect on the answer.
            samples = (await client.get("/trajectories/running")).json()
            assert samples["complete"] is True
            router.send(signal.SIGTERM)
            await until(lambda: router.ended)
        async with start(*flags(copy)) as restored:
            workers = (await restored.client.get("/workers")).json()["workers"]
            assert [(each["id"], each["url"]) for each in workers] == [(worker, engine)]
            text = "Tell done" + told["text"]
            found = (
                await restored.client.post("/retrieve_from_text", json={"text": text, "session_id": "done"})
            ).json()
            sampled = [token for token, mask in zip(found["tokens"], found["loss_mask"], strict=True) if mask]
            assert sampled == [token for _, token, *_ in told["meta_info"]["output_token_logprobs"]]
            complete = {}
            for session in ("done", "running"):
                samples = (await restored.client.get(f"/trajectories/{session}")).json()
                complete[session] = samples["complete"]
            assert complete == {"done": True, "running": False}

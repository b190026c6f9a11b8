"""The viewer's data over HTTP: every token against the engine's journal."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dashboard.rolled import RECORDING, SYSTEM, branched, entries, follow_up, say, tokenizer_of, user
from deadlines import until
from radix_cache.shelf import ALL_DEMOTED
from routers import BARE, Start
from slime_dashboard.trajectory_reasons import experts_words, reason_words
from slime_radix_cache.contracts import SessionTurns
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_testing import Running

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "plugins"


async def get(running: Running, path: str = "", **query: Any) -> Any:
    answer = await running.client.get(f"/ui/data/trajectory{path}", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def refused(running: Running, path: str = "", **query: Any) -> tuple[int, str]:
    answer = await running.client.get(f"/ui/data/trajectory{path}", params=query)
    return answer.status_code, answer.json()["error"]["message"]


async def columns(running: Running, total: int, **query: Any) -> dict[str, list[Any]]:
    """All pages of a branch, one after the other."""
    found: dict[str, list[Any]] = {"ids": [], "texts": [], "logprobs": []}
    while len(found["ids"]) < total:
        page = await get(running, "/tokens", start=len(found["ids"]), **query)
        assert (page["start"], page["total"]) == (len(found["ids"]), total)
        assert len(page["ids"]) == min(4096, total - page["start"])
        for name, column in found.items():
            assert len(page[name]) == len(page["ids"])
            column += page[name]
    return found


def with_role(branch: dict[str, Any], ids: list[int], role: str) -> list[tuple[int, list[int]]]:
    """The turn and the tokens of each span with ``role``."""
    return [
        (span["turn"], ids[span["start"] : span["end"]]) for span in branch["spans"] if span["role"] == role
    ]


async def test_roles_are_those_of_the_engines_journal(start: Start) -> None:
    async with start(*RECORDING) as running:
        text = SYSTEM + user("Why?")
        text += await say(running, "a", text) + follow_up("And then?")
        text += await say(running, "a", text) + follow_up("Then?")
        await say(running, "a", text)
        journal = await entries(running)
        answer = await get(running, session="a")
        branch = answer["branch"]
        found = await columns(running, branch["tokens"], session="a")
        first, second, third = journal
        assert found["ids"] == third["input_ids"] + third["output_ids"]
        assert with_role(branch, found["ids"], "sampled") == [(2, third["output_ids"])]
        assert with_role(branch, found["ids"], "reused") == [
            (0, first["output_ids"]),
            (1, second["output_ids"]),
        ]
        before = [
            0,
            len(first["input_ids"] + first["output_ids"]),
            len(second["input_ids"] + second["output_ids"]),
        ]
        assert with_role(branch, found["ids"], "prompt") == [
            (turn, entry["input_ids"][before[turn] :]) for turn, entry in enumerate(journal)
        ]
        logprobs: list[float | None] = [None] * branch["tokens"]
        for entry in journal:
            place = len(entry["input_ids"])
            logprobs[place : place + len(entry["output_ids"])] = entry["output_logprobs"]
        assert found["logprobs"] == logprobs
        assert all(span["mask"] == (span["role"] != "prompt") for span in branch["spans"])
        assert all(one["end"] == two["start"] for one, two in pairwise(branch["spans"]))
        sampled = sum(len(entry["output_ids"]) for entry in journal)
        own = len(third["output_ids"])
        assert branch["counts"] == {
            "prompt": branch["tokens"] - sampled,
            "sampled": own,
            "reused": sampled - own,
            "trained": sampled,
        }
        assert (branch["exact"], branch["inexact_reason"], branch["experts"]) == (True, None, None)
        assert (answer["complete"], answer["turn_count"], answer["leaf_count"]) == (True, 3, 1)
        for turn, entry in zip(answer["turns"], journal, strict=True):
            assert (turn["start"], turn["tokens"]) == (len(entry["input_ids"]), len(entry["output_ids"]))
        tokenizer = tokenizer_of(running)
        for token, shown in zip(found["ids"], found["texts"], strict=True):
            raw = tokenizer.token_bytes[token]
            assert shown is None or shown.encode() == raw
            assert (shown is None) == ("\ufffd" in raw.decode("utf-8", "replace"))


async def test_forks_are_a_tree_whose_branches_are_those_of_the_journal(start: Start) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        journal = await entries(running)
        answer = await get(running, session="a")
        turns = answer["turns"]
        assert [turn["before"] for turn in turns] == [None, 0, 0, 1, 2]
        assert [turn["is_leaf"] for turn in turns] == [False, False, False, True, True]
        assert turns[1]["prompt"] == turns[2]["prompt"]
        assert len({turn["prompt"] for turn in turns}) == 4
        assert answer["leaf_count"] == 2
        for turn, entry in zip(turns, journal, strict=True):
            branch = (await get(running, session="a", turn=turn["number"]))["branch"]
            found = await columns(running, branch["tokens"], session="a", turn=turn["number"])
            assert found["ids"] == entry["input_ids"] + entry["output_ids"]
            assert with_role(branch, found["ids"], "sampled") == [(turn["number"], entry["output_ids"])]
            assert turn["kept"] == turn["tokens"] == len(entry["output_ids"])
            assert turn["versions"] == list(dict.fromkeys(entry["output_versions"]))
            assert turn["finish"] == entry["finish_reason"]["type"]


async def test_weight_versions_are_those_under_which_tokens_were_sampled(start: Start) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        branch = (await get(running, session="a", turn=4))["branch"]
        assert [(span["role"], span["turn"], span["version"]) for span in branch["spans"]] == [
            ("prompt", 0, None), ("reused", 0, "default"), ("prompt", 2, None), ("reused", 2, "7"),
            ("prompt", 4, None), ("sampled", 4, "7"),
        ]  # fmt: skip


async def test_a_cut_answer_keeps_only_what_the_engine_consumed_again(start: Start) -> None:
    async with start(*RECORDING) as running:
        text = SYSTEM + user("Why?")
        said = await say(running, "a", text, tokens=30)
        await say(running, "a", f"{text}{said[: len(said) // 2]}\n<tool_response>42</tool_response>\n")
        journal = await entries(running)
        answer = await get(running, session="a")
        first, second = answer["turns"]
        ids = (await columns(running, answer["branch"]["tokens"], session="a"))["ids"]
        assert ids == journal[1]["input_ids"] + journal[1]["output_ids"]
        ((turn, reused),) = with_role(answer["branch"], ids, "reused")
        assert (turn, reused) == (0, journal[0]["output_ids"][: len(reused)])
        assert first["kept"] == len(reused) < first["tokens"] == len(journal[0]["output_ids"])
        assert second["before"] == 0
        whole = (await get(running, session="a", turn=0))["branch"]
        assert whole["counts"]["sampled"] == first["tokens"]


async def test_answers_of_another_session_are_told_apart(start: Start) -> None:
    async with start(*RECORDING) as running:
        text = SYSTEM + user("Why?")
        text += await say(running, "a", text)
        await say(running, "b", text + follow_up("And then?"))
        answer = await get(running, session="b")
        spans = [(span["role"], span["turn"], span["mask"]) for span in answer["branch"]["spans"]]
        assert spans == [("prompt", 0, 0), ("reused", None, 1), ("prompt", 0, 0), ("sampled", 0, 1)]


async def test_tokenising_again_gives_what_the_tokenizer_makes_of_the_text(start: Start) -> None:
    async with start(*RECORDING) as running:
        tokenizer = tokenizer_of(running)
        spelt = tokenizer.encode_plain("<think>")
        prompt = [*tokenizer.encode(SYSTEM + user("Why?")), *spelt, *tokenizer.encode("\nOne.")]
        await say(running, "a", prompt)
        (entry,) = await entries(running)
        recorded = entry["input_ids"] + entry["output_ids"]
        again = tokenizer.encode(tokenizer.decode(recorded))
        found = await get(running, "/retokenised", session="a")
        place = prompt.index(spelt[0], len(tokenizer.encode(SYSTEM + user("Why?"))))
        first = found["places"][0]
        assert (first["start"], first["end"]) == (place, place + len(spelt))
        assert first["again"] == [{"id": tokenizer.encode("<think>")[0], "text": "<think>", "bytes": None}]
        assert [one["id"] for one in first["recorded"]] == spelt
        made = list(recorded)
        for one in reversed(found["places"]):
            made[one["start"] : one["end"]] = [new["id"] for new in one["again"]]
        assert made == again
        assert (found["compared"], found["tokens"], found["again"]) == (True, len(recorded), len(again))
        assert found["changed"] == sum(one["end"] - one["start"] for one in found["places"])
        assert found["changed_trained"] == found["changed"] - len(spelt)
        assert found["place_count"] == len(found["places"])


async def test_tokens_that_are_no_utf_8_have_their_bytes(start: Start) -> None:
    async with start(*RECORDING) as running:
        tokenizer = tokenizer_of(running)
        emoji = [token for token in tokenizer.encode("🦀") if tokenizer.token_bytes[token]]
        assert len(emoji) > 1
        await say(running, "a", [*tokenizer.encode("Crab: "), *emoji], tokens=1)
        page = await get(running, "/tokens", session="a")
        place = page["ids"].index(emoji[0])
        assert page["texts"][place : place + len(emoji)] == [None] * len(emoji)
        raw = [bytes.fromhex(page["bytes"][str(place + more)]) for more in range(len(emoji))]
        assert raw == [tokenizer.token_bytes[token] for token in emoji]
        assert b"".join(raw).decode() == "🦀"


async def test_long_branches_come_in_pages(start: Start) -> None:
    async with start(*RECORDING) as running:
        tokenizer = tokenizer_of(running)
        prompt = tokenizer.encode("The harbour wakes at five. " * 1500)
        assert len(prompt) > 2 * 4096
        await say(running, "a", prompt)
        (entry,) = await entries(running)
        branch = (await get(running, session="a"))["branch"]
        assert len(branch["spans"]) == 2
        found = await columns(running, branch["tokens"], session="a")
        assert found["ids"] == entry["input_ids"] + entry["output_ids"]
        page = await get(running, "/tokens", session="a", start=5000, limit=7)
        assert page["ids"] == found["ids"][5000:5007]
        beyond = await get(running, "/tokens", session="a", start=branch["tokens"], limit=9999)
        assert beyond["ids"] == []


async def test_what_is_left_out_is_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_dashboard.trajectory._MOST_TURNS", 2)
    monkeypatch.setattr("slime_dashboard.trajectory._MOST_COMPARED", 100)
    monkeypatch.setattr("slime_dashboard.trajectory._MOST_PLACES", 1)
    async with start(*RECORDING) as running:
        await branched(running, "a")
        answer = await get(running, session="a")
        assert [turn["number"] for turn in answer["turns"]] == [3, 4]
        assert (answer["turn_count"], answer["leaf_count"]) == (5, 2)
        assert (await get(running, session="a", turn=0))["branch"]["turn"] == 0
        found = await get(running, "/retokenised", session="a")
        assert answer["branch"]["tokens"] > 100
        assert found == {"compared": False, "why": "the branch has more than 100 tokens"}
        spelt = tokenizer_of(running).encode_plain("<think> a <think>")
        await say(running, "b", spelt, tokens=1)
        places = await get(running, "/retokenised", session="b")
        assert places["place_count"] > len(places["places"]) == 1


async def test_reasons_are_told_in_plain_words(start: Start) -> None:
    async with start(*RECORDING) as running:
        await say(running, "a", SYSTEM, return_logprob=False)
        branch = (await get(running, session="a"))["branch"]
        assert not branch["exact"]
        assert branch["inexact_reason"]["code"] == "no_logprobs"
        assert "no logprob" in branch["inexact_reason"]["words"]
        page = await get(running, "/tokens", session="a")
        assert set(page["logprobs"]) == {None}
        answer = await get(running, session="a")
        assert answer["turns"][0]["inexact_reason"] == branch["inexact_reason"]


def test_each_documented_reason_has_words() -> None:
    tokens = re.findall(
        r"^\| `(\w+)` \|", (DOCS / "radix_cache.md").read_text().partition("| reason |")[2], re.M
    )
    table = (DOCS / "r3.md").read_text().partition("### Reasons")[2].partition("### The size")[0]
    experts = re.findall(r"^\| `(\w+)` \|", table, re.M)[1:]  # without the head
    reasons = tokens[: tokens.index("evicted") + 1]
    assert len(reasons) >= 7
    for reason in reasons:
        assert " " in reason_words(reason), reason
    assert len(experts) >= 10
    for reason in experts:
        assert " " in experts_words(reason), reason
    assert "'custom_x'" in reason_words("unknown_field:custom_x")


async def test_experts_are_exact_or_say_why_not(start: Start) -> None:
    async with start(*RECORDING, "--engine-moe-layers", "2", "--plugin", "r3") as running:
        await say(running, "a", SYSTEM + user("Why?"))
        branch = (await get(running, session="a"))["branch"]
        assert branch["experts"] == {
            "exact": True, "code": None, "words": None, "shape": [branch["tokens"] - 1, 2, 4],
        }  # fmt: skip
        await say(running, "b", SYSTEM + user("Why?"), return_routed_experts=False)
        experts = (await get(running, session="b"))["branch"]["experts"]
        assert (experts["exact"], experts["code"]) == (False, "not_told")
        assert experts["words"] == experts_words("not_told")


async def test_what_is_not_there_is_told_clearly(start: Start) -> None:
    async with start(*RECORDING) as running:
        await say(running, "a/b?c", SYSTEM)
        assert (await get(running, session="a/b?c"))["session"] == "a/b?c"
        status, message = await refused(running, session="</script>")
        assert (status, "check the name" in message) == (404, True)
        assert "'</script>'" in message
        for path in ("", "/tokens", "/retokenised"):
            assert await refused(running, path, session="a/b?c", turn=1) == (
                404, "wanted a turn from 0 to 0, got 1",
            )  # fmt: skip
            assert await refused(running, path) == (400, "name a session: ?session=NAME")
            assert (await refused(running, path, session="a/b?c", turn="-1"))[0] == 400
        assert (await refused(running, "/tokens", session="a/b?c", limit="x"))[0] == 400


async def test_a_lost_session_says_so(start: Start) -> None:
    async with start(*RECORDING) as running:
        await say(running, "a", SYSTEM)
        running.router.components.get("session_turns").forget("a")
        status, message = await refused(running, session="a")
        assert (status, "evicted or not recorded" in message) == (404, True)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_session_that_goes_while_it_is_read_is_shown_as_it_was(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    experts = ("--engine-moe-layers", "2", "--plugin", "r3")
    async with start(*RECORDING, *experts, *ALL_DEMOTED) as running:
        threads = running.router.threads
        cold: ColdTrajectories = running.router.components.get("ownership")
        source: SessionTurns = running.router.components.get("session_turns")
        run = threads.run
        gone: list[str] = []

        async def run_late(work: Callable[[], Any], client: str | None) -> Any:
            if is_deleted:
                source.forget(session)
            cold.check()
            await until(lambda: not source.turns(session))
            gone.append(session)
            return await run(work, client)

        for path in ("", "/tokens", "/retokenised"):
            await branched(running, session := f"a{path}", tokens=4)
            before = await get(running, path, session=session)
            with monkeypatch.context() as patch:
                patch.setattr(threads, "run", run_late)
                after = await get(running, path, session=session)
            assert session in gone
            if is_deleted and not path:
                assert after["branch"].pop("experts")["exact"] is False
                assert before["branch"].pop("experts")["exact"] is True
            assert after == before


async def test_a_first_answer_under_way_is_named(start: Start) -> None:
    async with start(*RECORDING) as running:
        # more text than the sockets between the engine and this test can hold
        long = {"max_new_tokens": 3000, "ignore_eos": True}
        body = {"text": SYSTEM, "session_id": "a", "stream": True, "sampling_params": long}
        async with running.client.stream("POST", "/generate", json=body) as reply:
            await anext(reply.aiter_lines())
            status, message = await refused(running, session="a")
        assert (status, "its first response is not complete yet" in message) == (404, True)


async def test_without_radix_cache_the_answer_names_it(start: Start) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        assert await refused(running, session="a") == (
            501,
            "nothing is recorded without --plugin radix_cache",
        )


async def test_tokens_need_the_key_that_workers_need(start: Start) -> None:
    keys = ("--api-key", "t", "--admin-api-key", "a")
    async with start(*BARE, "--plugin", "dashboard", *keys) as running:
        for path in ("", "/tokens", "/retokenised"):
            for key, status in ((None, 401), ("t", 403), ("a", 501)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                answer = await running.client.get(f"/ui/data/trajectory{path}?session=s", headers=headers)
                assert answer.status_code == status

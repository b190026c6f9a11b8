"""The trajectory viewer in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dashboard.browser import Browser
from dashboard.rolled import RECORDING, SYSTEM, branched, entries, follow_up, say, tokenizer_of, user
from routers import BARE, Start
from slime_testing import Running

pytestmark = pytest.mark.anyio

SAILOR = "<|im_start|>system\nYou are a sailor.<|im_end|>\n"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">\u202egnp.exe\u200b\x1b[31m\u0301x"
RIGHT, LEFT, UP, DOWN, HOME, END, ESCAPE = (
    "\ue014",
    "\ue012",
    "\ue013",
    "\ue015",
    "\ue011",
    "\ue010",
    "\ue00c",
)
FOCUSED = "return Number(document.activeElement.dataset.index)"


@pytest.fixture
def anyio_backend() -> str:
    """A usual loop: the browser lives in real time."""
    return "asyncio"


async def opened(browser: Browser, running: Running, session: str, **more: Any) -> None:
    """Open the viewer, and wait until the text was tokenised again."""
    await browser.open(f"{running.url}/ui/trajectory", **more)
    await browser.enter("#session", session)
    await browser.until_text("#again", "the text again would")


async def tokens_of(browser: Browser, role: str) -> list[int]:
    """The places of the tokens that are drawn with ``role``."""
    all_of = "[...document.querySelectorAll(`#tokens .token[data-role=${arguments[0]}]`)]"
    found: list[int] = await browser.js(f"return {all_of}.map((one) => +one.dataset.index)", role)
    return found


async def card_of(browser: Browser, token: int) -> str:
    """The details that are shown when ``token`` has the focus."""
    await browser.js("document.querySelector(`.token[data-index='${arguments[0]}']`).focus()", token)
    return await browser.text("#token-card")


async def test_page_shows_what_the_engines_journal_has(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        _, _, right, _, last = await entries(running)
        root = (await entries(running))[0]
        await opened(chromium, running, "a")
        total = len(last["input_ids"]) + len(last["output_ids"])
        assert "Exact" in await chromium.text("#verdicts")
        assert f"Tokens\n{total}" in await chromium.text("#counts")
        sampled = list(range(len(last["input_ids"]), total))
        assert await tokens_of(chromium, "sampled") == sampled
        reused = [
            len(entry["input_ids"]) + more
            for entry in (root, right)
            for more in range(len(entry["output_ids"]))
        ]
        assert await tokens_of(chromium, "reused") == reused
        assert await tokens_of(chromium, "prompt") == sorted({*range(total)} - {*sampled, *reused})
        card = await card_of(chromium, reused[0])
        assert f"id {root['output_ids'][0]}" in card
        assert "sampled in turn 0, re-used by turns 2, 4" in card
        assert f"{root['output_logprobs'][0]:#.4g}" in card
        assert "default" in card
        assert "1, trained on" in card
        assert "0, not trained on" in await card_of(chromium, 0)
        umbrella, space = (tokenizer_of(running).encode(text)[-1] for text in ("☔", "x "))
        assert 'part of "☔"' in await card_of(chromium, last["input_ids"].index(umbrella))
        name = "return document.querySelector(`.token[data-index='${arguments[0]}']`).ariaLabel"
        assert await chromium.js(name, last["input_ids"].index(space)) == '" "'
        assert await chromium.problems() == []


async def test_a_branch_can_be_chosen(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        left = (await entries(running))[3]
        await opened(chromium, running, "a")
        tree = await chromium.text("#tree")
        assert [tree.count(f"Turn {number}") for number in range(5)] == [1] * 5
        assert tree.count("Shared prompt") == 1
        assert tree.count("✓ exact") == 2
        await chromium.click("[data-turn='3']")
        await chromium.until_text("#branch-title", "turn 3")
        await chromium.until_text("#again", "the text again would")
        assert await chromium.js("return location.search") == "?session=a&turn=3"
        start_of_answer = len(left["input_ids"])
        assert (await tokens_of(chromium, "sampled"))[0] == start_of_answer
        assert await chromium.js("return document.querySelectorAll('.turn[aria-current]').length") == 1
        path = "return [...document.querySelectorAll('.turn.on')].map((one) => one.dataset.turn)"
        assert await chromium.js(path) == ["0", "1", "3"]


async def test_the_tree_is_one_tab_stop_and_arrow_keys_move_in_it(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        await opened(chromium, running, "a")
        stops = "return [...document.querySelectorAll('#tree [tabindex=\"0\"]')].map((one) => one.dataset.turn ?? null)"
        assert await chromium.js(stops) == ["4"]
        assert (
            await chromium.js("return document.querySelectorAll('[role=tree] [role=treeitem]').length") == 6
        )
        row = "return document.activeElement.dataset.turn ?? document.activeElement.className"
        await chromium.js("document.querySelector('#tree [tabindex=\"0\"]').focus()")
        visited = []
        for key in (HOME, RIGHT, RIGHT, RIGHT, DOWN, LEFT, LEFT, UP, UP, END):
            await chromium.press(key)
            visited.append(await chromium.js(row))
        assert visited == ["0", "shared", "1", "3", "2", "shared", "0", "0", "0", "4"]
        assert await chromium.js(stops) == ["4"]
        await chromium.press(UP + UP + UP)
        assert await chromium.js(row) == "1"
        await chromium.press("\ue007")
        await chromium.until_text("#branch-title", "turn 1")
        assert await chromium.js(row) == "1", "a choice keeps the focus"
        assert await chromium.js(stops) == ["1"]
        selected = (
            "return [...document.querySelectorAll('[aria-selected=true]')].map((one) => one.dataset.turn)"
        )
        assert await chromium.js(selected) == ["1"]


async def test_modes_have_their_legends(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        await branched(running, "a")
        await opened(chromium, running, "a")
        assert "Re-used" in await chromium.text("#legend")
        await chromium.click("input[value=probability]")
        assert "< 1 %" in await chromium.text("#legend")
        shown = await chromium.js("return document.querySelector('#tokens').dataset.mode")
        assert shown == "probability"
        await chromium.click("input[value=version]")
        assert "7" in await chromium.text("#legend")
        grounds = await chromium.js(
            "const of = (begins) => getComputedStyle(document.querySelector(`.token[data-begins='${begins}']`));"
            "return [of('default').backgroundColor, of('7').backgroundColor]"
        )
        assert len(set(grounds)) == 2


async def test_places_that_differ_are_marked_and_visited(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        tokenizer = tokenizer_of(running)
        before = tokenizer.encode(SYSTEM + user("Why?"))
        prompt = [*before, *tokenizer.encode_plain("<think>"), *tokenizer.encode("\nOne.")]
        await say(running, "a", prompt, tokens=1)
        await opened(chromium, running, "a")
        assert "tokenising the text again would change" in (await chromium.text("#again")).lower()
        assert "≠" in await chromium.js(
            "return getComputedStyle(document.querySelector('.below'), '::before').content"
        )
        assert await chromium.text(".place .below") == "<think>"
        await chromium.click("#next-place")
        await chromium.until("Number(document.activeElement.dataset.index) === arguments[0]", len(before))
        assert '"<think>"' in await chromium.text("#token-card")
        await chromium.click("#places summary")
        assert "<think>" in await chromium.text("#places tbody")
        await chromium.click("#show-again")
        assert not await chromium.js("return document.querySelector('.below').checkVisibility()")


async def test_arrow_keys_move_over_tokens(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        text = SYSTEM + user("One.\nTwo.")
        await say(running, "a", text + await say(running, "a", text) + follow_up("And?"))
        await opened(chromium, running, "a")
        await chromium.js("document.querySelector('#tokens .token').focus()")
        await chromium.press(RIGHT * 9)
        assert await chromium.js(FOCUSED) == 9
        await chromium.press(LEFT)
        assert await chromium.js(FOCUSED) == 8
        assert await chromium.js("return document.activeElement.getAttribute('aria-selected')") == "true"
        assert "Token" in await chromium.text("#token-card")
        box = "const of = document.activeElement.getClientRects()[0]; return of.top"
        top = await chromium.js(box)
        await chromium.press(DOWN)
        assert await chromium.js(box) > top
        await chromium.press(UP)
        assert await chromium.js(box) == top
        await chromium.press(END)
        end = await chromium.js(FOCUSED)
        assert end == (await tokens_of(chromium, "reused"))[0] - 1
        await chromium.press(RIGHT)
        assert await chromium.js(FOCUSED) == end + 1
        await chromium.press(HOME + LEFT + HOME)
        assert await chromium.js(FOCUSED) == 0
        await chromium.press(ESCAPE)
        assert await chromium.js("return document.getElementById('token-card').hidden")


async def test_text_is_found_in_tokens_that_are_not_drawn(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING, "--engine-context-length", "40000") as running:
        tokenizer = tokenizer_of(running)
        filler = tokenizer.encode("The harbour wakes at five.\n") * 1000
        spelt = tokenizer.encode_plain("<needle ☔>")
        prompt = [*filler, *spelt, *filler[:500], *spelt]
        await say(running, "a", prompt, tokens=4)
        await opened(chromium, running, "a")
        first, second = len(filler), len(prompt) - len(spelt)
        current = "Number(document.querySelector('#tokens [aria-selected=true]')?.dataset.index)"
        for place, token in (("1 of 2", first), ("2 of 2", second), ("1 of 2", first)):
            await chromium.enter("#wanted", "<needle ☔>")
            await chromium.until(f"{current} === arguments[0]", token)
            await chromium.until_text("#found", place)
        assert f"id {spelt[0]}" in await chromium.text("#token-card")
        await chromium.enter("#wanted", "needle ☔> The")
        await chromium.until_text("#found", "Not found")
        await chromium.enter("#wanted", "☔>The")
        await chromium.until_text("#found", "1 of 1")
        assert await chromium.problems() == []


async def test_hostile_tokens_and_names_are_only_text(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        name = HOSTILE.replace("\x1b", "")  # the router refuses it in names
        await say(running, name, SYSTEM + user(HOSTILE))
        await opened(chromium, running, name)
        shown = await chromium.text("#tokens")
        assert "onerror" in shown
        assert "\\x1b" in shown
        everything = await chromium.js("return document.body.innerText")
        assert not set("\u202e\u200b\x1b") & set(everything)
        assert await chromium.js("return document.querySelectorAll('main img, main script').length") == 0
        assert "\\u{202e}" in await chromium.text("#facts-title")
        assert "owned" not in await chromium.js("return document.title.slice(0, 5)")
        assert await chromium.problems() == []


async def test_characters_that_cannot_be_seen_are_spelt_out(start: Start, chromium: Browser) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        await chromium.open(f"{running.url}/ui/trajectory")
        written = (
            "return import('./static/trajectory-text.js').then(({writeToken, quoted}) => {"
            "const made = document.createElement('p'), [text, bytes] = arguments;"
            "writeToken(made, {id: 7, text, bytes});"
            "return [made.textContent, text === null ? '' : quoted(text)]; })"
        )
        for text, raw, shown, quoted in (
            ("a\u202eb", None, "aU+202Eb", '"a\\u{202e}b"'),
            ("\x1b[0m\x07", None, "\\x1b[0m\\x07", '"\\u{1b}[0m\\u{7}"'),
            ("x\n", None, "x\u21b5\n", '"x\\n"'),
            ("\u200b\u2066", None, "U+200BU+2066", '"\\u{200b}\\u{2066}"'),
            ("\u0301", None, "\u25cc\u0301", '"\u0301"'),
            ("👩\u200d👧", None, "👩\u200d👧", '"👩\\u{200d}👧"'),
            (None, "f09f", "f0 9f", ""),
            (None, None, "#7", ""),
            ("", None, "#7", '""'),
        ):
            assert await chromium.js(written, text, raw) == [shown, quoted]


async def test_long_branch_draws_only_what_is_near(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING, "--engine-context-length", "40000") as running:
        tokenizer = tokenizer_of(running)
        prompt = (tokenizer.encode("The harbour wakes at five.\n") * 6000)[:32_000]
        await say(running, "a", prompt, tokens=400)
        await opened(chromium, running, "a")
        (entry,) = await entries(running)
        drawn = "return document.querySelectorAll('#tokens .token').length"
        assert 0 < await chromium.js(drawn) < 8000
        await chromium.js("document.querySelector('#tokens .token').focus()")
        await chromium.press(END)
        await chromium.until("Number(document.activeElement.dataset.index) === arguments[0]", 31_999)
        await chromium.press(RIGHT)
        await chromium.until("Number(document.activeElement.dataset.index) === 32000")
        assert f"id {entry['output_ids'][0]}" in await chromium.text("#token-card")
        assert 0 < await chromium.js(drawn) < 8000
        loaded = await chromium.js(
            "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/tokens?')).length"
        )
        assert loaded < 8


async def test_unknown_session_is_told(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING) as running:
        await chromium.open(f"{running.url}/ui/trajectory?session=nope")
        await chromium.until_text("#problem", "nothing is kept of session 'nope'")
        await say(running, "yes", SYSTEM)
        await chromium.enter("#session", "yes")
        await chromium.until_text("#facts-title", "yes")
        assert not await chromium.js("return document.getElementById('problem').checkVisibility()")


async def test_missing_radix_cache_is_told(start: Start, chromium: Browser) -> None:
    async with start(*BARE, "--plugin", "dashboard") as running:
        await chromium.open(f"{running.url}/ui/trajectory?session=a")
        await chromium.until_text("#problem", "--plugin radix_cache")


async def test_overview_leads_to_a_session_behind_the_key(start: Start, chromium: Browser) -> None:
    async with start(*RECORDING, "--admin-api-key", "a-secret") as running:
        await say(running, "roll/1?x", SYSTEM)
        await chromium.open(f"{running.url}/ui")
        await chromium.until_text("#sign-in", "This router needs a key")
        await chromium.enter("#key", "a-secret")
        await chromium.until_text("#sessions", "roll/1?x")
        await chromium.click("#sessions a")
        await chromium.until_text("#facts-title", "roll/1?x")
        await chromium.until("document.querySelector('#tokens .token') !== null")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_trajectories_can_be_pictured(
    theme: str, start: Start, chromium: Browser, keep_picture: Callable[[str, bytes], None]
) -> None:
    recording = ("--plugin", "engine", "--engine-seed", "57", "--plugin", "radix_cache", "--plugin", "r3")
    async with start(*recording, "--engine-moe-layers", "2") as running:
        await branched(running, "rollout-17", SAILOR, tokens=40, temperature=0.9)
        await opened(chromium, running, "rollout-17", theme=theme)
        await chromium.until("document.querySelector('#tokens [aria-busy]') === null")
        if theme == "dark":
            await chromium.click("input[value=probability]")
            await chromium.click("#next-place")
            await chromium.until_text("#token-card", "Again")
        keep_picture(f"trajectory-{theme}", await chromium.screenshot())
        if theme == "light":
            await chromium.click("input[value=version]")
            await chromium.click("#places summary")
            keep_picture("trajectory-versions", await chromium.screenshot())
        assert await chromium.problems() == []

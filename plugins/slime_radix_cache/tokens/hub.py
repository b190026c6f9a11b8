"""Reachability of the Hugging Face Hub, within a deadline."""

from __future__ import annotations

import threading

import httpx

__all__ = ["hub_failure"]

_DEADLINE_S = 5.0


def hub_failure(deadline_s: float = _DEADLINE_S) -> str | None:
    """Return the reason why the Hub cannot be reached, in words; None if it answers.

    The Hub's own client would retry for minutes. Any HTTP answer counts, even an error.
    """
    from huggingface_hub import constants  # slow to import, and only needed for names on the Hub

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = constants.ENDPOINT
    failure: list[str | None] = [f"{url} did not answer within {deadline_s:g} s"]

    def ask() -> None:
        try:
            httpx.head(url, timeout=deadline_s)
        except httpx.TimeoutException:
            return
        except Exception as error:
            failure[0] = f"{url} cannot be reached: {error}"
        else:
            failure[0] = None

    # In a thread, since no timeout ends a DNS look-up. A daemon thread, so that the router can exit meanwhile.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(deadline_s)
    return failure[0]

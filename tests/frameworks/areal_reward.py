"""The reward of AReaL's rollouts, in a module of its own: AReaL calls it in another process."""

from __future__ import annotations

__all__ = ["RIGHT", "reward"]

RIGHT = "Stay at home ☔."


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: object
) -> float:
    """1.0 for the right answer. After 0.0 the workflow asks again."""
    return float(RIGHT in completion)

"""The trajectories against a model of plain lists, with the invariants of both trees after each step."""

from __future__ import annotations

from hypothesis import settings

from radix_cache.model import Model

Model.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestModel = Model.TestCase

"""Routed experts for rollout routing replay (R3): ask every worker for them, and leave the answer alone.

SGLang returns ``meta_info.routed_experts`` when a request says ``return_routed_experts`` and the server runs with
``--enable-return-routed-experts``. It is base64 of int32, ``[prompt + completion - 1, num_layers, top_k]``: 80 MB for
a 32k-token sample of a 60-layer, top-8 model. The reply is never parsed here nor encoded again: it passes as a stream,
byte for byte.
"""

from __future__ import annotations

import argparse

from router_core import BadRequest, Exchange, hookimpl
from router_core.router import Router

__all__ = ["R3", "make_plugin"]

_FIELD = "return_routed_experts"
_GENERATING = frozenset(("/generate", "/v1/chat/completions", "/v1/completions"))


def make_plugin(options: argparse.Namespace) -> R3:
    """The plugin; it has no flags."""
    return R3()


class R3:
    """Adds ``return_routed_experts: true`` to generation requests that do not speak of it themselves."""

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router
        self._pool = router.pool

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        request = exchange.request
        if self._pool.passthrough or request.method != "POST" or request.path not in _GENERATING:
            return
        try:
            if b'"return_routed_experts"' in request.body:
                payload = await self._router.read_json(exchange)
                if not isinstance(payload, dict) or _FIELD in payload:
                    return
            request.add_field(b'"return_routed_experts":true')
        except BadRequest:
            return  # the worker refuses it in its own words

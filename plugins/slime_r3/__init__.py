"""Routed experts for rollout routing replay (R3): requested from every worker, passed on unchanged.

SGLang returns ``meta_info.routed_experts`` if a request has ``return_routed_experts`` and the server runs with
``--enable-return-routed-experts``. It is base64 of int32, ``[prompt + completion - 1, num_layers, top_k]``.
That is 80 MB for a 32k-token sample of a 60-layer, top-8 model. So this plugin neither parses nor encodes the
reply, which is streamed byte for byte.
"""

from __future__ import annotations

import argparse

from router_core import BadRequest, Exchange, hookimpl
from router_core.router import Router

__all__ = ["R3", "make_plugin"]

_FIELD = "return_routed_experts"
_METHODS = ("POST", "PUT")  # SGLang accepts both for /generate
_GENERATING = frozenset(("/generate", "/v1/chat/completions", "/v1/completions"))


def make_plugin(options: argparse.Namespace) -> R3:
    """Return the plugin; it has no flags."""
    return R3()


class R3:
    """Plugin that adds ``return_routed_experts: true`` to generation requests without the field."""

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router
        self._pool = router.pool

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        request = exchange.request
        if self._pool.passthrough or request.method not in _METHODS or request.path not in _GENERATING:
            return
        try:
            if b'"return_routed_experts"' in request.body:
                payload = await self._router.read_json(exchange)
                if not isinstance(payload, dict) or _FIELD in payload:
                    return
            request.add_field(b'"return_routed_experts":true')
        except BadRequest:
            return  # the worker refuses the request itself

"""Asks engines for routed experts, with the field ``return_routed_experts``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_core import BadRequest, Exchange
from router_core.router import Router
from slime_r3.settings import ALWAYS, Settings
from slime_sglang.generation import generates

__all__ = ["FIELD", "Asking"]

FIELD = "return_routed_experts"
#: Paths of generations whose answers may have experts.
_GENERATING = frozenset(("/generate", "/v1/chat/completions", "/v1/completions"))
#: The name of the note that marks an exchange to which the router has added the field.
_NOTE = "r3"


class Asking:
    """Adds the field to generations, unless the client has set it or ``--r3-inject`` is ``when-asked``."""

    def __init__(self, settings: Settings, router: Router) -> None:
        self._injects = settings.inject == ALWAYS
        self._router = router

    async def inject(self, exchange: Exchange) -> None:
        """Add the field to a generation that lacks it. A body that is not a JSON object stays as it is."""
        request = exchange.request
        if not self._injects or self._router.pool.passthrough or _is_declined(exchange):
            return
        if request.path not in _GENERATING or not generates(request):
            return
        try:
            if b'"return_routed_experts"' in request.body:
                payload = await self._router.read_json(exchange)
                if not isinstance(payload, dict) or FIELD in payload:
                    return
            request.add_field(b'"return_routed_experts":true')
        except BadRequest:
            return  # the request passes unchanged: the worker refuses it
        exchange.notes[_NOTE] = True

    def is_own(self, exchange: Exchange, body: Mapping[str, Any]) -> bool:
        """Return True if the router, not the client, asks for experts in ``exchange``. ``body``: the request's JSON."""
        if FIELD not in body:
            return self._injects and not _is_declined(exchange)
        parent = exchange.parent
        return _NOTE in exchange.notes or (parent is not None and _NOTE in parent.notes)


def _is_declined(exchange: Exchange) -> bool:
    """Return True if ``exchange`` was made for another generation, its parent, to which the field was not added."""
    parent = exchange.parent
    return parent is not None and parent.request.path in _GENERATING and _NOTE not in parent.notes

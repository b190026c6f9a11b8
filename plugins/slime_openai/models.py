"""``/v1/models``: the models that the workers serve."""

from __future__ import annotations

import time
from typing import Any

from router_core.errors import HTTPError
from router_core.router import Router
from slime_openai.errors import InvalidRequest
from slime_openai.requests.options import Options
from slime_sglang.facts import model_id

__all__ = ["ModelNotFound", "Models"]


class ModelNotFound(HTTPError):
    """No worker serves a model of the requested name."""

    status, type, code = 404, "not_found_error", "model_not_found"


class Models:
    """The models of a router's workers, each once."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._created = int(time.time())

    def all(self) -> dict[str, Any]:
        """Return ``{"object": "list", "data": [...]}``."""
        return {"object": "list", "data": [self._described(name) for name in self._names()]}

    def one(self, name: str) -> dict[str, Any]:
        """Describe the model ``name``. Raises ModelNotFound."""
        if name not in self._names():
            raise ModelNotFound(f"The model '{name}' does not exist.")
        return self._described(name)

    def default(self) -> str:
        """Return the model of a request that names no model: the first known model, or "default"."""
        return next(iter(self._names()), "default")

    def engine_fields(self, request: Options) -> dict[str, Any]:
        """Return ``request.engine``, with the LoRA adapter that ``request.model`` names, if it names one.

        The form is ``MODEL:ADAPTER``, as in SGLang's OpenAIServingBase._parse_model_parameter. A name in this form
        names an adapter if a worker serves MODEL, and no worker serves a model with the whole name.

        Raises InvalidRequest when ``lora_path`` names another adapter.
        """
        adapter = self._adapter(request.model or "")
        if adapter is None:
            return request.engine
        if request.engine.get("lora_path", adapter) != adapter:
            raise InvalidRequest("lora_path", "'model' and 'lora_path' name different LoRA adapters.")
        return {**request.engine, "lora_path": adapter}

    def _adapter(self, model: str) -> str | None:
        names = self._names()
        if model in names:
            return None
        found = [model.removeprefix(f"{name}:").strip() for name in names if model.startswith(f"{name}:")]
        return min(found, key=len, default=None) or None  # the adapter of the longest matching model name

    def _names(self) -> dict[str, None]:
        """Return the names of the models, each once, in the order of the workers."""
        return {name: None for worker in self._router.pool if (name := model_id(worker)) is not None}

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "sglang", "root": name}

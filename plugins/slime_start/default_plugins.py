"""Names of the plugins that are loaded by default."""

from __future__ import annotations

__all__ = ["DEFAULT_PLUGINS"]

#: Loaded in this order, before the plugins of ``--plugin``, unless ``--no-default-plugins`` is given.
DEFAULT_PLUGINS = (
    "otel", "access_log", "auth", "dashboard", "openapi", "sglang", "health", "policies", "control", "retries",
    "models", "limits", "pd", "kubernetes", "sessions", "metrics",
)  # fmt: skip

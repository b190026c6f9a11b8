"""One model for all engines."""

from pd.conftest import checkpoint, model

__all__ = ["checkpoint", "model"]

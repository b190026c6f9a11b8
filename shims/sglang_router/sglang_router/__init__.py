"""The SGLang gateway's Python package, as far as trainers use it; what it starts is slime-router."""

__all__ = ["__version__"]

# The gateway's version that this stands for: miles asks for more than 0.2.1, slime's image for "slime" in it.
__version__ = "0.3.2+slime.router"

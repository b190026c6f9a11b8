"""The parts of the SGLang gateway's Python package that trainers use. It starts slime-router."""

__all__ = ["__version__"]

# The gateway's version that this replaces. miles wants a version above 0.2.1; slime's image wants "slime" in it.
__version__ = "0.3.2+slime.router"

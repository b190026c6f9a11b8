"""The parts of the SGLang gateway's Python package that trainers use. It starts slime-router."""

__all__ = ["__version__"]

# The gateway's version that this replaces: miles requires more than 0.2.1, slime's image "slime" in the version.
__version__ = "0.3.2+slime.router"

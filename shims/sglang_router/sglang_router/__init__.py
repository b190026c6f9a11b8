"""The parts of the SGLang gateway's Python package that trainers use. It starts slime-router."""

__all__ = ["__version__"]

# The version of the gateway that this package replaces. miles wants a version above 0.2.1, and slime's image wants
# "slime" in the version.
__version__ = "0.3.2+slime.router"

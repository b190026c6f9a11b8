"""The module from which verl imports two names of the gateway. It launches no server."""

from sglang_router.launch_router import RouterArgs, launch_router

__all__ = ["RouterArgs", "launch_router"]

"""verl takes the two from here; servers are SGLang's own to launch."""

from sglang_router.launch_router import RouterArgs, launch_router

__all__ = ["RouterArgs", "launch_router"]

"""Plans gets and puts over the tiers."""

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.engine.global_engine import GlobalCacheEngine
from slime_tiered_store.engine.plans import InFlight, Plan

__all__ = ["CacheEngine", "GlobalCacheEngine", "InFlight", "Plan"]

"""Prefill/decode disaggregation: a generation is given to two workers, of which one reads and the other writes."""

from slime_pd.plugin import Disaggregation, add_options, make_plugin
from slime_pd.settings import Settings

__all__ = ["Disaggregation", "Settings", "add_options", "make_plugin"]

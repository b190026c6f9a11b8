"""Prefill/decode disaggregation: a prefill and a decode worker share each generation."""

from slime_pd.plugin import Disaggregation, add_options, make_plugin
from slime_pd.settings import Settings

__all__ = ["Disaggregation", "Settings", "add_options", "make_plugin"]

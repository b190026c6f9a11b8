"""Several models behind one router: a request goes to workers of the model that it names."""

from slime_models.plugin import ModelNotFound, Models, add_options, make_plugin

__all__ = ["ModelNotFound", "Models", "add_options", "make_plugin"]

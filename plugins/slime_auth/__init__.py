"""Authentication and authorization: API keys, roles, OpenID Connect tokens, an audit log, allowed worker addresses."""

from slime_auth.plugin import Auth, add_options, make_plugin
from slime_auth.settings import Settings

__all__ = ["Auth", "Settings", "add_options", "make_plugin"]

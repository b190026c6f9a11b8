"""Who gets in: keys, roles, tokens of an OpenID provider, an audit log; and which servers may be workers."""

from slime_auth.plugin import Auth, add_options, make_plugin
from slime_auth.settings import Settings

__all__ = ["Auth", "Settings", "add_options", "make_plugin"]

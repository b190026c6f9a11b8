"""A router with no plugin but that which says who gets in."""

__all__ = ["BARE"]

#: Its flags.
BARE = ("--no-default-plugins", "--plugin", "auth")

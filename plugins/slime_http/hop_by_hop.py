"""Headers that are for one hop only: RFC 9110 section 7.6.1."""

from __future__ import annotations

__all__ = ["NOT_RETURNED", "NOT_SENT", "PLAIN_CONNECTION"]

#: Not passed to a worker. Proxy-* are for this hop only (section 11.7). The router writes its own Host and
#: Content-Length, and answers "Expect" itself. Names with an underscore are listed too, since CGI servers do not
#: distinguish an underscore from a hyphen.
NOT_SENT = frozenset(
    (
        b"connection", b"content-length", b"content_length", b"expect", b"host", b"keep-alive", b"proxy-authenticate",
        b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"transfer_encoding",
        b"upgrade",
    )
)  # fmt: skip
#: Not passed to a client.
NOT_RETURNED = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip
#: Values of Connection that name no other header.
PLAIN_CONNECTION = frozenset((b"close", b"keep-alive"))

"""Headers that are for one hop only: RFC 9110 section 7.6.1."""

from __future__ import annotations

__all__ = ["NOT_RETURNED", "NOT_SENT", "PLAIN_CONNECTION"]

#: Not sent to a worker. Proxy-* are for this hop only (section 11.7); Host and the length are written anew;
#: "100 Continue" was settled with the client. Names with an underscore are the same ones to a server that speaks CGI.
NOT_SENT = frozenset(
    (
        b"connection", b"content-length", b"content_length", b"expect", b"host", b"keep-alive", b"proxy-authenticate",
        b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"transfer_encoding",
        b"upgrade",
    )
)  # fmt: skip
#: Not returned to a client.
NOT_RETURNED = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip
#: Values of Connection that name no other header.
PLAIN_CONNECTION = frozenset((b"close", b"keep-alive"))

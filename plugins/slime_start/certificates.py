"""Certificates for connections to workers, and messages for certificates that cannot be used."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

__all__ = ["cause", "worker_context"]

_CAUSES = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "a file has no certificate in PEM form",
    "NO_START_LINE": "a file has no certificate, or no key, in PEM form",
}


def cause(error: OSError) -> str:
    """Return why a certificate, or its key, cannot be used, in plainer words than OpenSSL's."""
    if isinstance(error, ssl.SSLError):
        # For swapped files, and for files that are no PEM, OpenSSL says only "PEM lib".
        known = _CAUSES.get(error.reason or "")
        return known or f"a file has no certificate, or no key, in PEM form; are they swapped? ({error})"
    return str(error)


def worker_context(cas: Iterable[str], certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the system's CAs and those in the files ``cas``, and shows ``certificate``.

    Raises OSError.
    """
    context = ssl.create_default_context()
    for path in cas:
        context.load_verify_locations(path)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context

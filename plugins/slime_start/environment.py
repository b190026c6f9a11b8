"""Variables of the environment that look like flags, but belong to no flag."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

__all__ = ["unknown_variables"]

#: Kubernetes sets these in a pod for each service: https://kubernetes.io/docs/concepts/services-networking/service/
_SERVICE = re.compile(r".*_SERVICE_(HOST|PORT(_.+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def unknown_variables(environment: Mapping[str, str], prefix: str, known: Container[str]) -> list[str]:
    """Return the variables that begin with ``prefix`` and are not ``known``, except those that Kubernetes sets.

    A ``known`` variable spelt in lower case is a different variable, so it is returned, too.
    """
    return [
        name
        for name, value in sorted(environment.items())
        if name not in known
        and (name.startswith(prefix) or name.upper() in known)
        and not (_SERVICE.fullmatch(name) or _SERVICE_URL.match(value))
    ]

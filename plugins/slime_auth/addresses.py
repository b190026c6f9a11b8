"""Checks of workers' addresses: a router that connects anywhere would let callers into its network (SSRF).

A name is checked by the addresses that it resolves to: at registration and at each connect, since DNS records change.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from router_core.errors import BadRequest, SettingsError

__all__ = ["WorkerAddresses", "is_loopback"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_RESOLVE_S = 2.0
#: Reserved: "this network", link-local (cloud metadata endpoints), multicast, and other metadata addresses.
_REFUSED: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "::/128", "fe80::/10", "ff00::/8",
            "100.100.100.200/32",  # Alibaba
            "168.63.129.16/32",  # Azure
            "192.0.0.192/32",  # Oracle
            "fd00:ec2::/32",  # Amazon
            "fd20:ce::254/128",  # Google
            "64:ff9b:1::/48",  # local-use NAT64 (RFC 8215): hides any IPv4 address, in one of four places
        ),
    )
)  # fmt: skip
_REFUSED_NAMES = frozenset(("metadata.google.internal", "metadata.goog", "instance-data"))
#: Networks of IPv6 addresses whose last four bytes are an IPv4 address: mapped, and translated (RFC 6052, RFC 2765).
_CARRIERS = tuple(map(IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96", "::ffff:0:0:0/96")))

_PATTERN = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-f:./]+\]|[a-z0-9._*?/-]+?|[0-9a-f]*:[0-9a-f:./]+)(?::(?P<port>\d{1,5}))?"
)
_WILD = {"*": "[^.]*", "?": "[^.]"}


def _literal(host: str) -> Address | None:
    """Parse an address, also in notations of resolvers (2852039166, 0xa9fea9fe, 169.254.43518); None for a name."""
    with suppress(ValueError):
        return ip_address(host)
    with suppress(OSError):
        return IPv4Address(socket.inet_aton(host))
    return None


def is_loopback(host: str) -> bool:
    """Return True when ``host`` is reachable from this machine only: a loopback address, or the name ``localhost``."""
    address = _literal(host)
    return host == "localhost" if address is None else address.is_loopback


def _embedded_ipv4(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 ``address`` stands for, else ``address``."""
    if isinstance(address, IPv6Address):
        if address.sixtofour is not None:
            return address.sixtofour
        if any(address in network for network in _CARRIERS):
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_here(address: Address) -> bool:
    """Return True when this machine has ``address``."""
    with socket.socket(
        socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM
    ) as asking:
        try:
            asking.connect((str(address), 9))  # sends nothing: the kernel only picks the source address
        except OSError:
            return False
        return address.is_loopback or ip_address(asking.getsockname()[0]) == address


@dataclass(frozen=True, slots=True)
class _Target:
    """The parts of a worker URL; ``address`` is None for a name."""

    scheme: str
    host: str
    port: int
    address: Address | None

    @classmethod
    def of(cls, url: str) -> _Target:
        parts = urlsplit(url)
        host = parts.hostname or ""
        return cls(parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), _literal(host))


def _refusal(url: str, address: str, target: _Target) -> BadRequest:
    if target.address is not None and target.address.is_unspecified:
        return BadRequest(
            f"worker {url} is at {address}, an address to listen on, not to connect to: name an address at which the"
            f" router reaches the worker, or add {target.host} to --allow-worker"
        )
    return BadRequest(
        f"worker {url} is at {address}, a link-local, multicast, cloud metadata or other reserved address;"
        f" to allow it, add {target.host} to --allow-worker"
    )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One value of ``--allow-worker``: a ``network``, a ``name``, or neither (any host).

    ``exact``: the name, if it has no wildcard.
    """

    scheme: str | None
    port: int | None
    network: Network | None
    name: re.Pattern[str] | None
    exact: str | None

    @classmethod
    def parse(cls, text: str) -> _Pattern:
        """Parse ``text``. Raises SettingsError."""
        wrong = SettingsError(
            f"--allow-worker: wanted [scheme://]host[:port], where host is a name (with * and ?), an address"
            f" or a network such as 10.0.0.0/8, got {text!r}"
        )
        found = _PATTERN.fullmatch(text.lower())
        if found is None:
            raise wrong
        host = found["host"]
        port = int(found["port"]) if found["port"] else None
        if port is not None and not 0 < port < 65536:
            raise wrong
        network = name = exact = None
        address = _literal(host)
        if address is not None or "/" in host or host.startswith("[") or ":" in host:
            try:
                network = ip_network(address if address is not None else host.strip("[]"))
            except ValueError:
                raise wrong from None
        elif host != "*":
            if re.fullmatch(r"[0-9.*?]+", host):  # 10.0.* would match the name 10.0.evil
                raise wrong
            name = re.compile("".join(_WILD.get(letter, re.escape(letter)) for letter in host))
            exact = host if not set(host) & set(_WILD) else None
        return cls(found["scheme"], port, network, name, exact)

    def matches(self, target: _Target) -> bool:
        """Return True when the pattern covers ``target``."""
        if not self._fits(target):
            return False
        if self.network is not None:
            return target.address is not None and target.address in self.network
        if self.name is not None:
            return target.address is None and self.name.fullmatch(target.host) is not None
        return True

    def explicitly_allows(self, target: _Target, address: Address | None) -> bool:
        """Return True when the pattern allows ``target`` at a reserved ``address``.

        Only an exact name, or a network that lies within a reserved network, allows a reserved address.
        """
        if not self._fits(target):
            return False
        if self.exact is not None:
            return self.exact == target.host
        if self.network is None or address is None or address not in self.network:
            return False
        mine = self.network
        return any(mine.version == other.version and mine.subnet_of(other) for other in _REFUSED)  # type: ignore[arg-type]  # of one version

    def _fits(self, target: _Target) -> bool:
        return self.scheme in (None, target.scheme) and self.port in (None, target.port)


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """The addresses that workers may have: those of ``patterns``, or without patterns all that are not reserved.

    Only an explicit pattern allows a reserved address. ``own``: host and port at which the router itself listens.
    """

    patterns: tuple[_Pattern, ...] = ()
    own: tuple[str, int] | None = None

    @classmethod
    def parse(cls, patterns: Iterable[str], own: tuple[str, int] | None = None) -> WorkerAddresses:
        """Parse the values of ``--allow-worker``. Raises SettingsError."""
        return cls(tuple(map(_Pattern.parse, patterns)), own)

    def check(self, url: str) -> None:
        """Check ``url`` without resolving its name. Raises BadRequest when no worker may be there."""
        target = _Target.of(url)
        if self.patterns and not any(pattern.matches(target) for pattern in self.patterns):
            raise BadRequest(f"worker {url} is not among the workers that --allow-worker names")
        if not self._tolerates(target, target.address):
            raise _refusal(url, target.host, target)
        self._check_own(url, target.port, target.address)

    def _check_own(self, url: str, port: int, address: Address | None) -> None:
        """Raise BadRequest for the router's own address: the router would forward requests to itself in a loop."""
        if self.own is None or self.own[1] != port or address is None:
            return
        listens = _literal(self.own[0])
        if address == listens or (listens is not None and listens.is_unspecified and _is_here(address)):
            raise BadRequest(f"worker {url} is this router itself")

    async def admit(self, url: str) -> None:
        """Check ``url``, and the addresses to which its name resolves. A name that does not resolve yet is admitted.

        Raises BadRequest.
        """
        self.check(url)
        target = _Target.of(url)
        if target.address is not None:
            return
        try:
            async with asyncio.timeout(_RESOLVE_S):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            return
        for *_, at in found:
            if not self.reachable(url, str(at[0])):
                raise _refusal(url, str(at[0]), target)
            self._check_own(url, target.port, ip_address(str(at[0])))

    def reachable(self, url: str, address: str) -> bool:
        """Return True when ``url`` may be at ``address``, the peer address of a connection to ``url``."""
        return self._tolerates(_Target.of(url), ip_address(address))

    def _tolerates(self, target: _Target, address: Address | None) -> bool:
        if address is None:
            refused = target.host in _REFUSED_NAMES
        else:
            address = _embedded_ipv4(address)
            refused = any(address in network for network in _REFUSED)
        return not refused or any(pattern.explicitly_allows(target, address) for pattern in self.patterns)

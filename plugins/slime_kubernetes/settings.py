"""The flags of service discovery, spelt as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router_core import SettingsError
from router_core.flags import flag, read_flags
from router_core.workers import WorkerType

__all__ = ["Settings"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9./_-]*)=([A-Za-z0-9._-]*)")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Labels = Mapping[str, str]


class _Labelled(argparse.Action):
    """Parses ``key=value ...`` into a dict, which is empty without the flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options | {"default": {}})

    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option: Any = None,
    ) -> None:
        labels = {}
        for word in " ".join(values or ()).split():  # in quotes, all labels are one argument
            found = _LABEL.fullmatch(word)
            if found is None:
                raise argparse.ArgumentError(self, f"wanted key=value, got {word!r}")
            labels[found[1]] = found[2]
        setattr(namespace, self.dest, labels)


_SELECTOR: dict[str, Any] = {"nargs": "+", "action": _Labelled, "metavar": "KEY=VALUE"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of service discovery. ``server``: the URL of the API.

    ``pairs``: all workers are prefill or decode workers. ``namespace`` None: all namespaces. ``account``: the directory
    with the token and the CA.
    """

    server: str
    pairs: bool = False
    enabled: bool = flag(
        "--service-discovery", default=False, help="register the pods that --selector matches as workers"
    )
    selector: Labels | None = flag(
        "--selector", **_SELECTOR, help="labels of worker pods; a pod must have all of them"
    )
    prefill_selector: Labels | None = flag(
        "--prefill-selector", **_SELECTOR,
        help="with --pd-disaggregation: labels of the prefill workers' pods",
    )  # fmt: skip
    decode_selector: Labels | None = flag(
        "--decode-selector", **_SELECTOR,
        help="with --pd-disaggregation: labels of the decode workers' pods",
    )  # fmt: skip
    port: int = flag(
        "--service-discovery-port", default=80, at_least=1, at_most=65535, metavar="PORT",
        help="port at which the discovered pods listen",
    )  # fmt: skip
    namespace: str | None = flag(
        "--service-discovery-namespace", metavar="NAME",
        help="namespace of the pods (default: all namespaces)",
    )  # fmt: skip
    account: Path = flag(
        "--service-account-dir", default=_ACCOUNT, type=Path, metavar="DIR",
        help="directory with the token and the ca.crt for the Kubernetes API",
    )  # fmt: skip

    @property
    def selectors(self) -> Mapping[WorkerType, Labels]:
        """The labels of the pods of each kind of worker. A pod that fits two kinds is of the first."""
        given: dict[WorkerType, Labels | None] = {"regular": self.selector}
        if self.pairs:
            given = {"prefill": self.prefill_selector, "decode": self.decode_selector}
        return {kind: labels for kind, labels in given.items() if labels}

    @classmethod
    def from_options(cls, options: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
        """Check a parsed command line that has ``--service-discovery``. Raises SettingsError."""
        pairs = bool(vars(options).get("pd_disaggregation"))  # the flag of another plugin
        settings = read_flags(cls, options, server="", pairs=pairs)
        if not settings.selectors:
            names = "--prefill-selector or --decode-selector" if pairs else "--selector"
            raise SettingsError(
                f"--service-discovery: wanted the labels of worker pods, by {names} key=value ..."
            )
        namespace = settings.namespace
        if namespace is not None and not _NAMESPACE.fullmatch(namespace):
            raise SettingsError(f"--service-discovery-namespace: wanted a DNS label, got {namespace!r}")
        for name in ("token", "ca.crt"):
            if not (settings.account / name).is_file():
                raise SettingsError(
                    f"--service-discovery: no {settings.account / name}: run in a pod with"
                    " automountServiceAccountToken, or give --service-account-dir"
                )
        return replace(settings, server=_server(environment))


def _server(environment: Mapping[str, str]) -> str:
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise SettingsError(
            "--service-discovery: wanted the address of the API in KUBERNETES_SERVICE_HOST and"
            " KUBERNETES_SERVICE_PORT, which Kubernetes sets in every pod"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

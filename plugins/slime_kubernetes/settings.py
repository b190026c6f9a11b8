"""The flags of service discovery, spelt as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_core import SettingsError, hookimpl
from router_core.workers import WorkerType

__all__ = ["Settings", "add_options"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9./_-]*)=([A-Za-z0-9._-]*)")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """``selectors``: for each kind of worker, the labels that its pods have. A pod that fits two is of the first kind.

    ``server``: the URL of the API. ``port``: the port at which the pods listen. ``namespace`` None: all namespaces.
    ``account``: the directory with the token and the CA.
    """

    selectors: Mapping[WorkerType, Labels]
    server: str
    port: int = 80
    namespace: str | None = None
    account: Path = _ACCOUNT

    @classmethod
    def from_options(cls, options: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
        """Check a parsed command line that has ``--service-discovery``. Raises SettingsError."""
        given: dict[WorkerType, Labels] = {"regular": options.selector}
        flags = "--selector"
        if vars(options).get("pd_disaggregation"):  # the flag of another plugin
            given = {"prefill": options.prefill_selector, "decode": options.decode_selector}
            flags = "--prefill-selector or --decode-selector"
        selectors = {kind: labels for kind, labels in given.items() if labels}
        if not selectors:
            raise SettingsError(
                f"--service-discovery: wanted the labels of worker pods, by {flags} key=value ..."
            )
        if not 0 < options.service_discovery_port < 65536:
            raise SettingsError(
                f"--service-discovery-port: wanted 1 to 65535, got {options.service_discovery_port}"
            )
        namespace = options.service_discovery_namespace
        if namespace is not None and not _NAMESPACE.fullmatch(namespace):
            raise SettingsError(f"--service-discovery-namespace: wanted a DNS label, got {namespace!r}")
        account = options.service_account_dir
        for name in ("token", "ca.crt"):
            if not (account / name).is_file():
                raise SettingsError(
                    f"--service-discovery: no {account / name}: run in a pod with automountServiceAccountToken,"
                    " or give --service-account-dir"
                )
        return cls(selectors, _server(environment), options.service_discovery_port, namespace, account)


def _server(environment: Mapping[str, str]) -> str:
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise SettingsError(
            "--service-discovery: wanted the address of the API in KUBERNETES_SERVICE_HOST and"
            " KUBERNETES_SERVICE_PORT, which Kubernetes sets in every pod"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class _Labelled(argparse.Action):
    """Parses ``key=value ...`` into a dict."""

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


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--service-discovery", action="store_true",
        help="register the pods that --selector matches as workers",
    )  # fmt: skip
    parser.add_argument(
        "--selector", nargs="+", action=_Labelled, default={}, metavar="KEY=VALUE",
        help="labels of worker pods; a pod must have all of them",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-selector", nargs="+", action=_Labelled, default={}, metavar="KEY=VALUE",
        help="with --pd-disaggregation: labels of the prefill workers' pods",
    )  # fmt: skip
    parser.add_argument(
        "--decode-selector", nargs="+", action=_Labelled, default={}, metavar="KEY=VALUE",
        help="with --pd-disaggregation: labels of the decode workers' pods",
    )  # fmt: skip
    parser.add_argument(
        "--service-discovery-port", type=int, default=80, metavar="PORT",
        help="port at which the discovered pods listen (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--service-discovery-namespace", metavar="NAME",
        help="namespace of the pods (default: all namespaces)",
    )  # fmt: skip
    parser.add_argument(
        "--service-account-dir", type=Path, default=_ACCOUNT, metavar="DIR",
        help="directory with the token and the ca.crt for the Kubernetes API (default: %(default)s)",
    )  # fmt: skip

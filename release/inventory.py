"""The software bill of materials (SBOM): what an installed router is made of, in the CycloneDX format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distributions import ReleaseError, run

__all__ = ["EXTRAS", "Vendored", "completed", "sbom_faults", "unnamed", "vendored", "write_sbom"]

#: The extras in the SBOM. Those with torch are left out: their packages depend on the machine's accelerator.
EXTRAS = ("grammar", "jwt", "otel")
_NAMED = re.compile(r"^(?P<name>\S+) (?P<version>[^\s:]+): .*npm package (?P<package>\S+) ")


class Vendored(NamedTuple):
    """A third-party library in a plugin. ``NAME.VERSION`` and ``NAME.LICENSE`` are beside the files of the library."""

    name: str
    version: str
    package: str


def vendored(root: Path) -> list[Vendored]:
    """Return the vendored libraries of the plugins in ``root``.

    Raises ReleaseError if ``NAME.VERSION`` has another form, or if ``NAME.LICENSE`` is not the MIT License.
    """
    found = []
    for path in sorted((root / "plugins").rglob("*.VERSION")):
        told = _NAMED.match(path.read_text())
        if told is None:
            raise ReleaseError(f"{path}: wanted 'NAME VERSION: FILES, from the npm package PACKAGE (URL)'")
        license_file = path.with_suffix(".LICENSE")
        if not license_file.is_file() or "MIT License" not in license_file.read_text():
            raise ReleaseError(f"{license_file}: wanted the MIT License, which NOTICE and the SBOM name")
        found.append(Vendored(told["name"], told["version"], told["package"]))
    return found


def unnamed(root: Path, libraries: Sequence[Vendored]) -> list[str]:
    """Return the minified files that belong to no vendored library, and the libraries that NOTICE does not name."""
    names = {each.name for each in libraries}
    files = sorted((root / "plugins").rglob("*.min.*"))
    notice = (root / "NOTICE").read_text()
    told = [f"{each.name} {each.version}" for each in libraries]
    return [
        *(f"{path.name}: no vendored library" for path in files if path.name.partition(".")[0] not in names),
        *(f"NOTICE does not name {each}" for each in told if each not in notice),
    ]


def write_sbom(python: Path, root: Path, into: Path, epoch: str) -> int:
    """Write the SBOM of the environment of ``python``, where the router is installed; return the number of components.

    Raises ReleaseError if the SBOM is not valid, lacks a component, or has a file URL.
    """
    run(
        "cyclonedx-py", "environment", python, "--pyproject", root / "pyproject.toml", "--short-PURLs",
        "--output-reproducible", "--no-validate", "--sv", "1.6", "-o", into,
        environment={"SOURCE_DATE_EPOCH": epoch},
    )  # fmt: skip
    libraries = vendored(root)
    document = completed(json.loads(into.read_text()), libraries)
    if faults := sbom_faults(
        document, [*_installed(python), *((each.name, each.version) for each in libraries)]
    ):
        raise ReleaseError("\n".join(faults))
    into.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    return len(document["components"])


def _installed(python: Path) -> list[tuple[str, str]]:
    """Return name and version of each distribution in the environment except the router."""
    script = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions()), sep='\\n')"
    lines = run(python, "-c", script).splitlines()
    return [
        (name, version)
        for name, _, version in (line.partition(" ") for line in lines)
        if name != "slime-router"
    ]


def completed(document: dict[str, Any], libraries: Sequence[Vendored]) -> dict[str, Any]:
    """Return the SBOM ``document`` with the vendored ``libraries``, and without file URLs of this machine."""
    main = document["metadata"]["component"]
    added: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": f"vendored:{each.package}",
            "name": each.name,
            "version": each.version,
            "purl": f"pkg:npm/{each.package}@{each.version}",
            "licenses": [{"license": {"id": "MIT", "acknowledgement": "declared"}}],
            "description": "vendored: its files are part of the wheel",
        }
        for each in libraries
    ]
    own = [each for each in document["components"] if each["name"] == main["name"]]
    others = [each for each in document["components"] if each not in own]
    # The installed router is the main component: references to its entry become references to the main component.
    same = {each["bom-ref"]: main["bom-ref"] for each in own}
    depends: dict[str, set[str]] = {main["bom-ref"]: {each["bom-ref"] for each in added}}
    for entry in document["dependencies"]:
        reference = same.get(entry["ref"], entry["ref"])
        wanted = {same.get(each, each) for each in entry.get("dependsOn", [])} - {reference}
        depends.setdefault(reference, set()).update(wanted)
    for each in added:
        depends[each["bom-ref"]] = set()
    components = [_without_files(each) for each in [*others, *added]]
    dependencies = [
        {"ref": reference, **({"dependsOn": sorted(wanted)} if wanted else {})}
        for reference, wanted in sorted(depends.items())
    ]
    return {**document, "components": components, "dependencies": dependencies}


def _without_files(component: dict[str, Any]) -> dict[str, Any]:
    references = component.get("externalReferences", [])
    kept = [each for each in references if not each["url"].startswith("file:")]
    rest = {key: value for key, value in component.items() if key != "externalReferences"}
    return {**rest, "externalReferences": kept} if kept else rest


def sbom_faults(document: dict[str, Any], wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Return what is wrong with an SBOM: faults by CycloneDX's schema, missing ``wanted`` components, and file URLs."""
    # Imported here: only the environment of a release has cyclonedx.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = json.dumps(document)
    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    faults = [] if found is None else [f"not CycloneDX 1.6: {found}"]
    told = {(each["name"], each["version"]) for each in document["components"]}
    faults += [f"{name} {version} is missing" for name, version in wanted if (name, version) not in told]
    if "file:" in text:
        faults.append("an address of this machine is in it")
    return faults

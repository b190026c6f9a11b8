"""Faults of a release: contents, metadata, history, vendored files and the bill of materials."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from compiled import compiled_faults, earlier_wheels, hot_modules
from contents import metadata_faults, sdist_faults, source_names, wheel_faults
from distributions import ReleaseError, build_alike, checksums, differences, run
from history import changelog_faults
from inventory import Vendored, completed, unnamed, vendored
from versions import set_version, version_faults
from wheels import ROOT

SOURCES = {
    "router_core/__init__.py", "router_core/py.typed", "slime_a/__init__.py", "slime_a/py.typed",
    "slime_openapi/__init__.py", "slime_openapi/py.typed", "slime_openapi/openapi.yaml",
}  # fmt: skip
WHEEL = {*SOURCES, "slime_router-1.0.dist-info/METADATA", "slime_router-1.0.dist-info/licenses/LICENSE"}
SDIST = {
    "router_core/__init__.py", "router_core/py.typed", "plugins/slime_a/__init__.py", "plugins/slime_a/py.typed",
    "plugins/slime_openapi/__init__.py", "plugins/slime_openapi/py.typed", "docs/openapi.yaml",
    ".gitignore", "CHANGELOG.md", "LICENSE", "NOTICE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml",
}  # fmt: skip
UPLOT = Vendored("uPlot", "1.6.32", "uplot")


def test_whole_distributions_have_no_fault() -> None:
    assert wheel_faults(WHEEL, SOURCES) == []
    assert sdist_faults(SDIST, SOURCES) == []


@pytest.mark.parametrize(
    ("left_out", "added", "fault"),
    [
        ("slime_a/__init__.py", None, "slime_a/__init__.py: missing"),
        (None, "tests/test_a.py", "tests/test_a.py: a test"),
        (None, "slime_a/notes.orig", "slime_a/notes.orig: a stray file"),
        (None, "plugins/slime_a/__init__.py", "plugins/slime_a/__init__.py: not a file of the sources"),
    ],
)
def test_a_fault_of_the_wheel_is_told(left_out: str | None, added: str | None, fault: str) -> None:
    names = {name for name in [*WHEEL, added] if name is not None and name != left_out}
    assert fault in wheel_faults(names, SOURCES)


def test_a_package_without_py_typed_is_told() -> None:
    sources = SOURCES - {"slime_a/py.typed"}
    assert wheel_faults(WHEEL - {"slime_a/py.typed"}, sources) == ["slime_a/py.typed: missing"]


@pytest.mark.parametrize(
    ("left_out", "added", "fault"),
    [
        ("NOTICE", None, "NOTICE: missing"),
        ("plugins/slime_a/py.typed", None, "plugins/slime_a/py.typed: missing"),
        (None, "tox.ini", "tox.ini: not needed to build"),
        (None, "plugins/slime_a/tests/test_a.py", "plugins/slime_a/tests/test_a.py: a test"),
    ],
)
def test_a_fault_of_the_sdist_is_told(left_out: str | None, added: str | None, fault: str) -> None:
    names = {name for name in [*SDIST, added] if name is not None and name != left_out}
    assert fault in sdist_faults(names, SOURCES)


def test_the_sources_are_named_as_in_a_wheel() -> None:
    names = source_names(ROOT)
    assert {"router_core/cli.py", "slime_auth/py.typed", "slime_openapi/openapi.yaml"} <= names


def distributions(directory: Path, version: str, licenses: list[str]) -> tuple[Path, Path]:
    """A wheel of version 1.0 and an sdist of ``version``, with nothing but metadata."""
    told = "".join(f"License-File: {name}\n" for name in licenses)
    wheel, sdist = directory / "a-1.0-py3-none-any.whl", directory / f"a-{version}.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.0.dist-info/METADATA", f"Version: 1.0\n{told}\n")
        for name in licenses:
            archive.writestr(f"a-1.0.dist-info/licenses/{name}", "...")
    with tarfile.open(sdist, "w:gz") as packed:
        content = f"Version: {version}\n{told}\n".encode()
        member = tarfile.TarInfo(f"a-{version}/PKG-INFO")
        member.size = len(content)
        packed.addfile(member, io.BytesIO(content))
    return wheel, sdist


def test_another_version_and_a_missing_license_are_told(tmp_path: Path) -> None:
    wheel, sdist = distributions(tmp_path, "1.0", ["LICENSE"])
    assert metadata_faults(wheel, sdist, "1.0", ["LICENSE"]) == []
    wheel, sdist = distributions(tmp_path, "1.1", ["LICENSE"])
    assert metadata_faults(wheel, sdist, "1.0", ["LICENSE", "NOTICE"]) == [
        "wheel: License-File NOTICE is missing",
        "sdist: version 1.1, wanted 1.0 of pyproject.toml",
        "sdist: License-File NOTICE is missing",
        "wheel: a-1.0.dist-info/licenses/NOTICE is missing",
    ]


def test_a_tagged_commit_needs_its_section_and_no_fragments() -> None:
    whole = "# Changelog\n\n## 1.2.0 (2026-01-31)\n"
    assert changelog_faults("1.2.0", ["v1.2.0", "other"], whole, []) == []
    assert changelog_faults("1.2.0", [], "", ["a.fixed.md"]) == []
    assert changelog_faults("1.2.0", ["v1.3.0"], "", ["a.fixed.md"]) == [
        "the tag v1.3.0 is not of version 1.2.0",
        "changelog.d/a.fixed.md is not in CHANGELOG.md yet: run towncrier build",
        "CHANGELOG.md has no section of 1.2.0",
    ]


def test_a_new_version_is_written_wherever_the_version_is(tmp_path: Path) -> None:
    old = version("slime-router")
    assert version_faults(ROOT, old) == []
    places = (
        "pyproject.toml",
        "docs/deploy/kubernetes.md",
        "docs/openapi.yaml",
        "deploy/Dockerfile",
        "deploy/kubernetes/kustomization.yaml",
    )
    for name in (*places, "deploy/helm/slime-router/Chart.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    set_version(tmp_path, "12.3.4rc1")
    assert version_faults(tmp_path, "12.3.4rc1") == []
    assert len(version_faults(tmp_path, old)) == 7
    assert old not in (tmp_path / "docs/openapi.yaml").read_text()


def test_files_that_differ_in_a_byte_are_found_and_sums_are_written(tmp_path: Path) -> None:
    files = {}
    for folder, content in (("one", b"a"), ("two", b"a"), ("three", b"b")):
        (tmp_path / folder).mkdir()
        files[folder] = tmp_path / folder / "wheel"
        files[folder].write_bytes(content)
    assert differences([files["one"]], [files["two"]]) == []
    assert differences([files["one"]], [files["three"]]) == ["wheel"]
    for file in (files["one"], tmp_path / "wheel"):  # the second is there already
        sums = checksums([file], tmp_path)
        assert "wheel: OK" in run("sha256sum", "--check", sums.name, cwd=tmp_path)


def zipped(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


PLAIN = {"router_core/a.py": "1", "slime_b/c.py": "2", "slime_router-1.0.dist-info/WHEEL": "py3-none-any"}
COMPILED = PLAIN | {
    "router_core/": "",
    "router_core/a.cpython-311-x86_64-linux-gnu.so": "",
    "x__mypyc.cpython-311-x86_64-linux-gnu.so": "",
    "slime_router-1.0.dist-info/WHEEL": "cp311-cp311",
}


@pytest.mark.parametrize(
    ("files", "faults"),
    [
        (COMPILED, []),
        (PLAIN, ["router_core/a.py: not compiled"]),
        (COMPILED | {"slime_b/c.py": "3"}, ["slime_b/c.py: not as in slime_router-1.0-py3-none-any.whl"]),
        (COMPILED | {"slime_b/d.py": ""}, ["slime_b/d.py: a stray file"]),
        ({name: COMPILED[name] for name in COMPILED if name != "slime_b/c.py"}, ["slime_b/c.py: missing"]),
    ],
)
def test_compiled_wheel_is_the_other_wheel_with_compiled_modules(
    tmp_path: Path, files: dict[str, str], faults: list[str]
) -> None:
    plain = zipped(tmp_path / "slime_router-1.0-py3-none-any.whl", PLAIN)
    wheel = zipped(tmp_path / "slime_router-1.0-cp311-cp311-manylinux_2_34_x86_64.whl", files)
    zipped(tmp_path / "slime_router-0.9-cp311-cp311-manylinux_2_34_x86_64.whl", files)
    assert compiled_faults(wheel, plain, ["router_core/a.py"]) == faults
    assert earlier_wheels(tmp_path, plain, ["router_core/a.py"]) == ([] if faults else [wheel])


def test_compiled_modules_are_files_of_the_wheel() -> None:
    assert set(hot_modules(ROOT)) <= source_names(ROOT)


def test_uncommitted_changes_are_refused(tmp_path: Path) -> None:
    run("git", "init", "-q", cwd=tmp_path)
    (tmp_path / "a").write_text("1")
    run("git", "add", "a", cwd=tmp_path)
    with pytest.raises(ReleaseError, match="without uncommitted changes"):
        build_alike(tmp_path, tmp_path / "work")


def test_vendored_libraries_are_known_and_named_in_the_notice() -> None:
    assert vendored(ROOT) == [UPLOT]
    assert unnamed(ROOT, [UPLOT]) == []
    assert "NOTICE does not name uPlot 9.9" in unnamed(ROOT, [Vendored("uPlot", "9.9", "uplot")])
    assert "uPlot.min.css: no vendored library" in unnamed(ROOT, [])


def test_vendored_library_without_its_license_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "slime_a"
    folder.mkdir(parents=True)
    (folder / "b.VERSION").write_text("b 1.0: b.js, from the npm package b (https://example.org)")
    with pytest.raises(ReleaseError, match="wanted the MIT License"):
        vendored(tmp_path)


def test_the_sbom_names_vendored_libraries_and_no_file_of_this_machine() -> None:
    files = [{"type": "distribution", "url": "file:///tmp/a.whl"}, {"type": "website", "url": "https://a"}]
    document: dict[str, Any] = {
        "metadata": {"component": {"name": "slime-router", "bom-ref": "root"}},
        "components": [
            {"name": "slime-router", "version": "1.0", "bom-ref": "installed"},
            {"name": "a", "version": "2.0", "bom-ref": "a", "externalReferences": files},
        ],
        "dependencies": [{"ref": "root"}, {"ref": "installed", "dependsOn": ["a"]}, {"ref": "a"}],
    }
    whole = completed(document, [UPLOT])
    named = [(each["name"], each["version"]) for each in whole["components"]]
    assert named == [("a", "2.0"), ("uPlot", "1.6.32")]
    assert whole["components"][0]["externalReferences"] == files[1:]
    assert whole["components"][1]["purl"] == "pkg:npm/uplot@1.6.32"
    assert {"ref": "root", "dependsOn": ["a", "vendored:uplot"]} in whole["dependencies"]

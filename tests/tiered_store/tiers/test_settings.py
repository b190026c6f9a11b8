"""The flags of the tiers."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from router_core.errors import SettingsError, StartupError
from router_core.flags import add_flags, read_flags
from slime_tiered_store.tiers.settings import TierSettings, open_tiers

pytestmark = pytest.mark.anyio


def settings_of(*arguments: str) -> TierSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser, TierSettings)
    return read_flags(TierSettings, parser.parse_args(arguments))


async def test_memory_is_the_only_tier_by_default() -> None:
    tiers = await open_tiers(settings_of(), 1000)
    assert tiers.memory.capacity == (1 << 30) // 1000
    assert (tiers.ssd, tiers.remote) == (None, None)
    await tiers.aclose()


async def test_flags_open_all_tiers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "remote")]
    paths[2].mkdir()
    flags = [
        "--store-memory-bytes",
        "5000",
        "--store-ssd",
        f"{paths[0]},{paths[1]}",
        "--store-ssd-bytes",
        "999999",
    ]
    flags += ["--store-remote", paths[2].as_uri(), "--store-remote-bytes", "300000"]
    tiers = await open_tiers(settings_of(*flags), 1000)
    assert tiers.memory.capacity == 5
    assert tiers.ssd is not None
    assert tiers.remote is not None
    assert tiers.remote.capacity == 281  # with the headers
    assert tiers.ssd.capacity < 281
    used = sum(file.stat().st_size for path in paths[:2] for file in path.iterdir())
    assert 999_999 - 2 * 4300 < used <= 999_999 + 300  # store.json counts extra
    await tiers.aclose()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--store-ssd", "DIR"], "--store-ssd and --store-ssd-bytes: wanted both or none"),
        (["--store-ssd-bytes", "1000000"], "--store-ssd and --store-ssd-bytes: wanted both or none"),
        (
            ["--store-ssd", "DIR,", "--store-ssd-bytes", "1000000"],
            r"--store-ssd: wanted DIR\[,DIR\], got '.*,'",
        ),
        (
            ["--store-memory-bytes", "999"],
            "--store-memory-bytes: wanted at least 1000 bytes, the size of a block, got 999",
        ),
        (["--store-memory-bytes", str(1 << 62)], "--store-memory-bytes: the system does not give 46116860"),
        (
            ["--store-remote", "file:///", "--store-remote-bytes", "999"],
            "--store-remote-bytes: wanted at least 1064 bytes, the size of a block, got 999",
        ),
        (
            ["--store-ssd", "DIR", "--store-ssd-bytes", "5000"],
            "--store-ssd-bytes: a directory needs at least",
        ),
        (
            ["--store-ssd", "DIR", "--store-ssd-bytes", "100000", "--store-remote", "ftp://x"],
            "--store-remote: wanted",
        ),
    ],
)
async def test_a_mistake_in_the_flags_is_told_and_leaves_nothing_open(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    flags = [each.replace("DIR", str(tmp_path / "a")) if each.startswith("DIR") else each for each in flags]
    for _ in range(2):
        with pytest.raises(StartupError, match=message):
            await open_tiers(settings_of(*flags), 1000)


async def test_remote_tier_must_have_more_blocks_than_the_ssd(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    ssd = ["--store-ssd", str(tmp_path / "new"), "--store-ssd-bytes", "999999"]
    flags = [*ssd, "--store-remote", (tmp_path / "remote").as_uri(), "--store-remote-bytes"]
    with pytest.raises(SettingsError, match="--store-remote-bytes 5000: wanted at least") as error:
        await open_tiers(settings_of(*flags, "5000"), 1000)
    assert not (tmp_path / "new").exists(), "a smaller SSD can be given the same directory"
    wanted = int(str(error.value).split()[5])
    with pytest.raises(SettingsError, match=f"wanted at least {wanted} bytes"):
        await open_tiers(settings_of(*flags, str(wanted - 1)), 1000)
    tiers = await open_tiers(settings_of(*flags, str(wanted)), 1000)
    assert tiers.ssd is not None
    assert tiers.remote is not None
    assert tiers.remote.capacity == tiers.ssd.capacity + 1
    await tiers.aclose()
    with pytest.raises(SettingsError, match=f"wanted at least {wanted} bytes"):  # files keep their size
        await open_tiers(settings_of(*ssd[:3], "99999", *flags[4:], str(wanted - 1)), 1000)


async def test_remote_tier_has_twice_the_blocks_of_a_large_ssd_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    flags = ["--store-remote", (tmp_path / "remote").as_uri()]
    monkeypatch.setattr("slime_tiered_store.tiers.settings._REMOTE_BYTES", 10_000)
    tiers = await open_tiers(settings_of(*flags), 1000)
    assert tiers.remote is not None
    assert tiers.remote.capacity == 9
    await tiers.aclose()
    ssd = ["--store-ssd", str(tmp_path / "disk"), "--store-ssd-bytes"]
    for size in ("999999", "99999"):  # files keep their size
        tiers = await open_tiers(settings_of(*flags, *ssd, size), 1000)
        assert tiers.ssd is not None
        assert tiers.remote is not None
        assert tiers.remote.capacity == 2 * tiers.ssd.capacity > 400
        await tiers.aclose()


def test_numbers_have_limits() -> None:
    for flag in (
        "--store-memory-bytes",
        "--store-ssd-bytes",
        "--store-remote-bytes",
        "--store-remote-timeout-secs",
        "--store-wait-secs",
    ):
        with pytest.raises(SettingsError, match=flag):
            settings_of(flag, "-1")

"""Reads many objects of a log of notes. Another router may join the notes meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from anyio import create_task_group, sleep

from slime_tiered_store.note_objects import NoteObject, NotesChanged, StoredNote
from slime_tiered_store.tiers.remote.client import RemoteError

__all__ = ["again_if_changed", "contents_of"]

_AT_ONCE = 16
#: The most reads, and the seconds between two reads. All notes are read again if another router joins some meanwhile.
_READS, _READ_AGAIN_S = 4, 0.05


async def again_if_changed(read: Callable[[], Awaitable[list[StoredNote]]]) -> list[StoredNote]:
    """Return what ``read`` returns. Repeat it a few times if it raises NotesChanged."""
    # Not tenacity, see RemoteTier.call.
    for _ in range(_READS - 1):
        try:
            return await read()
        except NotesChanged:
            await sleep(_READ_AGAIN_S)
    return await read()


async def contents_of(
    objects: Sequence[NoteObject],
    read: Callable[[str], Awaitable[bytes | None]],
    damage: dict[str, str] | None = None,
) -> dict[str, bytes]:
    """Return the contents of ``objects``, by name; ``read(name)`` returns one content. Raises RemoteError.

    If ``damage`` is given, an object that cannot be read is left out, and the reason is added to ``damage``. But an
    object that does not exist any more raises NotesChanged in any case.
    """
    found: dict[str, bytes] = {}
    errors: list[RemoteError] = []
    rest = iter(objects)

    async def get() -> None:
        for one in rest:
            if errors:
                return
            try:
                content = await read(one.name)
                if content is None:
                    raise NotesChanged(f"{one.name} was deleted meanwhile")
                found[one.name] = bytes(content)
            except RemoteError as error:
                if damage is None or isinstance(error, NotesChanged):
                    errors.append(error)
                else:
                    damage[one.name] = f"it cannot be read: {error}"

    async with create_task_group() as tasks:
        for _ in range(_AT_ONCE):
            tasks.start_soon(get)
    if errors:
        raise errors[0]
    return found

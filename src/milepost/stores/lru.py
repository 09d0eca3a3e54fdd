"""Which stored object goes first: least recently used, and never before what builds on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """Attributes:
    num_bytes: what the object takes.
    parent: name of the object it builds on; None if there is none, or if it is not known yet.
    parent_known: whether `parent` was read.
    used_ns: when it was last used, for indexes that outlive the process.
    """

    num_bytes: int
    parent: str | None = None
    parent_known: bool = True
    used_ns: int = 0


class LruIndex:
    """Objects by recency. Not thread-safe.

    A segment is of use only with all segments before it, so using one uses its whole path: `touch_path`
    makes every object on it more recent than the ones that build on it, and a path is given up from its
    end.

    Args:
        read_parent: finds the parent of an object whose parent is not known yet.
        discover: finds an object that was not added here; others may write to the same place.
    """

    def __init__(
        self,
        read_parent: Callable[[str], str | None] = lambda name: None,
        discover: Callable[[str], Entry | None] = lambda name: None,
    ) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._read_parent = read_parent
        self._discover = discover
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def add(self, name: str, entry: Entry) -> None:
        """As the most recent; replaces what had the name."""
        self.remove(name)
        self._entries[name] = entry
        self.total_bytes += entry.num_bytes

    def remove(self, name: str) -> None:
        """Forget it, if it is known."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.total_bytes -= entry.num_bytes

    def move_to_end(self, name: str) -> None:
        self._entries.move_to_end(name)

    def path(self, name: str | None) -> list[str]:
        """`name` and what it builds on, child first, as far as it is here."""
        names: dict[str, None] = {}
        while name is not None and name not in names:
            entry = self._entries.get(name)
            if entry is None:
                entry = self._discover(name)
                if entry is None:
                    break
                self.add(name, entry)
            names[name] = None
            if not entry.parent_known:
                entry.parent, entry.parent_known = self._read_parent(name), True
            name = entry.parent
        return list(names)

    def touch_path(self, name: str) -> list[str]:
        """Make the path of `name` the most recent, its root last; the names in that order."""
        names = self.path(name)
        for each in names:
            self._entries.move_to_end(each)
        return names

    def victims(self, needed_bytes: int, protected: Collection[str]) -> list[str] | None:
        """The objects to give up for `needed_bytes`, in order; None if all that may go are too few.

        Args:
            protected: never given up, whatever their age.
        """
        names: list[str] = []
        for name, entry in self._entries.items():
            if needed_bytes <= 0:
                break
            if name not in protected:
                names.append(name)
                needed_bytes -= entry.num_bytes
        return names if needed_bytes <= 0 else None

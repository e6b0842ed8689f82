"""page_pool: which pages each sequence has, and how many sequences share a page. Numbers on the host only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Need(NamedTuple):
    """A sequence will have `columns` pages. Those from `first_written` on must be its own."""

    sequence: int
    first_written: int
    columns: int


@dataclass
class Changes:
    """What has to change on the device: entries of the table, and pages to copy before that."""

    entries: list[tuple[int, int, int]] = field(default_factory=list)  # (sequence, column, page)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from page, to page)


class PagePool:
    """The pages of a cache. A page is free, or in one sequence, or shared by several that have the same prefix."""

    def __init__(self, pages: int, sequences: int) -> None:
        self.free = list(range(pages - 1, -1, -1))  # the next page is the last
        self.uses = [0] * pages
        self.of: list[list[int]] = [[] for _ in range(sequences)]  # pages of each sequence, by column

    def missing(self, needs: Iterable[Need]) -> int:
        """Return how many pages `grow` would take more than there are."""
        uses: Counter[int] = Counter()  # changes of self.uses
        taken = 0
        for need in needs:
            pages = self.of[need.sequence]
            taken += max(0, need.columns - len(pages))
            for page in pages[need.first_written : need.columns]:
                if self.uses[page] + uses[page] > 1:
                    uses[page] -= 1
                    taken += 1
        return taken - len(self.free)

    def grow(self, needs: Iterable[Need]) -> Changes:
        """Add pages, and copy shared ones that will be written. The caller has checked that none are missing."""
        changes = Changes()
        for sequence, first_written, columns in needs:
            pages = self.of[sequence]
            for column in range(first_written, min(columns, len(pages))):
                old = pages[column]
                if self.uses[old] > 1:
                    self.uses[old] -= 1
                    pages[column] = self._take()
                    changes.copies.append((old, pages[column]))
                    changes.entries.append((sequence, column, pages[column]))
            for column in range(len(pages), columns):
                pages.append(self._take())
                changes.entries.append((sequence, column, pages[column]))
        return changes

    def shrink(self, sequence: int, columns: int) -> None:
        """Take the pages from `columns` on from a sequence. Those that no other sequence has become free."""
        pages = self.of[sequence]
        for page in reversed(pages[columns:]):
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free.append(page)
        del pages[columns:]

    def share(self, source: int, targets: Sequence[int], columns: int) -> Changes:
        """Give the first pages of a sequence to others, which have none."""
        changes = Changes()
        for target in targets:
            pages = self.of[source][:columns]
            self.of[target] = pages
            for column, page in enumerate(pages):
                self.uses[page] += 1
                changes.entries.append((target, column, page))
        return changes

    def _take(self) -> int:
        page = self.free.pop()
        self.uses[page] = 1
        return page

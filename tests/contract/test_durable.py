"""What a head notes besides its runs is there for the next one."""

from __future__ import annotations

from pathlib import Path

from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head.book import Book
from fallow.head.durable import Durable
from fallow.head.turn import Turn


async def test_notes_are_found_again_by_the_next_head(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    book = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id")
    for expected, note in (({}, b"one"), ({"experience": b"one"}, b"two"), ({"experience": b"three"}, b"four")):
        durable = Durable(paths, None)
        await durable.open()
        await durable.begin_term()
        await durable.load(book, 0.0)
        assert durable.notes == expected
        for text in (note, b"three") if note == b"two" else (note,):
            turn = Turn(book, 0.0, 0.0)
            turn.notes["experience"] = text
            await durable.write(turn)
        await durable.close()

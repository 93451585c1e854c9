"""Reading a file of which some lines are bad: they are counted, a few are kept to be shown, and the rest is used."""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path

from fallow.model import Exit, FallowError, TraceRead
from fallow.slurm.parse.values import MOST_NODES

Row = dict[str, str]
"""Column -> text."""

MOST_EXAMPLES = 5
LAST_S = 2.0**32
"""In 2106. Later times are a mistake of somebody's."""
_SHOWN = 80


class Tally:
    """What became of the lines of one file.

    Args:
        path: the file.
        expected: what it should be, in words, for the messages.
    """

    def __init__(self, path: Path, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._bad: Counter[str] = Counter()
        self._wrong = 0
        self._examples: list[str] = []
        self._assumed: dict[str, int] = {}
        self.read = 0

    def bad(self, line: int, reason: str, value: str = "") -> None:
        """A line that cannot be used."""
        self._bad[reason] += 1
        self._wrong += 1
        if len(self._examples) < MOST_EXAMPLES:
            excerpt = f" ({value[:_SHOWN]!r})" if value else ""
            self._examples.append(f"line {line}: {reason}{excerpt}")

    def left_out(self, reason: str) -> None:
        """A good line of which nothing is needed."""
        self._bad[reason] += 1

    def assume(self, what: str) -> None:
        """Something that the file does not say; said once, with how often if that is more than once."""
        self._assumed[what] = self._assumed.get(what, 0) + 1

    def refuse(self, reason: str) -> FallowError:
        """The error that says why the whole file is of no use."""
        return FallowError(f"{self._path}: {reason}; expected {self._expected}", Exit.DATA)

    def check_size(self, nodes: float) -> None:
        """Raises FallowError: so many nodes are no cluster's."""
        if nodes > MOST_NODES:
            raise self.refuse(f"it asks for {nodes:,.0f} nodes, more than {MOST_NODES:,}")

    def result(self) -> TraceRead:
        """All of it.

        Raises:
            FallowError: nothing could be used, or more than half of the lines were bad.
        """
        first = f"; the first: {self._examples[0]}" if self._examples else ""
        if 2 * self._wrong > self.read:
            raise self.refuse(f"{self._wrong} of {self.read} lines are bad{first}")
        good_lines = self.read - self._bad.total()
        if not good_lines:
            raise self.refuse(f"none of its {self.read} lines can be used{first}")
        return TraceRead(
            name=self._path.name,
            jobs=good_lines,
            bad_lines=dict(sorted(self._bad.items())),
            examples=list(self._examples),
            assumed=[what if times == 1 else f"{what} ({times} times)" for what, times in self._assumed.items()],
        )


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of a text file, which may be packed by gzip, whatever its name.

    Raises:
        FallowError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b" or path.suffix == ".gz"
        opened = gzip.open if packed else open
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n")
    except FileNotFoundError:
        raise FallowError(f"{path}: no such file", Exit.NOINPUT) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FallowError(f"{path}: cannot read it ({reason})", Exit.DATA) from error


def table(path: Path, columns: Sequence[str], tally: Tally, separator: str = ",") -> Iterator[tuple[int, Row]]:
    """(line, column -> text) of a file with a header, which must have `columns`.

    Lines of another number of fields are counted as bad.
    """
    header: list[str] = []
    for number, line in lines(path):
        fields = line.split(separator)
        if not header:
            header = [name.strip() for name in fields]
            if missing := [name for name in columns if name not in header]:
                raise tally.refuse(f"column {missing[0]} is missing")
            continue
        if not line.strip():
            continue
        tally.read += 1
        if len(fields) != len(header):
            tally.bad(number, f"not {len(header)} fields")
        else:
            yield number, dict(zip(header, fields, strict=True))
    if not header:
        raise tally.refuse("it is empty")


def numbers(
    path: Path, columns: Sequence[str], tally: Tally, words: Sequence[str] = ()
) -> Iterator[tuple[int, Row, list[float]]]:
    """As `table`, with the numbers in `columns`. Lines where one of them is no finite number are bad.

    Args:
        words: other columns that there must be.
    """
    for number, row in table(path, (*words, *columns), tally):
        try:
            values = [float(row[name]) for name in columns]
        except ValueError as error:
            tally.bad(number, "not a number", str(error))
            continue
        if all(map(isfinite, values)):
            yield number, row, values
        else:
            tally.bad(number, "not a number")

"""Reading a file with bad lines: bad lines are counted, a few are kept as examples, and all other lines are used."""

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
"""Unix time in 2106. A later time in a trace is a mistake."""
_EXCERPT_LENGTH = 80


class Tally:
    """Counts of the good and bad lines of one file.

    Args:
        path: the file.
        expected: the expected format in words, for messages.
    """

    def __init__(self, path: Path, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._bad: Counter[str] = Counter()
        self._wrong = 0
        self._examples: list[str] = []
        self._assumed: dict[str, int] = {}
        self.lines_read = 0

    def reject(self, line: int, reason: str, value: str = "") -> None:
        """Count a bad line. The first ones become examples, with `value`."""
        self._bad[reason] += 1
        self._wrong += 1
        if len(self._examples) < MOST_EXAMPLES:
            excerpt = f" ({value[:_EXCERPT_LENGTH]!r})" if value else ""
            self._examples.append(f"line {line}: {reason}{excerpt}")

    def skip(self, reason: str) -> None:
        """Count a good line that is not needed."""
        self._bad[reason] += 1

    def assume(self, what: str) -> None:
        """Note an assumption where the file says nothing. The result has each assumption once, with its count."""
        self._assumed[what] = self._assumed.get(what, 0) + 1

    def refuse(self, reason: str) -> FallowError:
        """The error for a file that cannot be used at all."""
        return FallowError(f"{self._path}: {reason}; expected {self._expected}", Exit.DATA)

    def check_size(self, nodes: float) -> None:
        """Raises FallowError: no cluster has this number of nodes."""
        if nodes > MOST_NODES:
            raise self.refuse(f"it has {nodes:,.0f} nodes, more than {MOST_NODES:,}")

    def result(self) -> TraceRead:
        """The counts, examples and assumptions.

        Raises:
            FallowError: no line could be used, or more than half of the lines were bad.
        """
        first = f"; the first: {self._examples[0]}" if self._examples else ""
        if 2 * self._wrong > self.lines_read:
            raise self.refuse(f"{self._wrong} of {self.lines_read} lines are bad{first}")
        good_lines = self.lines_read - self._bad.total()
        if not good_lines:
            raise self.refuse(f"none of its {self.lines_read} lines can be used{first}")
        return TraceRead(
            name=self._path.name,
            jobs=good_lines,
            bad_lines=dict(sorted(self._bad.items())),
            examples=list(self._examples),
            assumed=[what if times == 1 else f"{what} ({times} times)" for what, times in self._assumed.items()],
        )


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of a text file. The file may be compressed with gzip, whatever its name.

    Raises:
        FallowError: the file cannot be read.
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
    """(line number, column -> text) of a file whose header must have `columns`.

    Lines with another number of fields than the header count as bad.
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
        tally.lines_read += 1
        if len(fields) != len(header):
            tally.reject(number, f"not {len(header)} fields")
        else:
            yield number, dict(zip(header, fields, strict=True))
    if not header:
        raise tally.refuse("the file is empty")


def numbers(
    path: Path, columns: Sequence[str], tally: Tally, words: Sequence[str] = ()
) -> Iterator[tuple[int, Row, list[float]]]:
    """Like `table`, with the numbers in `columns`. Lines in which one of them is not a finite number are bad.

    Args:
        words: further required columns, whose text is not a number.
    """
    for number, row in table(path, (*words, *columns), tally):
        try:
            values = [float(row[name]) for name in columns]
        except ValueError as error:
            tally.reject(number, "not a number", str(error))
            continue
        if all(map(isfinite, values)):
            yield number, row, values
        else:
            tally.reject(number, "not a number")

"""What people write for a deadline: a date, a point in time, or a weekday. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from fallow.model import Exit, FallowError

DEADLINE_FORMS = "YYYY-MM-DD, YYYY-MM-DDTHH:MM, a weekday such as friday, or friday-18:00"
"""A day alone means its end."""

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORM = re.compile(
    rf"(?:(?P<date>\d{{4}}-\d\d-\d\d)|(?P<weekday>{'|'.join(_WEEKDAYS)}))(?:[T-](?P<clock>\d\d:\d\d))?", re.IGNORECASE
)


def deadline_at(text: str, now: float) -> float:
    """Unix time of a deadline, in the local time zone.

    Args:
        text: in one of `DEADLINE_FORMS`; a weekday is the next one, today if its time is still to come.
        now: Unix time.

    Raises:
        FallowError: it has none of the forms (USAGE), or it has passed (DATA).
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise FallowError(f"deadline={text[:64]}: must be {DEADLINE_FORMS}", Exit.USAGE)
    today = datetime.fromtimestamp(now)
    try:
        if match["date"]:
            day = datetime.fromisoformat(match["date"])
        else:
            ahead = (_WEEKDAYS.index(match["weekday"].lower()) - today.weekday()) % 7
            day = datetime(today.year, today.month, today.day) + timedelta(days=ahead)
        clock = match["clock"]
        end = datetime.fromisoformat(f"{day:%Y-%m-%d}T{clock}") if clock else day + timedelta(days=1)
        if end.timestamp() <= now and match["weekday"]:
            end += timedelta(days=7)
        at = end.timestamp()
    except (ValueError, OverflowError) as error:
        raise FallowError(f"deadline={text[:64]}: {error}", Exit.USAGE) from error
    if at <= now:
        raise FallowError(f"deadline={text[:64]}: has passed; give a later one", Exit.DATA)
    return at

"""torchft's lighthouse with the settings of its own examples, in a process of its own: it writes a lot of output."""

from __future__ import annotations

import sys
import threading
from pathlib import Path


def main() -> None:
    """Serve until killed; the address goes to the file that the first argument names."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100, heartbeat_timeout_ms=5_000
    )
    place = Path(sys.argv[1])
    place.with_suffix(".tmp").write_text(lighthouse.address())
    place.with_suffix(".tmp").rename(place)
    threading.Event().wait()


if __name__ == "__main__":
    main()

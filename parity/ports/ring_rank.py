"""One rank of a split model, started by ``mlx.launch``: answers the request in the folder that it is given."""

from __future__ import annotations

import sys
from pathlib import Path

from parity.compare import crash_note
from parity.ports.ring_files import Request, write_answer
from parity.ports.split import RankSession, Split
from port.transport import Distributed


def answer(folder: Path, transport: Distributed) -> None:
    """Every split of the request in turn."""
    request = Request.read(folder)
    for number, split in enumerate(request.splits):
        session = RankSession(Split.parsed(split), request.checkpoint, request.dtype, transport)
        taps = session.run(request.steps, request.imposed)
        write_answer(folder, number, transport.rank, taps, session.read)


def main() -> None:
    folder, transport = Path(sys.argv[1]), Distributed("ring")
    try:
        answer(folder, transport)
    except Exception as error:
        (folder / f"{transport.rank}.error").write_text(crash_note(error))
        sys.exit(1)


if __name__ == "__main__":
    main()

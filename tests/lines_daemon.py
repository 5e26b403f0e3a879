"""The real process with one more dialect in its registry: ``python lines_daemon.py --config FILE``."""

from __future__ import annotations

import sys

from lines_dialect import LINES

from aiogw.cli import main
from aiogw.dialects import DIALECTS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dialects=(*DIALECTS, LINES)))

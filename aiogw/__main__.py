"""``python -m aiogw`` is the console script by another name; nothing else may be known here."""

import sys

from aiogw.cli import main

sys.exit(main())

"""``python -m tests.hazards``: write the table of hazards as README.md."""

from __future__ import annotations

import sys

from tests.hazards.document import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")

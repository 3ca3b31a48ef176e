"""Add up junit files and print one closing line: `N passed, N failed, N skipped`.

    python tools/test_summary.py runs/junit

Exit status 1 when a test failed, a file cannot be read, or there was no test at all.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def counts(path: Path) -> tuple[int, int, int]:
    """Passed, failed (errors counted in) and skipped tests of one junit file."""
    passed = failed = skipped = 0
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main(folder: Path) -> int:
    """Print a line per package and the sum."""
    total = [0, 0, 0]
    for path in sorted(folder.glob("*.xml")):
        try:
            row = counts(path)
        except ET.ParseError as error:
            print(f"{path.stem}: unreadable ({error}); counted as one failure")
            row = (0, 1, 0)
        print("{:<12} {:>5} passed {:>3} failed {:>4} skipped".format(path.stem, *row))
        total = [a + b for a, b in zip(total, row, strict=True)]
    print("{} passed, {} failed, {} skipped".format(*total))
    return int(total[1] > 0 or total[0] == 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Adds up the JUnit files of a test run and prints one line: 'N passed, N failed[, N skipped]'.

Exit status: 0 all passed, 1 a failure or no test at all.
"""

from __future__ import annotations

import pathlib
import sys
import xml.etree.ElementTree as ET


def count(directory: pathlib.Path) -> dict[str, tuple[int, int, int]]:
    """(passed, failed, skipped) of each JUnit file in `directory`, by the file's name."""
    results = {}
    for path in sorted(directory.glob("*.xml")):
        passed = failed = skipped = 0
        for case in ET.parse(path).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
                skipped += 1
            else:
                passed += 1
        results[path.stem] = (passed, failed, skipped)
    return results


def main() -> int:
    results = count(pathlib.Path(sys.argv[1]))
    for name, (passed, failed, skipped) in results.items():
        print(f"  {name:<16} {passed:5} passed {failed:5} failed {skipped:5} skipped")
    passed, failed, skipped = (
        sum(counts[kind] for counts in results.values()) for kind in range(3)
    )
    line = f"{passed} passed, {failed} failed"
    print(line + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())

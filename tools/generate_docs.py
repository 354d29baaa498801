"""Writes doc/cuda-coverage.md from the API's description; --check compares."""

from __future__ import annotations

import argparse
import pathlib
import sys
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "doc" / "cuda-coverage.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    from gpupoold import coverage

    wanted = coverage.markdown(coverage.load())
    current = PAGE.is_file() and PAGE.read_text() == wanted
    if not check:
        PAGE.write_text(wanted)
        return 0
    suite = ET.Element("testsuite", name="docs")
    case = ET.SubElement(suite, "testcase", classname="docs", name="coverage table")
    if not current:
        ET.SubElement(case, "failure", message="doc/cuda-coverage.md is out of date")
        print("doc/cuda-coverage.md is out of date; run: python tools/generate_docs.py")
    results = ROOT / "build" / "results"
    results.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(results / "docs.xml")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())

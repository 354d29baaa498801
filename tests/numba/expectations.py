"""Which of the suite's tests may fail or be left out, and what is wrong with a run's results."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

WAYS = ("direct", "pool")


@dataclass
class Expectations:
    """expected.toml."""

    failures: dict[str, dict[str, str]]  # way: test: reason
    skips: dict[str, str]  # beginning of the suite's words: why

    @classmethod
    def read(cls, path: Path) -> Expectations:
        """Raises ValueError if a test is listed twice or has no reason."""
        data = tomllib.loads(path.read_text())
        result = cls({way: {} for way in WAYS}, {})
        for entry in data.get("expected", []):
            for way in entry.get("ways", WAYS):
                listed = result.failures[way]
                for test in entry["tests"]:
                    if test in listed or not entry["reason"].strip():
                        raise ValueError(f"{path.name}: {test} is there twice, or without a reason")
                    listed[test] = entry["reason"]
        for entry in data.get("skipped", []):
            result.skips[entry["text"]] = entry["why"]
        return result

    def names(self, text: str) -> bool:
        """Whether a skip's reason is one of those that are named."""
        return any(text.startswith(beginning) for beginning in self.skips)


@dataclass
class Result:
    """Of one test, one way."""

    test: str
    outcome: str
    seconds: float = 0.0
    cpu: float = 0.0
    text: str = ""


def problems_of(
    way: str, results: dict[str, Result], expected: Expectations, modules: set[str]
) -> dict[str, str]:
    """What is wrong with the results of one way, by test. `modules`: what was to run."""
    failures = expected.failures[way]
    problems = {}
    for test, result in results.items():
        listed = test in failures
        if result.outcome == "failed" and not listed:
            problems[test] = result.text
        elif result.outcome == "passed" and listed:
            problems[test] = "passes: take it off the list of expected failures"
        elif result.outcome == "skipped" and listed:
            problems[test] = f"is skipped ({result.text}): take it off the list"
        elif result.outcome == "skipped" and not expected.names(result.text):
            problems[test] = f"is skipped for a reason that is not named: {result.text}"
    for test in failures:
        if test not in results and test.partition("::")[0] in modules:
            problems[test] = "is expected to fail, but there is no such test"
    for module in modules - {test.partition("::")[0] for test in results}:
        problems[module] = "no result"
    return problems


def differences(results: dict[str, dict[str, Result]], expected: Expectations) -> dict[str, str]:
    """Tests whose outcome depends on the way, unless the list says that it does."""
    one, other = (results[way] for way in WAYS)
    found = {}
    for test in sorted(one.keys() | other.keys()):
        if (test in expected.failures[WAYS[0]]) != (test in expected.failures[WAYS[1]]):
            continue
        outcomes = [way[test].outcome if test in way else "not run" for way in (one, other)]
        if outcomes[0] != outcomes[1]:
            found[test] = f"{outcomes[0]} directly, {outcomes[1]} through the pool"
    return found

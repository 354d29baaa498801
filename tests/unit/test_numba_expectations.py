"""What counts as a problem in a run of numba-cuda's tests."""

from __future__ import annotations

import pytest

from tests.numba.expectations import WAYS, Expectations, Result, differences, problems_of

EXPECTED = Expectations(
    {"direct": {"a.py::known": "why"}, "pool": {"a.py::known": "why", "a.py::apart": "why"}},
    {"needs": "why"},
)


def results(**outcomes: str) -> dict[str, Result]:
    return {f"a.py::{name}": Result(f"a.py::{name}", outcome) for name, outcome in outcomes.items()}


def test_what_is_as_expected_is_no_problem():
    fine = results(one="passed", known="failed")
    fine["a.py::left"] = Result("a.py::left", "skipped", text="needs a card")
    assert problems_of("direct", fine, EXPECTED, {"a.py"}) == {}


@pytest.mark.parametrize(
    ("outcomes", "test", "words"),
    [
        ({"one": "failed", "known": "failed"}, "a.py::one", ""),
        ({"known": "passed"}, "a.py::known", "take it off"),
        ({"known": "skipped"}, "a.py::known", "take it off"),
        ({"one": "skipped", "known": "failed"}, "a.py::one", "not named"),
        ({"one": "passed"}, "a.py::known", "no such test"),
    ],
)
def test_what_differs_from_the_list_is_a_problem(outcomes, test, words):
    problems = problems_of("direct", results(**outcomes), EXPECTED, {"a.py"})
    assert list(problems) == [test]
    assert words in problems[test]


def test_a_module_without_results_is_a_problem_and_one_that_was_not_to_run_is_none():
    found = problems_of("direct", results(known="failed"), EXPECTED, {"a.py", "b.py"})
    assert found == {"b.py": "no result"}
    assert problems_of("direct", {}, EXPECTED, set()) == {}


def test_both_ways_give_the_same_unless_the_list_says_otherwise():
    direct = results(one="passed", known="failed", apart="passed", more="passed")
    pool = results(one="failed", known="failed", apart="failed")
    found = differences({"direct": direct, "pool": pool}, EXPECTED)
    assert list(found) == ["a.py::more", "a.py::one"]


def test_a_list_that_names_a_test_twice_or_without_a_reason_is_refused(tmp_path):
    file = tmp_path / "expected.toml"
    entry = '[[expected]]\nreason = "{}"\ntests = ["a.py::x"]\n'
    file.write_text(entry.format("why"))
    assert Expectations.read(file).failures == {way: {"a.py::x": "why"} for way in WAYS}
    for text in (entry.format("why") * 2, entry.format(" ")):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"a\.py::x"):
            Expectations.read(file)

"""The list of faults has a test for every case, and what names a case is no accident."""

from pathlib import Path

import fault_tests


def test_every_case_has_a_test(capsys) -> None:
    assert fault_tests.main() == 0, capsys.readouterr().out
    assert "cases have a test\n" in capsys.readouterr().out


def test_what_names_a_case(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(
        "# F1\n"
        "TABLE = {'F2, tab': 3}\n"
        "UNUSED = 'F3'\n"
        "def test_f4_and_more():\n    'F5: was wrong.'  # noqa: F401\n    return 'F6'\n"
        "@mark(TABLE, [\n    1,  # F7\n])\n"
        "def test_other(f8): ...\n"
        "def helper():\n    'F9'\n"
    )
    found = fault_tests.tests_by_case(tmp_path)
    names = {case: [one.partition("::")[2] for one in tests] for case, tests in found.items()}
    assert names == {
        "F4": ["test_f4_and_more"], "F5": ["test_f4_and_more"],
        "F2": ["test_other"], "F7": ["test_other"],
    }  # fmt: skip

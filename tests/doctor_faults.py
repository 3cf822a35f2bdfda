"""`make doctor-faults`: every fault that is planted, and the line of `dflow-train doctor` for it.

The faults are those of `test_doctor.py`; this runs them there, and prints what they came to. The
exit status is pytest's.
"""

import sys
import textwrap
from pathlib import Path

import pytest

TEST = "test_finds_what_is_planted"
WIDTH = 120  # columns


class Table:
    """A row a fault, when it has been looked for."""

    def __init__(self) -> None:
        self.found = self.planted = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        fault = report.nodeid.partition("[")[2].rstrip("]").replace("_", " ")
        line = dict(report.user_properties).get("line", "no line")
        self.planted += 1
        self.found += report.passed
        mark = "found" if report.passed else "MISSED"
        indent = 10 * " "
        print(f"{mark:<8}  {fault}")
        print(textwrap.fill(str(line), WIDTH, initial_indent=indent, subsequent_indent=indent))


def main() -> int:
    table = Table()
    file = Path(__file__).with_name("test_doctor.py")
    quiet = ("-p", "no:terminal", "-o", "addopts=", "-p", "no:cacheprovider")
    status = pytest.main([*quiet, f"{file}::{TEST}"], plugins=[table])
    print(f"\n{table.planted} faults planted, {table.found} found")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

"""`megarlhf report RUN ...`: run directories -> one HTML file that needs nothing else.

One run: curves, phase times, samples before and after, audit and configuration (single.py). Several: their curves on
common axes, final numbers, differences of configurations, responses to the same prompts (several.py). Runs that are
still going or were cut short are read, too. Imports no torch: it is instant.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megarlhf.config import UserError

COMPARISON = "comparison.html"  # the page of several runs, in the working directory


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the directory of a run, finished or not")
    parser.add_argument(
        "--output", metavar="FILE", help=f"the page to write (default: RUN/report.html, of several runs {COMPARISON})"
    )


def main(runs: list[str], output: str | None) -> None:
    usual = Path(runs[0]) / "report.html" if len(runs) == 1 else Path(COMPARISON)
    print(write([Path(run) for run in runs], Path(output) if output else usual))


def write(runs: list[Path], output: Path) -> Path:
    """`render(runs)` as the file `output`."""
    html = render(runs)
    try:
        output.write_text(html, encoding="utf-8", errors="replace")  # of half a surrogate pair
    except OSError as error:
        raise UserError(f"{output}: cannot write the report ({error.strerror}); give --output another place")
    return output


def render(runs: list[Path]) -> str:
    """The page of a run directory, or of several."""
    from megarlhf.report import several, single

    return single.render(runs[0]) if len(runs) == 1 else several.render(runs)

"""`python -m profiles.nsys`."""

from __future__ import annotations

import typer

from capture.cli import run_app

from .command import report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(report)

if __name__ == "__main__":
    run_app(app)

"""Run the command line as ``python -m stretto``."""

from stretto.cli import main

main()

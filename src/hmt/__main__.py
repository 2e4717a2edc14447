"""`python -m hmt`: the command line where `hmt` itself is not installed."""

from hmt.cli.main import main

main()

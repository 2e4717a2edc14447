"""`python -m hmt`: the command line where `hmt` itself is not installed."""

from hmt.cli.main import main

if __name__ == "__main__":  # processes that it starts import it, too
    main()

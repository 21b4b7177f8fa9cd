"""`python -m rolecall` is the same as the `rolecall` command."""

from rolecall.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

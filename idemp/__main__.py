"""`python -m idemp`: the command line."""

from idemp.cli import main

main()

"""`python -m idemp` is the command `idemp`."""

from idemp.cli import main

main()

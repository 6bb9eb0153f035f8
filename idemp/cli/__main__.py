"""`python -m idemp.cli`, for where the script is not on the PATH."""

from __future__ import annotations

from idemp.cli import main

if __name__ == "__main__":
    main()

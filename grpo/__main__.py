"""`python -m grpo` is the command `grpo`, for interpreters whose scripts are not on the path."""

import sys

from grpo.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m ddpo_lessons.cli`, which `accelerate launch -m` takes."""

import sys

from ddpo_lessons.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

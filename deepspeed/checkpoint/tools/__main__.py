"""`python -m deepspeed.checkpoint.tools` is `deepspeed-checkpoint`, where the console script is not installed.

Does not live here: anything else (`main`).
"""

from __future__ import annotations

import sys

from deepspeed.checkpoint.tools.main import main

if __name__ == "__main__":
    sys.exit(main())

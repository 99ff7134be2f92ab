"""`python -m brx`, as torchrun starts it."""

import sys

from brx.cli.main import main

sys.exit(main())

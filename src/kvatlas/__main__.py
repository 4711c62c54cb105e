"""``python -m kvatlas``."""

import sys

from kvatlas.cli.main import main

sys.exit(main())

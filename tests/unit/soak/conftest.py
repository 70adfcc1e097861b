"""The pure parts of soaks are tested here; the soaks themselves are programs in tests/soak."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

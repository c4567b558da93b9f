"""How a known bug gets at the classes that it changes."""

from collections.abc import Callable
from typing import Any

# Patch(owner, attribute, value), undone when the bug is taken out again.
Patch = Callable[[Any, str, Any], None]

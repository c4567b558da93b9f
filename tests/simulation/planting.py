"""The type of the function with which a planted bug changes a class or a module."""

from collections.abc import Callable
from typing import Any

# Patch(owner, attribute, value), undone when the bug is taken out again.
Patch = Callable[[Any, str, Any], None]

"""The type of the function through which a planted bug changes a class or a module."""

from collections.abc import Callable
from typing import Any

# Patch(owner, attribute, value) sets the attribute until the bug is removed.
Patch = Callable[[Any, str, Any], None]

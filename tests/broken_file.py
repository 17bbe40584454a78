"""A trainer file that cannot be imported."""

import a_module_that_is_not_there  # noqa: F401

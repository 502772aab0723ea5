"""Use: one call for models of other libraries, which are no dependency."""

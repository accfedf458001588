"""A package, so that an installed distribution of this name does not stand in its way."""

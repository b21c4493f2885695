"""Several runs in one folder: the same settings from many seeds, or a search over settings."""

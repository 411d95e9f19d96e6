"""Functions on texts."""

"""Commands that run many runs, from a checkout."""

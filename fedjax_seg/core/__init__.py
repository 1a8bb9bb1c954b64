"""Types every room speaks, rows of stacked pytrees, and error messages. Imports nothing else of the package."""

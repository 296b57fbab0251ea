"""Functions, classes and processes of the user's own code."""

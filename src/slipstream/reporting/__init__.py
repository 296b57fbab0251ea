"""Runs and studies as text, terminal panels and HTML pages, read from their directories alone."""

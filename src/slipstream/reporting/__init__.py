"""Display of runs and studies as text, terminal panels and HTML pages, from the files in a run directory only."""

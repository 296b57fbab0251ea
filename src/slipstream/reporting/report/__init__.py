"""A page of runs, or of a study, in one file that opens anywhere."""

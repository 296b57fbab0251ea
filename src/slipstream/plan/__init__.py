"""Planning of runs and evaluations: all decisions and checks that are made before any engine starts."""

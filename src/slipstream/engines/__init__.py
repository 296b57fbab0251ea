"""What runs a model. `base.py` holds the protocols and is all that the pipeline sees."""

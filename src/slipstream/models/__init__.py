"""Model files: names and built-in models, adapter directories, and the model card of the final student."""

"""Models by name: built-in models, adapters, and the model card of the final student."""

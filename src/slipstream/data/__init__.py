"""Training data: rows of files and datasets, prompts, tokenizers, and the contexts of teachers."""

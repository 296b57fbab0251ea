"""Training data: readers of files and datasets, prompts, tokenizers, and the contexts that teachers see."""

"""Native engines: sampler, scorer and learner for any Hugging Face causal LM, on CPU or GPU, without a server."""

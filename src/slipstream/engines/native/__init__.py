"""Sampler, scorer and learner for any HF causal LM, on CPU or GPU, without a server."""

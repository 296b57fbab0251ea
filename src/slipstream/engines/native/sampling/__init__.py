"""The native sampler, which generates rollouts with any Hugging Face causal LM."""

"""Rollouts by an HTTP server of vLLM or SGLang that runs elsewhere, and takes weights from a shared folder."""

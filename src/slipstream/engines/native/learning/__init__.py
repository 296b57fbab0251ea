"""The native learner, which trains the student."""

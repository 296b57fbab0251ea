"""Rewards: how an answer is graded, and the processes that grade."""

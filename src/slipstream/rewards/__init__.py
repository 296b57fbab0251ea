"""Rewards: functions that grade responses, and the processes that call these functions."""

"""Objective of an update, and the decisions about its batch that are made before its first gradient."""

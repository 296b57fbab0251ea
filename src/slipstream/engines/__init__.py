"""Engines that run models. The pipeline imports only `base.py`, which holds their protocols."""

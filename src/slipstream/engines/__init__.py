"""Engines that run models. The pipeline imports only their protocols (`slipstream/protocols.py`)."""

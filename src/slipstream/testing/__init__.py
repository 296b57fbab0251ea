"""Fakes that ship with the package: servers for tests of endpoints and sandboxes."""

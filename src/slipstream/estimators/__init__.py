"""Pure tensor functions, which use no config object, clock, device choice, file or log."""

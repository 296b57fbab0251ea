"""Pure tensor functions, which know no config object, clock, device choice, file or log."""

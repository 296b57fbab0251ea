"""What runs have written, for a person: read from their directories alone."""

"""What a person calls, one file each."""

"""Which policy losses, advantages and corrections there are, and what each takes: all but the mathematics."""

"""Planning: decisions and checks that come before any engine starts."""

"""Tables of policy losses, advantages and corrections with their options, without formulas."""

"""Tables of losses, advantages and corrections, with options or descriptions, without formulas."""

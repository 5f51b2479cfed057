"""Training of prediction heads for a frozen target."""

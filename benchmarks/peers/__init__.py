"""What TRL 0.21 and imageddpo compute, and how they fail: recorded into tests/golden/peers.json."""

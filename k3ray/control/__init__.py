"""The supernode's decisions as pure functions, and the journal they are recorded in."""

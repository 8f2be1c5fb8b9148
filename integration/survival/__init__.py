"""A profile that is killed again and again loses nothing."""

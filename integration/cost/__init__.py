"""What deduplication and the adaptive sweep save, from one database of real measurements."""

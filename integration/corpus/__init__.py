"""The duplication benchmark: what four planners measure of three corpora (paper, 7.2 and J)."""

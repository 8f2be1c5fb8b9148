"""``python -m dooly_backend`` is `dooly`."""

from dooly_backend.cli import main

if __name__ == "__main__":
    main()

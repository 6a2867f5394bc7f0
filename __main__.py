"""Lets ``python -m moa_data`` do what the console script ``moa-data`` does."""

from .cli import main

if __name__ == "__main__":
    main()

"""The command line: the only module that reads arguments, prints and exits."""

import click


@click.group()
def main() -> None:
    """Turn a language model's activations into a dataset, and train drafters from it."""

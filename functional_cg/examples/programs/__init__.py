"""Five short programs, each whole in its own file: ``python -m functional_cg.examples.programs.NAME``."""

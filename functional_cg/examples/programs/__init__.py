"""Short, self-contained programs: ``python -m functional_cg.examples.programs.NAME``."""

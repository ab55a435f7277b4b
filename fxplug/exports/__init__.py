"""A traced module as one file that runs without Python code of anybody's."""

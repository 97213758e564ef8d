"""Tools of this project that no installation contains: the training of the embedded model, and studies.

They run in a clone: `pip install -e .` puts this folder on Python's path, along with the package.
"""

"""`python -m rekindle.tiny`: train the embedded model from scratch."""

from rekindle._src.tiny_training.train import main

if __name__ == "__main__":
    main()

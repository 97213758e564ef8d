"""The training of the encoder of pictures that belongs to the embedded model, from pictures drawn with Pillow."""

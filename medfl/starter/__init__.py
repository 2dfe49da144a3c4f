"""`medfl new`: a bundle for a folder of images, written by looking at them."""

"""`medfl new`: creates a bundle for a folder of images from their contents."""

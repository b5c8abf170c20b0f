"""One training script a file, written as its author would without knowing of this test."""
